package router

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"warmroute/backends"
)

func TestShortestPrefillFirstWithAgeing(t *testing.T) {
	f := func(name string, blocks int, later time.Duration, want ...int) {
		t.Helper()
		r, fleet, c := newFleet(t, 1, "prefix", withQueue)
		busy := sent(t, "", submit(r, ask(fleet, 1, 20_000))) // 1,280,000 tokens
		var got []int
		put := func(key, n int) {
			r.Submit(ask(fleet, key, n), func(*Reservation, error) { got = append(got, key) })
		}
		put(2, blocks)
		c.advance(later)
		put(3, 1)
		busy.RecordFirstEvent()
		r.Tick()
		if !slices.Equal(got, want) {
			t.Errorf("%s: sent %v, want %v", name, got, want)
		}
	}
	// 8,192 tokens: a second of work, five of ageing.
	f("the short one first", 128, 4*time.Second, 3, 2)
	f("unless it came too late", 128, 6*time.Second, 2, 3)
	// 96,000 tokens would be 60 s of ageing, which is all the time there is.
	f("before a very long one", 1500, 29*time.Second, 3, 2)
	f("unless half of its time was over", 1500, 31*time.Second, 2)
}

func TestTenantFlood(t *testing.T) {
	const flood, other = 7, 8
	served := func(tenant uint64, keys bool) int {
		r, fleet, c := newFleet(t, 1, "prefix", withQueue)
		first := ask(fleet, 1, 2000)
		if keys {
			first.Tenant = 9
		}
		busy := sent(t, "", submit(r, first))
		before := 0
		var last *Reservation
		put := func(key int, tenant uint64, served func()) {
			req := ask(fleet, key, 120)
			req.Tenant = tenant
			r.Submit(req, func(d *Reservation, _ error) { last = d; served() })
		}
		for key := range 100 {
			put(2+key, tenant, func() { before++ })
		}
		c.advance(10 * time.Millisecond)
		done := false
		put(200, other, func() { done = true })
		for busy.Release(Outcome{End: Completed}); !done; {
			c.advance(time.Second)
			last.Release(Outcome{End: Completed, OutputTokens: 10})
		}
		return before
	}
	if n := served(flood, false); n > 3 {
		t.Errorf("%d requests of a tenant that floods the queue went before another's only one", n)
	}
	if n := served(0, false); n != 100 {
		t.Errorf("without keys: %d requests went before one that came after them, want all 100", n)
	}
	if n := served(0, true); n > 3 {
		t.Errorf("%d requests without a key went before the only one of a tenant with one", n)
	}
}

// A tenant with few requests gets as many responses beside one with many as its share allows, where outputs and not prompts take
// the time.
func TestShareWhereOutputsAreTheLimit(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	fleet[0].SetOptions(backends.Options{MaxInFlight: 4})
	const flood, other, seconds = 7, 8, 60
	var running []func()
	served, key := map[uint64]int{}, 0
	var send func(tenant uint64)
	send = func(tenant uint64) {
		key++
		req := ask(fleet, key, 1)
		req.Tenant = tenant
		r.Submit(req, func(d *Reservation, err error) {
			if err != nil {
				t.Error(err)
				return
			}
			d.RecordFirstEvent()
			running = append(running, func() {
				d.Release(Outcome{End: Completed, OutputTokens: 100})
				served[tenant]++
				send(tenant)
			})
		})
	}
	for range 40 {
		send(flood)
	}
	for range 2 {
		send(other)
	}
	for range seconds {
		c.advance(time.Second)
		ended := running
		running = nil
		for _, end := range ended {
			end()
		}
	}
	if share := float64(served[other]) / float64(served[flood]+served[other]); share < 0.2 {
		t.Errorf("a tenant with 2 requests beside 40 of another one got %d of %d responses", served[other], served[flood]+served[other])
	}
}

// What a tenant was sent at once counts for its share as well.
func TestUnqueuedRequestsAreCharged(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix", withQueue)
	of := func(tenant uint64, key, blocks int) *waiter {
		req := ask(fleet, key, blocks)
		req.Tenant = tenant
		return submit(r, req)
	}
	busy := sent(t, "", of(1, 1, 2000)) // 16 s of the backend's work
	second, other := of(1, 2, 300), of(2, 3, 300)
	busy.RecordFirstEvent()
	sent(t, "the tenant that has had nothing", other)
	waits(t, "the one that had everything", second)
}

func TestCancelledAndRetriedAreNotCharged(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix", withQueue)
	busy := sent(t, "", submit(r, ask(fleet[:1], 1, 2000)))
	of := func(tenant uint64, key int, tried ...*backends.Backend) *waiter {
		req := ask(fleet[:1], key, 300)
		if tried != nil {
			req.Backends, req.Priority = fleet, 1
		}
		req.Tenant = tenant
		return submit(r, req, tried...)
	}
	for key := range 20 {
		w := of(1, 2+key)
		waits(t, "", w)
		w.queued.Cancel()
	}
	for key := range 20 { // each was charged when it came first
		waits(t, "a retry", of(1, 30+key, fleet[1]))
	}
	mine := of(1, 100)
	c.advance(time.Millisecond)
	other := of(2, 101)
	busy.RecordFirstEvent()
	sent(t, "it came first, and those before it left", mine)
	waits(t, "it came later", other)
}

// An engine that prefills 8,000 tokens a second gets short requests faster than
// it can take them, for minutes; one long one is among them.
func TestLongPromptIsNotStarved(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix", func(o *Options) { o.Queue = QueueSettings{Requests: 1 << 20} })
	start := c.now
	var running []*Reservation
	deliver := func(d *Reservation, _ error) { running = append(running, d) }
	busyUntil := make([]time.Time, 2)
	finishes := map[*Reservation]time.Time{}
	var long time.Duration
	key := 1
	for long == 0 && c.now.Sub(start) < 10*time.Minute {
		if c.now.Sub(start) == 10*time.Second {
			r.Submit(ask(fleet, 1<<20, 500), func(d *Reservation, err error) { // 32,000 tokens: 4 s
				deliver(d, err)
				long = c.now.Sub(start) - 10*time.Second
			})
		}
		for range 6 { // of 320 tokens, each 20 ms: 96,000 a second
			r.Submit(ask(fleet, key, 5), deliver)
			key++
		}
		c.advance(20 * time.Millisecond)
		var still []*Reservation
		due := running
		running = nil
		for _, d := range due {
			at, known := finishes[d]
			if !known {
				slot := d.Backend.Slot
				busyUntil[slot] = maxTime(busyUntil[slot], c.now).Add(time.Duration(d.entry.Prediction.Uncached / 8000 * float64(time.Second)))
				at = busyUntil[slot]
				finishes[d] = at
			}
			if at.After(c.now) {
				still = append(still, d)
				continue
			}
			delete(finishes, d)
			d.RecordFirstEvent()
			d.Release(Outcome{End: Completed, OutputTokens: 1})
		}
		running = append(running, still...)
		r.Tick()
	}
	// It may be overtaken by what comes 4 s / 0.2 after it, of which the fleet
	// serves a sixth as fast as it comes; and what was there before goes first.
	if long == 0 || long > 3*time.Minute {
		t.Errorf("the long request was sent after %v (0: never)", long)
	}
}

func maxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// TestDataParallelEngines sends requests to a replica until one is queued: each of its engines prefills its share.
func TestDataParallelEngines(t *testing.T) {
	for _, tc := range []struct {
		name    string
		engines int     // as reported; 0: unknown
		times   float64 // of blocksFor, of each request
		want    int     // requests sent
	}{
		{"one engine, long prompts", 1, 2, 1},
		{"one engine, short prompts", 1, 0.45, 3},
		{"not known", 0, 2, 1},
		{"three engines, long prompts", 3, 2, 3},
		{"three engines, short prompts", 3, 0.45, 7},
	} {
		r, fleet, c := newFleet(t, 1, "prefix", withQueue)
		fleet[0].SetLoad(&backends.Load{Engines: tc.engines, PolledAt: c.now})
		var running []*Reservation
		submitNext := func() *waiter { return submit(r, ask(fleet, len(running)+1, blocksFor(tc.times))) }
		for range tc.want {
			running = append(running, sent(t, tc.name, submitNext()))
		}
		queued := submitNext()
		waits(t, tc.name, queued)
		running[0].RecordFirstEvent()
		r.Tick()
		sent(t, tc.name+": an engine is free", queued)
	}
}

func TestEngineCacheTokens(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	seen := recordChoices(r)
	for engines, want := range map[int]float64{0: 12_000, 1: 12_000, 3: 4000} {
		fleet[0].SetLoad(&backends.Load{Engines: engines, CacheTokens: 12_000, PolledAt: c.now})
		mustPick(t, r, ask(fleet, 1, 1))
		if got := seen.candidates[0]; got.EngineCacheTokens != want || got.CacheTokens != 12_000 {
			t.Errorf("%d engines: %v tokens of %v in each, want %v of 12000", engines, got.EngineCacheTokens, got.CacheTokens, want)
		}
	}
}

// BenchmarkDispatch tells the time; here is what it consists of.
func TestWorkPerRequestIsIndependentOfQueueLength(t *testing.T) {
	perRequest := func(queued int) float64 {
		r, fleet, c := newFleet(t, 8, "prefix", func(o *Options) { o.Queue = QueueSettings{Requests: 2 * queued} })
		learnPrefillRate(r, testPrefillRate)
		count := recordChoices(r)
		var running []*Reservation
		key, sent := 0, 0
		fill := func() {
			for r.CountWaiting() < queued {
				r.Submit(ask(fleet, key%5000, 20+key%100), func(d *Reservation, _ error) {
					running = append(running, d)
					sent++
				})
				key++
			}
		}
		fill()
		count.choices, sent = 0, 0
		for sent < 2000 {
			c.advance(10 * time.Millisecond)
			d := running[0]
			running = running[1:]
			d.RecordFirstEvent()
			d.Release(Outcome{End: Completed, OutputTokens: 100})
			fill()
		}
		return float64(count.choices) / float64(sent)
	}
	short, long := perRequest(1000), perRequest(10_000)
	if long > 2*short {
		t.Errorf("%.1f scorings for a request sent through a queue of 10,000, and %.1f through one of 1,000", long, short)
	}
}

func TestQueueReordersWhenPrefixIsComputed(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	busy := sent(t, "", submit(r, ask(fleet, 1, 500)))
	urgent := ask(fleet, 2, blocksFor(1.2))
	urgent.Priority = -1
	first := submit(r, urgent)
	var order []string
	put := func(name string, req *Request) {
		r.Submit(req, func(*Reservation, error) { order = append(order, name) })
	}
	put("more to compute", ask(fleet, 3, blocksFor(1)))
	put("all but a block is the first one's prompt", ask(fleet, 2, blocksFor(1.2)+1))
	busy.RecordFirstEvent()
	sent(t, "by priority", first)
	if len(order) > 0 {
		t.Errorf("sent %q beside the first one", order)
	}
	c.advance(reorderInterval)
	first.d.RecordFirstEvent()
	if len(order) != 2 || order[1] != "more to compute" {
		t.Errorf("sent %q", order)
	}
}

// panickingReporter panics when a request for a model is reported.
type panickingReporter string

func (model panickingReporter) ReportPlacement(e *PlacementEvent) {
	if e.Model == string(model) {
		panic("cannot report " + e.Model)
	}
}

func TestPanicInDispatchRefusesOneRequest(t *testing.T) {
	var causes []any
	r, fleet, c := newFleet(t, 1, "prefix", withQueue, func(o *Options) {
		o.Reporter = panickingReporter("poison")
		o.OnPanic = func(cause any, stack []byte) {
			causes = append(causes, cause)
			if !strings.Contains(string(stack), "ReportPlacement") {
				t.Errorf("stack %s", stack)
			}
		}
	})
	busy := mustPick(t, r, ask(fleet, 1, blocksFor(2)))
	poison := ask(fleet, 2, 1)
	poison.Model = "poison"
	refused, behind := submit(r, poison), submit(r, ask(fleet, 3, 2))
	waits(t, "poison", refused)
	waits(t, "behind it", behind)
	busy.RecordFirstEvent() // it makes room
	if refused.err != ErrPanicked || refused.d != nil {
		t.Errorf("got %v, %v; want %v", refused.d, refused.err, ErrPanicked)
	}
	if len(causes) != 1 || causes[0] != "cannot report poison" {
		t.Errorf("reported %v, want one panic", causes)
	}
	r.Tick()
	sent(t, "behind it", behind).Release(Outcome{End: Completed})
	busy.Release(Outcome{End: Completed})
	if n := fleet[0].InFlight.Load(); n != 0 {
		t.Errorf("at the end %d in flight", n)
	}
	expectEmptyAccount(t, "at the end", r, 0, c.now)
	if n := r.CountWaiting(); n != 0 {
		t.Errorf("%d queued at the end", n)
	}
}

func TestRunTicksForRequestsQueuedBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, fleet, _ := newFleet(t, 1, "prefix", withQueue, func(o *Options) {
			o.Now = time.Now
			o.Queue.NoneReadyTimeout = time.Second
		})
		fleet[0].SetState(backends.Down)
		w := submit(r, ask(fleet, 1, 1))
		<-r.admission.started // by a Run that panicked
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { r.Run(ctx) })
		time.Sleep(2 * time.Second)
		cancel()
		running.Wait()
		if w.err != ErrNoneReady {
			t.Errorf("got %v after its time in the queue, want %v", w.err, ErrNoneReady)
		}
	})
}
