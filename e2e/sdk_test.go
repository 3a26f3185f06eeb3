package e2e

import (
	"fmt"
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

// startProxy puts a proxy with the default settings in front of the replicas,
// and the SDK in front of the proxy.
func (f *sdkFleet) startProxy(t *testing.T) {
	t.Helper()
	proxy, _ := startServer(t, f.replicas...)
	f.admin = "http://" + proxy.AdminAddr().String()

	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	f.client = openai.NewClient(
		option.WithBaseURL("http://"+proxy.Addr().String()+"/v1"),
		option.WithAPIKey("none"),
		option.WithHTTPClient(&http.Client{Transport: transport}),
		option.WithMaxRetries(0), // what fails must be seen to fail
	)
	f.eventually(t, "all replicas ready", func() bool {
		return f.proxyMetric(t, "warmroute_backend_ready") == float64(len(f.replicas))
	})
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
