package router

import (
	"testing"
	"time"
)

// TestRefusedLate has requests with a target for the time to first token. A backend prefills 8,000 tokens a second.
func TestRefusedLate(t *testing.T) {
	const blocks = testPrefillRate / tokensPerBlock // that a second of prefill takes
	for _, c := range []struct {
		name   string
		blocks int // of the request
		target time.Duration
		change func(*Router, *Request)
		want   error
	}{
		{"in time", blocks, 2 * time.Second, nil, nil},
		{"its prefill takes longer", blocks, 500 * time.Millisecond, nil, ErrLate},
		{"no refusal is wanted", blocks, 500 * time.Millisecond, func(_ *Router, q *Request) { q.RefuseLate = false }, nil},
		{"no target", blocks, 500 * time.Millisecond, func(_ *Router, q *Request) { q.FirstTokenDue = time.Time{} }, nil},
		{"the rate is not known", blocks, 500 * time.Millisecond, func(r *Router, _ *Request) { r.fleet.estimates.ForgetLearned(0) }, nil},
		{"a retry", blocks, 500 * time.Millisecond, func(r *Router, q *Request) { q.Arrival = r.now() }, nil},
		{"no engine works on it", blocks, 500 * time.Millisecond, func(_ *Router, q *Request) { q.NoEngine = true }, nil},
	} {
		r, fleet, clock := newFleet(t, 1, "prefix", withQueue)
		req := ask(fleet, 1, c.blocks)
		req.FirstTokenDue, req.RefuseLate = clock.now.Add(c.target), true
		if c.change != nil {
			c.change(r, req)
		}
		if refused := r.Explain(*req).Refused; (refused != "") != (c.want != nil) {
			t.Errorf("%s: the explanation has the refusal %q", c.name, refused)
		}
		w := submit(r, req)
		if w.err != c.want || (w.d != nil) != (c.want == nil) {
			t.Errorf("%s: got %v, %v, want %v", c.name, w.d, w.err, c.want)
		}
	}
}

// TestRefusedLateInQueue has a request wait in the queue until its first token is due.
func TestRefusedLateInQueue(t *testing.T) {
	const ahead = 4 * maxSharedQueue * time.Second // of prefill
	for _, refuse := range []bool{false, true} {
		r, fleet, c := newFleet(t, 1, "prefix", withQueue)
		sent(t, "an idle backend takes anything", submit(r, ask(fleet, 1, blocksFor(4))))
		ofTarget := func(key int, target time.Duration) *waiter {
			req := ask(fleet, key, 1)
			req.FirstTokenDue, req.RefuseLate = c.now.Add(target), refuse
			return submit(r, req)
		}
		if w := ofTarget(2, ahead/2); (w.err == ErrLate) != refuse {
			t.Errorf("refuse %v, half of the prefill before it: %v", refuse, w.err)
		}
		predicted := r.Explain(*ask(fleet, 3, 1)).Backends[0].TTFTSeconds
		target := time.Duration((predicted + 0.2) * float64(time.Second))
		w := ofTarget(3, target)
		waits(t, "its target allows that", w)
		c.advance(target)
		r.Tick()
		if (w.err == ErrLate) != refuse || refuse && w.d != nil {
			t.Errorf("refuse %v, when its first token is due: %v, %v", refuse, w.d, w.err)
		}
	}
}
