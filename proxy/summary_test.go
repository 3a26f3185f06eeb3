package proxy

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

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
	writing.Go(func() { l.Run(ctx, nil) })
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

func TestAccessLog(t *testing.T) {
	t.Parallel()
	change, read := accessLines(t)
	f := serve(t, change, &replica{script: once()}, &replica{script: always(answered("200 OK", whole))})
	const traceID = "0af7651916cd43dd8448eb211c80319c"
	_, answer := f.post("/v1/chat/completions", askWhole, "X-Request-Id", "my-id", "Traceparent", "00-"+traceID+"-b7ad6b7169203331-01")
	line := read(1)[0]
	has(t, line, map[string]any{
		"msg": "request", "request_id": "my-id", "endpoint": "/v1/chat/completions", "model": "m", "backend": "r1", "reason": "only",
		"code": 200.0, "attempts": 2.0,
		"failures": "truncated", "bytes_in": float64(len(askWhole)), "bytes_out": float64(len(answer)), "prompt_tokens": 12.0,
		"cached_tokens": 8.0,
		"output_tokens": 3.0, "predicted_tokens": 0.0, "trace_id": traceID, "disconnected": nil, "key": nil, "ttft_ms": nil, "queue_ms": nil,
	})
	if host, _ := line["client"].(string); !strings.HasPrefix(host, "127.0.0.1:") || line["duration_ms"].(float64) <= 0 ||
		line["overhead_us"].(float64) <= 0 {
		t.Errorf("the line: %v", line)
	}
}

func TestAccessLogStream(t *testing.T) {
	t.Parallel()
	change, read := accessLines(t)
	f := serve(t, change, &replica{script: always(streamed(goodStream))})
	f.post("/v1/chat/completions", askStream)
	line := read(1)[0]
	has(t, line, map[string]any{"code": 200.0, "bytes_out": float64(len(goodStream)), "backend": "r0", "failures": nil, "trace_id": nil})
	if ttft, _ := line["ttft_ms"].(float64); ttft <= 0 || ttft > line["duration_ms"].(float64) {
		t.Errorf("the line: %v", line)
	}
}

func TestAccessLogRejected(t *testing.T) {
	t.Parallel()
	change, read := accessLines(t)
	f := serve(t, change, &replica{script: always(answered("200 OK", whole))})
	f.post("/v1/chat/completions", `{"model":"other","messages":[]}`)
	f.post("/v1/chat/completions", `{`)
	lines := read(2)
	has(t, lines[0], map[string]any{"code": 404.0, "model": nil, "backend": nil, "attempts": nil})
	has(t, lines[1], map[string]any{"code": 400.0, "backend": nil, "prompt_tokens": nil})
}

func TestAccessLogDisconnect(t *testing.T) {
	t.Parallel()
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
	has(t, read(1)[0], map[string]any{"code": 499.0, "disconnected": "in_stream", "backend": "r0", "level": "INFO"})
}

func TestAccessLogQueued(t *testing.T) {
	t.Parallel()
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
	f := serveWithQueue(t, router.QueueSettings{Requests: 10, Bytes: 1 << 20, NoneReadyTimeout: time.Minute, BusyTimeout: time.Minute}, change,
		r)
	terms := *f.backends[0].Options()
	terms.MaxInFlight = 1
	f.backends[0].SetOptions(terms)
	var asking sync.WaitGroup
	for range 2 {
		asking.Go(func() { f.post("/v1/chat/completions", askWhole) })
	}
	eventually(t, "one waits", func() bool { return f.router.CountWaiting() == 1 })
	free <- true
	free <- true
	asking.Wait()
	lines := read(2)
	at := slices.IndexFunc(lines, func(l map[string]any) bool { return l["queue_ms"] != nil }) // the answers end in either order
	if at < 0 {
		t.Fatalf("none waited: %v", lines)
	}
	has(t, lines[1-at], map[string]any{"queue_ms": nil})
	if held, _ := lines[at]["queue_ms"].(float64); held <= 0 {
		t.Errorf("the line: %v", lines[at])
	}
}

func TestRequestMetrics(t *testing.T) {
	t.Parallel()
	chat, other := &replica{models: []string{"m"}, script: always(streamed(goodStream))},
		&replica{models: []string{"n"}, script: always(answered("400 Bad Request", "{}"))}
	f := serve(t, nil, chat, other)
	f.post("/v1/chat/completions", askStream)
	f.post("/v1/chat/completions", askStream)
	f.post("/v1/completions", `{"model":"n","prompt":"x"}`)
	f.post("/v1/completions", `{"model":"evil\nname{}","prompt":"x"}`, "X-Request-Id", "evil-id")
	f.post("/v1/chat/completions", "evil body")
	f.post("/v1/evil-path", "{}")
	f.awaitIdle()
	for _, line := range []string{
		`warmroute_requests_total{backend="r0",code="200",endpoint="/v1/chat/completions",model="m"} 2`,
		`warmroute_requests_total{backend="r1",code="400",endpoint="/v1/completions",model="n"} 1`,
		`warmroute_requests_total{backend="",code="404",endpoint="/v1/completions",model=""} 1`,
		`warmroute_requests_total{backend="",code="400",endpoint="/v1/chat/completions",model=""} 1`,
		`warmroute_request_duration_seconds_count{backend="r0",model="m"} 2`,
		`warmroute_ttft_seconds_count{backend="r0",model="m"} 2`,
		`warmroute_overhead_seconds_count 3`,
		`warmroute_prompt_tokens_total{backend="r0",cached_tokens="reported",model="m"} 24`,
		`warmroute_cached_tokens_total{backend="r0",cached_tokens="reported",model="m"} 16`,
		`warmroute_predicted_tokens_total{backend="r0",cached_tokens="reported",model="m"} 11`,
		`warmroute_backend_in_flight{backend="r0"} 0`,
		`warmroute_backend_ready{backend="r1"} 1`,
		`warmroute_index_blocks{backend="r0"} 4`,
	} {
		f.awaitMetric(line)
	}
	text := f.exposition()
	if strings.Contains(text, "evil") {
		t.Error("a label holds a client's bytes")
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	if _, err := parser.TextToMetricFamilies(strings.NewReader(text)); err != nil {
		t.Error(err)
	}
}

func TestEstimateMetrics(t *testing.T) {
	t.Parallel()
	f := simulated(t, 1, router.QueueSettings{})
	ask := `{"model":"m","max_tokens":30,"messages":[{"role":"user","content":"` + question + `"}]}`
	for range 5 {
		if resp, answer := f.post("/v1/chat/completions", ask); resp.StatusCode != 200 {
			t.Fatalf("%d %s", resp.StatusCode, answer)
		}
	}
	f.awaitIdle()
	valueOf := func(series string) float64 {
		t.Helper()
		_, rest, found := strings.Cut(f.exposition(), "\nwarmroute_"+series+" ")
		line, _, _ := strings.Cut(rest, "\n")
		v, err := strconv.ParseFloat(line, 64)
		if !found || err != nil {
			t.Fatalf("%s is %q", series, line)
		}
		return v
	}
	value := func(name string) float64 { return valueOf(name + `{backend="r0"}`) }
	const reported = `{backend="r0",cached_tokens="reported",model="m"}`
	predicted, cached := valueOf("predicted_tokens_total"+reported), valueOf("cached_tokens_total"+reported)
	if predicted < 4*192 || cached < 4*192 || predicted > 5*300 || cached > 5*300 {
		t.Errorf("%v tokens predicted to be cached, %v were, of five times about 270", predicted, cached)
	}
	if bytes := value("learned_bytes_per_token"); bytes < 3 || bytes > 5 {
		t.Errorf("%v bytes a token, where there are four", bytes)
	}
	if answer := value("learned_output_tokens"); answer < 30 || answer >= 250 {
		t.Errorf("an answer of %v tokens, where all have 30 and the guess is 250", answer)
	}
	if factor := value("learned_capacity_factor"); factor < 0.2 || factor > 2 {
		t.Errorf("a capacity factor of %v", factor)
	}
	if value("learned_prefill_tokens_per_second") <= 0 {
		t.Error("no rate")
	}
}

func TestRetryReasonMetrics(t *testing.T) {
	f := serve(t, nil, &replica{script: always(answered("503 Service Unavailable", "full"))}, &replica{script: once()},
		&replica{script: always(answered("200 OK", whole))})
	if resp, _ := f.post("/v1/chat/completions", askWhole); resp.StatusCode != 200 {
		t.Fatalf("status %d", resp.StatusCode)
	}
	f.awaitIdle()
	f.awaitMetric(`warmroute_retries_total{reason="status_503"} 1`)
	f.awaitMetric(`warmroute_retries_total{reason="truncated"} 1`)
}

func TestFailedAttemptLog(t *testing.T) {
	f := serve(t, nil, &replica{script: once()}, &replica{script: always(answered("200 OK", whole))})
	f.post("/v1/chat/completions", askWhole, "X-Request-Id", "my-id")
	log := f.log.String()
	for _, want := range []string{`msg="attempt failed" backend=r0 reason=truncated`, "request_id=my-id"} {
		if !strings.Contains(log, want) {
			t.Errorf("the log lacks %s:\n%s", want, log)
		}
	}
	if strings.Contains(log, "What do you make") {
		t.Error("the log holds a prompt")
	}
}

func TestAccessLogClientBehindProxy(t *testing.T) {
	t.Parallel()
	change, read := accessLines(t)
	f := serve(t, func(o *Options) {
		change(o)
		o.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
	}, &replica{script: always(answered("200 OK", whole))})
	// Connection may name the header, which is then not forwarded.
	f.post("/v1/chat/completions", askWhole, "X-Forwarded-For", "198.51.100.1, 192.0.2.1", "Connection", "X-Forwarded-For")
	has(t, read(1)[0], map[string]any{"client": "192.0.2.1", "code": 200.0})
}
