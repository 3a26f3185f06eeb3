package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
)

// composeProject loads docker-compose.yml as `docker compose` does, with the
// profiles given or, without any, those of .env.
func composeProject(t *testing.T, profiles ...string) *types.Project {
	t.Helper()
	return composeFile(t, "docker-compose.yml", profiles...)
}

// composeFile loads a file as `docker compose -f` does.
func composeFile(t *testing.T, file string, profiles ...string) *types.Project {
	t.Helper()
	options, err := cli.NewProjectOptions([]string{file},
		cli.WithWorkingDirectory(filepath.Dir(file)), cli.WithEnvFiles(), cli.WithDotEnv, cli.WithDefaultProfiles(profiles...))
	if err != nil {
		t.Fatal(err)
	}
	project, err := options.LoadProject(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return project
}

func composeProfiles() []struct {
	name, proxy string
	replicas    []string
	gpus        []string // of each replica, "" for none
} {
	return []struct {
		name, proxy string
		replicas    []string
		gpus        []string
	}{
		{"gpu", "warmroute", []string{"vllm-0", "vllm-1"}, []string{"0", "1"}},
		{"one-gpu", "warmroute-one-gpu", []string{"vllm-half-0", "vllm-half-1"}, []string{"0", "0"}},
		{"sim", "warmroute-sim", []string{"sim-0", "sim-1"}, []string{"", ""}},
		{"pd", "warmroute-pd", []string{"vllm-prefill", "vllm-decode-0", "vllm-decode-1"}, []string{"0", "1", "2"}},
	}
}

func TestComposeProfiles(t *testing.T) {
	for _, profile := range composeProfiles() {
		t.Run(profile.name, func(t *testing.T) {
			project := composeProject(t, profile.name)
			want := append([]string{profile.proxy}, profile.replicas...)
			slices.Sort(want)
			if got := project.ServiceNames(); !slices.Equal(got, want) {
				t.Fatalf("services %v, want %v", got, want)
			}
			proxy := project.Services[profile.proxy]
			urls := make([]string, len(profile.replicas))
			for i, replica := range profile.replicas {
				urls[i] = "http://" + replica + ":8000"
			}
			args := slices.Clone(proxy.Command[1:])
			for _, c := range proxy.Configs {
				content := project.Configs[c.Source].Content
				for _, url := range urls {
					if !strings.Contains(content, `"`+url+`"`) {
						t.Errorf("%s is not in %s", url, content)
					}
				}
				args[slices.Index(args, c.Target)] = writeFile(t, content)
			}
			if len(proxy.Configs) == 0 && !slices.Equal(args, urls) {
				t.Errorf("the proxy runs with %q, want %q", args, urls)
			}
			if status, _, output := runCommand(t, append([]string{"check"}, args...)...); status != 0 || proxy.Command[0] != "serve" {
				t.Errorf("the proxy would not start with %q: %s", proxy.Command, output)
			}
			if len(proxy.Ports) != 1 || proxy.Ports[0].Target != 8080 {
				t.Errorf("the proxy publishes %+v", proxy.Ports)
			}
			for _, replica := range profile.replicas {
				if s := project.Services[replica]; len(s.Ports) != 0 || s.NetworkMode != "" {
					t.Errorf("%s is reachable past the proxy: ports %v, network mode %q", replica, s.Ports, s.NetworkMode)
				}
			}
		})
	}
}

func TestComposeHA(t *testing.T) {
	project := composeProject(t, "ha")
	proxies := []string{"warmroute-ha-0", "warmroute-ha-1"}
	want := append([]string{"nginx", "sim-0", "sim-1", "valkey"}, proxies...)
	slices.Sort(want)
	if got := project.ServiceNames(); !slices.Equal(got, want) {
		t.Fatalf("services %v, want %v", got, want)
	}
	nginx, err := os.ReadFile(project.Services["nginx"].Volumes[0].Source)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range proxies {
		s := project.Services[name]
		if status, _, output := runCommand(t, append([]string{"check"}, s.Command[1:]...)...); status != 0 {
			t.Errorf("%s would not start: %s", name, output)
		}
		if url := s.Environment["WARMROUTE_REDIS_URL"]; url == nil || *url != "redis://valkey:6379" {
			t.Errorf("%s does not share over valkey", name)
		}
		if len(s.Ports) != 0 || len(s.Volumes) != 0 {
			t.Errorf("%s has the ports %v and the volumes %v", name, s.Ports, s.Volumes)
		}
		if !strings.Contains(string(nginx), "server "+name+":8080 ") {
			t.Errorf("nginx sends nothing to %s", name)
		}
	}
	for _, name := range project.ServiceNames() {
		if published := len(project.Services[name].Ports) > 0; published != (name == "nginx") {
			t.Errorf("%s publishes ports: %v", name, published)
		}
	}
}

// TestDeployedComposeFiles has the files of docs/deploy/compose start a proxy that finds their replicas.
func TestDeployedComposeFiles(t *testing.T) {
	for file, replicas := range map[string][]string{
		"docs/deploy/compose/scale.yaml": {"vllm"},
		"docs/deploy/compose/file.yaml":  {"vllm-0", "vllm-1"},
	} {
		project := composeFile(t, file)
		if got := project.ServiceNames(); !slices.Equal(got, append(slices.Clone(replicas), "warmroute")) {
			t.Errorf("%s has the services %v", file, got)
		}
		proxy := project.Services["warmroute"]
		args := append([]string{"check"}, proxy.Command[min(1, len(proxy.Command)):]...)
		cmd := exec.CommandContext(t.Context(), binary, args...)
		cmd.Env = []string{"NONE="}
		if list := proxy.Environment["WARMROUTE_BACKENDS_FILE"]; list != nil {
			mount := proxy.Volumes[0]
			cmd.Env = append(cmd.Env, "WARMROUTE_BACKENDS_FILE="+strings.Replace(*list, mount.Target, mount.Source, 1))
		}
		if output, err := cmd.CombinedOutput(); err != nil || !strings.HasPrefix(string(output), fmt.Sprintf("ok: %d backend", len(replicas))) {
			t.Errorf("%s: %q: %v %s", file, args, err, output)
		}
		for _, name := range replicas {
			s := project.Services[name]
			if s.HealthCheck == nil || len(s.Ports) != 0 || s.ContainerName != "" {
				t.Errorf("%s: %s has no health check, publishes ports, or cannot be scaled", file, name)
			}
			if d := proxy.DependsOn[name]; d.Condition != types.ServiceConditionStarted {
				t.Errorf("%s: the proxy waits for %s to be %q", file, name, d.Condition)
			}
		}
	}
}
