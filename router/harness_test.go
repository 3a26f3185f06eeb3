package router

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/url"
	"slices"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/lab/policies"
	"warmroute/prompt"
	"warmroute/router/decide"
	"warmroute/router/estimate"
	"warmroute/router/ledger"
	"warmroute/router/policy"
)

const (
	testPrefillRate = 8000 // of a fleet with a queue
	tokensPerBlock  = 64   // of ask
)

// Constants of the packages below, by which tests compute what they expect.
const (
	defaultOutputTokens = 250 // of estimate

	maxSharedQueue = 2 // these of decide
	fullKVUsage    = 0.95
	maxSequences   = 1024

	reservedPrefills   = 0.3 // these of ledger
	maxAdapters        = 64
	maxExternalLoadAge = 3
	maxMeanOutputs     = 8

	stoppingDelay = time.Second // of health
)

// blocksFor returns how many blocks take so many times the prefill that a shared backend has before a request at most.
func blocksFor(times float64) int {
	return int(times * maxSharedQueue * testPrefillRate / tokensPerBlock)
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
		Settings: Settings{Policy: name, PollInterval: time.Second}, Policies: policies.All(), Backends: fleet, BlockBytes: 256,
		IndexMaxBytes: 1 << 26,
		Now:           c.read, Rand: rand.NewPCG(1, 1),
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
		setShared(r)
	}
	return r, fleet, c
}

// timeToWorkOff returns in what time the blocks of blocksFor are worked off where nothing is heard.
func timeToWorkOff(times float64) time.Duration {
	return time.Duration(times * maxSharedQueue / ledger.WorkRate * float64(time.Second))
}

// setShared makes the backends count as shared by several tenants for the rest of a test, so that requests wait where
// enough is queued.
func setShared(r *Router) { r.fleet.tenantMix.until = time.Unix(1<<40, 0) }

// learnPrefillRate makes the router learn a rate for all backends.
func learnPrefillRate(r *Router, tokensPerSecond int) {
	const samples, noRequest = 100, 1e-6
	for slot := range r.fleet.states {
		for range samples {
			r.fleet.estimates.LearnSteps(slot, &estimate.StepSample{Seconds: 1, Tokens: float64(tokensPerSecond), Prompt: noRequest})
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

func mustPick(t testing.TB, r *Router, req *Request, tried ...*backends.Backend) *Reservation {
	t.Helper()
	d, err := r.Pick(context.Background(), req, tried...)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// decision is what the router knows when it chooses a backend.
type decision struct {
	view       *decide.Fleet
	query      *decide.Query
	candidates *decide.Candidates
}

// filterAll views all backends and filters them for a request, of which it reserves nothing.
func filterAll(r *Router, req *Request, now time.Time, tried ...*backends.Backend) (decision, error) {
	f, s := &r.fleet, &scratch{}
	d := decision{view: f.viewAll(s, &r.callbacks, now), query: f.match(s, req, tried), candidates: &s.candidates}
	return d, f.filter(s, d.view, d.query, f.ledger)
}

// mustFilterAll is filterAll for a request that has candidates.
func mustFilterAll(t testing.TB, r *Router, req *Request, now time.Time) decision {
	t.Helper()
	d, err := filterAll(r, req, now)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// seenByPolicy is the policy of a router, and remembers what it was last given to choose from.
type seenByPolicy struct {
	policy.Policy
	choices    int // so far
	request    policy.Request
	candidates []policy.Candidate
}

// recordChoices replaces the policy of a router by one that chooses the same.
func recordChoices(r *Router) *seenByPolicy {
	seen := &seenByPolicy{Policy: r.fleet.policy.Policy}
	r.fleet.policy.Policy = seen
	return seen
}

func (p *seenByPolicy) Choose(req *policy.Request, candidates []policy.Candidate) int {
	p.choices++
	p.request, p.candidates = *req, slices.Clone(candidates)
	return p.Policy.Choose(req, candidates)
}

// seen has the policy choose for a request that has candidates, of which nothing is reserved, and
// returns what it was given.
func (d *decision) seen(t testing.TB, r *Router) *seenByPolicy {
	t.Helper()
	p := &seenByPolicy{Policy: r.fleet.policy.Policy}
	d.view.Choose(d.query, d.candidates, p, &policy.Trace{})
	return p
}

// figuresOf returns the account of a backend.
func figuresOf(r *Router, b *backends.Backend, now time.Time) ledger.Figures {
	return r.fleet.ledger.Figures(b.Slot, now)
}

// ownKVTokens returns how many tokens of a backend's cache our requests in flight use.
func ownKVTokens(r *Router, slot int, now time.Time) float64 {
	return r.fleet.ledger.Figures(slot, now).OwnKVTokens
}

// expectEmptyAccount checks that nothing is left in the account of a slot.
func expectEmptyAccount(t testing.TB, when string, r *Router, slot int, now time.Time) {
	t.Helper()
	l := r.fleet.ledger
	for _, at := range []time.Time{now, now.Add(time.Hour)} {
		f := l.Figures(slot, at)
		if f.Requests != 0 || f.Pending != 0 || f.QueuedTokens != 0 || f.UnstartedTokens != 0 || f.UnstartedAttention != 0 ||
			f.OwnKVTokens != 0 || l.CountOwn(slot) != 0 {
			t.Errorf("%s: the account of slot %d is %+v, want nothing in it", when, slot, f)
		}
	}
	if n := r.fleet.index.CountPinned(slot); n != 0 {
		t.Errorf("%s: %d blocks of slot %d are in use", when, n, slot)
	}
}

// waiter is a request that was submitted, and what became of it.
type waiter struct {
	queued *QueuedRequest // nil: it was not queued
	d      *Reservation
	err    error
}

func (w *waiter) waits() bool { return w.d == nil && w.err == nil }

func submit(r *Router, req *Request, tried ...*backends.Backend) *waiter {
	w := &waiter{}
	w.queued = r.Submit(req, func(d *Reservation, err error) { w.d, w.err = d, err }, tried...)
	return w
}

func withQueue(o *Options) {
	o.Queue = QueueSettings{Requests: 1000, Bytes: 1 << 28, LowPriorityRequests: 1000, NoneReadyTimeout: time.Minute, BusyTimeout: time.Minute}
}

// sent fails the test unless w was sent, and returns its reservation.
func sent(t *testing.T, name string, w *waiter) *Reservation {
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

// configure changes the settings.
func configure(r *Router, s Settings) error {
	apply, err := r.PrepareSettings(s)
	if err == nil {
		apply()
	}
	return err
}

// stallsOf returns how often a backend was found stalled, and whether it was when it was checked last.
func stallsOf(r *Router, b *backends.Backend) (count uint64, stalled bool) {
	s := r.Status(b)
	return s.Stalls, s.Stalled
}

// breakerOf returns the state of a backend's breaker, and how often it was opened.
func breakerOf(r *Router, b *backends.Backend) (state BreakerState, opens uint64) {
	s := r.Status(b)
	return s.Breaker, s.Opens
}

// contextLengths returns the lengths of backends by their slots; 0: not known.
func contextLengths(bySlot ...int) backends.ContextLengths {
	var all []*backends.Backend
	for slot, length := range bySlot {
		b := &backends.Backend{Name: fmt.Sprint("b", slot)}
		b.SetModels([]backends.Model{{ID: "m", MaxTokens: length}})
		all = append(all, b)
	}
	r, err := backends.NewRegistry(all)
	if err != nil {
		panic(err)
	}
	return r.Catalog().ContextLengths("m")
}
