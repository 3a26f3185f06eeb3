package proxy

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"warmroute/proxy/accesslog"
	"warmroute/router"
)

// accessLines has the fleet write an access log, and returns what reads its lines
// when there are n of them.
func accessLines(t *testing.T) (change func(*Options), read func(n int) []map[string]any) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "access")
	l, err := accesslog.New(accesslog.Settings{File: path, Format: "json", Sample: 1}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var writing sync.WaitGroup
	writing.Go(func() { l.Run(ctx) })
	t.Cleanup(func() { cancel(); writing.Wait() })
	return func(o *Options) { o.AccessLog = l }, func(n int) (out []map[string]any) {
		t.Helper()
		var text string
		eventually(t, "the lines are there", func() bool {
			raw, _ := os.ReadFile(path)
			text = string(raw)
			return strings.Count(text, "\n") >= n
		})
		for line := range strings.Lines(text) {
			var fields map[string]any
			if err := json.Unmarshal([]byte(line), &fields); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			out = append(out, fields)
		}
		if len(out) != n || strings.Contains(text, "What do you make") || strings.Contains(text, "Hello") {
			t.Fatalf("%d lines, want %d without prompt and answer:\n%s", len(out), n, text)
		}
		return out
	}
}

// has compares some fields of a line; nil: it must not be there.
func has(t *testing.T, line, want map[string]any) {
	t.Helper()
	for key, value := range want {
		if line[key] != value {
			t.Errorf("%s is %v, want %v; the line: %v", key, line[key], value, line)
		}
	}
}

func TestAccessLogTellsWhatBecameOfARequest(t *testing.T) {
	change, read := accessLines(t)
	f := serve(t, change, &replica{script: once()}, &replica{script: always(answered("200 OK", whole))})
	const traceID = "0af7651916cd43dd8448eb211c80319c"
	_, answer := f.post("/v1/chat/completions", askWhole, "X-Request-Id", "my-id", "Traceparent", "00-"+traceID+"-b7ad6b7169203331-01")
	line := read(1)[0]
	has(t, line, map[string]any{
		"msg": "request", "request_id": "my-id", "endpoint": "/v1/chat/completions", "model": "m", "backend": "r1", "reason": "only", "code": 200.0, "attempts": 2.0,
		"failures": "broken", "bytes_in": float64(len(askWhole)), "bytes_out": float64(len(answer)), "prompt_tokens": 12.0, "observed_tokens": 8.0,
		"answer_tokens": 3.0, "predicted_tokens": 0.0, "trace_id": traceID, "aborted": nil, "key": nil, "ttft_ms": nil, "held_ms": nil,
	})
	if host, _ := line["client"].(string); !strings.HasPrefix(host, "127.0.0.1:") || line["duration_ms"].(float64) <= 0 || line["overhead_us"].(float64) <= 0 {
		t.Errorf("the line: %v", line)
	}
}

func TestAccessLogOfAStream(t *testing.T) {
	change, read := accessLines(t)
	f := serve(t, change, &replica{script: always(streamed(goodStream))})
	f.post("/v1/chat/completions", askStream)
	line := read(1)[0]
	has(t, line, map[string]any{"code": 200.0, "bytes_out": float64(len(goodStream)), "backend": "r0", "failures": nil, "trace_id": nil})
	if ttft, _ := line["ttft_ms"].(float64); ttft <= 0 || ttft > line["duration_ms"].(float64) {
		t.Errorf("the line: %v", line)
	}
}

func TestAccessLogOfRequestsThatNoReplicaSaw(t *testing.T) {
	change, read := accessLines(t)
	f := serve(t, change, &replica{script: always(answered("200 OK", whole))})
	f.post("/v1/chat/completions", `{"model":"other","messages":[]}`)
	f.post("/v1/chat/completions", `{`)
	lines := read(2)
	has(t, lines[0], map[string]any{"code": 404.0, "model": nil, "backend": nil, "attempts": nil})
	has(t, lines[1], map[string]any{"code": 400.0, "backend": nil, "prompt_tokens": nil})
}

func TestAccessLogOfAClientThatLeft(t *testing.T) {
	change, read := accessLines(t)
	f := serve(t, change, &replica{script: func(s *session) {
		s.request()
		s.say(sseHead, chunk(role), chunk(hello))
		s.closed()
	}})
	resp, br := f.stream(askStream)
	if _, err := br.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	has(t, read(1)[0], map[string]any{"code": 499.0, "aborted": "in_stream", "backend": "r0", "level": "INFO"})
}

func TestAccessLogOfARequestThatWasHeld(t *testing.T) {
	change, read := accessLines(t)
	free := make(chan bool)
	r := &replica{script: func(s *session) {
		for {
			if _, ok := s.request(); !ok {
				return
			}
			<-free
			s.say(answered("200 OK", whole))
		}
	}}
	f := serveHolding(t, router.QueueSettings{Requests: 10, Bytes: 1 << 20, Timeout: time.Minute}, change, r)
	terms := *f.backends[0].Terms()
	terms.MaxInFlight = 1
	f.backends[0].SetTerms(terms)
	var asking sync.WaitGroup
	for range 2 {
		asking.Go(func() { f.post("/v1/chat/completions", askWhole) })
	}
	eventually(t, "one waits", func() bool { return f.router.WaitingRequests() == 1 })
	free <- true
	free <- true
	asking.Wait()
	lines := read(2)
	at := slices.IndexFunc(lines, func(l map[string]any) bool { return l["held_ms"] != nil }) // the answers end in either order
	if at < 0 {
		t.Fatalf("none waited: %v", lines)
	}
	has(t, lines[1-at], map[string]any{"held_ms": nil})
	if held, _ := lines[at]["held_ms"].(float64); held <= 0 {
		t.Errorf("the line: %v", lines[at])
	}
}
