//go:build docker && browser

package e2e

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
)

// dockerProject is a project of docker compose. scripts/docker/run starts the daemon and has built the images.
type dockerProject struct {
	t          *testing.T
	args       []string // of docker compose, before its command
	profiles   []string // --profile and a name, for each
	env        []string
	url, admin string
	prometheus string
	network    string // the first three numbers of the addresses of nginx and two proxies
}

// projectCount numbers the projects, each of which has its own ports and network.
var projectCount atomic.Int32

func newDockerProject(t *testing.T, files ...string) *dockerProject {
	t.Helper()
	n := int(projectCount.Add(1))
	port := func(i int) string { return strconv.Itoa(20_000 + 10*n + i) }
	p := &dockerProject{t: t, args: []string{"compose", "--ansi", "never", "--progress", "quiet", "-p", fmt.Sprintf("test%d", n)},
		url: "http://127.0.0.1:" + port(0), admin: "http://127.0.0.1:" + port(1), prometheus: "http://127.0.0.1:" + port(3),
		network: fmt.Sprint("172.16.", n)}
	for _, file := range files {
		p.args = append(p.args, "-f", file)
	}
	p.env = append(os.Environ(), "MODEL=sim", "COMPOSE_PROFILES=", "PROXY_PORT="+port(0), "ADMIN_PORT="+port(1), "ADMIN_PORT_1="+port(2),
		"PROMETHEUS_PORT="+port(3), "HA_NETWORK="+p.network)
	t.Cleanup(func() {
		if t.Failed() {
			output, _ := p.commandForProfiles([]string{"--profile", "*"}, "logs", "--no-color", "--tail", "40").CombinedOutput()
			t.Logf("%s", output)
		}
		output, err := p.commandForProfiles([]string{"--profile", "*"}, "down", "-v", "-t", "0", "--remove-orphans").CombinedOutput()
		if err != nil {
			t.Errorf("down: %v %s", err, output)
		}
	})
	return p
}

// newProfile is the project of docker-compose.yml with profiles, without GPUs.
func newProfile(t *testing.T, profiles ...string) *dockerProject {
	t.Helper()
	p := newDockerProject(t, "docker-compose.yml", "e2e/testdata/compose/no-gpu.yaml")
	for _, name := range profiles {
		p.profiles = append(p.profiles, "--profile", name)
	}
	return p
}

func (p *dockerProject) command(args ...string) *exec.Cmd {
	return p.commandForProfiles(p.profiles, args...)
}

func (p *dockerProject) commandForProfiles(profiles []string, args ...string) *exec.Cmd {
	cmd := exec.Command("docker", slices.Concat(p.args, profiles, args)...)
	cmd.Env = p.env
	return cmd
}

// compose runs a command of docker compose and returns what it printed.
func (p *dockerProject) compose(args ...string) string {
	p.t.Helper()
	output, err := p.command(args...).CombinedOutput()
	if err != nil {
		p.t.Fatalf("docker compose %s: %v\n%s", strings.Join(args, " "), err, output)
	}
	return string(output)
}

// up starts the services and returns when the proxies say that they have so many replicas.
func (p *dockerProject) up(replicas int, args ...string) {
	p.t.Helper()
	p.compose(append([]string{"up", "-d"}, args...)...)
	p.awaitReady(replicas)
}

func (p *dockerProject) awaitReady(replicas int) {
	p.t.Helper()
	p.eventually(fmt.Sprint(replicas, " replicas are ready"), func() bool {
		text, err := get(p.admin + "/metrics")
		return err == nil && len(regexp.MustCompile(`(?m)^warmroute_backend_ready\{.*\} 1$`).FindAllString(text, -1)) == replicas
	})
	p.eventually("the proxy is ready", func() bool { _, err := get(p.url + "/readyz"); return err == nil })
}

func (p *dockerProject) eventually(what string, is func() bool) {
	p.t.Helper()
	for end := time.Now().Add(2 * time.Minute); !is(); time.Sleep(300 * time.Millisecond) {
		if time.Now().After(end) {
			p.t.Fatalf("not within two minutes: %s", what)
		}
	}
}

// get returns the body of a response with status 200.
func get(url string) (string, error) {
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}).Get(url)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, body)
	}
	return string(body), err
}

// ask sends a chat as an OpenAI client does.
func (p *dockerProject) ask(key string) error {
	client := openai.NewClient(option.WithBaseURL(p.url+"/v1"), option.WithAPIKey(key), option.WithMaxRetries(0))
	chat, err := client.Chat.Completions.New(p.t.Context(), openai.ChatCompletionNewParams{
		Model: "sim", MaxTokens: openai.Int(8), Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Hello")},
	})
	if err == nil && chat.Choices[0].Message.Content == "" {
		err = fmt.Errorf("no text in %+v", chat)
	}
	return err
}

// adminToken reads the token from the volume with the command of docs/deploy/compose.md.
func (p *dockerProject) adminToken(service string) string {
	p.t.Helper()
	cp := p.commandForProfiles(nil, "cp", service+":/var/lib/warmroute/admin-token", "-")
	tar := exec.Command("tar", "-xO")
	var err error
	if tar.Stdin, err = cp.StdoutPipe(); err != nil {
		p.t.Fatal(err)
	}
	if err := cp.Start(); err != nil {
		p.t.Fatal(err)
	}
	token, err := tar.Output()
	if copied := cp.Wait(); err != nil || copied != nil {
		p.t.Fatalf("the token: %v, %v", err, copied)
	}
	return strings.TrimSpace(string(token))
}

// container returns the ID of the container of a service.
func (p *dockerProject) container(service string) string {
	p.t.Helper()
	return strings.TrimSpace(p.compose("ps", "-q", service))
}

// inspect returns what a template says of the container of a service.
func (p *dockerProject) inspect(service, template string) string {
	p.t.Helper()
	return dockerOutput(p.t, "inspect", "-f", template, p.container(service))
}

func dockerOutput(t *testing.T, args ...string) string {
	t.Helper()
	output, err := exec.Command("docker", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("docker %s: %v %s", strings.Join(args, " "), err, output)
	}
	return strings.TrimSpace(string(output))
}

// kill kills the process of a service, as the kernel does without memory, and returns when Docker has restarted it.
func (p *dockerProject) kill(service string) {
	p.t.Helper()
	id := p.container(service)
	var pid int
	var started string
	if _, err := fmt.Sscan(dockerOutput(p.t, "inspect", "-f", "{{.State.Pid}} {{.State.StartedAt}}", id), &pid, &started); err != nil {
		p.t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		p.t.Fatal(err)
	}
	p.eventually(service+" is restarted", func() bool {
		now := dockerOutput(p.t, "inspect", "-f", "{{.State.Running}} {{.State.StartedAt}}", id)
		return strings.HasPrefix(now, "true ") && now != "true "+started
	})
}

// dockerLoad is clients that send requests until stop.
type dockerLoad struct {
	done    atomic.Int64
	over    atomic.Bool
	clients sync.WaitGroup
	mutex   sync.Mutex
	failed  []string
	longest time.Duration // of the requests that succeeded
}

// startLoad starts clients. Every second one sends streams of so many tokens, the others short requests, half of them on
// new connections.
func (p *dockerProject) startLoad(clients, tokens int) *dockerLoad {
	l := &dockerLoad{}
	for i := range clients {
		l.clients.Go(func() {
			client := &http.Client{Transport: &http.Transport{DisableKeepAlives: i%4 < 2}}
			defer client.CloseIdleConnections()
			for k := 0; !l.over.Load(); k++ {
				n := 8
				if i%2 == 0 {
					n = tokens
				}
				began := time.Now()
				err := askStream(client, p.url, fmt.Sprintf("client %d, request %d", i, k), n, nil)
				l.mutex.Lock()
				if err != nil {
					l.failed = append(l.failed, fmt.Sprintf("%d tokens, begun at %s: %v", n, began.Format("15:04:05.000"), err))
				} else {
					l.longest = max(l.longest, time.Since(began))
				}
				l.mutex.Unlock()
				l.done.Add(1)
				time.Sleep(250 * time.Millisecond)
			}
		})
	}
	return l
}

// more waits until so many more requests have ended.
func (l *dockerLoad) more(n int64) {
	for from := l.done.Load(); l.done.Load() < from+n; time.Sleep(20 * time.Millisecond) {
	}
}

// failures returns the failures since the last call.
func (l *dockerLoad) failures() []string {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	failed := l.failed
	l.failed = nil
	return failed
}

func (l *dockerLoad) stop() (requests int64, failures []string) {
	l.over.Store(true)
	l.clients.Wait()
	return l.done.Load(), l.failures()
}

// checkRestricted checks that the container of a service can do little, and that its ports are open to this host only.
func (p *dockerProject) checkRestricted(services ...string) {
	p.t.Helper()
	const template = "{{with .HostConfig}}{{.ReadonlyRootfs}}{{.CapDrop}}{{.SecurityOpt}}{{ne (print .Memory) \"0\"}}{{end}} {{.State.Pid}}" +
		"{{range .NetworkSettings.Ports}}{{range .}} {{.HostIp}}{{end}}{{end}}"
	for _, service := range services {
		got := strings.Fields(p.inspect(service, template))
		if got[0] != "true[ALL][no-new-privileges:true]true" {
			p.t.Errorf("%s: %s", service, got[0])
		}
		status, err := os.ReadFile("/proc/" + got[1] + "/status")
		if err != nil || !regexp.MustCompile(`(?s)Uid:\s65532.*CapEff:\s0{16}\n.*CapBnd:\s0{16}\n.*NoNewPrivs:\s1`).Match(status) {
			p.t.Errorf("%s runs with %v %s", service, err, status)
		}
		for _, address := range got[2:] {
			if address != "127.0.0.1" {
				p.t.Errorf("%s publishes a port on %s", service, address)
			}
		}
	}
}

// TestDockerProfiles runs each profile with one proxy: an OpenAI client, a killed replica, a killed proxy.
func TestDockerProfiles(t *testing.T) {
	t.Parallel()
	for _, profile := range composeProfiles() {
		t.Run(profile.name, func(t *testing.T) {
			t.Parallel()
			p := newProfile(t, profile.name)
			p.up(len(profile.replicas))
			if err := p.ask("unused"); err != nil {
				t.Fatal(err)
			}
			p.checkRestricted(profile.proxy)
			token := p.adminToken(profile.proxy)
			p.kill(profile.replicas[0])
			p.awaitReady(len(profile.replicas))
			p.kill(profile.proxy)
			p.awaitReady(len(profile.replicas))
			if again := p.adminToken(profile.proxy); len(token) < 26 || again != token {
				t.Errorf("the token is %q, after a restart %q", token, again)
			}
			if err := p.ask("unused"); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestDockerPageAndReplica opens the live page, adds a replica that the file does not have, and makes a backup.
func TestDockerPageAndReplica(t *testing.T) {
	t.Parallel()
	p := newDockerProject(t, "docker-compose.yml", "e2e/testdata/compose/third-replica.yaml")
	p.profiles = []string{"--profile", "sim"}
	p.up(2, "--scale", "sim-2=0")
	if logs := p.compose("logs", "--no-color", "warmroute-sim"); strings.Count(logs, "admin token created") != 1 {
		t.Errorf("the log does not name the page once: %s", logs)
	}
	page := openPage(t, p.admin)
	page.do(chromedp.SendKeys(chromedp.CSS("#token-input"), p.adminToken("warmroute-sim")+"\r"))
	page.shows("#backends-count", "2 of 2 ready")

	p.compose("up", "-d", "sim-2")
	add := p.commandForProfiles(nil, "exec", "-T", "warmroute-sim", "/warmroute", "backends", "add", "http://sim-2:8000", "--wait", "1m")
	if output, err := add.CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, output)
	}
	page.shows("#backends-count", "3 of 3 ready")
	backup := filepath.Join(t.TempDir(), "state.tar")
	file, err := os.Create(backup)
	if err != nil {
		t.Fatal(err)
	}
	p.compose("stop", "warmroute-sim")
	cp := p.command("cp", "warmroute-sim:/var/lib/warmroute/.", "-")
	cp.Stdout = file
	if err := cp.Run(); err != nil {
		t.Fatal(err)
	}
	p.compose("down", "-v")
	p.compose("create")
	restore := p.command("cp", "-", "warmroute-sim:/var/lib/warmroute")
	if restore.Stdin, err = os.Open(backup); err != nil {
		t.Fatal(err)
	}
	if output, err := restore.CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, output)
	}
	p.up(3)
	page.shows("#backends-count", "3 of 3 ready") // with the same token
	if list := p.compose("exec", "-T", "warmroute-sim", "/warmroute", "backends", "list"); strings.Count(list, " ready ") != 3 {
		t.Errorf("after the backup was restored:\n%s", list)
	}
}

// TestDockerKeys removes the # of the lines for API keys in the compose file.
func TestDockerKeys(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("docker-compose.yml")
	if err != nil {
		t.Fatal(err)
	}
	text := regexp.MustCompile(`(?m)^( *)# (.*# API keys|WARMROUTE_KEYS_FILE: .*)$`).ReplaceAllString(string(source), "$1$2")
	if uncommented := regexp.MustCompile(`(?m)^[^#\n]*\bapi-keys\b`).FindAllString(text, -1); len(uncommented) != 3 {
		t.Fatalf("the compose file has %q for API keys, want three lines", uncommented)
	}
	dir := t.TempDir()
	const key = "the-key-of-team-a-0123456789"
	hashed := fmt.Sprintf("team-a sha256:%x\n", sha256.Sum256([]byte(key)))
	for name, content := range map[string]string{"docker-compose.yml": text, "api-keys": hashed} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	p := newDockerProject(t, filepath.Join(dir, "docker-compose.yml"))
	p.profiles = []string{"--profile", "sim"}
	p.up(2)
	if err := p.ask("another-key"); err == nil || !strings.Contains(err.Error(), "401") {
		t.Errorf("with another key: %v", err)
	}
	if err := p.ask(key); err != nil {
		t.Error(err)
	}
}

// TestDockerReleaseImage builds the image of a release archive and runs it.
func TestDockerReleaseImage(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	container := dockerOutput(t, "create", "warmroute")
	dockerOutput(t, "cp", container+":/warmroute", filepath.Join(dir, "warmroute"))
	dockerOutput(t, "rm", container)
	const image = "warmroute-release"
	build := exec.Command("docker", "build", "-q", "--network", "none", "-t", image, "-f", "scripts/release/Dockerfile", dir)
	build.Env = append(os.Environ(), "DOCKER_BUILDKIT=0") // buildx is not installed
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, output)
	}
	t.Cleanup(func() { dockerOutput(t, "rmi", image) })
	output := dockerOutput(t, "run", "--rm", "-e", "WARMROUTE_STATE_FILE=/var/lib/warmroute/state.json", image,
		"check", "http://127.0.0.1:8000")
	if !strings.Contains(output, "ok: 1 backend") {
		t.Errorf("it says %s", output)
	}
}

// TestDockerScale changes the number of containers of a service, of which each takes a GPU of its own.
func TestDockerScale(t *testing.T) {
	t.Parallel()
	p := newDockerProject(t, "docs/deploy/compose/scale.yaml", "e2e/testdata/compose/no-gpu-scale.yaml")
	p.up(3, "--scale", "vllm=3")
	p.checkRestricted("warmroute")
	load := p.startLoad(4, 200)
	load.more(20)
	p.compose("up", "-d", "--no-recreate", "--scale", "vllm=1")
	p.awaitReady(1)
	load.more(20)
	if _, failures := load.stop(); len(failures) > 0 {
		t.Errorf("scaling down lost requests: %q", failures)
	}
}

// TestDockerFile runs the compose file with a mounted list of replicas.
func TestDockerFile(t *testing.T) {
	t.Parallel()
	p := newDockerProject(t, "docs/deploy/compose/file.yaml", "e2e/testdata/compose/no-gpu-file.yaml")
	p.up(2)
	p.checkRestricted("warmroute")
	if list := p.compose("exec", "-T", "warmroute", "/warmroute", "backends", "list"); !strings.Contains(list, "gpu-1 ") {
		t.Errorf("listed as\n%s", list)
	}
}

// haProfiles are the profiles with two proxies, and their replicas, but for one-gpu-ha, which TestDockerRestart runs.
func haProfiles() map[string]int {
	return map[string]int{"ha": 2, "gpu-ha": 2, "disaggregation-ha": 3}
}

// haProxies returns the services of the two proxies of a profile.
func haProxies(profile string) []string {
	return []string{"warmroute-" + profile + "-0", "warmroute-" + profile + "-1"}
}

// TestDockerHA kills each container of each profile with two proxies, under load.
func TestDockerHA(t *testing.T) {
	t.Parallel()
	for profile, replicas := range haProfiles() {
		t.Run(profile, func(t *testing.T) {
			t.Parallel()
			p := newProfile(t, profile)
			if profile == "ha" {
				p.args = append(p.args, "-f", "e2e/testdata/compose/access-log.yaml")
			}
			p.up(replicas)
			if err := p.ask("unused"); err != nil {
				t.Fatal(err)
			}
			proxies := haProxies(profile)
			p.checkRestricted(append([]string{"nginx", "valkey"}, proxies...)...)
			const clients = 8
			if profile == "gpu-ha" {
				// What can be replaced while requests come.
				load := p.startLoad(clients, 500)
				load.more(40)
				for _, service := range []string{"vllm-0", "valkey"} {
					p.compose("up", "-d", "--force-recreate", "--no-deps", service)
					p.awaitReady(replicas)
				}
				load.more(40)
				if _, failures := load.stop(); len(failures) > 0 {
					t.Errorf("lost when a replica and Valkey were replaced: %q", failures)
				}
				p.compose("exec", "-T", "nginx", "nginx", "-e", "stderr", "-s", "reload")
				if err := p.ask("unused"); err != nil {
					t.Error(err)
				}
			}
			if profile != "ha" {
				return
			}
			// nginx states the address of the client, here that of Docker's gateway, and the proxies believe it.
			if logs := p.compose("logs", "--no-color", proxies[0], proxies[1]); !strings.Contains(logs, `"client":"`+p.network+`.1"`) {
				t.Errorf("no proxy logs %s.1 as the client: %s", p.network, logs)
			}
			load := p.startLoad(clients, 100)
			for _, service := range []string{"valkey", proxies[0], proxies[1], "sim-0"} {
				load.more(40)
				p.kill(service)
				load.more(40)
				p.awaitReady(replicas)
				failures := load.failures()
				// A killed proxy takes with it what it had in flight, a replica the streams that have begun.
				if len(failures) > clients || service == "valkey" && len(failures) > 0 {
					t.Errorf("%d requests were lost when %s was killed: %q", len(failures), service, failures)
				}
				load.more(40)
				if failures := load.failures(); len(failures) > 0 {
					t.Errorf("after the restart of %s: %q", service, failures)
				}
			}
			if _, failures := load.stop(); len(failures) > 0 {
				t.Error(failures)
			}
			p.kill("nginx")
			p.awaitReady(replicas)
			if err := p.ask("unused"); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestDockerUpdate replaces one proxy after the other with the commands of docs/deploy/compose.md, under 32 clients, half of
// them with streams of 30 s. No request is lost or refused.
func TestDockerUpdate(t *testing.T) {
	t.Parallel()
	p := newProfile(t, "ha")
	p.args = append(p.args, "-f", "e2e/testdata/compose/slow-replicas.yaml")
	p.up(2)
	load := p.startLoad(32, updateStreamTokens)
	load.more(100)
	for _, proxy := range haProxies("ha") {
		before := p.container(proxy)
		p.compose("up", "-d", "--force-recreate", "--no-deps", "--wait", proxy)
		if p.container(proxy) == before {
			t.Errorf("%s was not replaced", proxy)
		}
		load.more(100)
	}
	for load.done.Load() < 2000 {
		load.more(1)
	}
	requests, failures := load.stop()
	t.Logf("%d requests, the longest took %v; %d lost or refused", requests, load.longest, len(failures))
	if len(failures) > 0 {
		t.Errorf("lost or refused: %q", failures)
	}
}

// TestDockerUpdateOneProxy replaces the only proxy. Meanwhile connections are refused, or closed by Docker's proxy of the
// port, which accepts them; and no response that has begun is lost.
func TestDockerUpdateOneProxy(t *testing.T) {
	t.Parallel()
	p := newProfile(t, "sim")
	p.up(2)
	load := p.startLoad(8, 1000)
	load.more(20)
	p.compose("up", "-d", "--force-recreate", "--no-deps", "warmroute-sim")
	p.awaitReady(2)
	refused := load.failures()
	t.Logf("%d requests refused: %q", len(refused), refused)
	for _, failure := range refused {
		if !strings.Contains(failure, ": Post ") { // an error of net/http before there is a response
			t.Errorf("lost: %s", failure)
		}
	}
	load.more(20)
	if _, failures := load.stop(); len(failures) > 0 {
		t.Errorf("after the update: %q", failures)
	}
}

// updateStreamTokens is the length of a stream that takes 30 s beside the others.
const updateStreamTokens = 570

// TestDockerMonitoring adds Prometheus to what runs, and looks at its targets and rules.
func TestDockerMonitoring(t *testing.T) {
	t.Parallel()
	for _, profile := range []string{"sim", "ha"} {
		p := newProfile(t)
		p.profiles = []string{"--profile", profile}
		p.compose("up", "-d")
		p.profiles = []string{"--profile", "monitoring"}
		p.compose("up", "-d", "prometheus")
		want := map[string]int{"sim": 1, "ha": 2}[profile]
		p.eventually("Prometheus scrapes each proxy", func() bool {
			var targets struct {
				Data struct {
					ActiveTargets []struct {
						Health string
						Labels struct{ Job string }
					}
				}
			}
			text, err := get(p.prometheus + "/api/v1/targets")
			up := 0
			if err == nil && json.Unmarshal([]byte(text), &targets) == nil {
				for _, one := range targets.Data.ActiveTargets {
					if one.Health == "up" && one.Labels.Job == "warmroute" {
						up++
					}
				}
			}
			return up == want && len(targets.Data.ActiveTargets) == want
		})
		p.eventually("Prometheus evaluates the rules", func() bool {
			text, err := get(p.prometheus + "/api/v1/rules")
			return err == nil && strings.Contains(text, "WarmrouteNotScraped") && !strings.Contains(text, `"health":"err"`) &&
				!strings.Contains(text, `"health":"unknown"`)
		})
	}
}

// TestDockerRestart restarts the Docker daemon, as a reboot does. The two replicas of one GPU start one after the other, with
// no word of compose.
func TestDockerRestart(t *testing.T) {
	p := newProfile(t, "one-gpu-ha")
	p.up(2)
	token := p.adminToken("warmroute-one-gpu-ha-0")
	starts := p.inspect("vllm-half-0", "{{.State.StartedAt}}")
	restartDaemon(t)
	p.awaitReady(2)
	if again := p.inspect("vllm-half-0", "{{.State.StartedAt}}"); again == starts {
		t.Error("the replicas were not restarted")
	}
	for _, service := range []string{"vllm-half-0", "vllm-half-1"} {
		if logs := p.compose("logs", "--no-color", service); strings.Contains(logs, "another replica measures") {
			t.Errorf("both replicas started at once: %s", logs)
		}
	}
	if err := p.ask("unused"); err != nil {
		t.Error(err)
	}
	if again := p.adminToken("warmroute-one-gpu-ha-1"); again != token {
		t.Errorf("the token was %q, is %q", token, again)
	}
}

// restartDaemon ends the daemon, with its containers, and starts it with the command in DOCKERD.
func restartDaemon(t *testing.T) {
	t.Helper()
	argv := strings.Fields(os.Getenv("DOCKERD"))
	at := slices.Index(argv, "--pidfile")
	if at < 0 {
		t.Fatal("DOCKERD has no command of the daemon: run scripts/docker/run")
	}
	data, err := os.ReadFile(argv[at+1])
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(2 * time.Minute); exec.Command("docker", "info").Run() == nil || syscall.Kill(pid, 0) == nil; {
		if time.Now().After(end) {
			t.Fatal("the daemon does not end")
		}
		time.Sleep(100 * time.Millisecond)
	}
	log, err := os.OpenFile(argv[at+1]+".log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	daemon := exec.Command(argv[0], argv[1:]...)
	daemon.Stdout, daemon.Stderr, daemon.SysProcAttr = log, log, &syscall.SysProcAttr{Setsid: true}
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	go daemon.Wait()
	for end := time.Now().Add(time.Minute); exec.Command("docker", "info").Run() != nil; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the daemon does not start")
		}
	}
}
