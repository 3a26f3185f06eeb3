package server

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/config"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// endless writes a text over and over, until so many bytes are out or nobody reads.
func endless(text string, most int) http.HandlerFunc {
	piece := []byte(strings.Repeat(text, 1+(64<<10)/len(text)))
	return func(w http.ResponseWriter, _ *http.Request) {
		for n := 0; n < most; n += len(piece) {
			if _, err := w.Write(piece); err != nil {
				return
			}
		}
	}
}

// numbered writes lines that differ in a number, as that many series or models would.
func numbered(before, after string, lines int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		piece := make([]byte, 0, 64<<10)
		for i := range lines {
			piece = fmt.Appendf(piece, "%s%d%s", before, i, after)
			if len(piece) > 60<<10 || i == lines-1 {
				if _, err := w.Write(piece); err != nil {
					return
				}
				piece = piece[:0]
			}
		}
	}
}

func text(s string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, s) }
}

// stall writes a part of a response and no more.
func stall(part string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, part)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}
}

// Polling metrics without end, over and over, keeps the memory of one poll at most.
func TestEndlessMetricsMemory(t *testing.T) {
	var polls sync.WaitGroup
	polls.Add(8)
	var once [8]sync.Once
	n := make(chan int, 1)
	n <- 0
	flood := endless(`vllm:lora_requests_info{max_lora="1",running_lora_adapters="`+strings.Repeat("a,", 5000)+"\"} 1\n", 1<<50)
	p := startFronted(t, func(c *config.Config) {
		c.Poll.Interval, c.Poll.FastInterval = 10*time.Millisecond, 10*time.Millisecond
	},
		standIn{metrics: func(w http.ResponseWriter, r *http.Request) {
			i := <-n
			n <- i + 1
			flood(w, r)
			if i < len(once) {
				once[i].Do(polls.Done)
			}
		}}.start(t))
	p.ready(1)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	polls.Wait()
	runtime.ReadMemStats(&after)
	if spent := after.TotalAlloc - before.TotalAlloc; spent > 32<<20 {
		t.Errorf("8 polls of 16 MiB each allocated %d MB", spent>>20)
	}
}

// models makes a list of what writes its elements, each with a comma behind it.
func models(elements http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, `{"data":[`)
		elements(w, r)
		io.WriteString(w, `{"id":"last"}]}`)
	}
}

func TestUnresolvableBackend(t *testing.T) {
	t.Parallel()
	p := startFronted(t, nil, "http://no-such-replica.invalid:8000", standIn{}.start(t))
	p.logs("no-such-replica.invalid:8000")
	p.ready(1)
	for range 3 {
		p.checkServed()
	}
}

// impatient serves a stand-in that closes every connection as soon as it is idle,
// and says nothing of it.
func (s standIn) impatient(t *testing.T) string {
	t.Helper()
	server := httptest.NewUnstartedServer(s.handler())
	server.Config.ConnState = func(c net.Conn, state http.ConnState) {
		if state == http.StateIdle {
			c.Close()
		}
	}
	server.Start()
	t.Cleanup(server.Close)
	return server.URL
}

// nginx loses 296 of these 300.
func TestBackendClosingIdleConnections(t *testing.T) {
	t.Parallel()
	stream := func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if !bytes.Contains(body, []byte(`"stream":true`)) {
			io.WriteString(w, wholeResponse)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, `data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}`+"\n\ndata: [DONE]\n\n")
	}
	p := startFronted(t, nil, standIn{chat: stream}.impatient(t), standIn{chat: stream}.impatient(t))
	p.ready(2)
	long := strings.Repeat("What do you make of this? ", 40_000)
	for name, f := range map[string]struct{ requests, clients, size int }{
		"one after another":       {300, 1, 20},
		"8 clients":               {300, 8, 20},
		"1 MB, one after another": {40, 1, len(long)},
		"1 MB, 8 clients":         {80, 8, len(long)},
	} {
		t.Run(name, func(t *testing.T) {
			var clients sync.WaitGroup
			for client := range f.clients {
				clients.Go(func() {
					for n := range f.requests / f.clients {
						body := fmt.Sprintf(`{"model":"m","stream":%v,"messages":[{"role":"user","content":"%d %d %s"}]}`, n%2 == 0, client, n, long[:f.size])
						resp, text, err := p.chat(body)
						if err != nil || resp.StatusCode != http.StatusOK || n%2 == 0 && !strings.HasSuffix(text, "[DONE]\n\n") || n%2 == 1 &&
							text != wholeResponse {
							t.Errorf("request %d of client %d: %v, %v, %.200q", n, client, resp, err, text)
						}
					}
				})
			}
			clients.Wait()
		})
	}
	for _, b := range p.server.registry.All() {
		if s := b.State(); s != backends.Ready {
			t.Errorf("%s is %v", b.Name, s)
		}
	}
}

// What a replica has accepted and does nothing about is served by another, be
// it that only its engine hangs or all of its process.
func TestHungBackend(t *testing.T) {
	t.Parallel()
	for name, everything := range map[string]bool{"its responses": false, "its process": true} {
		t.Run(name, func(t *testing.T) {
			g := startGuarded(t, 2, sim.Config{}, nil)
			holder := g.goesTo("sim", known+"one")
			g.fault(holder, sim.Fault{Kind: sim.Hang, Everything: everything})
			var all []<-chan int
			for i := range 4 {
				all = append(all, g.ask(fmt.Sprint(known, i)))
			}
			g.until("one was sent there", func() bool { return g.server.registry.All()[holder].InFlight.Load() > 0 })
			for i, done := range all {
				if by := <-done; by != 1-holder {
					t.Errorf("request %d was served by replica %d, which hangs", i, by)
				}
			}
			if metricSum(t, g.admin, "warmroute_retries_total") == 0 {
				t.Error("none was sent again")
			}
			g.fault(holder, sim.Fault{Kind: sim.Clear})
		})
	}
}

// A request that does not stream may take any time as long as the polls see progress.
// Without it, and without metrics that show so, timeouts.response ends it.
func TestResponseTimeoutFollowsPolledProgress(t *testing.T) {
	t.Parallel()
	const limit = 3 * time.Second
	// 1,000 steps of 8 ms.
	replica := sim.Config{Engine: engine.Config{StepTime: 8 * time.Millisecond}}
	g := startGuarded(t, 1, replica, func(c *config.Config) { c.Timeouts.Response = limit })
	ask := func(tokens int) (status int, body string, took time.Duration) {
		began := time.Now()
		resp, err := g.client.Post(g.url+"/v1/chat/completions", "application/json", strings.NewReader(fmt.Sprintf(
			`{"model":"sim","ignore_eos":true,"max_tokens":%d,"messages":[{"role":"user","content":"hi"}]}`, tokens)))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(text), time.Since(began)
	}
	if status, body, took := ask(1000); status != http.StatusOK || took < 2*limit {
		t.Errorf("a long response: %d after %v: %.200s", status, took, body)
	}
	g.fault(0, sim.Fault{Kind: sim.MetricsGone})
	g.until("the metrics are known to be gone", func() bool { return g.server.registry.All()[0].Load() == nil })
	g.fault(0, sim.Fault{Kind: sim.Hang})
	if status, body, _ := ask(1); status != http.StatusGatewayTimeout || !strings.Contains(body, "response_timeout") {
		t.Errorf("a replica that hangs: %d: %.200s", status, body)
	}
	g.fault(0, sim.Fault{Kind: sim.Clear})
}
