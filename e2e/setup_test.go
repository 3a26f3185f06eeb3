package e2e

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/spf13/pflag"

	"warmroute/config"
	"warmroute/lab/policies"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
	"warmroute/server"
)

// startServer runs a proxy with the default settings in this process until stop is
// called or the test ends.
func startServer(t *testing.T, urls ...string) (s *server.Server, stop func()) {
	t.Helper()
	c := loadConfig(t, "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\n", urls...)
	s, err := server.New(server.Options{Config: c, Policies: policies.All(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return s, runUntilStopped(t, s.Run)
}

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
	defaults, err := os.ReadFile("config.yaml")
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

// standIn is a replica that does what no simulated one does. A path that is nil is
// answered as a healthy replica would.
type standIn struct {
	health, models, metrics, chat http.HandlerFunc
}

const wholeAnswer = `{"id":"c","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant",` +
	`"content":"hi"},"finish_reason":"stop"}],` +
	`"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}`

func (s standIn) handler() http.Handler {
	mux := http.NewServeMux()
	for path, f := range map[string]struct {
		serve  http.HandlerFunc
		answer string
	}{
		"/health":              {s.health, ""},
		"/v1/models":           {s.models, `{"object":"list","data":[{"id":"m","object":"model","root":"m","max_model_len":131072}]}`},
		"/metrics":             {s.metrics, "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"},
		"/v1/chat/completions": {s.chat, wholeAnswer},
	} {
		if f.serve == nil {
			f.serve = func(w http.ResponseWriter, r *http.Request) {
				io.Copy(io.Discard, r.Body)
				w.Header().Set("Content-Type", "application/json")
				io.WriteString(w, f.answer)
			}
		}
		mux.HandleFunc(path, f.serve)
	}
	return mux
}

// start serves it over http and returns its URL.
func (s standIn) start(t *testing.T) string {
	t.Helper()
	server := httptest.NewServer(s.handler())
	t.Cleanup(func() {
		server.CloseClientConnections() // some of its handlers never end by themselves
		server.Close()
	})
	return server.URL
}

const plainChat = `{"model":"m","messages":[{"role":"user","content":"hello"}]}`
