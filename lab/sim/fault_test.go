package sim

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"warmroute/lab/sim/engine"
)

// failsafe bounds waits for events that always come.
const failsafe = 20 * time.Second

const (
	short  = `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":4,"ignore_eos":true}`
	stream = `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":40,"ignore_eos":true,"stream":true,` +
		`"stream_options":{"include_usage":true}}`
	// long takes minutes at the default speed.
	long = `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":20000,"ignore_eos":true,"stream":true,` +
		`"stream_options":{"include_usage":true}}`
)

// send posts a chat request on a connection of its own.
func send(t *testing.T, ctx context.Context, s *Server, body string) (*http.Response, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL()+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Close = true
	return http.DefaultClient.Do(req)
}

// until waits for cond.
func until(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(failsafe); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("timed out waiting for: %s", what)
		}
	}
}

func set(t *testing.T, s *Server, f Fault) {
	t.Helper()
	if err := s.SetFault(f); err != nil {
		t.Fatal(err)
	}
}

func TestFaultsOfOneRequest(t *testing.T) {
	for _, c := range []struct {
		fault  Fault
		body   string
		status int   // 0: none comes
		err    error // of the request or of the body
	}{
		{Fault{Kind: Reset}, short, 0, syscall.ECONNRESET},
		{Fault{Kind: ResetLate}, stream, 200, syscall.ECONNRESET},
		{Fault{Kind: ResetAtWork, Delay: 0.01}, stream, 0, syscall.ECONNRESET},
		{Fault{Kind: Die, Chunks: 3}, stream, 200, io.ErrUnexpectedEOF},
		{Fault{Kind: Die}, short, 0, io.EOF},
		{Fault{Kind: Status, Status: 503}, short, 503, nil},
		{Fault{Kind: Status, Status: 429}, stream, 429, nil},
	} {
		t.Run(string(c.fault.Kind), func(t *testing.T) {
			s := start(t, Config{Engine: fast})
			c.fault.Requests = 1
			set(t, s, c.fault)
			resp, err := send(t, t.Context(), s, c.body)
			if err == nil {
				if resp.StatusCode != c.status {
					t.Errorf("status %d, want %d", resp.StatusCode, c.status)
				}
				_, err = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			} else if c.status != 0 {
				t.Errorf("no status, want %d", c.status)
			}
			if !errors.Is(err, c.err) {
				t.Errorf("error %v, want %v", err, c.err)
			}
			ask(t, s, short) // the second request is served
			until(t, "nothing is left in the engine", func() bool { return s.Stats().Running == 0 })
		})
	}
}

func TestDie(t *testing.T) {
	s := start(t, Config{})
	set(t, s, Fault{Kind: Die, Chunks: 2})
	resp, err := send(t, t.Context(), s, long)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body) // it ends with an error, as wanted
	if n := strings.Count(string(body), `"delta":{"content":"`); n != 2 {
		t.Errorf("%d chunks of content, want 2", n)
	}
}

func TestAbortEach(t *testing.T) {
	s := start(t, Config{Engine: fast})
	for chunks, want := range map[int]string{0: `"content":""`, 3: `"completion_tokens":3`} {
		set(t, s, Fault{Kind: AbortEach, Chunks: chunks, Requests: 1})
		if status, body := post(t, s, "/v1/chat/completions", strings.Replace(short, ":4", ":40", 1)); status != 200 ||
			!strings.Contains(body, want) || !strings.Contains(body, `"finish_reason":"abort"`) {
			t.Errorf("after %d tokens: %d %s", chunks, status, body)
		}
	}
	ask(t, s, short)
	until(t, "nothing is left in the engine", func() bool { return s.Stats().Running == 0 })
}

func TestRefuse(t *testing.T) {
	s := start(t, Config{Engine: fast})
	set(t, s, Fault{Kind: Refuse})
	until(t, "connections are refused", func() bool {
		conn, err := net.Dial("tcp", strings.TrimPrefix(s.URL(), "http://"))
		if err == nil {
			conn.Close()
		}
		return errors.Is(err, syscall.ECONNREFUSED)
	})
	if err := s.ClearFaults(); err != nil {
		t.Fatal(err)
	}
	ask(t, s, short)
}

func TestFaultEndsAfterTime(t *testing.T) {
	s := start(t, Config{Engine: fast})
	set(t, s, Fault{Kind: Refuse, Seconds: 0.05})
	until(t, "the replica is back", func() bool {
		resp, err := send(t, t.Context(), s, short)
		if err == nil {
			resp.Body.Close()
		}
		return err == nil
	})
}

func TestHang(t *testing.T) {
	s := start(t, Config{Engine: fast})
	set(t, s, Fault{Kind: Hang, Requests: 1})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if resp, err := send(t, ctx, s, short); err == nil {
		resp.Body.Close()
		t.Errorf("status %d from a replica that hangs", resp.StatusCode)
	}
	ask(t, s, short)
}

// TestEndOfOpenStreams covers the ways in which requests in flight end when
// their replica goes.
func TestEndOfOpenStreams(t *testing.T) {
	for _, c := range []struct {
		kind FaultKind
		tail string // of what the client got
		err  error
	}{
		{Abort, `[DONE]`, nil},
		{Fail, "data: {\"error\": {\"message\": \"EngineCore encountered an issue. See stack trace (above) for the root cause.\", \"type\": " +
			"\"InternalServerError\", \"param\": null, \"code\": 500}}\n\ndata: [DONE]", nil},
		{Restart, "", syscall.ECONNRESET},
	} {
		t.Run(string(c.kind), func(t *testing.T) {
			s := start(t, Config{})
			resp, err := send(t, t.Context(), s, long)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			in := bufio.NewReader(resp.Body)
			if _, err := in.ReadString('\n'); err != nil {
				t.Fatal(err)
			}
			set(t, s, Fault{Kind: c.kind})
			rest, err := io.ReadAll(in)
			if !errors.Is(err, c.err) {
				t.Errorf("error %v, want %v", err, c.err)
			}
			if !strings.HasSuffix(strings.TrimSpace(string(rest)), c.tail) {
				t.Errorf("ends with %q, want %q", rest[max(0, len(rest)-200):], c.tail)
			}
			if c.kind == Abort && !strings.Contains(string(rest), `"finish_reason":"abort"`) {
				t.Error(`no finish_reason "abort"`)
			}
			if st := s.Stats(); st.Running != 0 || st.KVUsage != 0 {
				t.Errorf("%d still running, usage %v", st.Running, st.KVUsage)
			}
		})
	}
}

func TestRestart(t *testing.T) {
	s := start(t, Config{Engine: fast})
	question := `{"messages":[{"role":"user","content":"` + strings.Repeat("word ", 100) + `"}],"max_tokens":4}`
	ask(t, s, question)
	before := s.processStartTime()
	set(t, s, Fault{Kind: Restart})
	if st := s.Stats(); st != (engine.Stats{}) {
		t.Errorf("counters after a restart: %+v", st)
	}
	if !s.processStartTime().After(before) {
		t.Error("the start time did not change")
	}
	if a := ask(t, s, question); a.Usage.PromptTokensDetails.CachedTokens != 0 {
		t.Error("the cache survived")
	}
}

func TestDrainRefusesNewRequests(t *testing.T) {
	s := start(t, Config{Engine: fast})
	set(t, s, Fault{Kind: Drain})
	status, body := post(t, s, "/v1/chat/completions", short)
	if want := `{"error":{"message":"cannot schedule new futures after shutdown","type":"InternalServerError",` +
		`"param":null,"code":500}}`; status != 500 || body != want {
		t.Errorf("%d %s, want 500 %s", status, body, want)
	}
	if status := get(t, s, "/health"); status != 200 {
		t.Errorf("/health is %d", status)
	}
}

func TestDrainLetsRequestsFinish(t *testing.T) {
	s := start(t, Config{})
	resp, err := send(t, t.Context(), s, stream)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	s.Drain(failsafe)
	if s.hasLiveRequests() {
		t.Error("drained, and still at work")
	}
	if status, body := post(t, s, "/v1/chat/completions", short); status != 500 {
		t.Errorf("a new request gets %d %s, want a 500", status, body)
	}
	if body, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(body), `"finish_reason":"length"`) ||
		strings.Contains(string(body), "abort") {
		t.Errorf("the stream ended with %v and %q", err, body[max(0, len(body)-300):])
	}
}

// A full replica refuses a stream after its status, as vLLM does where other requests have come between its two checks.
func TestQueueFull(t *testing.T) {
	s := start(t, Config{})
	set(t, s, Fault{Kind: QueueFull, Limit: 1})
	resp, err := send(t, t.Context(), s, long)
	if err != nil {
		t.Fatal(err)
	}
	until(t, "the request is in the engine", s.hasLiveRequests)
	for path, want := range map[string]string{
		"/v1/chat/completions": `data: {"error": {"message": "The engine is currently busy and cannot accept new requests. Please try again ` +
			`later or on a different instance.", ` +
			`"type": "Service Unavailable", "param": null, "code": 503}}` + "\n\ndata: [DONE]\n\n",
		"/v1/messages": "event: error\n" + `data: {"type":"error","error":{"type":"internal_error","message":"2 validation errors for ` +
			`ChatCompletionStreamResponse\nmodel\n  Field required [type=missing, input_value={'error': {'message': 'Th...am': None, 'code': ` +
			`503}}, input_type=dict]`,
	} {
		if status, body := post(t, s, path,
			`{"model":"sim","messages":[{"role":"user","content":"Hi"}],"max_tokens":2,"stream":true}`); status != http.StatusOK ||
			!strings.HasPrefix(body, want) {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	if status, body := post(t, s, "/v1/chat/completions", short); status != http.StatusServiceUnavailable ||
		!strings.Contains(body, "currently busy") {
		t.Errorf("not streamed: %d %s", status, body)
	}
	resp.Body.Close()
	until(t, "the request is aborted", func() bool { return !s.hasLiveRequests() })
	ask(t, s, short)
}

func TestHold(t *testing.T) {
	s := start(t, Config{Engine: fast})
	set(t, s, Fault{Kind: Hold, Delay: 0.1, Requests: 1})
	began := time.Now()
	ask(t, s, short)
	if took := time.Since(began); took < 100*time.Millisecond {
		t.Errorf("responded after %v", took)
	}
}

func TestFreeze(t *testing.T) {
	s := start(t, Config{})
	resp, err := send(t, t.Context(), s, long)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	in := bufio.NewReader(resp.Body)
	if _, err := in.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	set(t, s, Fault{Kind: Freeze})
	late, err := send(t, t.Context(), s, long) // accepted, in vLLM's way: status and headers at once
	if err != nil {
		t.Fatal(err)
	}
	defer late.Body.Close()
	var still int64
	until(t, "the counters stand still", func() bool { // a step may have been under way
		before := s.Stats().GenerationTokens
		time.Sleep(50 * time.Millisecond) // six steps
		still = s.Stats().GenerationTokens
		return still == before
	})
	if get(t, s, "/health") != 200 || get(t, s, "/metrics") != 200 {
		t.Error("its server does not respond")
	}
	if err := s.ClearFaults(); err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(late.Body).ReadString('\n'); err != nil {
		t.Errorf("after the freeze: %v", err)
	}
	if now := s.Stats().GenerationTokens; now == still {
		t.Error("after the freeze the counters stand still")
	}
}

func TestSlow(t *testing.T) {
	s := start(t, Config{Engine: fast})
	set(t, s, Fault{Kind: Slow, Factor: 1000}) // back to one step in 5.07 ms
	ask(t, s, `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":20,"ignore_eos":true}`)
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	if mean := s.ranks[0].counters.itl.sum / 19; mean < 0.005 || mean > 0.0055 {
		t.Errorf("%v s between tokens, want 5 to 5.5 ms", mean)
	}
}

func TestShutdown(t *testing.T) {
	s := NewServer(Config{})
	if err := s.Bind("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	ran := make(chan error, 1)
	go func() { ran <- s.Run(context.Background()) }()
	resp, err := send(t, t.Context(), s, long)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	ctx, cancel := context.WithTimeout(t.Context(), failsafe)
	defer cancel()
	in := bufio.NewReader(resp.Body)
	if _, err := in.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	shut := make(chan error, 1)
	go func() { shut <- s.AbortAndShutdown(ctx) }()
	body, err := io.ReadAll(in)
	if err != nil || !strings.Contains(string(body), `"finish_reason":"abort"`) || !strings.HasSuffix(string(body), "data: [DONE]\n\n") {
		t.Errorf("the stream ended with %v and %q", err, body[max(0, len(body)-300):])
	}
	if err := <-shut; err != nil {
		t.Error(err)
	}
	if err := <-ran; err != nil {
		t.Error(err)
	}
}

func TestMetricsFaults(t *testing.T) {
	s := start(t, Config{})
	set(t, s, Fault{Kind: MetricsGone})
	if status := get(t, s, "/metrics"); status != 404 {
		t.Errorf("/metrics is %d, want 404", status)
	}
	if err := s.ClearFaults(); err != nil {
		t.Fatal(err)
	}
	if status := get(t, s, "/metrics"); status != 200 {
		t.Errorf("/metrics is %d after the fault was cleared", status)
	}
}

func TestHugeMetrics(t *testing.T) {
	s := start(t, Config{})
	set(t, s, Fault{Kind: MetricsHuge})
	resp, err := http.Get(s.URL() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if n, err := io.Copy(io.Discard, resp.Body); err != nil || n < hugeMetricsBytes {
		t.Errorf("%d bytes, %v; want %d at least", n, err, hugeMetricsBytes)
	}
}

func TestCloseIdle(t *testing.T) {
	s := start(t, Config{Engine: fast})
	set(t, s, Fault{Kind: CloseIdle})
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.URL(), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(failsafe))
	if _, err := io.WriteString(conn, "GET /health HTTP/1.1\r\nHost: replica\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	response, err := io.ReadAll(conn) // returns when the replica closes
	if err != nil || !strings.HasPrefix(string(response), "HTTP/1.1 200") || strings.Contains(string(response), "Connection: close") {
		t.Errorf("got %q, %v", response, err)
	}
}

func TestFaultsOverHTTP(t *testing.T) {
	s := start(t, Config{Engine: fast})
	for body, want := range map[string]int{
		`{"kind":"status","status":502,"requests":1}`: 204,
		`{"kind":"status","status":200}`:              400,
		`{"kind":"gremlins"}`:                         400,
		`{"kind":"slow"}`:                             400,
		`{"kind":"hold"}`:                             400,
		`{"kind":"refuse","requests":3}`:              400,
		`{"kind":"queue-full","limit":-1}`:            400,
		`{"kind":"freeze","requests":3}`:              400,
		`{"kind":"hang","chunk":1}`:                   400,
	} {
		if status, response := post(t, s, "/sim/fault", body); status != want {
			t.Errorf("%s: %d %s, want %d", body, status, response, want)
		}
	}
	if status, _ := post(t, s, "/v1/chat/completions", short); status != 502 {
		t.Errorf("status %d, want 502", status)
	}
	ask(t, s, short)
}

func get(t *testing.T, s *Server, path string) int {
	t.Helper()
	resp, err := http.Get(s.URL() + path)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	return resp.StatusCode
}

// A surplus response comes before the response to the next request on the connection.
func TestSurplus(t *testing.T) {
	s := start(t, Config{Engine: fast})
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.URL(), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(failsafe))
	responses := bufio.NewReader(conn)
	ask := func(id string) {
		fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: sim\r\nContent-Type: application/json\r\nX-Request-Id: "+
			"%s\r\nContent-Length: %d\r\n\r\n%s", id, len(short), short)
	}
	requireID := func(id string) {
		t.Helper()
		resp, err := http.ReadResponse(responses, nil)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		if err != nil || !strings.HasPrefix(string(body), `{"id":"chatcmpl-`+id+`"`) {
			t.Errorf("got %.60q (%v), want the response to %s", body, err, id)
		}
	}
	set(t, s, Fault{Kind: Surplus, Requests: 1})
	ask("one")
	requireID("one")
	ask("two")
	requireID("one")
	requireID("two")
	ask("three")
	requireID("three")
}
