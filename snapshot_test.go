package main

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"warmroute/backends/vllmsim"
	"warmroute/replay"
)

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
		url, _ := startSimReplica(t, vllmsim.Config{Engine: vllmsim.EngineConfig{KVTokens: kvTokens, Speed: 20}}, "127.0.0.1:0")
		f.urls = append(f.urls, url)
	}
	return f
}

// proxied is a proxy with the default settings but for what a test changes.
type proxied struct {
	url  string
	log  syncBuffer
	stop func() // as SIGTERM does
}

// startProxy returns when every replica is ready and was scraped.
func (f *simFleet) startProxy(t *testing.T, change func(*Config)) *proxied {
	t.Helper()
	config, err := demoConfig("prefix", "127.0.0.1:0", "127.0.0.1:0", f.urls)
	if err != nil {
		t.Fatal(err)
	}
	change(config)
	p := &proxied{}
	s, err := newService(config, slog.New(slog.NewTextHandler(&p.log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	public, admin, err := listen(config)
	if err != nil {
		t.Fatal(err)
	}
	p.url = baseURL(public)
	p.stop = runUntilStopped(t, func(ctx context.Context) error { return s.run(ctx, public, admin) })
	known := func() bool {
		for _, b := range s.registry.All() {
			if b.Load() == nil {
				return false
			}
		}
		return metricSum(t, baseURL(admin), "warmroute_backend_ready") == float64(len(f.urls))
	}
	for !known() {
		if t.Context().Err() != nil {
			t.Fatal("the replicas did not become ready")
		}
		time.Sleep(5 * time.Millisecond)
	}
	return p
}

// play sends a trace through a proxy and returns what was seen.
func (p *proxied) play(t *testing.T, trace *replay.Trace) replay.Summary {
	t.Helper()
	client := replay.NewClient()
	defer client.CloseIdleConnections()
	var tally replay.Tally
	player := &replay.Player{
		URL: p.url, Model: "sim", Client: client, Speed: 20, Timeout: time.Minute, MaxInFlight: 8, Report: tally.Add,
	}
	player.PlayTrace(t.Context(), trace)
	s := tally.Summary("prefix", 0)
	if s.Lost > 0 || s.Requests != len(trace.Requests) {
		t.Fatalf("%d of %d requests answered: %v", s.Requests, len(trace.Requests), s.Errors)
	}
	return s
}

// turn is the n-th turn of 60 conversations: each sends again what it sent
// before, with 128 tokens more.
func turn(n int) *replay.Trace {
	t := &replay.Trace{BlockTokens: 64}
	for c := range 60 {
		r := replay.TraceRequest{PromptTokens: 64 * (16 + 2*n), AnswerTokens: 1}
		for i := range 16 + 2*n {
			r.Blocks = append(r.Blocks, uint64(1000*c+i))
		}
		t.Requests = append(t.Requests, r)
	}
	return t
}

// A proxy is restarted between two turns of 60 conversations, on replicas that
// each hold a third of them.
func TestARestartOfTheProxyDoesNotMakeTheFleetCold(t *testing.T) {
	hits := func(restored int, change func(*Config)) float64 {
		t.Helper()
		fleet := startSimFleet(t, 4, 32_000)
		first := fleet.startProxy(t, change)
		first.play(t, turn(0))
		before := first.play(t, turn(1)).HitRatio
		if before < 0.7 {
			t.Fatalf("hit ratio %.3f before the restart; the conversations are to be warm", before)
		}
		first.stop()
		second := fleet.startProxy(t, change)
		for strings.Count(second.log.String(), "index restored") < restored {
			time.Sleep(time.Millisecond)
		}
		return second.play(t, turn(2)).HitRatio - before
	}
	without := hits(0, func(*Config) {})
	file := filepath.Join(t.TempDir(), "index")
	with := hits(4, func(c *Config) { c.Index.Snapshot = file })
	t.Logf("hit ratio after a restart, against before: %+.3f with a snapshot, %+.3f without", with, without)
	if with < -0.02 {
		t.Errorf("a restart with a snapshot cost %.3f of hit ratio", -with)
	}
	if without > -0.2 {
		t.Errorf("a restart without a snapshot cost only %.3f of hit ratio; this test shows nothing", -without)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the snapshot: %v, %v", info, err)
	}
	if left, _ := filepath.Glob(file + ".*"); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestASnapshotOfNoUseIsReportedAndReplaced(t *testing.T) {
	fleet := startSimFleet(t, 1, 200_000)
	file := filepath.Join(t.TempDir(), "index")
	change := func(c *Config) { c.Index.Snapshot = file }
	f := func(name, level, want string, prepare func() error) {
		t.Helper()
		if err := prepare(); err != nil {
			t.Fatal(err)
		}
		p := fleet.startProxy(t, change)
		p.play(t, turn(0))
		p.stop()
		if log := p.log.String(); strings.Contains(log, "WARN") != (level == "WARN") || !strings.Contains(log, want) {
			t.Errorf("%s: the log says\n%s\nwant %q", name, log, want)
		}
		if data, err := os.ReadFile(file); err != nil || !bytes.HasPrefix(data, []byte("warmroute index")) {
			t.Errorf("%s: no snapshot was written: %v", name, err)
		}
	}
	f("none yet", "", "", func() error { return nil })
	f("good", "INFO", "index restored", func() error { return nil })
	f("damaged", "WARN", "damaged", func() error {
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		data[len(data)/2] ^= 1
		return os.WriteFile(file, data, 0o600)
	})
	f("foreign", "WARN", "no snapshot of warmroute's", func() error { return os.WriteFile(file, []byte("something else"), 0o644) })
	f("left over by a crash", "INFO", "index restored", func() error { return os.WriteFile(file+".tmp", []byte("half"), 0o644) })

	p := fleet.startProxy(t, func(c *Config) { c.Index.Snapshot = filepath.Join(filepath.Dir(file), "absent", "index") })
	p.stop()
	if log := p.log.String(); strings.Count(log, "WARN") != 2 { // at the start and at the end
		t.Errorf("a folder that is not there: the log says\n%s", log)
	}
}
