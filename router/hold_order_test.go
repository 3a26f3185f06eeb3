package router

import (
	"slices"
	"testing"
	"time"
)

func TestShortWorkFirstUntilTheLongHasWaited(t *testing.T) {
	f := func(name string, blocks int, later time.Duration, want ...int) {
		t.Helper()
		r, fleet, c := newFleet(t, 1, "prefix", holding)
		busy := sent(t, "", submit(r, ask(fleet, 1, 20_000))) // 1,280,000 tokens
		var got []int
		put := func(key, n int) {
			r.Submit(ask(fleet, key, n), func(*Decision, error) { got = append(got, key) })
		}
		put(2, blocks)
		c.advance(later)
		put(3, 1)
		busy.FirstEvent()
		r.Tick()
		if !slices.Equal(got, want) {
			t.Errorf("%s: sent %v, want %v", name, got, want)
		}
	}
	// 8,192 tokens: a second of work, five of ageing.
	f("the short one first", 128, 4*time.Second, 3)
	f("unless it came too late", 128, 6*time.Second, 2)
	// 96,000 tokens would be 60 s of ageing, which is all the time there is.
	f("before a very long one", 1500, 44*time.Second, 3)
	f("unless it came too late for that", 1500, 46*time.Second, 2)
}

func TestATenantsFloodDoesNotStarveOthers(t *testing.T) {
	const flood, other = 7, 8
	served := func(tenant uint64) int {
		r, fleet, c := newFleet(t, 1, "prefix", holding)
		busy := sent(t, "", submit(r, ask(fleet, 1, 2000)))
		before := 0
		var last *Decision
		put := func(key int, tenant uint64, served func()) {
			req := ask(fleet, key, 120)
			req.Tenant = tenant
			r.Submit(req, func(d *Decision, _ error) { last = d; served() })
		}
		for key := range 100 {
			put(2+key, tenant, func() { before++ })
		}
		c.advance(10 * time.Millisecond)
		done := false
		put(200, other, func() { done = true })
		for busy.Release(Outcome{End: Served}); !done; {
			c.advance(time.Second)
			last.Release(Outcome{End: Served, AnswerTokens: 10})
		}
		return before
	}
	if n := served(flood); n > 3 {
		t.Errorf("%d requests of a tenant that floods the queue went before another's only one", n)
	}
	if n := served(0); n != 100 {
		t.Errorf("%d requests of nobody in particular went before one that came after them, want all 100", n)
	}
}

// An engine that prefills 8,000 tokens a second gets short requests faster than
// it can take them, for minutes; one long one is among them.
func TestAStreamOfShortRequestsDoesNotStarveALongOne(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix", func(o *Options) { o.Hold = HoldOptions{Requests: 1 << 20} })
	start := c.now
	var running []*Decision
	deliver := func(d *Decision, _ error) { running = append(running, d) }
	busyUntil := make([]time.Time, 2)
	finishes := map[*Decision]time.Time{}
	var long time.Duration
	key := 1
	for long == 0 && c.now.Sub(start) < 10*time.Minute {
		if c.now.Sub(start) == 10*time.Second {
			r.Submit(ask(fleet, 1<<20, 500), func(d *Decision, err error) { // 32,000 tokens: 4 s
				deliver(d, err)
				long = c.now.Sub(start) - 10*time.Second
			})
		}
		for range 6 { // of 320 tokens, each 20 ms: 96,000 a second
			r.Submit(ask(fleet, key, 5), deliver)
			key++
		}
		c.advance(20 * time.Millisecond)
		var still []*Decision
		due := running
		running = nil
		for _, d := range due {
			at, known := finishes[d]
			if !known {
				slot := d.Backend.Slot
				busyUntil[slot] = maxTime(busyUntil[slot], c.now).Add(time.Duration(d.uncached / 8000 * float64(time.Second)))
				at = busyUntil[slot]
				finishes[d] = at
			}
			if at.After(c.now) {
				still = append(still, d)
				continue
			}
			delete(finishes, d)
			d.FirstEvent()
			d.Release(Outcome{End: Served, AnswerTokens: 1})
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
