package server

import (
	"bufio"
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/spf13/pflag"
	"go.uber.org/goleak"

	"warmroute/config"
	"warmroute/lab/policies"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// TestMain looks for goroutines left behind, but for those that close idle connections, which end within
// timeouts.keepalive_idle after the last connection. Parallel tests wait most of the time, so that more of them run than there
// are processors.
func TestMain(m *testing.M) {
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == strconv.Itoa(runtime.GOMAXPROCS(0)) {
		_ = f.Value.Set("8")
	}
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*HostClient).connsCleaner"))
}

// startServer runs a Server with the default settings, but for what a test changes, on
// ports of its own until stop is called or the test ends.
func startServer(t *testing.T, log io.Writer, change func(*config.Config), urls ...string) (s *Server, stop func()) {
	t.Helper()
	c := loadConfig(t, "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\n", urls...)
	if change != nil {
		change(c)
	}
	return startConfigured(t, log, c)
}

func startConfigured(t *testing.T, log io.Writer, c *config.Config) (s *Server, stop func()) {
	t.Helper()
	s, err := New(Options{Config: c, Policies: policies.All(), Log: slog.New(slog.NewTextHandler(log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	return s, runUntilStopped(t, s.Run)
}

// publicURL and adminURL are those of the two listeners.
func (s *Server) publicURL() string { return "http://" + s.Addr().String() }
func (s *Server) adminURL() string  { return "http://" + s.AdminAddr().String() }

// loadConfig returns the default configuration with what a file of that content and
// the backends' URLs change.
func loadConfig(t *testing.T, yaml string, urls ...string) *config.Config {
	t.Helper()
	file := filepath.Join(t.TempDir(), "test.yaml")
	if err := os.WriteFile(file, []byte(yaml), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := loadConfigFile(t, file, urls...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func loadConfigFile(t *testing.T, file string, urls ...string) (*config.Config, error) {
	t.Helper()
	defaults, err := os.ReadFile("../config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	loader := config.Loader{Defaults: defaults, Policies: policies.All()}
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	loader.AddFlags(flags)
	if err := flags.Parse([]string{"--config", file}); err != nil {
		t.Fatal(err)
	}
	return loader.Load(flags, urls)
}

// syncBuffer is a log that may be read while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// simFleet is simulated replicas, fast ones, that outlive the proxies before them.
type simFleet struct{ urls []string }

func startSimFleet(t *testing.T, n, kvTokens int) *simFleet {
	t.Helper()
	f := &simFleet{}
	for range n {
		url, _ := startSimReplica(t, sim.Config{Engine: engine.Config{KVTokens: kvTokens, Speed: 20}}, "127.0.0.1:0")
		f.urls = append(f.urls, url)
	}
	return f
}

// startSimReplica runs a replica until it is killed or the test ends.
func startSimReplica(t *testing.T, c sim.Config, address string) (url string, kill func()) {
	t.Helper()
	s := sim.NewServer(c)
	if err := s.Bind(address); err != nil {
		t.Fatal(err)
	}
	kill = runUntilStopped(t, s.Run)
	return s.URL(), kill
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

// askStream sends one streamed request, and returns an error unless its response
// comes whole. tokens is its output's length; begun is called at its first event.
func askStream(client *http.Client, url, prompt string, tokens int, begun func()) error {
	body := fmt.Appendf(nil, `{"model":"sim","stream":true,"ignore_eos":true,"max_tokens":%d,"messages":[{"role":"user","content":%q}]}`,
		tokens, prompt)
	resp, err := client.Post(url+"/v1/chat/completions", "application/json", bytes.NewReader(body))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	var last string
	for events := 0; lines.Scan(); {
		if line := lines.Text(); line != "" {
			last = line
			if events++; events == 1 && begun != nil {
				begun()
			}
			if strings.Contains(line, `"error"`) {
				return fmt.Errorf("status %d, %s", resp.StatusCode, line)
			}
		}
	}
	if lines.Err() != nil || resp.StatusCode != http.StatusOK || last != "data: [DONE]" {
		return fmt.Errorf("status %d, last line %q, %w", resp.StatusCode, last, lines.Err())
	}
	return nil
}

// crowd is clients that ask and ask again until they are told to leave.
type crowd struct {
	t       *testing.T
	served  atomic.Int64
	over    atomic.Bool
	clients sync.WaitGroup
}

// startCrowd has half of the clients keep their connections, and half connect
// anew for each request.
func startCrowd(t *testing.T, url string, n int, transport *http.Transport) *crowd {
	c := &crowd{t: t}
	for i := range n {
		c.clients.Go(func() {
			own := transport.Clone()
			own.DisableKeepAlives = i%2 == 0
			client := &http.Client{Transport: own}
			defer client.CloseIdleConnections()
			for k := 0; !c.over.Load(); k++ {
				if err := askStream(client, url, fmt.Sprintf("client %d, request %d", i, k), 8, nil); err != nil {
					c.t.Errorf("client %d, request %d: %v", i, k, err)
				}
				c.served.Add(1)
			}
		})
	}
	return c
}

// more waits until so many more requests were served.
func (c *crowd) more(n int64) {
	c.t.Helper()
	from := c.served.Load()
	for end := time.Now().Add(time.Minute); c.served.Load() < from+n; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			c.t.Fatalf("%d requests served within a minute, not %d", c.served.Load()-from, n)
		}
	}
}

func (c *crowd) leave() {
	c.over.Store(true)
	c.clients.Wait()
}
