package cli

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"warmroute/admin"
	"warmroute/router/step"
)

// serveRecordedChats sends chats through a proxy with its default settings in front of two replicas, and returns it.
func serveRecordedChats(t *testing.T, o *demoOptions) *demoFleet {
	t.Helper()
	serving, stop := context.WithCancel(t.Context())
	var servers sync.WaitGroup
	t.Cleanup(servers.Wait)
	t.Cleanup(stop)
	setup := o.setup()
	f, err := setup.startReplicasAndProxy(testConfigs(), 1, 2, "127.0.0.1:0", "127.0.0.1:0", func(serve func(context.Context) error) {
		servers.Go(func() {
			if err := serve(serving); err != nil {
				t.Error(err)
			}
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.waitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	load, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	f.runChats(load, demoChats(2))
	return f
}

// A fleet with roles is replayed with them.
func TestReplayFromProxyWithRoles(t *testing.T) {
	f := serveRecordedChats(t, &demoOptions{backends: 2, disaggregation: true})
	status, out, errs := execute(t.Context(), t, "replay", "--from", f.adminURL, "--policy", "least-load")
	want := `on 2 simulated replicas, 1 of them for prefill and 1 for decode, with(?s:.*)\n +prefix\+roles .*\n +least-load `
	if status != 0 || errs != "" || !regexp.MustCompile(want).MatchString(out) {
		t.Errorf("status %d, %s\n%s", status, errs, out)
	}
}

// TestReplayFromRunningProxy sends chats through a proxy with its default settings, and replays them.
func TestReplayFromRunningProxy(t *testing.T) {
	f := serveRecordedChats(t, &demoOptions{backends: 2})
	for _, c := range []struct{ args, want string }{
		{"", `^\d+ requests of \ds until \S+ \S+, on 2 simulated replicas with 32000 tokens of KV cache each\.\n` +
			`Their steps take what the proxy has learned: \d+ prompt tokens a second, \S+ ms for a step\.\n` +
			`The proxy uses the policy prefix\.\n\n` +
			`127\.0\.0\.1:\d+, 2 backends, load \S+\n(?s:.*)\n +prefix .*\n +least-load .*\n +round-robin .*\n +pooled `},
		{"--policy prefix --backends 3 --kv-tokens 64000", `on 3 simulated replicas with 64000 tokens(?s:.*), 3 backends, load`},
	} {
		status, out, errs := execute(t.Context(), t, append([]string{"replay", "--from", f.adminURL}, strings.Fields(c.args)...)...)
		if status != 0 || errs != "" || !regexp.MustCompile(c.want).MatchString(out) {
			t.Errorf("%s: status %d, %s\n%s", c.args, status, errs, out)
		}
	}
}

func TestReplayFromErrors(t *testing.T) {
	const first = `{"warmroute_record":2,"started_ms":1,"block_bytes":256,"block_tokens":64`
	const request = `{"timestamp":1,"input_length":9,"input_bytes":40,"output_length":50,"block_runs":[],"code":200}` + "\n"
	for _, c := range []struct {
		name     string
		status   int
		response string
		want     string
	}{
		{"recording is off", 404, `{"error":{"message":"set recording.memory","src":"warmroute"}}`, "set recording.memory"},
		{"another server", 404, "hello", "is not an admin listener of warmroute (404 Not Found): name the right one with --from"},
		{"nothing", 200, "", "read the first line of the recording: EOF"},
		{"no recording", 200, "hello\n", "parse the first line of the recording: invalid character"},
		{"no requests", 200, first + "}\n", "the proxy has recorded no request yet"},
		{"no backends", 200, first + "}\n" + request, "the proxy has 0 backends, expected 1 to 1024"},
		{"bad request", 200, first + "}\n{}\n", "parse the recording: trace line 2: timestamp is missing"},
		{"bad step", 200, first + `,"backends":[{"ready":true,"step":{"prompt_tokens_per_second":5}}]}` + "\n" + request,
			"times of steps that the proxy has learned: 0 is not above 0"},
		{"another model", 200, first + `,"backends":[{"ready":true,"step":{"prompt_tokens_per_second":5},"models":[1]},{"ready":true,` +
			`"step":{"prompt_tokens_per_second":5},"models":[2]}]}` + "\n" + request, "no ready backend serves the models"},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/api/recording" {
				t.Errorf("%s: request for %s", c.name, r.URL.Path)
			}
			w.WriteHeader(c.status)
			io.WriteString(w, c.response)
		}))
		status, out, errs := execute(t.Context(), t, "replay", "--from", server.URL)
		server.Close()
		if status != 1 || out != "" || !strings.Contains(errs, c.want) {
			t.Errorf("%s: status %d, %q, %q, want %q", c.name, status, out, errs, c.want)
		}
	}
}

func TestNewLiveFleet(t *testing.T) {
	backend := func(ready bool, rate float64, kvTokens int, device string, models ...uint64) admin.RecordedBackend {
		return admin.RecordedBackend{Ready: ready, KVTokens: kvTokens, Device: device, Step: step.Model{Rate: rate}, Models: models}
	}
	for _, c := range []struct {
		name     string
		backends []admin.RecordedBackend
		want     string // kvTokens, speeds, devices, modelOf
	}{
		{"equal ones", []admin.RecordedBackend{backend(true, 100, 50, "", 0), backend(true, 100, 50, "", 0)}, "50 [1 1] [0 1] [0 0]"},
		{"one is not ready", []admin.RecordedBackend{backend(false, 1, 1, "", 0), backend(true, 100, 50, "", 0)}, "50 [1] [0] [0]"},
		{"none is ready", []admin.RecordedBackend{backend(false, 100, 50, "", 0)}, "50 [1] [0] [0]"},
		{"different ones", []admin.RecordedBackend{backend(true, 50, 20, "", 0), backend(true, 100, 40, "", 0), backend(true, 200, 0, "", 0)},
			"30 [0.5 1 2] [0 1 2] [0 0 0]"},
		{"a shared device", []admin.RecordedBackend{backend(true, 1, 1, "", 0), backend(true, 1, 1, "gpu", 0), backend(true, 1, 1, "", 0),
			backend(true, 1, 1, "gpu", 0)}, "1 [1 1 1 1] [0 1 2 1] [0 0 0 0]"},
		{"two models", []admin.RecordedBackend{backend(true, 1, 1, "", 5), backend(true, 1, 1, "", 7), backend(true, 1, 1, "", 5)},
			"1 [1 1 1] [0 1 2] [0 1 0]"},
		{"two models connected", []admin.RecordedBackend{backend(true, 1, 1, "", 5), backend(true, 1, 1, "", 7), backend(true, 1, 1, "", 5, 7)},
			"1 [1 1 1] [0 1 2] [0 0 0]"},
		{"no recorded model", []admin.RecordedBackend{backend(true, 1, 1, ""), backend(true, 1, 1, "")}, "1 [1 1] [0 1] [0 0]"},
	} {
		f, err := newLiveFleet(c.backends)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
		} else if got := fmt.Sprint(f.kvTokens, f.speeds, f.devices, f.modelOf); got != c.want {
			t.Errorf("%s: got %s, want %s", c.name, got, c.want)
		}
	}
	withRole := func(role string, rate float64) admin.RecordedBackend {
		b := backend(true, rate, 1, "", 0)
		b.Role = role
		return b
	}
	f, err := newLiveFleet([]admin.RecordedBackend{withRole("", 1), withRole("decode", 1), withRole("prefill", 2), withRole("decode", 1)})
	if err != nil || f.prefills != 1 || f.decodes != 2 || fmt.Sprint(f.speeds) != "[2 1 1 1]" {
		t.Errorf("with roles: %+v, %v", f, err)
	}
	if _, err := newLiveFleet([]admin.RecordedBackend{withRole("draft", 1)}); err == nil {
		t.Error("no error for an unknown role")
	}
	if f, _ := newLiveFleet([]admin.RecordedBackend{backend(true, 1, 1, "", 5, 6), backend(true, 1, 1, "", 7)}); !reflect.DeepEqual(f.groupOf,
		map[uint64]int{5: 0, 6: 0, 7: 1}) {
		t.Errorf("groups %v", f.groupOf)
	}
	if _, err := newLiveFleet([]admin.RecordedBackend{backend(true, 1, 1, ""), backend(true, 1e9, 1, "")}); err == nil {
		t.Error("no error for speeds that differ by nine orders of magnitude")
	}
}

func FuzzParseLiveTraffic(f *testing.F) {
	f.Add(`{"warmroute_record":2,"started_ms":1,"block_bytes":256,"backends":[{"ready":true,"device":"a","kv_tokens":9,` +
		`"step":{"prompt_tokens_per_second":5},"models":[0]}]}` + "\n" +
		`{"timestamp":1,"input_length":90,"input_bytes":600,"output_length":50,"block_runs":[7,2],"code":200}` + "\n")
	f.Fuzz(func(t *testing.T, text string) {
		traffic, err := parseLiveTraffic(strings.NewReader(text))
		if err != nil {
			return
		}
		if fleet, err := newLiveFleet(traffic.header.Backends); err == nil && len(fleet.modelOf) != len(fleet.backends) {
			t.Errorf("%d models for %d backends", len(fleet.modelOf), len(fleet.backends))
		}
	})
}
