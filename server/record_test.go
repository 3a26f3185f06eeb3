package server

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/config"
	"warmroute/lab/loadgen"
	"warmroute/lab/replay"
	"warmroute/prompt"
	"warmroute/proxy/recorder"
)

// recordChats plays chats through a proxy that records, and returns what was
// seen and what was recorded.
func recordChats(t *testing.T, replicas, kvTokens int) (replay.Summary, []byte) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "traffic")
	fleet := startSimFleet(t, replicas, kvTokens)
	p := fleet.startProxy(t, func(c *config.Config) { c.Recording.File = file })
	client := loadgen.NewHTTPClient()
	defer client.CloseIdleConnections()
	var tally replay.Tally
	player := &loadgen.Client{URL: p.url, Model: "sim", HTTP: client, Speed: 20, Timeout: time.Minute, OnResult: tally.Add}
	chats := &loadgen.Chats{
		Seed:          1,
		Concurrency:   6 * replicas,
		Sessions:      40,
		SystemPrompts: 10 * replicas,
		SystemTokens:  1200,
		Zipf:          0.8,
		Turns:         loadgen.Range{Min: 6, Max: 14},
		UserTokens:    loadgen.Range{Min: 200, Max: 600},
		OutputTokens:  loadgen.Range{Min: 30, Max: 90},
		Think:         time.Second,
	}
	player.RunChats(t.Context(), chats)
	p.stop() // all is on the disk then
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	s := tally.Summary("prefix", 0)
	if s.Lost > 0 {
		t.Fatalf("lost requests: %v", s.Errors)
	}
	return s, data
}

func TestReplayOfRecording(t *testing.T) {
	t.Parallel()
	const replicas, kvTokens = 4, 32_000
	seen, data := recordChats(t, replicas, kvTokens)
	trace, err := replay.ParseTrace(strings.NewReader(string(data)))
	if err != nil {
		t.Fatal(err)
	}
	// The replicas ran 20 times as fast as those that the replay simulates.
	for i := range trace.Requests {
		trace.Requests[i].At *= 20
	}
	s := replay.Scenario{
		Backends: replicas, KVTokens: kvTokens, Policy: "prefix", PollInterval: 20 * time.Second,
		Workload: replay.Traced{Trace: trace},
	}
	got, err := s.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("over sockets: %d requests, %d and %d tokens, hit ratio %.3f; replayed: %d, %d and %d, %.3f",
		seen.Requests, seen.PromptTokens, seen.CompletionTokens, seen.HitRatio,
		got.Requests, got.PromptTokens, got.CompletionTokens, got.HitRatio)
	near := func(what string, got, want, most float64) {
		t.Helper()
		if math.Abs(got-want) > most {
			t.Errorf("%s: replayed %.3f, seen %.3f", what, got, want)
		}
	}
	near("requests", float64(got.Requests), float64(seen.Requests), 0)
	near("output tokens", float64(got.CompletionTokens), float64(seen.CompletionTokens), 0)
	near("tokens of prompts", float64(got.PromptTokens), float64(seen.PromptTokens), 0.03*float64(seen.PromptTokens))
	// At 20 times its speed a machine that is busy, or looks for races, is late.
	near("hit ratio", got.HitRatio, seen.HitRatio, 0.1)
}

// Prompts, names, keys and headers that look like nothing else, so that any
// trace of them would be found.
func TestRecordingHasNoContent(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "traffic")
	fleet := startSimFleet(t, 2, 32_000)
	p := fleet.startProxy(t, func(c *config.Config) {
		c.Recording.File = file
		c.Routing.ConversationHeaders = []string{"X-Session"}
	})
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	send := func(body string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.url+"/v1/chat/completions?q=quokka", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Authorization", "Bearer sk-zebra")
		req.Header.Set("X-Session", "walrus")
		req.Header.Set("X-Request-Id", "ocelot")
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	text := strings.Repeat("armadillo ", 100)
	for _, form := range []string{
		`{"model":"sim","user":"narwhal","max_tokens":8,"messages":[{"role":"user","content":%q}]}`,
		`{"model":"sim","stream":true,"max_tokens":8,"messages":[{"role":"user","content":%q}],"cache_salt":"pangolin"}`,
		`{"model":"lemur","messages":[{"role":"user","content":%q}]}`, // 404
	} {
		send(fmt.Sprintf(form, text))
	}
	p.stop()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	if len(lines) != 3 {
		t.Fatalf("want a header and the two requests that a replica was asked, got\n%s", data)
	}
	for _, word := range []string{"armadillo", "narwhal", "pangolin", "lemur", "zebra", "walrus", "ocelot", "quokka", "sim", "chat"} {
		if strings.Contains(string(data), word) {
			t.Errorf("%q stands in\n%s", word, data)
		}
	}
	keys := []string{"block_runs", "cached_tokens", "code", "counted", "duration_ms", "extra_bytes", "input_bytes", "input_length", "model",
		"output_length", "session", "stream", "timestamp", "ttft_ms"}
	for _, line := range lines[1:] {
		var fields map[string]any
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			t.Fatal(err)
		}
		for _, k := range slices.Sorted(maps.Keys(fields)) {
			if !slices.Contains(keys, k) {
				t.Errorf("unknown key %s in %s", k, line)
			}
			values, isList := fields[k].([]any)
			if !isList {
				values = []any{fields[k]}
			}
			for _, v := range values {
				switch x := v.(type) {
				case bool:
				case float64:
					// A hash has 64 bits; a number by first sight is small after so few requests.
					if x > 1e6 {
						t.Errorf("%s is %v: is it a hash?", k, x)
					}
				default:
					t.Errorf("%s is %v, which is no number", k, x)
				}
			}
		}
	}
}

func TestRecordingOfDisconnectedClient(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "traffic")
	fleet := startSimFleet(t, 1, 32_000)
	p := fleet.startProxy(t, func(c *config.Config) { c.Recording.File = file })
	ctx, leave := context.WithCancel(t.Context())
	body := `{"model":"sim","stream":true,"ignore_eos":true,"max_tokens":8000,"messages":[{"role":"user","content":"go on"}]}`
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(resp.Body, make([]byte, 4000)); err != nil {
		t.Fatal(err)
	}
	leave()
	resp.Body.Close()
	p.stop()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	trace, err := replay.ParseTrace(strings.NewReader(string(data)))
	if err != nil {
		t.Fatal(err)
	}
	if r := trace.Requests[0]; len(trace.Requests) != 1 || r.OutputTokens < 2 || r.OutputTokens >= 8000 ||
		!strings.Contains(string(data), `"code":499`) {
		t.Errorf("recorded\n%s", data)
	}
}

// The recorder's limits and the reader's are written down in two places, which
// cannot import each other.
func TestRecordingReadable(t *testing.T) {
	f := func(name string, blockBytes int, written bool, change func(*recorder.Request)) {
		t.Helper()
		dropped := 0
		file := filepath.Join(t.TempDir(), "traffic")
		r, err := recorder.New(recorder.Options{
			Settings: recorder.Settings{File: file, MaxBytes: 1 << 30}, BlockBytes: blockBytes, Log: slog.New(slog.DiscardHandler), Dropped: func() {
				dropped++
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		now := time.Now()
		q := r.NewRequest()
		q.Arrived, q.Plain, q.Bytes, q.PromptTokens, q.OutputTokens, q.Code = now, true, 16<<20, 4<<20, 1<<20, 200
		change(q)
		for i := range q.Bytes / blockBytes {
			q.Blocks = append(q.Blocks, prompt.Block(i))
		}
		small := r.NewRequest()
		small.Arrived, small.Bytes, small.OutputTokens, small.Code = now, 10, 1, 200
		if q.Arrived.After(now) {
			small.Arrived = q.Arrived.Add(-time.Hour)
		}
		r.Enqueue(q)
		r.Enqueue(small)
		done, end := context.WithCancel(t.Context())
		end()
		r.Run(done)
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		want := 1
		if written {
			want = 2
		}
		trace, err := replay.ParseTrace(bytes.NewReader(data))
		if err != nil || len(trace.Requests) != want || dropped != 2-want {
			t.Errorf("%s, blocks of %d bytes: %d dropped, error %v; want %d requests to be read", name, blockBytes, dropped, err, want)
		}
	}
	for _, blockBytes := range []int{64, 256, 4096} {
		f("the largest", blockBytes, true, func(*recorder.Request) {})
		f("as much beside it", blockBytes, true, func(q *recorder.Request) { q.Bytes, q.ExtraBytes = 8<<20, 8<<20 })
		f("too long a prompt", blockBytes, false, func(q *recorder.Request) { q.Bytes++ })
		f("too much beside it", blockBytes, false, func(q *recorder.Request) { q.ExtraBytes++ })
		f("too many tokens", blockBytes, false, func(q *recorder.Request) { q.PromptTokens++ })
		f("too long an output", blockBytes, false, func(q *recorder.Request) { q.OutputTokens++ })
		f("less than nothing", blockBytes, false, func(q *recorder.Request) { q.OutputTokens = -1 })
	}
	const year = 365 * 24 * time.Hour
	f("after a year", 256, true, func(q *recorder.Request) { q.Arrived = q.Arrived.Add(year - time.Hour) })
	f("after more than a year", 256, false, func(q *recorder.Request) { q.Arrived = q.Arrived.Add(year + time.Minute) })
}

// What a replica counts is compared with input_bytes only where it is that
// text's: else tokens of further prompts and sequences would make all text dense.
func TestRecordingCountedTokens(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "traffic")
	fleet := startSimFleet(t, 1, 32_000)
	p := fleet.startProxy(t, func(c *config.Config) { c.Recording.File = file })
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	long := strings.Repeat("word ", 200)
	for _, r := range []struct{ path, body string }{
		{"chat/completions", `{"model":"sim","max_tokens":4,"messages":[{"role":"user","content":"` + long + `"}]}`},
		{"chat/completions", `{"model":"sim","max_tokens":4,"n":2,"messages":[{"role":"user","content":"` + long + `"}]}`},
		{"completions", `{"model":"sim","max_tokens":4,"prompt":"` + long + `"}`},
		{"completions", `{"model":"sim","max_tokens":4,"prompt":["` + long + `","` + long + `","` + long + `"]}`},
	} {
		resp, err := client.Post(p.url+"/v1/"+r.path, "application/json", strings.NewReader(r.body))
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	p.stop()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")[1:]
	want := []struct {
		counted bool
		extra   int
	}{{true, 0}, {false, 0}, {true, 0}, {false, 2 * len(long)}}
	if len(lines) != len(want) {
		t.Fatalf("recorded\n%s", data)
	}
	for i, line := range lines {
		var got struct {
			Bytes   int  `json:"input_bytes"`
			Extra   int  `json:"extra_bytes"`
			Counted bool `json:"counted"`
			Code    int  `json:"code"`
		}
		if err := json.Unmarshal([]byte(line), &got); err != nil {
			t.Fatal(err)
		}
		w := want[i]
		if got.Code != 200 || got.Counted != w.counted || got.Extra < w.extra || got.Extra > w.extra+50 || got.Bytes < len(long) {
			t.Errorf("request %d: %s\nwant counted %v and extra_bytes about %d", i, line, w.counted, w.extra)
		}
	}
}
