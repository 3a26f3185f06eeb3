package main

import (
	"bytes"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
)

// composeProject loads docker-compose.yml as `docker compose` does, with the
// profiles given or, without any, those of .env.
func composeProject(t *testing.T, profiles ...string) *types.Project {
	t.Helper()
	options, err := cli.NewProjectOptions([]string{"docker-compose.yml"},
		cli.WithWorkingDirectory("."), cli.WithEnvFiles(), cli.WithDotEnv, cli.WithDefaultProfiles(profiles...))
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
	}
}

func TestComposeWithoutAProfileIsTwoGPUs(t *testing.T) {
	if got, want := composeProject(t).ServiceNames(), composeProject(t, "gpu").ServiceNames(); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestComposeProfileIsAProxyAndItsReplicas(t *testing.T) {
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
			if want := append([]string{"serve"}, urls...); !slices.Equal(proxy.Command, want) {
				t.Errorf("the proxy runs %q, want %q", proxy.Command, want)
			}
			var output bytes.Buffer
			if status := run(t.Context(), append([]string{"check"}, proxy.Command[1:]...), &output, &output); status != 0 {
				t.Errorf("the proxy would not start: %s", output.String())
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

func TestComposeReplicasHoldTheirGPUs(t *testing.T) {
	for _, profile := range composeProfiles() {
		project := composeProject(t, profile.name)
		for i, replica := range profile.replicas {
			var ids []string
			if deploy := project.Services[replica].Deploy; deploy != nil {
				for _, d := range deploy.Resources.Reservations.Devices {
					if d.Driver != "nvidia" || !slices.Contains(d.Capabilities, "gpu") {
						t.Errorf("%s reserves %+v", replica, d)
					}
					ids = append(ids, d.IDs...)
				}
			}
			if got := strings.Join(ids, ","); got != profile.gpus[i] {
				t.Errorf("%s has GPU %q, want %q", replica, got, profile.gpus[i])
			}
		}
	}
}

func TestComposeSecondReplicaOnAGPUWaitsForTheFirst(t *testing.T) {
	project := composeProject(t, "one-gpu")
	second := project.Services["vllm-half-1"].DependsOn["vllm-half-0"]
	if second.Condition != types.ServiceConditionHealthy {
		t.Errorf("it starts on %q", second.Condition)
	}
	for _, name := range []string{"vllm-half-0", "vllm-half-1"} {
		if command := project.Services[name].Command; !slices.Contains(command, "--gpu-memory-utilization=0.45") {
			t.Errorf("%s runs %q", name, command)
		}
	}
}

func TestComposeReplicasRunAsTheProxyNeedsThem(t *testing.T) {
	for _, profile := range composeProfiles()[:2] {
		project := composeProject(t, profile.name)
		for _, name := range profile.replicas {
			s := project.Services[name]
			for _, flag := range []string{
				"--enable-prefix-caching", "--enable-prompt-tokens-details", "--shutdown-timeout=60",
				"--disable-access-log-for-endpoints=/health,/metrics,/ping",
			} {
				if !slices.Contains(s.Command, flag) {
					t.Errorf("%s runs without %s", name, flag)
				}
			}
			if keep := s.Environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]; keep == nil || *keep != "75" {
				t.Errorf("%s closes idle connections before the proxy does", name)
			}
			if s.Ipc != "host" {
				t.Errorf("%s has ipc %q", name, s.Ipc)
			}
			if h := s.HealthCheck; h == nil || h.StartPeriod == nil || time.Duration(*h.StartPeriod) < 10*time.Minute {
				t.Errorf("%s may be called unhealthy while it loads its model", name)
			}
			if g := s.StopGracePeriod; g == nil || time.Duration(*g) <= time.Minute {
				t.Errorf("%s is killed before its --shutdown-timeout is over", name)
			}
			if len(s.Volumes) != 1 || s.Volumes[0].Source != "vllm-cache" {
				t.Errorf("%s does not share the cache: %+v", name, s.Volumes)
			}
		}
	}
}

func TestComposeSimulatedReplicasRunACommandOfTheImage(t *testing.T) {
	project := composeProject(t, "sim")
	for _, name := range composeProfiles()[2].replicas {
		s := project.Services[name]
		if s.Image != project.Services["warmroute-sim"].Image {
			t.Errorf("%s runs the image %s", name, s.Image)
		}
		var output bytes.Buffer
		if status := run(t.Context(), append(s.Command, "--help"), &output, &output); status != 0 || s.Command[0] != "sim" {
			t.Errorf("%s runs %q: %s", name, s.Command, &output)
		}
		if check := s.HealthCheck; check == nil || !slices.Equal(check.Test[1:3], []string{"/warmroute", "health"}) {
			t.Errorf("%s has the health check of the proxy", name)
		}
	}
}

func TestComposeProxyMayFinishItsRequestsAndKnowsItsVariables(t *testing.T) {
	timeouts := mustLoad(t, "", "http://a:8000").Timeouts
	shutdown := timeouts.Drain + timeouts.Shutdown
	variables := settingVariables(t)
	for _, profile := range composeProfiles() {
		proxy := composeProject(t, profile.name).Services[profile.proxy]
		if g := proxy.StopGracePeriod; g == nil || time.Duration(*g) <= shutdown {
			t.Errorf("%s is killed within timeouts.drain and timeouts.shutdown, %v", profile.proxy, shutdown)
		}
		for name := range maps.Keys(proxy.Environment) {
			if !variables[name] {
				t.Errorf("%s has the variable %s, which is no setting", profile.proxy, name)
			}
		}
		if port := strconv.Itoa(int(proxy.Ports[0].Target)); !strings.HasSuffix(mustLoad(t, "", "http://a:8000").Listen, ":"+port) {
			t.Errorf("%s publishes port %s, on which nothing listens", profile.proxy, port)
		}
	}
}

func TestComposeProxyKeepsItsSnapshotWhereItMayWrite(t *testing.T) {
	final := dockerfileStages(t)[1]
	owner := instruction(t, final, "USER")
	for _, profile := range composeProfiles() {
		proxy := composeProject(t, profile.name).Services[profile.proxy]
		file := proxy.Environment["WARMROUTE_INDEX_SNAPSHOT"]
		if file == nil || len(proxy.Volumes) != 1 {
			t.Fatalf("%s has the snapshot %v and the volumes %+v", profile.proxy, file, proxy.Volumes)
		}
		v := proxy.Volumes[0]
		if v.Type != types.VolumeTypeVolume || v.ReadOnly || v.Source == "" || path.Dir(*file) != v.Target {
			t.Errorf("%s keeps its snapshot in %s, outside of the volume %+v", profile.proxy, *file, v)
		}
		// A new volume has the owner of the folder that it is mounted on.
		if !slices.ContainsFunc(final, func(line string) bool {
			return strings.HasPrefix(line, "COPY --from=build --chown="+owner+" ") && strings.HasSuffix(line, " "+v.Target)
		}) {
			t.Errorf("the image has no %s that belongs to %s", v.Target, owner)
		}
	}
}
