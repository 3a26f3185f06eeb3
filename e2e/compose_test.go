package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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
		{"disaggregation", "warmroute-disaggregation", []string{"vllm-prefill", "vllm-decode-0", "vllm-decode-1"}, []string{"0", "1", "2"}},
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
				file := project.Configs[c.Source].File
				content, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				for _, url := range urls {
					if !strings.Contains(string(content), `"`+url+`"`) {
						t.Errorf("%s is not in %s", url, content)
					}
				}
				args[slices.Index(args, c.Target)] = file
			}
			if len(proxy.Configs) == 0 && !slices.Equal(args, urls) {
				t.Errorf("the proxy runs with %q, want %q", args, urls)
			}
			if status, _, output := runCommand(t, append([]string{"check"}, args...)...); status != 0 || proxy.Command[0] != "serve" {
				t.Errorf("the proxy would not start with %q: %s", proxy.Command, output)
			}
			if got, want := publishedPorts(proxy), []string{"127.0.0.1:8080:8080", "127.0.0.1:9090:9090"}; !slices.Equal(got, want) {
				t.Errorf("the proxy publishes %q, want %q", got, want)
			}
			for _, replica := range profile.replicas {
				if s := project.Services[replica]; len(s.Ports) != 0 || s.NetworkMode != "" {
					t.Errorf("%s is reachable past the proxy: ports %v, network mode %q", replica, s.Ports, s.NetworkMode)
				}
			}
		})
	}
}

// publishedPorts returns each port of a service with its address.
func publishedPorts(s types.ServiceConfig) (ports []string) {
	for _, p := range s.Ports {
		ports = append(ports, fmt.Sprintf("%s:%s:%d", p.HostIP, p.Published, p.Target))
	}
	return ports
}

// TestComposeHA compares each profile with two proxies to that with one: the proxies run the same command in front of the same
// replicas, and nginx and the proxies know each other's addresses.
func TestComposeHA(t *testing.T) {
	for _, profile := range composeProfiles() {
		name := profile.name + "-ha"
		if profile.name == "sim" {
			name = "ha"
		}
		project := composeProject(t, name)
		proxies := []string{"warmroute-" + name + "-0", "warmroute-" + name + "-1"}
		want := slices.Concat([]string{"nginx", "valkey"}, profile.replicas, proxies)
		slices.Sort(want)
		if got := project.ServiceNames(); !slices.Equal(got, want) {
			t.Fatalf("%s has the services %v, want %v", name, got, want)
		}
		one := composeProject(t, profile.name).Services[profile.proxy]
		nginx := project.Services["nginx"]
		config, err := os.ReadFile(nginx.Volumes[0].Source)
		if err != nil {
			t.Fatal(err)
		}
		for i, proxy := range proxies {
			s := project.Services[proxy]
			if !slices.Equal(s.Command, one.Command) || fmt.Sprint(s.Configs) != fmt.Sprint(one.Configs) {
				t.Errorf("%s runs %q with %v, %s %q with %v", proxy, s.Command, s.Configs, profile.proxy, one.Command, one.Configs)
			}
			environment := s.Environment.Resolve(func(string) (string, bool) { return "", false })
			if trusted := environment["WARMROUTE_TRUSTED_PROXIES"]; trusted == nil || *trusted != nginx.Networks["front"].Ipv4Address {
				t.Errorf("%s does not trust nginx", proxy)
			}
			if url := environment["WARMROUTE_REDIS_URL"]; url == nil || *url != "redis://valkey:6379" {
				t.Errorf("%s does not share over valkey", proxy)
			}
			host := fmt.Sprint("proxy-", i)
			if addresses := nginx.ExtraHosts[host]; !slices.Equal(addresses, []string{s.Networks["front"].Ipv4Address}) ||
				!strings.Contains(string(config), "server "+host+":8080 ") {
				t.Errorf("nginx sends nothing to %s", proxy)
			}
			if got := publishedPorts(s); len(got) != 1 || !strings.HasPrefix(got[0], "127.0.0.1:") || !strings.HasSuffix(got[0], ":9090") {
				t.Errorf("%s publishes %q", proxy, got)
			}
		}
		if got := publishedPorts(nginx); !slices.Equal(got, []string{"127.0.0.1:8080:8080"}) {
			t.Errorf("nginx publishes %q", got)
		}
		for _, name := range append(slices.Clone(profile.replicas), "valkey") {
			if got := publishedPorts(project.Services[name]); len(got) > 0 {
				t.Errorf("%s publishes %q", name, got)
			}
		}
	}
}

// TestComposeRestricted checks what the containers of the proxies and of those beside them may do, and that each image has an
// exact version.
func TestComposeRestricted(t *testing.T) {
	exact := regexp.MustCompile(`:v?\d+\.\d+\.\d+$`)
	project := composeProject(t, "*")
	for name, s := range project.Services {
		if s.Image != "warmroute" && !exact.MatchString(s.Image) {
			t.Errorf("%s has the image %s", name, s.Image)
		}
		restricted := s.ReadOnly && slices.Equal(s.CapDrop, []string{"ALL"}) && slices.Equal(s.SecurityOpt, []string{"no-new-privileges:true"})
		proxy := s.Image == "warmroute" && s.Command[0] == "serve"
		if !restricted && (s.Image == "warmroute" || name == "nginx" || name == "valkey") {
			t.Errorf("%s may write to its root, has capabilities or can get privileges", name)
		}
		if s.MemLimit == 0 && (proxy || name == "nginx" || name == "valkey") {
			t.Errorf("%s has no memory limit", name)
		}
		if !proxy {
			continue
		}
		limit := s.Environment["GOMEMLIMIT"]
		var mib int64
		if _, err := fmt.Sscanf(*limit, "%dMiB", &mib); err != nil || mib<<20 >= int64(s.MemLimit) || mib < 1024+2*256 {
			t.Errorf("%s: GOMEMLIMIT is %s with a limit of %d bytes: %v", name, *limit, s.MemLimit, err)
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
