package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"warmroute/backends"
	"warmroute/backends/vllmsim"
)

// guarded is simulated replicas behind a proxy with the default settings, and
// clients that go past it.
type guarded struct {
	t        *testing.T
	replicas []*vllmsim.Server
	service  *service
	url      string
	admin    string
	log      syncBuffer
	client   *http.Client
}

func startGuarded(t *testing.T, n int, c vllmsim.Config, change func(*Config)) *guarded {
	t.Helper()
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() { verifyNoGoroutineLeft(t, before) })
	transport := &http.Transport{}
	g := &guarded{t: t, client: &http.Client{Transport: transport}}
	t.Cleanup(transport.CloseIdleConnections)
	var urls []string
	for range n {
		s := vllmsim.NewServer(c)
		if err := s.Listen("127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		runUntilStopped(t, s.Run)
		g.replicas = append(g.replicas, s)
		urls = append(urls, s.URL())
	}
	config, err := demoConfig("prefix", "127.0.0.1:0", "127.0.0.1:0", urls)
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(config)
	}
	if g.service, err = newService(config, slog.New(slog.NewTextHandler(&g.log, nil))); err != nil {
		t.Fatal(err)
	}
	public, admin, err := listen(config)
	if err != nil {
		t.Fatal(err)
	}
	runUntilStopped(t, func(ctx context.Context) error { return g.service.run(ctx, public, admin) })
	g.url, g.admin = baseURL(public), baseURL(admin)
	g.until("every replica is ready and was polled", func() bool {
		for _, b := range g.service.registry.All() {
			if b.State() != backends.Ready || b.Load() == nil {
				return false
			}
		}
		return true
	})
	return g
}

func (g *guarded) until(what string, reached func() bool) {
	g.t.Helper()
	for deadline := time.Now().Add(time.Minute); !reached(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			g.t.Fatalf("not within a minute: %s", what)
		}
	}
}

// load is what the proxy's poll of a replica said last.
func (g *guarded) load(replica int) *backends.Load {
	if l := g.service.registry.All()[replica].Load(); l != nil {
		return l
	}
	return new(backends.Load)
}

// stream is an answer of which the first event has come.
type stream struct {
	replica int // that it came from, where the proxy said so
	in      *bufio.Reader
	leave   func()
}

// open asks for a stream of so many tokens, and waits for its first event.
func (g *guarded) open(ctx context.Context, base, model, prompt string, tokens int) (*stream, error) {
	ctx, leave := context.WithCancel(ctx)
	body := fmt.Sprintf(`{"model":%q,"stream":true,"ignore_eos":true,"max_tokens":%d,"messages":[{"role":"user","content":%q}]}`, model, tokens, prompt)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		g.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := g.client.Do(req)
	if err != nil {
		leave()
		return nil, err
	}
	s := &stream{replica: -1, in: bufio.NewReader(resp.Body)}
	s.leave = func() { leave(); resp.Body.Close() }
	for i, b := range g.service.registry.All() {
		if b.Name == resp.Header.Get("X-Warmroute-Backend") {
			s.replica = i
		}
	}
	if line, err := s.in.ReadString('\n'); err != nil || !strings.HasPrefix(line, "data: {") {
		s.leave()
		return nil, fmt.Errorf("status %d, %q, %v", resp.StatusCode, line, err)
	}
	return s, nil
}

// long opens a stream through the proxy that lasts until the test ends.
func (g *guarded) long(prompt string) *stream {
	g.t.Helper()
	s, err := g.open(g.t.Context(), g.url, "sim", prompt, 20_000)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(s.leave)
	return s
}

// goesTo asks for two tokens through the proxy and returns which replica gave them.
func (g *guarded) goesTo(model, prompt string) int {
	g.t.Helper()
	s, err := g.open(g.t.Context(), g.url, model, prompt, 2)
	if err != nil {
		g.t.Fatal(err)
	}
	defer s.leave()
	if _, err := io.ReadAll(s.in); err != nil {
		g.t.Fatal(err)
	}
	return s.replica
}

// intrude makes another client, which goes past the proxy, open streams at a
// replica. They last until the test ends, or leave is called.
func (g *guarded) intrude(replica, streams int, model, prompt string, tokens int) (leave func()) {
	g.t.Helper()
	ctx, leave := context.WithCancel(g.t.Context())
	g.t.Cleanup(leave)
	for i := range streams {
		s, err := g.open(ctx, g.replicas[replica].URL(), model, fmt.Sprint(i, prompt), tokens)
		if err != nil {
			g.t.Fatal(err)
		}
		g.t.Cleanup(s.leave)
	}
	return leave
}

func (g *guarded) fault(replica int, f vllmsim.Fault) {
	g.t.Helper()
	if err := g.replicas[replica].SetFault(f); err != nil {
		g.t.Fatal(err)
	}
}

// known is the beginning of many prompts: 700 tokens.
var known = strings.Repeat("All of us know this. ", 134)

func TestASecondClientThatGoesPastTheProxyIsSeen(t *testing.T) {
	g := startGuarded(t, 2, vllmsim.Config{}, nil)
	holder := g.goesTo("sim", known+"one")
	if again := g.goesTo("sim", known+"two"); again != holder {
		t.Fatalf("the second request went to %d, and the prefix is on %d", again, holder)
	}
	leave := g.intrude(holder, 24, "sim", "somebody else's", 8000)
	g.until("the poll sees them", func() bool { return g.load(holder).Running >= 24 })
	if busy := g.goesTo("sim", known+"three"); busy == holder {
		t.Error("a request went where another client has 24")
	}
	leave()
	// The other replica holds the prompt by now as well, so it takes its load for
	// requests to come back.
	g.until("they are gone", func() bool { return g.load(holder).Running == 0 && g.load(holder).QueuesKnown })
	g.intrude(1-holder, 24, "sim", "somebody else's", 8000)
	g.until("the poll sees them", func() bool { return g.load(1-holder).Running >= 24 })
	if back := g.goesTo("sim", known+"four"); back != holder {
		t.Error("a request went where another client has 24, though the other one has left")
	}
}

// small is a replica that one long prompt fills to 98 %.
var small = vllmsim.Config{Engine: vllmsim.EngineConfig{KVTokens: 20_000, Speed: 20}}

// fill makes another client fill a replica's KV cache to 98 %, and stay.
func (g *guarded) fill(replica int) (leave func()) {
	g.t.Helper()
	leave = g.intrude(replica, 1, "sim", strings.Repeat("long", 19_600), 100)
	g.fault(replica, vllmsim.Fault{Kind: vllmsim.Freeze})
	g.until("the poll sees a full cache", func() bool { return g.load(replica).KVCacheUsage >= 0.98 })
	return leave
}

func TestAReplicaAt98PercentKVGetsNothingWhileAnotherCanTakeIt(t *testing.T) {
	g := startGuarded(t, 2, small, nil)
	holder := g.goesTo("sim", known+"one")
	g.fill(holder)
	if to := g.goesTo("sim", known+"two"); to == holder {
		t.Error("a request went to a replica at 98 %")
	}
}

func TestWhereAllReplicasAreAt98PercentKVRequestsAreServed(t *testing.T) {
	for name, held := range map[string]int{"with the hold queue": 1000, "without": 0} {
		t.Run(name, func(t *testing.T) {
			g := startGuarded(t, 2, small, func(c *Config) { c.Routing.Hold.Requests = held })
			g.goesTo("sim", known+"one")
			leave := []func(){g.fill(0), g.fill(1)}
			served := make(chan int)
			go func() {
				s, err := g.open(t.Context(), g.url, "sim", known+"two", 2)
				if err != nil {
					t.Error(err)
					close(served)
					return
				}
				defer s.leave()
				served <- s.replica
			}()
			// Its turn is the engine's to give: who fills the cache may stay for long.
			g.until("it was sent to a replica", func() bool { return g.inFlight() == 1 })
			for i := range g.replicas {
				leave[i]()
				g.fault(i, vllmsim.Fault{Kind: vllmsim.Clear})
			}
			<-served
		})
	}
}

func (g *guarded) inFlight() (sum int64) {
	for _, b := range g.service.registry.All() {
		sum += b.InFlight.Load()
	}
	return sum
}

func TestRequestsBeyondMaxInFlightWaitForAPlace(t *testing.T) {
	g := startGuarded(t, 2, vllmsim.Config{}, func(c *Config) {
		c.Backends[0].MaxInFlight, c.Backends[1].MaxInFlight = 1, 1
	})
	first, second := g.long(known+"one"), g.long(known+"two")
	if first.replica == second.replica {
		t.Fatalf("both went to %d", first.replica)
	}
	served := make(chan int)
	go func() {
		s, err := g.open(t.Context(), g.url, "sim", known+"three", 2)
		if err != nil {
			t.Error(err)
			close(served)
			return
		}
		defer s.leave()
		served <- s.replica
	}()
	g.until("the third is held", func() bool { return g.service.router.HeldRequests() == 1 })
	second.leave()
	if to := <-served; to != second.replica {
		t.Errorf("went to %d, where there was no place", to)
	}
}

func TestAReplicaThatStopsProducingGetsNothingUntilItDoes(t *testing.T) {
	for _, kind := range []vllmsim.FaultKind{vllmsim.Freeze, vllmsim.Hang} {
		t.Run(string(kind), func(t *testing.T) {
			g := startGuarded(t, 2, vllmsim.Config{}, nil)
			holder := g.goesTo("sim", known+"one")
			if kind == vllmsim.Freeze {
				if s := g.long(known + "two"); s.replica != holder { // stands still in mid-answer
					t.Fatalf("went to %d, and the prefix is on %d", s.replica, holder)
				}
			}
			g.fault(holder, vllmsim.Fault{Kind: kind})
			go g.open(t.Context(), g.url, "sim", known+"three", 2) // sent there, and not answered
			g.until("requests go elsewhere", func() bool {
				ctx, leave := context.WithTimeout(t.Context(), 500*time.Millisecond)
				defer leave()
				s, err := g.open(ctx, g.url, "sim", known+"four", 2)
				if err != nil {
					return false
				}
				defer s.leave()
				return s.replica != holder
			})
			if to := g.goesTo("sim", known+"five"); to == holder {
				t.Error("sent to a stalled replica")
			}
			stalls := func(of string) float64 { return metricSum(t, g.admin, "warmroute_backend_"+of) }
			if now, times := stalls("stalled"), stalls("stalls_total"); now != 1 || times != 1 {
				t.Errorf("metrics say that %v are stalled, and were %v times", now, times)
			}
			g.until("the log says so", func() bool { return strings.Contains(g.log.String(), "produces nothing") })
			if kind == vllmsim.Hang {
				return // what it has read it never answers
			}
			g.fault(holder, vllmsim.Fault{Kind: vllmsim.Clear})
			g.intrude(1-holder, 24, "sim", "somebody else's", 8000)
			g.until("requests come back", func() bool { return g.goesTo("sim", known+"six") == holder })
			g.until("the log says so", func() bool { return strings.Contains(g.log.String(), "produces again") })
		})
	}
}

func TestAdaptersAreFoundWhereTheyAreLoaded(t *testing.T) {
	g := startGuarded(t, 2, vllmsim.Config{}, nil)
	load := func(replica int, name string) {
		t.Helper()
		body := fmt.Sprintf(`{"lora_name":%q,"lora_path":"/adapters/%s"}`, name, name)
		resp, err := g.client.Post(g.replicas[replica].URL()+"/v1/load_lora_adapter", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		all := g.service.registry
		g.service.checker.Suspect(all.All()[replica])
		g.until("it is listed", func() bool {
			e, _ := all.Catalog().Find(name)
			for _, b := range e.Backends {
				if b == all.All()[replica] {
					return true
				}
			}
			return false
		})
	}
	load(0, "sql")
	for i := range 4 {
		if to := g.goesTo("sql", fmt.Sprint(i, known)); to != 0 {
			t.Fatalf("sent to replica %d, which has no such adapter", to)
		}
	}
	load(1, "sql")
	// Who is at work for it comes first, though the other one is idle.
	leave := g.intrude(1, 1, "sql", "somebody else's", 8000)
	g.until("the poll sees it", func() bool { return len(g.load(1).RunningAdapters) == 1 })
	for i := range 4 {
		if to := g.goesTo("sql", fmt.Sprint(4+i, known)); to != 1 {
			t.Errorf("sent to replica %d, and the adapter is at work on the other one", to)
		}
	}
	leave()
}
