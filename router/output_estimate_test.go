package router

import (
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router/ledger"
)

func TestEstimateOutputTokens(t *testing.T) {
	const second, rate = time.Second, ledger.DefaultDecodeRate
	for _, c := range []struct {
		name    string
		change  func(*Request)
		ahead   bool // another prompt has to be computed before it
		elapsed time.Duration
		want    int
	}{
		{"at once", func(*Request) {}, false, 0, 0},
		{"in the prefill", func(req *Request) { req.Bytes = 64_000 }, false, second, 0},
		{"after the prefill", func(req *Request) { req.Bytes = 64_000 }, false, 3 * second, rate},
		{"after another one's prefill", func(*Request) {}, true, 3 * second, rate},
		{"one sequence", func(*Request) {}, false, 5 * second, 5 * rate},
		{"twenty sequences", func(req *Request) { req.Sequences = 20 }, false, 5 * second / 2, 50 * rate},
		{"at most what was asked for", func(req *Request) { req.Sequences, req.MaxOutputTokens = 20, 30 }, false, time.Hour, 600},
		{"a stream", func(req *Request) { req.Streams = true }, false, second, 0},
		{"no text", func(req *Request) { req.NonGenerative = true }, false, second, 0},
		{"no engine", func(req *Request) { req.NoEngine = true }, false, second, 0},
	} {
		r, fleet, clock := newFleet(t, 1, "prefix")
		learnPrefillRate(r, testPrefillRate)
		if c.ahead {
			other := ask(fleet, 2, 0)
			other.Bytes = 64_000
			mustPick(t, r, other)
		}
		req := ask(fleet, 1, 0)
		req.Streams = false
		c.change(req)
		d := mustPick(t, r, req)
		clock.advance(c.elapsed)
		if got := d.EstimateOutputTokens(0, time.Time{}); got < c.want-c.want/100 || got > c.want { // a token of the prompt takes its time too
			t.Errorf("%s: %d tokens, want about %d", c.name, got, c.want)
		}
	}
}

// A backend that was removed has no rates any more.
func TestEstimateOutputTokensOfRemovedBackend(t *testing.T) {
	r, fleet, clock := newFleet(t, 2, "prefix")
	req := ask(fleet[:1], 1, 0)
	req.Streams = false
	d := mustPick(t, r, req)
	r.RemoveBackend(fleet[0])
	clock.advance(time.Second)
	if got := d.EstimateOutputTokens(0, time.Time{}); got != ledger.DefaultDecodeRate {
		t.Errorf("%d tokens, want %d", got, ledger.DefaultDecodeRate)
	}
}

// A stream whose events stop, as they do where the reasoning is hidden, goes on generating.
func TestEstimateOutputTokensOfStream(t *testing.T) {
	for _, c := range []struct {
		name    string
		change  func(*Request)
		stalled bool
		counted int
		silence time.Duration
		want    int
	}{
		{"between two events", func(*Request) {}, false, 100, 25 * time.Millisecond, 101},
		{"twenty sequences without events", func(req *Request) {
			req.Sequences = 20
		}, false, 20, 5 * time.Second, 20 + 100*ledger.DefaultDecodeRate},
		{"at most what was asked for", func(req *Request) { req.Sequences, req.MaxOutputTokens = 20, 30 }, false, 20, time.Hour, 600},
		{"more events than asked for", func(req *Request) { req.MaxOutputTokens = 30 }, false, 31, time.Hour, 31},
		{"on a stalled backend", func(*Request) {}, true, 20, time.Hour, 20},
	} {
		r, fleet, clock := newFleet(t, 1, "prefix")
		req := ask(fleet, 1, 0)
		req.Streams = true
		c.change(req)
		d := mustPick(t, r, req)
		poll := func() { // its counters do not change
			if c.stalled {
				r.ObserveLoad(fleet[0], &backends.Load{TokensKnown: true, GenerationTokens: 1, PolledAt: clock.now})
			}
		}
		poll()
		clock.advance(time.Minute)
		last := r.now()
		clock.advance(c.silence)
		poll()
		if _, stalled := stallsOf(r, fleet[0]); stalled != c.stalled {
			t.Fatalf("%s: stalled is %v", c.name, stalled)
		}
		if got := d.EstimateOutputTokens(c.counted, last); got != c.want {
			t.Errorf("%s: %d tokens, want %d", c.name, got, c.want)
		}
	}
}
