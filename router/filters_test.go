package router

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/estimate"
	"warmroute/router/ledger"
	"warmroute/router/queue"
)

func TestMaxInFlight(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix")
	fleet[0].SetOptions(backends.Options{MaxInFlight: 2})
	fleet[1].SetOptions(backends.Options{MaxInFlight: 3})
	var open []*Reservation
	for range 5 {
		open = append(open, mustPick(t, r, ask(fleet, 1, 10)))
	}
	if a, b := fleet[0].InFlight.Load(), fleet[1].InFlight.Load(); a != 2 || b != 3 {
		t.Errorf("%d and %d in flight, want 2 and 3", a, b)
	}
	refused := func(want error, tried ...*backends.Backend) {
		t.Helper()
		if _, err := r.Pick(context.Background(), ask(fleet, 1, 10), tried...); !errors.Is(err, want) {
			t.Errorf("got %v, want %v", err, want)
		}
	}
	refused(ErrMaxInFlight)
	refused(ErrMaxInFlight, fleet[0])
	refused(ErrNoneReady, fleet...)
	open[0].Release(Outcome{End: Completed})
	if d := mustPick(t, r, ask(fleet, 1, 10)); d.Backend != open[0].Backend {
		t.Errorf("sent to %s, where there was no place", d.Backend.Name)
	}
}

func TestMaxInFlightCountsSequences(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	fleet[0].SetOptions(backends.Options{MaxInFlight: 4})
	many := ask(fleet, 1, 10)
	many.Sequences = 9
	d := mustPick(t, r, many) // more than there ever is room for: it goes alone
	if _, err := r.Pick(context.Background(), ask(fleet, 1, 10)); !errors.Is(err, ErrMaxInFlight) {
		t.Errorf("one beside it: %v", err)
	}
	d.Release(Outcome{End: Completed})
	mustPick(t, r, ask(fleet, 1, 10))
	many.Sequences = 4
	if _, err := r.Pick(context.Background(), many); !errors.Is(err, ErrMaxInFlight) {
		t.Errorf("four beside one: %v", err)
	}
	many.Sequences = 3
	mustPick(t, r, many)
}

func TestWeights(t *testing.T) {
	for _, name := range []string{"prefix", "least-load"} {
		r, fleet, _ := newFleet(t, 2, name)
		fleet[1].SetOptions(backends.Options{Weight: 3})
		for key := range 400 {
			d := mustPick(t, r, ask(fleet, key, 4))
			d.RecordFirstEvent()
		}
		if share := float64(fleet[1].InFlight.Load()) / 400; math.Abs(share-0.75) > 0.03 {
			t.Errorf("%s: a backend of three times the weight has %.2f of the requests", name, share)
		}
	}
}

func TestAdapterAffinity(t *testing.T) {
	r, fleet, c := newFleet(t, 3, "prefix")
	f := func(name string, want *backends.Backend, loads ...*backends.Load) {
		t.Helper()
		for i, b := range fleet {
			b.SetLoad(loads[i])
			if loads[i] != nil {
				b.Load().PolledAt = c.now
			}
		}
		req := ask(fleet, 1, 10)
		req.Adapter = "sql"
		d := mustPick(t, r, req)
		if d.Backend != want {
			t.Errorf("%s: sent to %s", name, d.Backend.Name)
		}
		d.Release(Outcome{End: NotProcessed})
	}
	has := func(adapters ...string) *backends.Load {
		return &backends.Load{RunningAdapters: adapters, MaxAdapters: 2}
	}
	f("one has it", fleet[2], has(), has("chat"), has("chat", "sql"))
	f("who says nothing may not have it", fleet[0], has("sql"), nil, &backends.Load{})
	f("no backend has it: where a slot is free", fleet[1], has("a", "b"), has("a"), has("a", "b", "c"))
}

func TestColdAdapterLoadsOnce(t *testing.T) {
	r, fleet, _ := newFleet(t, 8, "prefix")
	for _, b := range fleet {
		b.SetLoad(&backends.Load{MaxAdapters: 4})
	}
	var burst []*Reservation
	for key := range 8 {
		req := ask(fleet, key, 1)
		req.Adapter = "sql"
		burst = append(burst, mustPick(t, r, req))
	}
	for _, d := range burst {
		if d.Backend != burst[0].Backend {
			t.Errorf("loaded on %s as well as on %s", d.Backend.Name, burst[0].Backend.Name)
		}
		d.Release(Outcome{End: Completed})
	}
	for key := range 2 * maxAdapters { // more than are kept apart
		req := ask(fleet[:1], key, 1)
		req.Adapter = fmt.Sprint(key)
		burst = append(burst, mustPick(t, r, req))
	}
	isCounted := func(slot, key int) bool { return r.fleet.ledger.AdapterCost(slot, fmt.Sprint(key), nil) == 0 }
	if !isCounted(0, maxAdapters-1) || isCounted(0, maxAdapters) {
		t.Errorf("want the first %d adapters in use, and no more", maxAdapters)
	}
	for _, d := range burst[8:] {
		d.Release(Outcome{End: Completed})
	}
	for slot := range r.fleet.states {
		for key := range 2 * maxAdapters {
			if isCounted(slot, key) {
				t.Errorf("slot %d: adapter %d is in use when nothing is in flight", slot, key)
			}
		}
		if r.fleet.ledger.AdapterCost(slot, "sql", nil) == 0 {
			t.Errorf("slot %d: adapter sql is in use when nothing is in flight", slot)
		}
	}
}

// The first replica that has an adapter must not get all of its requests.
func TestHotAdapterSpreads(t *testing.T) {
	r, fleet, c := newFleet(t, 4, "prefix")
	for i, b := range fleet {
		l := &backends.Load{MaxAdapters: 2, PolledAt: c.now}
		if i == 0 {
			l.RunningAdapters = []string{"sql"}
		}
		b.SetLoad(l)
	}
	for key := range 200 {
		req := ask(fleet, key, 8)
		req.Adapter = "sql"
		mustPick(t, r, req).RecordFirstEvent()
	}
	for _, b := range fleet {
		if n := b.InFlight.Load(); n < 40 || n > 70 {
			t.Errorf("%s has %d of 200 in flight", b.Name, n)
		}
	}
}

func TestKVTokens(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "dynamo")
	f := func(when string, want float64) {
		t.Helper()
		d := mustFilterAll(t, r, ask(fleet, 9, 1), c.now)
		if got := d.seen(t, r).candidates[0].KVTokens; got != want {
			t.Errorf("%s: %.0f tokens in use, want %.0f", when, got, want)
		}
	}
	f("nothing sent", 0)
	a, b := mustPick(t, r, ask(fleet, 1, 10)), mustPick(t, r, ask(fleet, 1, 10))
	f("ten blocks of 64 tokens, sent twice", 640)
	a.RecordFirstEvent()
	c.advance(time.Second)
	f("output for a second", 640+ledger.DefaultDecodeRate)
	a.Release(Outcome{End: ClientDisconnected})
	f("the other request still needs them", 640)
	b.Release(Outcome{End: Completed})
	f("nothing in flight", 0)
}

// sized polls a fleet whose caches hold so many tokens each.
func sized(r *Router, fleet []*backends.Backend, c *clock, tokens int) {
	for _, b := range fleet {
		l := &backends.Load{CacheTokens: tokens, KVKnown: true, QueuesKnown: true, PolledAt: c.now}
		b.SetLoad(l)
		r.ObserveLoad(b, l)
	}
}

// limited is a request for a model whose prompts may have 10,000 tokens.
func limited(fleet []*backends.Backend, key, blocks int) *Request {
	req := ask(fleet, key, blocks)
	req.ContextLengths = contextLengths(10_000)
	return req
}

// learnTextLength has the router learn of enough text that what is too long is certain.
func learnTextLength(r *Router) {
	p := estimate.Prediction{Bytes: 400_000, IsText: true}
	r.fleet.estimates.LearnFromCompletion(0, &p, estimate.Usage{PromptTokens: 100_000}, estimate.CacheInfo{Alignment: 1})
}

func TestTooLongPromptIsNotIndexed(t *testing.T) {
	f := func(name string, cache int, req func([]*backends.Backend) *Request) {
		t.Helper()
		r, fleet, c := newFleet(t, 1, "prefix")
		sized(r, fleet, c, cache)
		learnTextLength(r)
		for key := range 10 {
			mustPick(t, r, ask(fleet, key, 100)).Release(Outcome{End: Completed})
		}
		before, _ := r.IndexStats()
		mean := r.fleet.estimates.MeanUncachedTokensOfAll()
		d := mustPick(t, r, req(fleet))
		if used := ownKVTokens(r, 0, c.now); used > 1000 {
			t.Errorf("%s: it takes %.0f tokens of the cache", name, used)
		}
		d.Release(Outcome{End: NotProcessed})
		if after, _ := r.IndexStats(); after[0] != before[0] {
			t.Errorf("%s: the index was %+v and is %+v", name, before[0], after[0])
		}
		if r.fleet.estimates.MeanUncachedTokensOfAll() != mean {
			t.Errorf("%s: the mean u was %.0f and is %.0f", name, mean, r.fleet.estimates.MeanUncachedTokensOfAll())
		}
	}
	f("longer than the model takes", 100_000, func(fleet []*backends.Backend) *Request { return limited(fleet, 99, 400) })
	f("longer than the cache", 80_000, func(fleet []*backends.Backend) *Request { return ask(fleet, 99, 8000) })
}

// Nothing is certain of a prompt that is a little too long by its bytes, of
// images, and of a prompt that is long only with those asked for beside it.
func TestPromptNearLimitIsIndexed(t *testing.T) {
	for name, req := range map[string]func([]*backends.Backend) *Request{
		"a little": func(fleet []*backends.Backend) *Request { return limited(fleet, 1, 200) }, // 12,800 tokens
		"images": func(fleet []*backends.Backend) *Request {
			req := limited(fleet, 1, 400)
			req.Media = true
			return req
		},
		"many prompts": func(fleet []*backends.Backend) *Request {
			req := limited(fleet, 1, 100)
			req.Sequences, req.Bytes = 8, 8*req.Bytes
			return req
		},
	} {
		r, fleet, c := newFleet(t, 1, "prefix")
		sized(r, fleet, c, 100_000)
		learnTextLength(r)
		d := mustPick(t, r, req(fleet))
		d.Release(Outcome{End: Completed})
		if again := mustPick(t, r, req(fleet)); again.MatchedBlocks != d.TotalBlocks {
			t.Errorf("%s: %d blocks are remembered of %d", name, again.MatchedBlocks, d.TotalBlocks)
		}
	}
}

func TestTooLongPromptIsNotQueued(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix", withQueue)
	sized(r, fleet, c, 100_000)
	learnTextLength(r)
	for key := range 2 {
		sent(t, "an idle backend", submit(r, ask(fleet, key, 400)))
	}
	waits(t, "nowhere is room", submit(r, ask(fleet, 2, 300)))
	f := func(name string, req *Request) {
		t.Helper()
		d := sent(t, name, submit(r, req))
		pending := figuresOf(r, d.Backend, c.now).QueuedTokens
		if pending > 26_000 {
			t.Errorf("%s: %.0f tokens are pending", name, pending)
		}
	}
	f("longer than the model takes", limited(fleet, 3, 400))
	f("longer than the cache", ask(fleet, 4, 8000))
}

// It is unknown whether such a prompt fits, but that no other's end makes
// room for it.
func TestPromptBeyondCacheIsNotQueued(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	sized(r, fleet, c, 100_000)
	sent(t, "an idle backend", submit(r, ask(fleet, 1, 10))).RecordFirstEvent()
	sent(t, "110,000 tokens", submit(r, ask(fleet, 2, 110_000/64)))
}

func TestLongPromptGoesToLargerCache(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix")
	sized(r, fleet[:1], c, 100_000)
	sized(r, fleet[1:], c, 1_000_000)
	learnTextLength(r)
	mustPick(t, r, ask(fleet[1:], 1, 1000)) // so that the other would be cheaper
	if d := mustPick(t, r, ask(fleet, 2, 4000)); d.Backend != fleet[1] {
		t.Errorf("256,000 tokens were sent to %s, whose cache has 100,000", d.Backend.Name)
	}
}

// A tenant's script must not change how long another's prompts are taken to be.
func TestTenantsWithDifferentScripts(t *testing.T) {
	const contextTokens = 100_000
	english := strings.Repeat("The committee had been in session since the early morning, and nobody could remember a longer debate. ", 10_000)
	encoded := make([]byte, 1<<20)
	for i, r := 0, rand.New(rand.NewPCG(1, 1)); i < len(encoded); i++ {
		encoded[i] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"[r.IntN(64)]
	}
	for name, other := range map[string]struct {
		text          string
		bytesPerToken float64
	}{
		"Chinese": {strings.Repeat("委员会从清晨就开始开会，没有人记得有哪一次辩论持续了这么久却毫无结果。", 10_000), 1.8},
		"base64":  {string(encoded), 1.4},
	} {
		r, fleet, c := newFleet(t, 2, "prefix")
		sized(r, fleet[:1], c, contextTokens)
		sized(r, fleet[1:], c, 10*contextTokens)
		var p prompt.Prompt
		request := func(tenant, bytes int, text string) *Request {
			quoted, err := json.Marshal(fmt.Sprint(tenant, " ", strings.ToValidUTF8(text[:bytes], "")))
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Parse(prompt.Completion, fmt.Appendf(nil, `{"model":"m","prompt":%s}`, quoted)); err != nil {
				t.Fatal(err)
			}
			p.ApplyLayout(prompt.DefaultLayout)
			return &Request{
				Backends: fleet, Model: "m", Tenant: uint64(tenant), TextClass: p.TextClass(nil),
				Blocks: p.AppendBlocks(nil, "m", 256), Bytes: len(p.Text), Sequences: 1, Streams: true,
			}
		}
		complete := func(tenant int, bytesPerToken float64, text string) {
			req := request(tenant, int(10_000*bytesPerToken), text)
			mustPick(t, r, req).Release(usage(int(float64(req.Bytes)/bytesPerToken), 0))
		}
		candidates := func(req *Request) (promptTokens float64, n int) {
			d := mustFilterAll(t, r, req, c.now)
			seen := d.seen(t, r)
			return seen.request.PromptTokens, len(seen.candidates)
		}
		const near, beyond = contextTokens * 9 / 10, contextTokens * 4
		for range 20 {
			complete(1, 4.5, english)
		}
		before, _ := candidates(request(1, near*4.5, english))
		for range 50 {
			complete(2, other.bytesPerToken, other.text)
		}
		after, n := candidates(request(1, near*4.5, english))
		if math.Abs(after-before) > 0.05*before || math.Abs(after-near) > 0.05*near {
			t.Errorf("%s: an English prompt of %d tokens was estimated at %.0f and is at %.0f", name, near, before, after)
		}
		if n != 2 {
			t.Errorf("%s: an English prompt of 90 %% of the context has %d candidates, want both", name, n)
		}
		if _, n := candidates(request(2, int(beyond*other.bytesPerToken*1.1), other.text)); n != 1 {
			t.Errorf("%s: a prompt of more than four times the context has %d candidates, want the larger one", name, n)
		}
		if _, n := candidates(request(1, contextTokens*8, english)); n != 1 {
			t.Errorf("%s: an English prompt of almost twice the context has %d candidates, want the larger one", name, n)
		}
	}
}

func TestMeanUncached(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	d := mustPick(t, r, ask(fleet, 1, 10))
	if r.fleet.estimates.MeanUncachedTokensOfAll() != 0 {
		t.Errorf("the mean u is %.0f before anything came back", r.fleet.estimates.MeanUncachedTokensOfAll())
	}
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed})
	large := &Request{Backends: fleet, Bytes: 1 << 20, Sequences: 1}
	mustPick(t, r, large).Release(Outcome{End: NotProcessed})
	large.NonGenerative = true
	mustPick(t, r, large).Release(Outcome{End: Completed})
	if r.fleet.estimates.MeanUncachedTokensOfAll() != 640 {
		t.Errorf("the mean u is %.0f, want the 640 tokens of the only one that was prefilled", r.fleet.estimates.MeanUncachedTokensOfAll())
	}
}

// TestQueueForLongerContext has more requests wait for a backend with a long context, which is down, than get a turn in a
// round: others are sent to one with a short context.
func TestQueueForLongerContext(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix", func(o *Options) {
		o.Queue = QueueSettings{Requests: 1000, NoneReadyTimeout: time.Minute, BusyTimeout: time.Minute}
	})
	learnTextLength(r)
	fleet[1].SetState(backends.Down)
	var sent []string
	var queued []*QueuedRequest
	for key := range 2 * queue.MaxTurns {
		req := ask(fleet, key, 200) // 12,800 tokens
		req.ContextLengths = contextLengths(4000, 64_000)
		queued = append(queued, r.Submit(req, func(d *Reservation, err error) {
			if err != nil {
				t.Error(err)
				return
			}
			sent = append(sent, d.Backend.Name)
			d.Release(Outcome{End: Completed})
		}))
	}
	if len(sent) > 0 || r.CountWaiting() != len(queued) {
		t.Fatalf("%d requests were sent, and %d wait", len(sent), r.CountWaiting())
	}
	req := ask(fleet, 1000, 10)
	req.ContextLengths = contextLengths(4000, 64_000)
	if d := mustPick(t, r, req); d.Backend != fleet[0] {
		t.Errorf("a short request is on %s", d.Backend.Name)
	}
	c.advance(time.Second)
	fleet[1].SetState(backends.Ready)
	for r.BackendStateChanged(fleet[1]); r.CountWaiting() > 0; r.Tick() {
		c.advance(TickInterval)
	}
	if len(sent) != len(queued) || slices.Contains(sent, fleet[0].Name) {
		t.Errorf("%d of %d were sent: %v", len(sent), len(queued), sent)
	}
}
