package server

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/config"
	"warmroute/lab/loadgen"
	"warmroute/lab/policies"
	"warmroute/lab/replay"
)

// proxied is a proxy with the default settings but for what a test changes.
type proxied struct {
	url  string
	log  syncBuffer
	stop func() // as SIGTERM does
}

// startProxy returns when every replica is ready and was scraped.
func (f *simFleet) startProxy(t *testing.T, change func(*config.Config)) *proxied {
	t.Helper()
	p := &proxied{}
	s, stop := startServer(t, &p.log, change, f.urls...)
	p.url, p.stop = s.publicURL(), stop
	known := func() bool {
		for _, b := range s.registry.All() {
			if b.Load() == nil {
				return false
			}
		}
		return metricSum(t, s.adminURL(), "warmroute_backend_ready") == float64(len(f.urls))
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
func (p *proxied) play(t *testing.T, trace *replay.Trace, inFlight int) replay.Summary {
	t.Helper()
	client := loadgen.NewHTTPClient()
	defer client.CloseIdleConnections()
	var tally replay.Tally
	player := &loadgen.Client{
		URL: p.url, Model: "sim", HTTP: client, Speed: 20, Timeout: time.Minute, MaxInFlight: inFlight, OnResult: tally.Add,
	}
	player.RunTrace(t.Context(), trace)
	s := tally.Summary("prefix", 0)
	if s.Lost > 0 || s.Requests != len(trace.Requests) {
		t.Fatalf("%d of %d requests served: %v", s.Requests, len(trace.Requests), s.Errors)
	}
	return s
}

// turn is the n-th turn of 60 conversations: each sends again what it sent
// before, with 128 tokens more.
func turn(n int) *replay.Trace {
	t := &replay.Trace{BlockTokens: 64}
	for c := range 60 {
		r := replay.TraceRequest{PromptTokens: 64 * (16 + 2*n), OutputTokens: 1}
		for i := range 16 + 2*n {
			r.Blocks = append(r.Blocks, uint64(1000*c+i))
		}
		t.Requests = append(t.Requests, r)
	}
	return t
}

// A proxy is restarted between two turns of 60 conversations, on replicas that
// each hold two thirds of them.
func TestSnapshotRestoresIndex(t *testing.T) {
	hits := func(restored int, change func(*config.Config)) float64 {
		t.Helper()
		fleet := startSimFleet(t, 4, 64_000)
		// These replicas take a millisecond: on a busy machine one would seem much faster than another.
		unlearned := func(c *config.Config) { c.Routing.Learn = false; change(c) }
		first := fleet.startProxy(t, unlearned)
		// The first prompts go where the queue is short. Later ones are sent one
		// at a time, so that only their prefix decides.
		first.play(t, turn(0), 8)
		before := first.play(t, turn(1), 1).HitRatio
		if before < 0.7 {
			t.Fatalf("hit ratio %.3f before the restart; the conversations are to be warm", before)
		}
		first.stop()
		second := fleet.startProxy(t, unlearned)
		for strings.Count(second.log.String(), "index restored") < restored {
			time.Sleep(time.Millisecond)
		}
		return second.play(t, turn(2), 1).HitRatio - before
	}
	without := hits(0, func(*config.Config) {})
	file := filepath.Join(t.TempDir(), "index")
	with := hits(4, func(c *config.Config) { c.Index.Snapshot = file })
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
	if left, _ := filepath.Glob(file + ".*"); !slices.Equal(left, []string{file + ".lock"}) {
		t.Errorf("left behind: %v, want the lock alone", left)
	}
}

func TestInvalidSnapshotReplaced(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 1, 200_000)
	file := filepath.Join(t.TempDir(), "index")
	change := func(c *config.Config) { // few enough connections for any limit on file descriptors, or the log warns of that
		c.Index.Snapshot, c.Limits.Connections, c.Limits.InFlight = file, 100, 100
	}
	f := func(name, level, want string, prepare func() error) {
		t.Helper()
		if err := prepare(); err != nil {
			t.Fatal(err)
		}
		p := fleet.startProxy(t, change)
		p.play(t, turn(0), 8)
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
	f("empty", "WARN", "damaged", func() error { return os.Truncate(file, 0) })
	f("another version", "WARN", "version 255", func() error {
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		data[len("warmroute index\n")] = 255
		return os.WriteFile(file, data, 0o600)
	})
}

// A snapshotFile on files that are no snapshots, without a proxy around it.
func TestSnapshotNeverOverwritesOtherFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	open := func(path string) (*snapshotFile, error) {
		c := loadConfig(t, "listen: 127.0.0.1:0\nadmin: \"\"", "http://a:8000")
		c.Index.Snapshot = path
		s, err := New(Options{Config: c, Policies: policies.All(), Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			return nil, err
		}
		s.listeners.closeAndWait()
		t.Cleanup(s.files.snapshot.releaseLock)
		return s.files.snapshot, nil
	}
	f := func(name, content string) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := open(path); err == nil || !strings.Contains(err.Error(), name+" is not a warmroute snapshot; name another file") {
			t.Errorf("%s: error %v", name, err)
		}
		if data, err := os.ReadFile(path); err != nil || string(data) != content {
			t.Errorf("%s is now %q, %v", name, data, err)
		}
	}
	f("notes", "do not lose this")
	f("short", "x")
	f("alike", "warmroute index of last week")

	if err := os.Symlink(dir, filepath.Join(dir, "folder")); err != nil {
		t.Fatal(err)
	}
	if _, err := open(filepath.Join(dir, "folder")); err == nil || !strings.Contains(err.Error(), "is not a regular file") {
		t.Errorf("a folder: %v", err)
	}

	// What takes the name later is no more ours.
	late := filepath.Join(dir, "late")
	s, err := open(late)
	if err != nil {
		t.Fatal(err)
	}
	s.load()
	if err := os.WriteFile(late, []byte("do not lose this"), 0o644); err != nil {
		t.Fatal(err)
	}
	s.save()
	if data, err := os.ReadFile(late); err != nil || string(data) != "do not lose this" {
		t.Errorf("late is now %q, %v", data, err)
	}
}

func TestStaleTempSnapshotsRemoved(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "index")
	const tempSuffix = ".warmroute-tmp"
	old := time.Now().Add(-2 * time.Hour)
	put := func(name, content string, changed time.Time) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(filepath.Join(dir, name), changed, changed); err != nil {
			t.Fatal(err)
		}
	}
	put("index.tmp", "somebody's", old)
	put("index.1"+tempSuffix, "warmroute index\nhalf", old)        // a crash
	put("index.2"+tempSuffix, "warmroute index\nhalf", time.Now()) // another proxy is about to write it
	put("index.3"+tempSuffix, "no snapshot", old)                  // nobody knows
	put("other.4"+tempSuffix, "warmroute index\nhalf", old)        // of another snapshot
	c := loadConfig(t, "listen: 127.0.0.1:0\nadmin: \"\"", "http://a:8000")
	c.Index.Snapshot = path
	s, err := New(Options{Config: c, Policies: policies.All(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	s.listeners.closeAndWait()
	s.files.snapshot.load()
	s.files.snapshot.save()
	s.files.snapshot.releaseLock()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var left []string
	for _, e := range entries {
		left = append(left, e.Name())
	}
	want := []string{"index", "index.2" + tempSuffix, "index.3" + tempSuffix, "index" + ".lock", "index.tmp", "other.4" + tempSuffix}
	if !slices.Equal(left, want) {
		t.Errorf("files %v, want %v", left, want)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the snapshot: %v, %v", info, err)
	}
}
