package router

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/url"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/lab/policies"
	"warmroute/prompt"
	"warmroute/router/estimate"
)

const (
	defaultOutputTokens = 250  // of estimate
	testPrefillRate     = 8000 // of a fleet with a queue
	tokensPerBlock      = 64   // of ask
)

// stepBudget returns how many uncached tokens a backend of a prefill rate is sent ahead.
func stepBudget(rate float64) float64 { return max(stepShare*defaultStepTokens, queuedSeconds*rate) }

// blocksFor returns how many blocks have so many steps' budgets of tokens, at most.
func blocksFor(budgets float64) int {
	return int(budgets * stepBudget(testPrefillRate) / tokensPerBlock)
}

// clock is a wall clock that stands still until a test moves it.
type clock struct{ now time.Time }

func (c *clock) read() time.Time { return c.now }

func (c *clock) advance(d time.Duration) { c.now = c.now.Add(d) }

func newFleet(t testing.TB, n int, name string, change ...func(*Options)) (*Router, []*backends.Backend, *clock) {
	t.Helper()
	var fleet []*backends.Backend
	for i := range n {
		b := &backends.Backend{Name: fmt.Sprintf("b%d", i), URL: &url.URL{}, Slot: i}
		b.SetState(backends.Ready)
		fleet = append(fleet, b)
	}
	c := &clock{time.Unix(1000, 0)}
	o := Options{
		Settings: Settings{Policy: name, PollInterval: time.Second}, Policies: policies.All(), Backends: fleet, BlockBytes: 256, IndexMaxBytes: 1 << 26,
		Now: c.read, Rand: rand.NewPCG(1, 1),
	}
	for _, f := range change {
		f(&o)
	}
	r, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	if o.Queue.Requests > 0 {
		learnPrefillRate(r, testPrefillRate)
	}
	return r, fleet, c
}

// timeToWorkOff returns in what time so many steps' budgets are worked off where nothing is heard.
func timeToWorkOff(budgets float64) time.Duration {
	return time.Duration(budgets * stepBudget(testPrefillRate) / (workRate * testPrefillRate) * float64(time.Second))
}

// learnPrefillRate makes the router learn a rate for all backends.
func learnPrefillRate(r *Router, tokensPerSecond int) {
	second := estimate.Prediction{Bytes: 4 * tokensPerSecond, Uncached: float64(tokensPerSecond), TTFT: time.Second, IsText: true}
	for slot := range r.states {
		for !r.estimates.KnowsPrefillRate(slot) {
			r.estimates.LearnFromCompletion(slot, &second, estimate.Usage{}, estimate.CacheInfo{Alignment: 1})
		}
	}
}

// ask makes a streamed request of n blocks, all of them different for each key.
func ask(fleet []*backends.Backend, key, n int) *Request {
	blocks := make([]prompt.Block, n)
	for i := range blocks {
		blocks[i] = prompt.Block(uint64(key)<<32 | uint64(i) + 1)
	}
	return &Request{Backends: fleet, Blocks: blocks, Bytes: n * 256, Sequences: 1, Streams: true}
}

func mustPick(t testing.TB, r *Router, req *Request, tried ...*backends.Backend) *Decision {
	t.Helper()
	d, err := r.Pick(context.Background(), req, tried...)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// waiter is a request that was submitted, and what became of it.
type waiter struct {
	ticket *Ticket
	d      *Decision
	err    error
}

func (w *waiter) waits() bool { return w.d == nil && w.err == nil }

func submit(r *Router, req *Request, tried ...*backends.Backend) *waiter {
	w := &waiter{}
	w.ticket = r.Submit(req, func(d *Decision, err error) { w.d, w.err = d, err }, tried...)
	return w
}

func withQueue(o *Options) {
	o.Queue = QueueSettings{Requests: 1000, Bytes: 1 << 28, BatchRequests: 1000, OutageTimeout: time.Minute, BusyTimeout: time.Minute}
}

// sent fails the test unless w was sent, and returns its decision.
func sent(t *testing.T, name string, w *waiter) *Decision {
	t.Helper()
	if w.d == nil {
		t.Fatalf("%s: not sent (%v)", name, w.err)
	}
	return w.d
}

func waits(t *testing.T, name string, w *waiter) {
	t.Helper()
	if !w.waits() {
		t.Fatalf("%s: it does not wait (%v)", name, w.err)
	}
}
