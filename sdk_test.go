package main

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.uber.org/goleak"

	"warmroute/sim"
	"warmroute/sim/engine"
)

// sdkFleet is three replicas behind a proxy, and OpenAI's SDK in front of it.
type sdkFleet struct {
	client   openai.Client
	model    string
	replicas []string // base URLs
	admin    string   // base URL of the proxy's admin listener

	// kill ends the last replica at once, as if its process had died; restart
	// brings it back on the same address.
	kill, restart func()
}

// test runs everything that an SDK's user relies on. The replica that dies comes
// last, since a restarted one starts with a cold cache.
func (f *sdkFleet) test(t *testing.T) {
	t.Run("answer with usage", f.answerWithUsage)
	t.Run("stream with usage", f.streamWithUsage)
	t.Run("stream without usage", f.streamWithoutUsage)
	t.Run("the next turn finds its prefix", f.nextTurnFindsItsPrefix)
	t.Run("tool call and its result", f.toolCallAndResult)
	t.Run("streamed tool call", f.streamedToolCall)
	t.Run("models", f.models)
	t.Run("completions", f.completions)
	t.Run("responses", f.responses)
	t.Run("unknown model", f.unknownModel)
	t.Run("prompt longer than the context", f.promptTooLong)
	t.Run("body that is not JSON", f.notJSON)
	t.Run("unknown path", f.unknownPath)
	t.Run("a client leaves in mid-stream", f.leaveInMidStream)
	t.Run("a client leaves a plain request", f.leavePlainRequest)
	t.Run("a replica is killed under load", f.replicaKilled)
}

func TestSDKInFrontOfSimulatedReplicas(t *testing.T) {
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() { verifyNoGoroutineLeft(t, before) })

	// As large as the real replicas that the same tests run against.
	config := sim.Config{Engine: engine.Config{KVTokens: 16_384}, MaxModelLen: 8192}
	f := &sdkFleet{model: "sim"}
	for range 2 {
		url, _ := startSimReplica(t, config, "127.0.0.1:0")
		f.replicas = append(f.replicas, url)
	}
	victim, kill := startSimReplica(t, config, "127.0.0.1:0")
	f.replicas = append(f.replicas, victim)
	f.kill = kill
	f.restart = func() { startSimReplica(t, config, strings.TrimPrefix(victim, "http://")) }
	f.startProxy(t)
	f.test(t)
}

// startSimReplica runs a replica until it is killed or the test ends.
func startSimReplica(t *testing.T, c sim.Config, address string) (url string, kill func()) {
	t.Helper()
	s := sim.NewServer(c)
	if err := s.Listen(address); err != nil {
		t.Fatal(err)
	}
	kill = runUntilStopped(t, s.Run)
	return s.URL(), kill
}

// startProxy puts a proxy with the default settings in front of the replicas,
// and the SDK in front of the proxy.
func (f *sdkFleet) startProxy(t *testing.T) {
	t.Helper()
	config, err := demoConfig("prefix", "127.0.0.1:0", "127.0.0.1:0", f.replicas)
	if err != nil {
		t.Fatal(err)
	}
	s, err := newService(config, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	public, admin, err := listen(config)
	if err != nil {
		t.Fatal(err)
	}
	runUntilStopped(t, func(ctx context.Context) error { return s.run(ctx, public, admin) })
	f.admin = baseURL(admin)

	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	f.client = openai.NewClient(
		option.WithBaseURL(baseURL(public)+"/v1"),
		option.WithAPIKey("none"),
		option.WithHTTPClient(&http.Client{Transport: transport}),
		option.WithMaxRetries(0), // what fails must be seen to fail
	)
	f.eventually(t, "all replicas ready", func() bool {
		return f.proxyMetric(t, "warmroute_backend_ready") == float64(len(f.replicas))
	})
}

// runUntilStopped runs an owner of goroutines until stop is called or the test
// ends, whichever comes first, and waits for it.
func runUntilStopped(t *testing.T, run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := run(ctx); err != nil {
			t.Error(err)
		}
	}()
	stop = func() { cancel(); <-done }
	t.Cleanup(stop)
	return stop
}

// eventually waits for a state that must come; the bound is only there for a run that is broken.
func (f *sdkFleet) eventually(t *testing.T, what string, reached func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !reached(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

// running is the number of requests that replicas compute or queue.
func running(t *testing.T, replicas ...string) (sum float64) {
	t.Helper()
	for _, url := range replicas {
		sum += metricSum(t, url, "vllm:num_requests_running") + metricSum(t, url, "vllm:num_requests_waiting")
	}
	return sum
}

// generated is the number of tokens that the replicas have produced so far.
func (f *sdkFleet) generated(t *testing.T) (sum float64) {
	t.Helper()
	for _, url := range f.replicas {
		sum += metricSum(t, url, "vllm:generation_tokens_total")
	}
	return sum
}

func (f *sdkFleet) proxyMetric(t *testing.T, name string) float64 {
	t.Helper()
	return metricSum(t, f.admin, name)
}

// metricSum returns the sum of a gauge's or counter's series that have all of
// the values as labels.
func metricSum(t *testing.T, url, name string, labels ...string) (sum float64) {
	t.Helper()
	resp, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	defer http.DefaultClient.CloseIdleConnections()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range families[name].GetMetric() {
		var values []string
		for _, l := range m.GetLabel() {
			values = append(values, l.GetValue())
		}
		if slices.ContainsFunc(labels, func(want string) bool { return !slices.Contains(values, want) }) {
			continue
		}
		sum += m.GetGauge().GetValue() + m.GetCounter().GetValue()
	}
	return sum
}

// words returns text that no earlier request has left in a cache.
func words(n int) string {
	vocabulary := strings.Fields("river stone copper lantern meadow signal harbor violet engine winter paper orbit")
	var b strings.Builder
	for range n {
		b.WriteString(vocabulary[rand.IntN(len(vocabulary))] + " ")
	}
	return fmt.Sprint(b.String(), rand.Uint64())
}

// port is the last part of a replica's address, which its backend's name ends in as well.
func port(t *testing.T, url string) string {
	t.Helper()
	_, port, err := net.SplitHostPort(strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	return port
}
