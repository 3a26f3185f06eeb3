//go:build unix

package e2e

import (
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/compose-spec/compose-go/v2/types"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
)

// composed is a profile of docker-compose.yml whose services are processes: each
// runs its own command in its own environment, but for names, ports and volumes,
// which are mapped to addresses on loopback and to folders.
type composed struct {
	t       *testing.T
	project *types.Project
	mapped  map[string]string // what stands in the file → what stands for it here
}

func startComposed(t *testing.T, profile string) *composed {
	t.Helper()
	c := &composed{t: t, project: composeProject(t, profile), mapped: map[string]string{}}
	for _, s := range c.project.Services {
		for _, v := range s.Volumes {
			if c.mapped[v.Target] == "" {
				c.mapped[v.Target] = t.TempDir()
			}
		}
	}
	return c
}

// here is a text of the file, mapped.
func (c *composed) here(text string) string {
	for from, to := range c.mapped {
		text = strings.ReplaceAll(text, from, to)
	}
	return text
}

// command is what the service, or its health check, runs.
func (c *composed) command(service string, argv []string, more ...string) *exec.Cmd {
	c.t.Helper()
	s := c.project.Services[service]
	if s.Build == nil || len(s.Entrypoint) > 0 {
		c.t.Fatalf("%s does not run the program of this repository", service)
	}
	var args []string
	for _, arg := range argv {
		args = append(args, c.here(arg))
	}
	cmd := exec.Command(binary, args...)
	cmd.Env = []string{"NONE="} // a container has nothing of the host's
	for name, value := range maps.All(s.Environment) {
		if value != nil {
			cmd.Env = append(cmd.Env, name+"="+c.here(*value))
		}
	}
	cmd.Env = append(cmd.Env, more...)
	return cmd
}

// replica starts a service that is a simulated one.
func (c *composed) replica(service string) *program {
	c.t.Helper()
	argv := append([]string(nil), c.project.Services[service].Command...)
	for i, arg := range argv {
		if arg == ":8000" {
			argv[i] = "127.0.0.1:0"
		}
	}
	p := launch(c.t, c.command(service, argv))
	p.url = p.awaitLog(`base URL (http://\S+)/v1`)
	c.mapped["http://"+service+":8000"] = p.url
	// The same for all of them, as each is asked in its own container.
	check := c.project.Services[service].HealthCheck.Test
	if check[0] != "CMD" || check[1] != "/warmroute" {
		c.t.Fatalf("%s is checked by %q, and its image has nothing but /warmroute", service, check)
	}
	asked := strings.ReplaceAll(strings.Join(check[2:], " "), "http://127.0.0.1:8000", p.url)
	if output, err := c.command(service, strings.Fields(asked)).CombinedOutput(); err != nil {
		c.t.Errorf("%s is not healthy: %v %s", service, err, output)
	}
	return p
}

// proxy starts the service, and asks what the image's health check asks.
func (c *composed) proxy(service string) *program {
	c.t.Helper()
	for _, config := range c.project.Services[service].Configs {
		content, err := os.ReadFile(c.project.Configs[config.Source].File)
		if err != nil {
			c.t.Fatal(err)
		}
		c.mapped[config.Target] = writeFile(c.t, c.here(string(content)))
	}
	elsewhere := []string{"WARMROUTE_ADMIN=127.0.0.1:0", "WARMROUTE_ADMIN_TOKEN_FILE=", "WARMROUTE_TIMEOUTS_SERVE_AFTER_TERM=0s"}
	p := startCommand(c.t, c.command(service, c.project.Services[service].Command, append(elsewhere, "WARMROUTE_LISTEN=127.0.0.1:0")...))
	check := execForm(c.t, instruction(c.t, dockerfileStages(c.t)[1], "HEALTHCHECK"))
	listens := "WARMROUTE_LISTEN=" + strings.TrimPrefix(p.url, "http://")
	if output, err := c.command(service, check[1:], listens).CombinedOutput(); err != nil {
		c.t.Errorf("%s is not healthy: %v %s", service, err, output)
	}
	return p
}

// down ends a service as `docker compose down` does.
func (c *composed) down(p *program) {
	c.t.Helper()
	p.signal(syscall.SIGTERM)
	if status := p.exit(); status != 0 {
		c.t.Errorf("it ended with status %d: %s", status, p.log.String())
	}
}

func TestComposedServices(t *testing.T) {
	t.Parallel()
	c := startComposed(t, "sim")
	profile := composeProfiles()[2]
	var replicas []*program
	for _, service := range profile.replicas {
		replicas = append(replicas, c.replica(service))
	}
	prompt := words(800)
	ask := func(p *program) (backend, reason string) {
		t.Helper()
		client := openai.NewClient(option.WithBaseURL(p.url+"/v1"), option.WithAPIKey("unused"), option.WithMaxRetries(0))
		var resp *http.Response
		answer, err := client.Chat.Completions.New(t.Context(), openai.ChatCompletionNewParams{
			Model: "sim", MaxTokens: openai.Int(8), Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage(prompt)},
		}, option.WithResponseInto(&resp))
		if err != nil || answer.Choices[0].Message.Content == "" {
			t.Fatalf("answer %+v, error %v", answer, err)
		}
		return resp.Header.Get("X-Warmroute-Backend"), resp.Header.Get("X-Warmroute-Reason")
	}
	p := c.proxy(profile.proxy)
	p.eventually("all replicas ready", func() bool {
		return metricSum(t, p.admin, "warmroute_backend_ready") == float64(len(replicas))
	})
	first, _ := ask(p)
	if again, reason := ask(p); again != first || reason != "prefix" {
		t.Errorf("the same prompt went to %s and to %s (%s)", first, again, reason)
	}
	c.down(p)
	if kept, _ := filepath.Glob(filepath.Join(c.mapped["/var/lib/warmroute"], "*")); len(kept) != 2 {
		t.Errorf("the volume holds %q, want the snapshot and its lock", kept)
	}
	p = c.proxy(profile.proxy)
	p.awaitLog(`msg="index restored" backend=\S*` + strings.TrimPrefix(first, "127.0.0.1"))
	if again, reason := ask(p); again != first || reason != "prefix" {
		t.Errorf("after a restart the prompt went to %s and not to %s (%s)", again, first, reason)
	}
	c.down(p)
	for _, r := range replicas {
		c.down(r)
	}
	http.DefaultClient.CloseIdleConnections()
}

// TestComposedSharedGPU runs the proxy of the profile one-gpu in front of simulated replicas, and adds another one.
func TestComposedSharedGPU(t *testing.T) {
	t.Parallel()
	c, fleet := startComposed(t, "one-gpu"), startSimFleet(t, 3, 0)
	profile := composeProfiles()[1]
	for i, service := range profile.replicas {
		c.mapped["http://"+service+":8000"] = fleet.urls[i]
	}
	p := c.proxy(profile.proxy)
	if status, _, stderr := runCommand(t, "backends", "add", fleet.urls[2], "--device", "gpu1", "--admin", p.admin); status != 0 {
		t.Fatalf("backends add: status %d, %s", status, stderr)
	}
	devices := map[string]string{}
	for _, b := range p.backends() {
		devices[b.Name] = b.Device
	}
	want := map[string]string{backendName(fleet.urls[0]): "gpu0", backendName(fleet.urls[1]): "gpu0", backendName(fleet.urls[2]): "gpu1"}
	if !maps.Equal(devices, want) {
		t.Errorf("the devices are %v, want %v", devices, want)
	}
	if _, list, _ := runCommand(t, "backends", "list", "--admin", p.admin); strings.Count(list, "  gpu0  ") != 2 ||
		strings.Count(list, "  gpu1  ") != 1 {
		t.Errorf("listed as\n%s", list)
	}
	c.down(p)
}

// TestComposedPrefillDecode runs the proxy of the profile disaggregation in front of simulated replicas, and adds another one.
func TestComposedPrefillDecode(t *testing.T) {
	t.Parallel()
	c, fleet := startComposed(t, "disaggregation"), startSimFleet(t, 4, 0)
	for i, service := range composeProfiles()[3].replicas {
		c.mapped["http://"+service+":8000"] = fleet.urls[i]
	}
	p := c.proxy("warmroute-disaggregation")
	if status, _, stderr := runCommand(t, "backends", "add", fleet.urls[3], "--role", "prefill", "--admin", p.admin); status != 0 {
		t.Fatalf("backends add: status %d, %s", status, stderr)
	}
	roles := map[string]string{}
	for _, b := range p.backends() {
		roles[b.Name] = b.Role
	}
	want := map[string]string{}
	for i, role := range []string{"prefill", "decode", "decode", "prefill"} {
		want[backendName(fleet.urls[i])] = role
	}
	if !maps.Equal(roles, want) {
		t.Errorf("the roles are %v, want %v", roles, want)
	}
	if _, list, _ := runCommand(t, "backends", "list", "--admin", p.admin); strings.Count(list, "  prefill  ") != 2 ||
		strings.Count(list, "  decode   ") != 2 {
		t.Errorf("listed as\n%s", list)
	}
	c.down(p)
}
