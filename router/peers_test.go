package router

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
)

// recordedEvents keeps what a router reports, as other proxies would have it.
type recordedEvents struct{ events []PlacementEvent }

func (r *recordedEvents) ReportPlacement(e *PlacementEvent) {
	copied := *e
	copied.Blocks, copied.End.Reply = slices.Clone(e.Blocks), slices.Clone(e.End.Reply)
	r.events = append(r.events, copied)
}

// take returns the events since the last call, for another fleet of the same size.
func (r *recordedEvents) take(to *Router) []PlacementEvent {
	list := r.events
	r.events = nil
	for i := range list {
		if b := list[i].Backend; b != nil {
			list[i].Backend = to.fleet.states[b.Slot].backend
		}
	}
	return list
}

// fleetOf is what newFleet returns beside the router.
type fleetOf struct {
	backends []*backends.Backend
	clock    *clock
}

// twoPeers returns two routers in front of two fleets that stand for the same replicas.
func twoPeers(t *testing.T, n int, change ...func(*Options)) (a, b *Router, events *recordedEvents, fleetA, fleetB fleetOf) {
	t.Helper()
	events = &recordedEvents{}
	report := func(o *Options) { o.Reporter = events }
	a, fleetA.backends, fleetA.clock = newFleet(t, n, "prefix", append(change, report)...)
	b, fleetB.backends, fleetB.clock = newFleet(t, n, "prefix", change...)
	return a, b, events, fleetA, fleetB
}

const peerID = 7

func TestPeerPlacementIsIndexed(t *testing.T) {
	a, b, events, fleetA, fleetB := twoPeers(t, 3)
	d := mustPick(t, a, ask(fleetA.backends, 1, 20))
	b.ApplyPlacements(peerID, events.take(b), 0)
	there := fleetB.backends[d.Backend.Slot]
	if got := there.PeerInFlight.Load(); got != 1 {
		t.Errorf("the peer has %d sequences in flight, want 1", got)
	}
	if got, want := figuresOf(b, there, b.now()).QueuedTokens, d.entry.Prediction.Uncached; got != want {
		t.Errorf("%v tokens are queued, want %v", got, want)
	}
	d.RecordFirstEvent()
	reply := []prompt.Block{1 << 60, 1<<60 + 1}
	d.Release(Outcome{End: Completed, OutputTokens: 100, Reply: reply})
	b.ApplyPlacements(peerID, events.take(b), 0)
	if got := there.PeerInFlight.Load(); got != 0 {
		t.Errorf("%d sequences are in flight after the end", got)
	}
	if got := b.CountPeerRequests(); got != 0 {
		t.Errorf("%d requests of the peer are left after their end", got)
	}
	next := ask(fleetB.backends, 1, 20)
	next.Blocks = append(next.Blocks, reply...)
	next.Bytes = len(next.Blocks) * 256
	if d := mustPick(t, b, next); d.Backend != there || d.MatchedBlocks != 22 {
		t.Errorf("the next turn goes to %s with %d blocks, want %s with 22", d.Backend.Name, d.MatchedBlocks, there.Name)
	}
}

func TestPeerLoadSpreadsRequests(t *testing.T) {
	a, b, events, fleetA, fleetB := twoPeers(t, 2)
	d := mustPick(t, a, ask(fleetA.backends, 1, 200))
	b.ApplyPlacements(peerID, events.take(b), 0)
	if other := mustPick(t, b, ask(fleetB.backends, 2, 200)); other.Backend.Slot == d.Backend.Slot {
		t.Error("both requests were sent to the same backend")
	}
}

func TestPeerRequestNotComputedIsRolledBack(t *testing.T) {
	a, b, events, fleetA, fleetB := twoPeers(t, 1)
	d := mustPick(t, a, ask(fleetA.backends, 1, 20))
	d.Release(Outcome{End: NotProcessed, Failed: true})
	b.ApplyPlacements(peerID, events.take(b), 0)
	if d := mustPick(t, b, ask(fleetB.backends, 1, 20)); d.MatchedBlocks != 0 {
		t.Errorf("%d blocks match that were never computed", d.MatchedBlocks)
	}
}

// TestPeerAccountsReturnToZero applies the events of many requests, some of which are lost or come
// twice, and expects that nothing is left of them after the last SyncPeer.
func TestPeerAccountsReturnToZero(t *testing.T) {
	a, b, events, fleetA, fleetB := twoPeers(t, 3, withQueue)
	ends := []Outcome{{End: Completed, OutputTokens: 50}, {End: ClientDisconnected}, {End: Truncated}, {End: NotProcessed, Failed: true}}
	for i := range 200 {
		req := ask(fleetA.backends, i%20, 5+i%30)
		req.Streams, req.Adapter = i%3 != 0, []string{"", "a", "b"}[i%3]
		w := submit(a, req)
		if w.d == nil {
			w.queued.Cancel()
			continue
		}
		if i%2 == 0 {
			w.d.RecordFirstEvent()
		}
		w.d.Release(ends[i%len(ends)])
		fleetA.clock.advance(100 * time.Millisecond)
		fleetB.clock.advance(100 * time.Millisecond)
		list := events.take(b)
		list = slices.DeleteFunc(list, func(e PlacementEvent) bool { return (e.ID+uint64(e.Kind))%5 == 0 })
		b.ApplyPlacements(peerID, list, 0)
		b.ApplyPlacements(peerID, list, 0)
	}
	b.SyncPeer(peerID, nil)
	if n := b.CountPeerRequests(); n != 0 {
		t.Errorf("%d requests are left", n)
	}
	for slot, at := range fleetB.backends {
		expectEmptyAccount(t, "after the last SyncPeer", b, slot, b.now())
		for _, adapter := range []string{"a", "b"} {
			if cost := b.fleet.ledger.AdapterCost(slot, adapter, nil); cost == 0 {
				t.Errorf("backend %d has adapter %s in use", slot, adapter)
			}
		}
		if n := at.PeerInFlight.Load(); n != 0 {
			t.Errorf("backend %d has %d sequences in flight", slot, n)
		}
	}
}

func TestIndexedPlacementOfPeer(t *testing.T) {
	a, b, events, fleetA, fleetB := twoPeers(t, 2)
	a.IndexPlacement(ask(fleetA.backends, 1, 20), fleetA.backends[1])
	b.ApplyPlacements(peerID, events.take(b), 0)
	if d := mustPick(t, b, ask(fleetB.backends, 1, 20)); d.Backend.Slot != 1 || d.MatchedBlocks != 20 {
		t.Errorf("the prompt goes to %s with %d blocks", d.Backend.Name, d.MatchedBlocks)
	}
}

func TestSyncPeer(t *testing.T) {
	_, b, _, _, fleetB := twoPeers(t, 2)
	at := fleetB.backends[1]
	b.SyncPeer(peerID, []Placement{
		{ID: 1, Backend: at, PromptTokens: 1000, UncachedTokens: 800, Sequences: 1, Streams: true},
		{ID: 2, Backend: at, PromptTokens: 500, UncachedTokens: 500, Sequences: 2, Streams: true, Prefilled: true},
		{ID: 3, PromptTokens: 500, UncachedTokens: 500, Sequences: 2}, // on a backend that is not known
	})
	if got, tokens := at.PeerInFlight.Load(), figuresOf(b, at, b.now()).QueuedTokens; got != 3 || tokens != 800 {
		t.Errorf("%d sequences and %v tokens, want 3 and 800", got, tokens)
	}
	b.SyncPeer(peerID, []Placement{{ID: 2, Backend: at, Prefilled: true}})
	if got, tokens := at.PeerInFlight.Load(), figuresOf(b, at, b.now()).QueuedTokens; got != 2 || tokens != 0 {
		t.Errorf("%d sequences and %v tokens, want 2 and 0", got, tokens)
	}
	b.RemovePeer(peerID)
	if got, n := at.PeerInFlight.Load(), b.CountPeerRequests(); got != 0 || n != 0 {
		t.Errorf("%d sequences of %d requests are left", got, n)
	}
	for id := range uint64(200) { // more than there may be at the same time
		b.SyncPeer(peerID+id, []Placement{{ID: 1, Backend: at, Sequences: 1}})
		if n := b.CountPeerRequests(); n != 1 {
			t.Fatalf("%d requests of the peer that came after %d others were removed, want 1", n, id)
		}
		b.RemovePeer(peerID + id)
	}
}

func TestPeerOfRemovedBackend(t *testing.T) {
	a, b, events, fleetA, fleetB := twoPeers(t, 2)
	d := mustPick(t, a, ask(fleetA.backends, 1, 20))
	b.ApplyPlacements(peerID, events.take(b), 0)
	removed := fleetB.backends[d.Backend.Slot]
	b.RemoveBackend(removed)
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed})
	b.ApplyPlacements(peerID, events.take(b), 0)
	if got, n := removed.PeerInFlight.Load(), b.CountPeerRequests(); got != 0 || n != 0 {
		t.Errorf("%d sequences and %d requests are left", got, n)
	}
}

// TestQueuedRequestsWaitForOtherPeers expects that what a peer leaves is taken after the delay.
func TestQueuedRequestsWaitForOtherPeers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b, events, fleetA, fleetB := twoPeers(t, 1, withQueue, func(o *Options) { o.Now = time.Now })
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { b.Run(ctx) })
		defer running.Wait()
		defer cancel()
		stillWaits := func(when string) {
			t.Helper()
			if b.CountWaiting() != 1 {
				t.Fatalf("it does not wait %s", when)
			}
		}
		d := mustPick(t, a, ask(fleetA.backends, 1, blocksFor(20)))
		b.ApplyPlacements(peerID, events.take(b), 0)
		w := submit(b, ask(fleetB.backends, 2, blocksFor(20)))
		stillWaits("while the peer's request is there")
		began := time.Now()
		d.RecordFirstEvent()
		b.ApplyPlacements(peerID, events.take(b), 13*time.Millisecond)
		b.Tick()
		stillWaits("while other peers come first")
		time.Sleep(13*time.Millisecond - 1)
		synctest.Wait()
		stillWaits("until the delay has passed")
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		sent(t, "after the delay", w).Release(Outcome{End: Completed})
		if took := time.Since(began); took != 13*time.Millisecond {
			t.Errorf("it was sent after %v", took)
		}
		d.Release(Outcome{End: Completed})
	})
}

// TestPeersKnowTheSame sends random requests to two routers that report to each other, and expects
// that their indexes and accounts are equal.
func TestPeersKnowTheSame(t *testing.T) {
	var reported [2]recordedEvents
	var routers [2]*Router
	var fleets [2]fleetOf
	for i := range routers {
		routers[i], fleets[i].backends, fleets[i].clock = newFleet(t, 3, "prefix", func(o *Options) {
			o.Reporter, o.IndexMaxBytes = &reported[i], 1<<17
		})
	}
	exchange := func() {
		for i, r := range routers {
			r.ApplyPlacements(peerID, reported[1-i].take(r), 0)
		}
	}
	random := rand.New(rand.NewPCG(3, 3))
	var open []*Reservation
	end := func(d *Reservation) {
		if random.IntN(2) == 0 {
			d.RecordFirstEvent()
			exchange()
		}
		d.Release([]Outcome{{End: Completed, OutputTokens: 10, Reply: []prompt.Block{prompt.Block(random.Uint64())}}, {End: NotProcessed},
			{End: Truncated}}[random.IntN(3)])
		exchange()
	}
	for range 2000 {
		i := random.IntN(2)
		open = append(open, mustPick(t, routers[i], ask(fleets[i].backends, random.IntN(40), 1+random.IntN(60))))
		exchange()
		for _, f := range fleets {
			f.clock.advance(10 * time.Millisecond)
		}
		if len(open) > 10 {
			at := random.IntN(len(open))
			end(open[at])
			open = slices.Delete(open, at, at+1)
		}
	}
	evicted := uint64(0)
	for slot := range 3 {
		if x, y := fleets[0].backends[slot].KnownInFlight(), fleets[1].backends[slot].KnownInFlight(); x != y {
			t.Errorf("backend %d: %d and %d sequences are in flight", slot, x, y)
		}
		a, b := figuresOf(routers[0], fleets[0].backends[slot], routers[0].now()), figuresOf(routers[1], fleets[1].backends[slot],
			routers[1].now())
		if math.Abs(a.QueuedTokens-b.QueuedTokens) > 1e-6 || a.Pending != b.Pending || a.Requests != b.Requests ||
			math.Abs(a.UnstartedTokens-b.UnstartedTokens) > 1e-6 || math.Abs(a.OwnKVTokens-b.OwnKVTokens) > 1e-6 {
			t.Errorf("backend %d: the accounts are %+v and %+v", slot, a, b)
		}
		x, y := routers[0].fleet.index, routers[1].fleet.index
		if x.Len(slot) != y.Len(slot) || x.CountPinned(slot) != y.CountPinned(slot) || x.Evictions(slot) != y.Evictions(slot) {
			t.Errorf("backend %d: %d and %d blocks, %d and %d pinned", slot, x.Len(slot), y.Len(slot), x.CountPinned(slot), y.CountPinned(slot))
		}
		evicted += x.Evictions(slot)
	}
	if evicted == 0 {
		t.Error("nothing was evicted, so the order of use was not compared")
	}
	var depths [2][3]int
	for key := range 40 {
		for i, r := range routers {
			r.fleet.index.Match(ask(nil, key, 60).Blocks, depths[i][:])
		}
		if depths[0] != depths[1] {
			t.Errorf("prompt %d: %v and %v blocks match", key, depths[0], depths[1])
		}
	}
	for _, d := range open {
		end(d)
	}
}
