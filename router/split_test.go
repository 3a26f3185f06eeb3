package router

import (
	"slices"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router/decide"
	"warmroute/router/health"
)

// newPDFleet returns a router for one replica for prefill, in slot 0, and two for decode.
func newPDFleet(t *testing.T) (*Router, []*backends.Backend, *clock) {
	t.Helper()
	r, fleet, c := newFleet(t, 3, "prefix", setRoles)
	return r, fleet, c
}

// setRoles makes the first backend one for prefill, and the others those for decode.
func setRoles(o *Options) {
	o.Queue.Requests = 100
	o.Disaggregation = DisaggregationSettings{Lease: 30 * time.Second}
	for i, b := range o.Backends {
		role := backends.RoleDecode
		if i == 0 {
			role = backends.RolePrefill
		}
		b.SetOptions(backends.Options{Role: role})
		b.SetVersion("0.32.0") // so that they pair
		b.SetLoad(&backends.Load{TransfersKV: true})
	}
}

// askSplittable is ask for a request that may be split.
func askSplittable(fleet []*backends.Backend, key, blocks int) *Request {
	req := ask(fleet, key, blocks)
	req.Splittable = true
	return req
}

// fillWithOutputs starts outputs on the replicas for decode, so that a prefill there delays them.
func fillWithOutputs(t *testing.T, r *Router, fleet []*backends.Backend) {
	t.Helper()
	for i := range 20 {
		mustPick(t, r, ask(fleet[1+i%2:2+i%2], 1000+i, 1)).RecordFirstEvent()
	}
}

func TestSplitReservesBothReplicas(t *testing.T) {
	r, fleet, c := newPDFleet(t)
	fillWithOutputs(t, r, fleet)
	before := []int64{fleet[0].InFlight.Load(), fleet[1].InFlight.Load() + fleet[2].InFlight.Load()}
	req := askSplittable(fleet, 1, 500)
	d := mustPick(t, r, req)
	if d.Split != decide.SplitDone || d.Prefill == nil || d.Prefill.Backend != fleet[0] || d.Backend == fleet[0] {
		t.Fatalf("split %q: %+v", d.Split, d)
	}
	if fleet[0].InFlight.Load() != before[0]+1 || fleet[1].InFlight.Load()+fleet[2].InFlight.Load() != before[1]+1 {
		t.Errorf("in flight: %d for prefill, %d for decode", fleet[0].InFlight.Load(), fleet[1].InFlight.Load()+fleet[2].InFlight.Load())
	}
	c.advance(4 * time.Second)
	d.Prefill.Release(Outcome{End: Completed, PromptTokens: 32_000, CachedKnown: true, OutputTokens: 1})
	d.StartDecode()
	c.advance(300 * time.Millisecond)
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed, PromptTokens: 32_000, CachedTokens: 31_000, CachedKnown: true, OutputTokens: 100})
	if fleet[0].InFlight.Load() != before[0] || fleet[1].InFlight.Load()+fleet[2].InFlight.Load() != before[1] {
		t.Error("a reservation was not released")
	}
	slot := d.Backend.Slot
	if got, before := r.fleet.estimates.KVTransferSeconds(slot, 32_000), r.fleet.estimates.KVTransferSeconds(0, 32_000); got >= before ||
		got < 0.3 {
		t.Errorf("a KV transfer is expected to take %.3f s after one of 0.3 s, and %.3f s before", got, before)
	}
	if got := r.fleet.estimates.MissingHits(slot); got != 0 {
		t.Errorf("%v of the matched tokens are thought to be missing: the cached tokens are of the replica for prefill", got)
	}
	// Both hold the prompt now.
	e := r.Explain(*askSplittable(fleet, 1, 500))
	for _, b := range e.Backends {
		if want := b.Name == fleet[0].Name || b.Name == d.Backend.Name; (b.MatchedBlocks == 500) != want {
			t.Errorf("%s holds %d blocks", b.Name, b.MatchedBlocks)
		}
	}
	if e.Choice != d.Backend.Name || e.Split == nil || e.Split.Result != decide.SplitCheaper {
		t.Errorf("the next turn is explained with %+v on %s", e.Split, e.Choice)
	}
}

// TestAnnouncedDecodeIsNoWork checks that a replica is not thought to be stalled while the prefill of its only request is
// done elsewhere.
func TestAnnouncedDecodeIsNoWork(t *testing.T) {
	r, fleet, c := newPDFleet(t)
	r.fleet.settings.Disaggregation.MinUncachedTokens = 1
	d := mustPick(t, r, askSplittable(fleet, 1, 2000))
	if d.Prefill == nil {
		t.Fatal("not split")
	}
	slot := d.Backend.Slot
	for range 20 {
		c.advance(time.Second)
		load := &backends.Load{PolledAt: c.now, TokensKnown: true, QueuesKnown: true}
		d.Backend.SetLoad(load)
		r.ObserveLoad(d.Backend, load)
	}
	if r.fleet.viewAll(&r.fleet.scratch, &r.callbacks, c.now).Backends[slot].Stalled {
		t.Fatal("stalled before the decode request was sent")
	}
	d.Prefill.Release(Outcome{End: Completed})
	d.StartDecode()
	if r.fleet.viewAll(&r.fleet.scratch, &r.callbacks, c.now).Backends[slot].Stalled {
		t.Fatal("stalled when the decode request was sent")
	}
	for range 20 {
		c.advance(time.Second)
		load := &backends.Load{PolledAt: c.now, TokensKnown: true, QueuesKnown: true, Running: 1}
		d.Backend.SetLoad(load)
		r.ObserveLoad(d.Backend, load)
	}
	if !r.fleet.viewAll(&r.fleet.scratch, &r.callbacks, c.now).Backends[slot].Stalled {
		t.Error("not stalled, though the decode request had no output for 20 s")
	}
	d.Release(Outcome{End: NotProcessed, Failed: true, Stalled: true})
}

// TestFailedPrefillLeavesNothing checks that a split request whose prefill failed leaves no trace in the account of the
// other replica.
func TestFailedPrefillLeavesNothing(t *testing.T) {
	r, fleet, _ := newPDFleet(t)
	r.fleet.settings.Disaggregation.MinUncachedTokens = 1
	d := mustPick(t, r, askSplittable(fleet, 1, 500))
	slot := d.Backend.Slot
	d.Prefill.Release(Outcome{End: NotProcessed, Failed: true})
	d.Release(Outcome{End: NotProcessed})
	l := r.fleet.ledger
	if fleet[0].InFlight.Load() != 0 || fleet[slot].InFlight.Load() != 0 || l.SentSequences(slot) != 0 || l.UnstartedTokens(slot) != 0 {
		t.Errorf("%d and %d in flight, %v tokens unstarted", fleet[0].InFlight.Load(), fleet[slot].InFlight.Load(), l.UnstartedTokens(slot))
	}
	e := r.Explain(*askSplittable(fleet, 1, 500))
	for _, b := range e.Backends {
		if b.MatchedBlocks > 0 {
			t.Errorf("%s holds %d blocks", b.Name, b.MatchedBlocks)
		}
	}
	req := askSplittable(fleet, 1, 500)
	req.Splittable = false
	whole := mustPick(t, r, req, fleet[0])
	if whole.Prefill != nil || whole.Split != decide.SplitUnsplittable {
		t.Errorf("after the failure: %q", whole.Split)
	}
	whole.Release(Outcome{End: Completed})
}

func TestDecodeElsewhereAfterRefusal(t *testing.T) {
	r, fleet, _ := newPDFleet(t)
	r.fleet.settings.Disaggregation.MinUncachedTokens = 1
	req := askSplittable(fleet, 1, 500)
	d := mustPick(t, r, req)
	d.Prefill.Release(Outcome{End: Completed})
	d.StartDecode()
	d.Release(Outcome{End: NotProcessed, Failed: true})
	req.PrefilledOn = fleet[0]
	again := mustPick(t, r, req, d.Backend)
	if again.Prefill != nil || again.Split != decide.SplitDone || again.Backend == d.Backend || again.Backend == fleet[0] {
		t.Errorf("the decode goes to %s, with %q", again.Backend.Name, again.Split)
	}
	again.StartDecode()
	again.Release(Outcome{End: Completed})
}

// TestOneProbeOfDecodeReplica checks that a decode replica with an open breaker is tried by one request, not by all that
// come while a prefill is done for it.
func TestOneProbeOfDecodeReplica(t *testing.T) {
	r, fleet, c := newPDFleet(t)
	r.fleet.settings.Disaggregation.MinUncachedTokens = 1
	r.fleet.settings.Breaker = health.BreakerSettings{Failures: 1, OpenTime: time.Second}
	failed := mustPick(t, r, ask(fleet[1:2], 1, 1))
	failed.Release(Outcome{End: NotProcessed, Failed: true})
	c.advance(2 * time.Second)
	probe := mustPick(t, r, askSplittable(fleet, 2, 20))
	if probe.Backend != fleet[1] {
		t.Fatalf("the probe is on %s", probe.Backend.Name)
	}
	if d := mustPick(t, r, askSplittable(fleet, 3, 20)); d.Backend == fleet[1] {
		t.Error("another request goes to it as well")
	}
}

// TestPeerLearnsFromSplitRequests checks that a router learns of a peer's split requests what that one does.
func TestPeerLearnsFromSplitRequests(t *testing.T) {
	a, b, events, fleetA, fleetB := twoPeers(t, 3, setRoles)
	a.fleet.settings.Disaggregation.MinUncachedTokens = 1
	exchange := func() { b.ApplyPlacements(peerID, events.take(b), 0) }
	advance := func(d time.Duration) {
		fleetA.clock.advance(d)
		fleetB.clock.advance(d)
	}
	for key := range 5 {
		req := askSplittable(fleetA.backends, key, 500)
		d := mustPick(t, a, req)
		exchange()
		for slot, backend := range fleetB.backends {
			if sent := b.fleet.ledger.SentSequences(slot); sent != 0 || backend.KnownInFlight() != fleetA.backends[slot].KnownInFlight() {
				t.Errorf("backend %d: %d of its own and %d sequences in flight", slot, sent, backend.KnownInFlight())
			}
		}
		advance(4 * time.Second)
		d.Prefill.Release(Outcome{End: Completed, PromptTokens: req.Bytes / 4, CachedKnown: true, OutputTokens: 1})
		d.StartDecode()
		exchange()
		advance(300 * time.Millisecond)
		d.RecordFirstEvent()
		exchange()
		advance(10 * time.Second)
		d.Release(Outcome{End: Completed, PromptTokens: req.Bytes / 4, OutputTokens: 500})
		exchange()
		if x, y := a.fleet.estimates.MeanUncachedTokens(req.Model), b.fleet.estimates.MeanUncachedTokens(req.Model); x != y {
			t.Fatalf("mean uncached tokens: %v, and %v by the peer", x, y)
		}
	}
	for slot := range 3 {
		if x, y := a.fleet.estimates.OutputTokens(slot), b.fleet.estimates.OutputTokens(slot); x != y {
			t.Errorf("backend %d: outputs of %v tokens, and of %v by the peer", slot, x, y)
		}
	}
}

// Replicas whose transfers keep failing are avoided for a while, for longer after each further failure, until one succeeds.
func TestPairWithFailingTransfersIsAvoided(t *testing.T) {
	var told []time.Duration
	r, fleet, c := newFleet(t, 3, "prefix", setRoles, func(o *Options) {
		o.OnPairAvoided = func(p decide.Pair, _ int, d time.Duration) {
			if p.Prefill != o.Backends[0] {
				t.Errorf("%v is avoided", p)
			}
			told = append(told, d)
		}
	})
	r.fleet.settings.Disaggregation.MinUncachedTokens = 1
	key := 0
	split := func() bool {
		key++
		d := mustPick(t, r, askSplittable(fleet[:2], key, 500)) // the second is the only one for decode
		if d.Prefill != nil {
			d.Prefill.Release(Outcome{})
		}
		d.Release(Outcome{})
		return d.Prefill != nil
	}
	fail := func() { r.RecordTransfer(fleet[0], fleet[1], true) }
	for range minTransferFailures {
		if !split() {
			t.Fatal("not split")
		}
		fail()
	}
	fail() // of a request that was sent before
	if split() || !slices.Equal(told, []time.Duration{minAvoidTimeout}) {
		t.Fatalf("split, or told %v", told)
	}
	if d := mustPick(t, r, askSplittable([]*backends.Backend{fleet[0], fleet[2]}, 100, 500)); d.Prefill == nil {
		t.Error("another pair is avoided, too")
	}
	c.advance(minAvoidTimeout)
	if !split() {
		t.Error("not split again")
	}
	fail()
	if split() || !slices.Equal(told, []time.Duration{minAvoidTimeout, 2 * minAvoidTimeout}) {
		t.Errorf("split, or told %v", told)
	}
	c.advance(2 * minAvoidTimeout)
	r.RecordTransfer(fleet[0], fleet[1], false)
	fail()
	if !split() {
		t.Error("one failure after a success has it avoided")
	}
	r.RemoveBackend(fleet[1])
	if n := len(r.fleet.transfers.failures); n != 0 {
		t.Errorf("%d pairs of a removed backend are remembered", n)
	}
	for range 10 * maxFailingPairs {
		r.fleet.transfers.recordFailure(decide.Pair{Prefill: fleet[0], Decode: new(backends.Backend)}, c.now)
	}
	if n := len(r.fleet.transfers.failures); n != maxFailingPairs {
		t.Errorf("%d pairs are remembered", n)
	}
}

// The KV cache of a decode request comes from the prefill replica: its cached tokens do not tell that the two share a store.
func TestDecodeRequestsTellNothingOfStores(t *testing.T) {
	r, fleet, _ := newPDFleet(t)
	for _, b := range fleet {
		r.ObserveLoad(b, &backends.Load{TransfersKV: true, HostHits: 1, HostHitsKnown: true})
	}
	req := askSplittable(fleet, 1, 500)
	r.fleet.ledger.IndexPrompt(0, req.Blocks[:400])
	fillWithOutputs(t, r, fleet)
	d := mustPick(t, r, req)
	if d.Split != decide.SplitDone || d.entry.Prediction.Elsewhere != 0 {
		t.Errorf("split %q: %v tokens are expected of another replica", d.Split, d.entry.Prediction.Elsewhere)
	}
	d.Release(Outcome{End: NotProcessed})
	d = mustPick(t, r, ask(fleet[1:2], 1, 500))
	if whole := d.entry.Prediction; d.Split == decide.SplitDone || whole.Elsewhere < 0.7*whole.PromptTokens {
		t.Errorf("split %q, sent whole: %v of %v tokens are those of another replica", d.Split, whole.Elsewhere, whole.PromptTokens)
	}
}
