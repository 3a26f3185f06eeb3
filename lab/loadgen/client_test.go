package loadgen

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"warmroute/lab/replay"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const failsafe = 30 * time.Second

func dataEvent(w http.ResponseWriter, data string) {
	fmt.Fprintf(w, "data: %s\n\n", data)
	w.(http.Flusher).Flush()
}

func content(w http.ResponseWriter, text string) {
	dataEvent(w, fmt.Sprintf(`{"choices":[{"index":0,"delta":{"content":%q},"finish_reason":null}]}`, text))
}

// opening is what vLLM's streams begin with, and a comment as a proxy may add.
func opening(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	io.WriteString(w, ": keep-alive\n\n")
	dataEvent(w, `{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}`)
}

func ending(w http.ResponseWriter) {
	dataEvent(w, `{"choices":[{"index":0,"delta":{"content":""},"finish_reason":"length"}]}`)
	dataEvent(w, `{"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":16}}}`)
	dataEvent(w, `[DONE]`)
}

// played returns a Client of a server with this handler, and what it reports.
func played(t *testing.T, h http.HandlerFunc) (*Client, *results) {
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	client := NewHTTPClient()
	t.Cleanup(client.CloseIdleConnections)
	got := &results{}
	return &Client{URL: s.URL, Model: "sim", HTTP: client, Speed: 1, Timeout: failsafe, OnResult: got.add}, got
}

type results struct {
	mu  sync.Mutex
	all []replay.Result
}

func (r *results) add(one replay.Result) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, one)
}

func one() *replay.Trace {
	return &replay.Trace{BlockTokens: 512, Requests: []replay.TraceRequest{{PromptTokens: 40, OutputTokens: 2, Blocks: []uint64{3}}}}
}

func requestsAt(times ...time.Duration) *replay.Trace {
	t := &replay.Trace{BlockTokens: 512}
	for _, at := range times {
		t.Requests = append(t.Requests, replay.TraceRequest{At: at, PromptTokens: 40, OutputTokens: 2, Blocks: []uint64{3}})
	}
	return t
}

func TestRunTrace(t *testing.T) {
	var sent chatRequest
	p, got := played(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method != "POST" || r.URL.Path != "/v1/chat/completions" || r.Header.Get("Authorization") != "Bearer key" {
			t.Errorf("got %s %s %v", r.Method, r.URL, r.Header)
		}
		if err := json.NewDecoder(r.Body).Decode(&sent); err != nil {
			t.Error(err)
		}
		opening(w)
		content(w, "one ")
		content(w, "two")
		ending(w)
	})
	p.APIKey = "key"
	p.RunTrace(t.Context(), one())

	if sent.Model != "sim" || !sent.Stream || !sent.StreamOptions.IncludeUsage || !sent.IgnoreEOS || sent.MaxTokens != 2 ||
		len(sent.Messages) != 1 || sent.Messages[0].Content != traceMessages(one().Requests[0], 512)[0].Content {
		t.Errorf("sent %+v", sent)
	}
	if len(got.all) != 1 {
		t.Fatalf("got %d results, want 1", len(got.all))
	}
	r := got.all[0]
	if r.Err != "" || r.PromptTokens != 40 || r.CachedTokens != 16 || r.CompletionTokens != 2 {
		t.Errorf("got %+v", r)
	}
	sum := time.Duration(0)
	for _, gap := range r.Gaps {
		sum += gap
	}
	if n := len(r.Gaps); n == 0 || r.ITL != sum/time.Duration(n) {
		t.Errorf("the mean of %d gaps is not %v", n, r.ITL)
	}
	if r.TTFT <= 0 || r.E2E < r.TTFT || r.ITL <= 0 || r.ITL > r.E2E-r.TTFT {
		t.Errorf("times do not fit: %+v", r)
	}
}

func TestFailureCauses(t *testing.T) {
	f := func(want string, h http.HandlerFunc) {
		t.Helper()
		p, got := played(t, h)
		if want == "timeout" {
			p.Timeout = 50 * time.Millisecond
		}
		p.RunTrace(t.Context(), one())
		if len(got.all) != 1 || got.all[0].Err != want {
			t.Errorf("got %+v, want %q", got.all, want)
		}
	}
	f("status 503", func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(503) })
	f("no connection", func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) })
	f("response is not a stream", func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, `{"choices":[]}`) })
	f("stream truncated", func(w http.ResponseWriter, r *http.Request) {
		opening(w)
		content(w, "one")
		panic(http.ErrAbortHandler)
	})
	f("stream truncated", func(w http.ResponseWriter, r *http.Request) { opening(w); content(w, "one") })
	f("stream truncated", func(w http.ResponseWriter, r *http.Request) { // [DONE], but never the body's end
		opening(w)
		content(w, "one")
		ending(w)
		panic(http.ErrAbortHandler)
	})
	f("response too long", func(w http.ResponseWriter, r *http.Request) {
		opening(w)
		dataEvent(w, strings.Repeat("x", maxEventBytes))
	})
	f("error event in the stream", func(w http.ResponseWriter, r *http.Request) {
		opening(w)
		content(w, "one")
		dataEvent(w, `{"error":{"message":"the replica died","code":502}}`)
		dataEvent(w, `[DONE]`)
	})
	f("response aborted", func(w http.ResponseWriter, r *http.Request) {
		opening(w)
		content(w, "one")
		dataEvent(w, `{"choices":[{"index":0,"delta":{"content":""},"finish_reason":"abort"}]}`)
		dataEvent(w, `[DONE]`)
	})
	f("response without content", func(w http.ResponseWriter, r *http.Request) { opening(w); ending(w) })
	f("timeout", func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	})
	f("timeout", func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		opening(w)
		<-r.Context().Done()
	})
}

func TestRefusedConnection(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	p, got := played(t, nil)
	p.URL = "http://" + l.Addr().String()
	p.RunTrace(t.Context(), one())
	if len(got.all) != 1 || got.all[0].Err != "no connection" {
		t.Errorf("got %+v", got.all)
	}
}

func TestCanceledRunReportsNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	p, got := played(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		opening(w)
		cancel()
		<-r.Context().Done()
	})
	p.RunTrace(ctx, requestsAt(0, 100_000*time.Second))
	if len(got.all) != 0 {
		t.Errorf("got %+v, want none", got.all)
	}
}

func TestMaxInFlight(t *testing.T) {
	var now, most atomic.Int64
	p, got := played(t, func(w http.ResponseWriter, r *http.Request) {
		n := now.Add(1)
		for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
		}
		opening(w)
		content(w, "one")
		now.Add(-1)
		ending(w)
	})
	p.MaxInFlight = 3
	p.Speed = 1000
	p.RunTrace(t.Context(), requestsAt(make([]time.Duration, 50)...))
	if most.Load() > 3 || len(got.all) != 50 {
		t.Errorf("%d at once, %d results; want at most 3, and 50", most.Load(), len(got.all))
	}
}

func TestRunChats(t *testing.T) {
	c := testChats()
	c.Think = time.Millisecond
	var open, most atomic.Int64
	var mu sync.Mutex
	asked := map[string]int{} // conversations' last user messages
	p, got := played(t, func(w http.ResponseWriter, r *http.Request) {
		n := open.Add(1)
		defer open.Add(-1)
		for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
		}
		var sent chatRequest
		if err := json.NewDecoder(r.Body).Decode(&sent); err != nil {
			t.Error(err)
		}
		for i, m := range sent.Messages {
			if m.Role == "assistant" && m.Content != "re: "+sent.Messages[i-1].Content[:10] {
				t.Errorf("fed back %q after %q", m.Content, sent.Messages[i-1].Content)
			}
		}
		last := sent.Messages[len(sent.Messages)-1].Content
		mu.Lock()
		asked[last]++
		mu.Unlock()
		opening(w)
		content(w, "re: ")
		content(w, last[:10])
		ending(w)
	})
	p.RunChats(t.Context(), c)

	want := 0
	for i := range c.Sessions {
		for _, turn := range turns(c.NewSession(i)) {
			want++
			if last := turn.Messages[len(turn.Messages)-1].Content; asked[last] != 1 {
				t.Errorf("session %d: %q was sent %d times", i, last, asked[last])
			}
		}
	}
	if len(got.all) != want || most.Load() > int64(c.Concurrency) {
		t.Errorf("%d results, %d at once; want %d, at most %d", len(got.all), most.Load(), want, c.Concurrency)
	}
}

func FuzzStream(f *testing.F) {
	f.Add("data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: [DONE]\n\n")
	f.Add("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1e99}}\r\n\r\n: x\ndata:[DONE]")
	f.Add("data: {\"error\":\"x\"}\n\n")
	f.Add("event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"a\"}}\n\ndata: " +
		"{\"type\":\"message_stop\"}\n\n")
	f.Add("data: {\"type\":\"message_delta\",\"usage\":{\"input_tokens\":-1,\"cache_read_input_tokens\":1e99}}\n\n")
	f.Add("data: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\ndata: {\"type\":\"response.completed\",\"response\":{}}\n\n")
	f.Fuzz(func(t *testing.T, body string) {
		var s responseReader
		if err := s.readStream(strings.NewReader(body)); err == nil && !strings.Contains(body, "[DONE]") && !strings.Contains(body, `"type"`) {
			t.Error("a whole response without [DONE] or a typed event")
		}
	})
}

// A server that refuses everything is not asked as fast as it refuses.
func TestRetryDelay(t *testing.T) {
	var asked atomic.Int64
	enough := make(chan struct{})
	p, got := played(t, func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		w.WriteHeader(503)
	})
	p.Stop = enough
	c := testChats()
	c.Sessions, c.Concurrency, c.Think = 0, 1, 0
	time.AfterFunc(500*time.Millisecond, func() { close(enough) })
	p.RunChats(t.Context(), c) // at 0, 0.1, 0.3 and not again before 0.7 s
	if n := asked.Load(); n < 1 || n > 3 || len(got.all) != int(n) {
		t.Errorf("asked %d times, %d results", n, len(got.all))
	}
}

func TestStop(t *testing.T) {
	enough := make(chan struct{})
	p, got := played(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		opening(w)
		close(enough) // twice would panic: nothing more is asked
		content(w, "one")
		ending(w)
	})
	p.Stop = enough
	c := testChats()
	c.Sessions, c.Concurrency, c.Think = 0, 1, 0
	p.RunChats(t.Context(), c)
	if len(got.all) != 1 || got.all[0].Err != "" {
		t.Errorf("got %+v", got.all)
	}
}

func TestOpenAIOnly(t *testing.T) {
	for _, plain := range []bool{false, true} {
		body := string(ChatBody("m", Turn{OutputTokens: 3, OpenAIOnly: plain}, true))
		if strings.Contains(body, "ignore_eos") == plain {
			t.Errorf("plain %v: %s", plain, body)
		}
	}
}

// startReplica runs a simulated replica until the test ends.
func startReplica(t *testing.T, c sim.Config) *sim.Server {
	t.Helper()
	replica := sim.NewServer(c)
	if err := replica.Bind("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := replica.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); running.Wait() })
	return replica
}

// simulated starts a replica a hundred times faster than real, and a player of it.
func simulated(t *testing.T) (*Client, *results) {
	replica := startReplica(t, sim.Config{Engine: engine.Config{Speed: 100}})
	client := NewHTTPClient()
	t.Cleanup(client.CloseIdleConnections)
	got := &results{}
	return &Client{URL: replica.URL(), Model: "sim", HTTP: client, Speed: 100, Timeout: failsafe, OnResult: got.add}, got
}

func TestNextTurnHitsCache(t *testing.T) {
	p, got := simulated(t)
	c := testChats()
	c.Sessions, c.Concurrency = 1, 1
	p.RunChats(t.Context(), c)

	want := turns(c.NewSession(0))
	if len(got.all) != len(want) {
		t.Fatalf("got %d results, want %d", len(got.all), len(want))
	}
	for i, r := range got.all {
		if r.Err != "" || r.CompletionTokens != want[i].OutputTokens || r.TTFT < 8*time.Millisecond || r.E2E < r.TTFT {
			t.Errorf("turn %d: %+v", i, r)
		}
		if i == 0 {
			continue
		}
		before := got.all[i-1]
		// All but a block of 16 tokens that was not full, and the output's last token.
		if least := before.PromptTokens + before.CompletionTokens - 17; r.CachedTokens < least {
			t.Errorf("turn %d: %d tokens cached, want %d at least", i, r.CachedTokens, least)
		}
	}
}

func TestTraceHitsCache(t *testing.T) {
	p, got := simulated(t)
	for _, r := range []replay.TraceRequest{
		{PromptTokens: 1100, OutputTokens: 3, Blocks: []uint64{0, 1, 2}},
		{PromptTokens: 1600, OutputTokens: 3, Blocks: []uint64{0, 1, 3, 4}},
	} {
		p.RunTrace(t.Context(), &replay.Trace{BlockTokens: 512, Requests: []replay.TraceRequest{r}})
	}
	if len(got.all) != 2 || got.all[0].Err != "" || got.all[1].Err != "" {
		t.Fatalf("got %+v", got.all)
	}
	// The two shared blocks of 512; the template's tokens before them move
	// their end by less than one of the replica's blocks.
	if c := got.all[1].CachedTokens; c < 1024-16 || c > 1024+16 {
		t.Errorf("%d tokens cached, want about 1024", c)
	}
}
