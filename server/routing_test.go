package server

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"warmroute/admin"
	"warmroute/backends"
	"warmroute/config"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// known is the beginning of many prompts: 700 tokens.
var known = strings.Repeat("All of us know this. ", 134)

func TestExternalLoad(t *testing.T) {
	t.Parallel()
	g := startGuarded(t, 2, sim.Config{}, nil)
	holder := g.goesTo("sim", known+"one")
	if again := g.goesTo("sim", known+"two"); again != holder {
		t.Fatalf("the second request went to %d, and the prefix is on %d", again, holder)
	}
	leave := g.openExternalStreams(holder, 96, "sim", "of another client", 8000)
	g.until("the poll sees them", func() bool { return g.load(holder).Running >= 96 })
	if busy := g.goesTo("sim", known+"three"); busy == holder {
		t.Error("a request went where another client has 96")
	}
	leave()
	// The other replica holds the prompt by now as well, so it takes its load for
	// requests to come back.
	g.until("they are gone", func() bool { return g.load(holder).Running == 0 && g.load(holder).QueuesKnown })
	g.openExternalStreams(1-holder, 96, "sim", "of another client", 8000)
	g.until("the poll sees them", func() bool { return g.load(1-holder).Running >= 96 })
	if back := g.goesTo("sim", known+"four"); back != holder {
		t.Error("a request went where another client has 96, though the other one has left")
	}
}

// countPolls counts the polls of each of two replicas until the first has had so many.
func (g *guarded) countPolls(first, polls int) (counts [2]int) {
	last := [2]time.Time{g.load(0).PolledAt, g.load(1).PolledAt}
	g.until("polls", func() bool {
		for i := range counts {
			if at := g.load(i).PolledAt; !at.Equal(last[i]) {
				last[i] = at
				counts[i]++
			}
		}
		return counts[first] >= polls
	})
	return counts
}

// A replica whose scrapes show only our own requests is polled less often than one with
// requests of another client.
func TestPollBackoff(t *testing.T) {
	t.Parallel()
	g := startGuarded(t, 2, sim.Config{}, func(c *config.Config) {
		c.Poll.Interval, c.Poll.FastInterval = 200*time.Millisecond, 200*time.Millisecond
	})
	external := func(replica int) (leave func()) {
		t.Helper()
		leave = g.openExternalStreams(replica, 4, "sim", "of another client", 8000)
		began := time.Now()
		g.until("the next poll sees them", func() bool {
			l := g.load(replica)
			if l.PolledAt.After(began) && l.Running < 4 {
				t.Fatalf("a poll that began after %d requests of another client has %d", 4, l.Running)
			}
			return l.Running >= 4
		})
		g.until(fmt.Sprintf("replica %d is polled more often than the other", replica), func() bool {
			counts := g.countPolls(1-replica, 3)
			return 2*counts[replica] >= 3*counts[1-replica] // twice as many, where the other has our request
		})
		return leave
	}
	g.long(known) // our own request, on either
	leave := external(0)
	leave()
	g.until("they are gone", func() bool { return g.load(0).Running <= 1 })
	external(1)
	for i, want := range []bool{true, false} {
		b := g.server.registry.All()[i]
		g.until(fmt.Sprintf("load of replica %d as expected: %v", i, want), func() bool { return g.server.router.IsLoadExpected(b) == want })
	}
}

// small is a replica that one long prompt fills to 98 %. It is slow enough to be stopped in the middle of an output.
var small = sim.Config{Engine: engine.Config{KVTokens: 20_000, Speed: 2}}

// fill makes another client fill a replica's KV cache to 98 %, and stay.
func (g *guarded) fill(replica int) (leave func()) {
	g.t.Helper()
	leave = g.openExternalStreams(replica, 1, "sim", strings.Repeat("long", 19_600), 300)
	g.fault(replica, sim.Fault{Kind: sim.Freeze})
	g.until("the poll sees a full cache", func() bool { return g.load(replica).KVCacheUsage >= 0.98 })
	return leave
}

// A short prompt is not worth waiting for room, though the full replica holds most of it.
func TestKVWait(t *testing.T) {
	g := startGuarded(t, 2, small, nil)
	holder := g.goesTo("sim", known+"one")
	g.fill(holder)
	s, err := g.open(t.Context(), g.url, "sim", known+"two", 2)
	if err != nil {
		t.Fatal(err)
	}
	defer s.leave()
	// What is sent to the full replica, which stands still, is moved to the other one in the end.
	if s.replica == holder || s.attempts != "1" {
		t.Errorf("a request went to replica %d after %s attempts, and replica %d is at 98 %%", s.replica, s.attempts, holder)
	}
}

func TestAllBackendsKVFull(t *testing.T) {
	for name, held := range map[string]int{"with the admission queue": 1000, "without": 0} {
		t.Run(name, func(t *testing.T) {
			g := startGuarded(t, 2, small, func(c *config.Config) { c.Routing.Queue.Requests = held })
			g.goesTo("sim", known+"one")
			leave := []func(){g.fill(0), g.fill(1)}
			served := g.ask(known + "two")
			// Its turn is the engine's to give: who fills the cache may stay for long.
			g.until("it was sent to a replica", func() bool { return g.inFlight() == 1 })
			for i := range g.replicas {
				leave[i]()
				g.fault(i, sim.Fault{Kind: sim.Clear})
			}
			<-served
		})
	}
}

func (g *guarded) inFlight() (sum int64) {
	for _, b := range g.server.registry.All() {
		sum += b.InFlight.Load()
	}
	return sum
}

func TestMaxInFlight(t *testing.T) {
	t.Parallel()
	g := startGuarded(t, 2, sim.Config{}, func(c *config.Config) {
		c.Backends[0].MaxInFlight, c.Backends[1].MaxInFlight = 1, 1
	})
	first, second := g.long(known+"one"), g.long(known+"two")
	if first.replica == second.replica {
		t.Fatalf("both went to %d", first.replica)
	}
	served := g.ask(known + "three")
	g.until("the third is held", func() bool { return g.server.router.CountWaiting() == 1 })
	second.leave()
	if to := <-served; to != second.replica {
		t.Errorf("went to %d, where there was no place", to)
	}
}

func TestStalledBackendGetsNoRequests(t *testing.T) {
	t.Parallel()
	for _, kind := range []sim.FaultKind{sim.Freeze, sim.Hang} {
		t.Run(string(kind), func(t *testing.T) {
			g := startGuarded(t, 2, sim.Config{}, nil)
			holder := g.goesTo("sim", known+"one")
			if kind == sim.Freeze {
				if s := g.long(known + "two"); s.replica != holder { // stands still in mid-response
					t.Fatalf("went to %d, and the prefix is on %d", s.replica, holder)
				}
			}
			g.fault(holder, sim.Fault{Kind: kind})
			go g.open(t.Context(), g.url, "sim", known+"three", 2) // sent there, and not served
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
			now, times := stalls("stalled"), stalls("stalls_total")
			// The stream in mid-response keeps it stalled. What has put out nothing was
			// moved: with nothing of ours it is stalled no more, until it is tried again.
			if kind == sim.Freeze && (now != 1 || times != 1) || times == 0 {
				t.Errorf("metrics say that %v are stalled, and were %v times", now, times)
			}
			// Not only the line of the request that was moved: what ends before a poll shows it is
			// not reported as recovered.
			g.until("the log says so", func() bool { return strings.Contains(g.log.String(), `msg="backend stalled`) })
			if kind == sim.Hang {
				return // what it has read it never responds to
			}
			g.fault(holder, sim.Fault{Kind: sim.Clear})
			g.openExternalStreams(1-holder, 24, "sim", "of another client", 8000)
			g.until("requests come back", func() bool { return g.goesTo("sim", known+"six") == holder })
			g.until("the log says so", func() bool { return strings.Contains(g.log.String(), "backend recovered") })
		})
	}
}

func TestLoRAAdapterRouting(t *testing.T) {
	t.Parallel()
	g := startGuarded(t, 2, sim.Config{}, nil)
	load := func(replica int, name string) {
		t.Helper()
		body := fmt.Sprintf(`{"lora_name":%q,"lora_path":"/adapters/%s"}`, name, name)
		resp, err := g.client.Post(g.replicas[replica].URL()+"/v1/load_lora_adapter", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		all := g.server.registry
		all.All()[replica].RequestCheck()
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
	leave := g.openExternalStreams(1, 1, "sql", "of another client", 8000)
	g.until("the polls see it, and nothing at the other one", func() bool {
		return len(g.load(1).RunningAdapters) == 1 && len(g.load(0).RunningAdapters) == 0 && g.load(0).Running == 0
	})
	for i := range 4 {
		if to := g.goesTo("sql", fmt.Sprint(4+i, known)); to != 1 {
			t.Errorf("sent to replica %d, and the adapter is at work on the other one", to)
		}
	}
	leave()
}

// state is what the admin listener shows.
func (g *guarded) state() (s admin.State) {
	g.t.Helper()
	resp, err := g.client.Get(g.admin + "/api/state")
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&s); err != nil || resp.StatusCode != http.StatusOK {
		g.t.Fatalf("status %d: %v", resp.StatusCode, err)
	}
	return s
}

func TestStateOfStalledBackend(t *testing.T) {
	t.Parallel()
	g := startGuarded(t, 2, sim.Config{}, nil)
	began := time.Now()
	stalled := g.long("a long output").replica
	g.fault(stalled, sim.Fault{Kind: sim.Freeze})
	g.until("the backend is shown as stalled", func() bool { return g.state().Backends[stalled].State == "stalled" })
	s := g.state()
	b, other := s.Backends[stalled], s.Backends[1-stalled]
	if b.Reason == "" || b.Since == nil || b.Since.Before(began) || b.Since.After(time.Now()) || b.LastReadyFor != nil {
		t.Errorf("the stalled one: %+v", b)
	}
	if other.State != "ready" || other.Reason != "" || len(other.LastReadyFor) != 1 || other.LastReadyFor[0] != "sim" {
		t.Errorf("the other one: %+v", other)
	}
	if m := s.Models; m.All != 1 || m.Unready != 0 || len(m.Listed) != 1 || m.Listed[0].ID != "sim" || m.Listed[0].Ready != 1 ||
		m.Listed[0].Backends != 2 || m.Listed[0].Reason != "" {
		t.Errorf("models: %+v", m)
	}
	if r := s.Requests.Oldest; len(r) != 1 || !r[0].Stalled || r[0].Phase != "responding" {
		t.Errorf("requests: %+v", r)
	}
	g.fault(stalled, sim.Fault{Kind: sim.Clear})
	g.until("it is ready again", func() bool { return g.state().Backends[stalled].State == "ready" })
	g.until("its stream goes on", func() bool { r := g.state().Requests.Oldest; return len(r) == 1 && !r[0].Stalled })
}

func TestStateOfDownBackend(t *testing.T) {
	t.Parallel()
	g := startGuarded(t, 1, sim.Config{}, func(c *config.Config) { c.Health.Interval = 100 * time.Millisecond })
	began := time.Now()
	g.fault(0, sim.Fault{Kind: sim.Status, Status: 503, Everything: true})
	g.until("the backend is shown as down", func() bool { return g.state().Backends[0].State == "down" })
	s := g.state()
	// The fault may begin between the two requests of a check.
	if b := s.Backends[0]; b.Reason != "/health returned 503" && b.Reason != "/v1/models returned 503" || b.Since == nil ||
		b.Since.Before(began) || b.LastReadyFor != nil {
		t.Errorf("got %+v", b)
	}
	m := s.Models
	if m.All != 1 || m.Unready != 1 || m.Listed[0].Ready != 0 || m.Listed[0].Backends != 1 || m.Listed[0].Since == nil ||
		!strings.Contains(m.Listed[0].Reason, g.server.registry.All()[0].Name+" is down") {
		t.Errorf("models: %+v", m)
	}
	g.fault(0, sim.Fault{Kind: sim.Clear})
	g.until("it is ready again", func() bool { return g.state().Backends[0].State == "ready" })
	if m := g.state().Models; m.Unready != 0 || m.Listed[0].Ready != 1 {
		t.Errorf("models: %+v", m)
	}
}

func TestStateOfDrainedBackend(t *testing.T) {
	t.Parallel()
	g := startGuarded(t, 2, sim.Config{}, nil)
	s := g.long("a long output")
	name := g.server.registry.All()[s.replica].Name
	post := func(verb string) {
		t.Helper()
		resp, err := g.client.Post(g.admin+"/api/backends/"+name+"/"+verb, "application/json", nil)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	post("drain")
	if b := g.state().Backends[s.replica]; b.State != "draining" || !b.Drained || b.Reason != "being drained by an operator" ||
		b.Since == nil {
		t.Errorf("with a request in flight: %+v", b)
	}
	s.leave()
	g.until("it has none in flight", func() bool {
		b := g.state().Backends[s.replica]
		return b.State == "draining" && b.Reason == "being drained by an operator" && b.InFlight == 0
	})
	post("undrain")
	g.until("it is shown as ready", func() bool { b := g.state().Backends[s.replica]; return b.State == "ready" && b.Reason == "" })
}

// Readiness checks and scrapes are no load, and what they find leaves the count of
// requests in flight alone.
func TestHealthChecksKeepInFlightCount(t *testing.T) {
	t.Parallel()
	var ill atomic.Bool
	var scrapes atomic.Int64
	first, finish := make(chan struct{}), make(chan struct{})
	p := startFronted(t, func(c *config.Config) {
		const often = 10 * time.Millisecond
		c.Health.Interval, c.Health.DownInterval, c.Poll.Interval, c.Poll.FastInterval = often, often, often, often
	}, standIn{
		health: func(w http.ResponseWriter, _ *http.Request) {
			if ill.Load() {
				w.WriteHeader(http.StatusInternalServerError)
			}
		},
		metrics: func(w http.ResponseWriter, _ *http.Request) {
			scrapes.Add(1)
			io.WriteString(w, "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n")
		},
		chat: func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			close(first)
			<-finish
			io.WriteString(w, wholeResponse)
		},
	}.start(t))
	p.ready(1)
	b := p.server.registry.All()[0]
	before := scrapes.Load()
	p.until("several scrapes", func() bool { return scrapes.Load() > before+5 })
	if n := b.InFlight.Load(); n != 0 {
		t.Errorf("checks and scrapes count as %d requests", n)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.checkServed()
	}()
	<-first
	for _, state := range []backends.State{backends.Down, backends.Ready} {
		ill.Store(state == backends.Down)
		p.until(state.String(), func() bool { return b.State() == state })
		if n := b.InFlight.Load(); n != 1 {
			t.Errorf("%v: %d in flight, want 1", state, n)
		}
	}
	close(finish)
	<-done
	p.until("none in flight", func() bool { return b.InFlight.Load() == 0 })
}

// Long prompts with images are tens of megabytes: nothing has to be set for them.
func TestLargeBodyByDefault(t *testing.T) {
	t.Parallel()
	var got atomic.Int64
	p := startFronted(t, nil, standIn{chat: func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		got.Store(n)
		io.WriteString(w, wholeResponse)
	}}.start(t))
	p.ready(1)
	body := `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,` +
		string(bytes.Repeat([]byte("QUFB"), 10<<20)) + `"}}]}]}`
	if resp, text, err := p.chat(body); err != nil || resp.StatusCode != http.StatusOK || text != wholeResponse ||
		got.Load() != int64(len(body)) {
		t.Errorf("%v, %v, %.300q; %d of %d bytes came", resp, err, text, got.Load(), len(body))
	}
}
