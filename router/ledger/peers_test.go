package ledger

import (
	"math"
	"slices"
	"testing"
	"time"

	"warmroute/backends"
)

const peerID = 7

func (f *fleet) apply(p *Peers, events ...PlacementEvent) {
	for i := range events {
		p.Apply(f.Ledger, peerID, &events[i], Recorder{}, f.now)
	}
}

func TestSync(t *testing.T) {
	f := newFleet(2)
	at := f.backends[1]
	var p Peers
	check := func(when string, sequences int64, tokens float64) {
		t.Helper()
		if got, queued := at.PeerInFlight.Load(), f.Figures(1, f.now).QueuedTokens; got != sequences || queued != tokens {
			t.Errorf("%s: %d sequences and %v tokens, want %d and %v", when, got, queued, sequences, tokens)
		}
	}
	p.Sync(f.Ledger, peerID, []Placement{
		{ID: 1, Backend: at, PromptTokens: 1000, UncachedTokens: 800, Sequences: 1, Streams: true},
		{ID: 2, Backend: at, PromptTokens: 500, UncachedTokens: 500, Sequences: 2, Streams: true, Prefilled: true},
		{ID: 3, PromptTokens: 500, UncachedTokens: 500, Sequences: 2}, // on a backend that is not known
	}, Recorder{}, f.now)
	check("three listed", 3, 800)
	p.Sync(f.Ledger, peerID, []Placement{{ID: 2, Backend: at, Prefilled: true}}, Recorder{}, f.now)
	check("one listed", 2, 0)
	p.Sync(f.Ledger, peerID, nil, Recorder{}, f.now)
	check("none listed", 0, 0)
	if p.Remove(peerID); len(p.byID) != 0 || p.Count() != 0 {
		t.Errorf("%d peers with %d requests are left", len(p.byID), p.Count())
	}
}

// The times of a peer's request are learned from if each of its events was applied when it happened.
func TestLateEvents(t *testing.T) {
	const sent, prefilled, ended = 1, 2, 4
	whole := request{key: 1, blocks: 100, sequences: 1}
	stream := whole
	stream.streams = true
	for _, q := range []*request{&stream, &whole} {
		for late := range 8 {
			for _, listed := range []bool{false, true} { // the first event was missed
				f := newFleet(1)
				var p Peers
				begin := PlacementEvent{Kind: PlacementSent, Placement: q.placement(f, 1), Late: late&sent != 0}
				f.poll(0, backends.Load{})
				step, rate := *f.estimates.Step(0), f.DecodeRate(0)
				if listed {
					p.Sync(f.Ledger, peerID, []Placement{begin.Placement}, Recorder{}, f.now)
				} else {
					f.apply(&p, begin)
				}
				f.now = f.now.Add(time.Second)
				f.apply(&p, PlacementEvent{Kind: PlacementPrefilled, Placement: Placement{ID: 1}, Late: late&prefilled != 0})
				f.now = f.now.Add(time.Second)
				f.apply(&p, PlacementEvent{Kind: PlacementEnded, Placement: Placement{ID: 1}, Late: late&ended != 0, End: PlacementEnd{
					Outcome: Outcome{End: Completed, OutputTokens: 1000, PromptTokens: 6400, CachedKnown: true}, TTFT: time.Second,
				}})
				want := late == 0 && !listed
				if learned := *f.estimates.Step(0) != step; learned != want {
					t.Errorf("stream %v, late %03b, listed %v: the steps were learned: %v", q.streams, late, listed, learned)
				}
				if learned := f.DecodeRate(0) != rate; learned != (want && q.streams) {
					t.Errorf("stream %v, late %03b, listed %v: the decode rate was learned: %v", q.streams, late, listed, learned)
				}
				f.expectEmpty(t, "at the end")
			}
		}
	}
}

func TestImplausiblePlacements(t *testing.T) {
	f := newFleet(1)
	var p Peers
	for i, placement := range []Placement{
		{PromptTokens: math.Inf(1), UncachedTokens: math.Inf(1), Sequences: math.MaxInt64},
		{PromptTokens: math.NaN(), UncachedTokens: math.NaN(), Sequences: -5},
		{PromptTokens: -1, UncachedTokens: -1, Bytes: -1},
	} {
		placement.ID, placement.Backend = uint64(i), f.backends[0]
		f.apply(&p, PlacementEvent{Kind: PlacementSent, Placement: placement})
		if tokens := f.Figures(0, f.now).QueuedTokens; !(tokens > 0 && tokens <= 2*maxPeerTokens) {
			t.Errorf("%+v: %v tokens are queued", placement, tokens)
		}
		if n := f.backends[0].PeerInFlight.Load(); n < 1 || n > MaxSequences {
			t.Errorf("%+v: %d sequences are in flight", placement, n)
		}
		p.Sync(f.Ledger, peerID, nil, Recorder{}, f.now)
		f.expectEmpty(t, "at the end")
	}
}

func TestPeerBounds(t *testing.T) {
	f := newFleet(1)
	listed := func(ids ...uint64) (list []Placement) {
		for _, id := range ids {
			list = append(list, Placement{ID: id, Backend: f.backends[0], Sequences: 1})
		}
		return list
	}
	var p Peers
	for id := range uint64(maxPeers + 10) {
		p.Sync(f.Ledger, id, listed(1), Recorder{}, f.now)
	}
	if got := p.Count(); got != maxPeers {
		t.Errorf("%d requests are counted, want those of %d peers", got, maxPeers)
	}
	p.Sync(f.Ledger, 0, nil, Recorder{}, f.now)
	p.Remove(0)
	p.Sync(f.Ledger, maxPeers, listed(1), Recorder{}, f.now)
	if got := p.Count(); got != maxPeers {
		t.Errorf("%d requests are counted after one peer replaced another, want %d", got, maxPeers)
	}

	p = Peers{}
	var ids []uint64
	for id := range uint64(maxAddedBySync + 10) {
		ids = append(ids, id)
	}
	for _, want := range []int{maxAddedBySync, len(ids), len(ids)} {
		p.Sync(f.Ledger, peerID, listed(ids...), Recorder{}, f.now)
		if got := p.Count(); got != want {
			t.Errorf("%d requests are counted of %d that a peer lists, want %d", got, len(ids), want)
		}
	}
	p.requests = maxPeerRequests
	f.apply(&p, PlacementEvent{Kind: PlacementSent, Placement: Placement{ID: 1 << 40, Backend: f.backends[0], Sequences: 1}})
	if got := p.Count(); got != maxPeerRequests {
		t.Errorf("%d requests are counted, want at most %d", got, maxPeerRequests)
	}
}

// Blocks beyond the bound are indexed, but cannot be removed again.
func TestPeerBlockBound(t *testing.T) {
	for _, c := range []struct {
		kept, left int // blocks before, and in the index at the end
	}{{0, 0}, {maxPeerBlocks - 10, 0}, {maxPeerBlocks - 9, 10}} {
		f := newFleet(1)
		p := Peers{blocks: c.kept}
		sent := requests[0].placement(f, 1)
		f.apply(&p, PlacementEvent{Kind: PlacementSent, Placement: sent},
			PlacementEvent{Kind: PlacementEnded, Placement: Placement{ID: 1}, End: PlacementEnd{Outcome: Outcome{End: NotProcessed}}})
		if got := f.match(0, sent.Blocks); got != c.left || p.blocks != c.kept {
			t.Errorf("with %d blocks: %d blocks match at the end, want %d, and %d are kept", c.kept, got, c.left, p.blocks)
		}
	}
}

// TestLostAndRepeatedEvents applies the events of many requests, of which some are lost and all come
// twice, and expects that nothing is left of them after the last Sync.
func TestLostAndRepeatedEvents(t *testing.T) {
	f := newFleet(1)
	var p Peers
	count := 0
	for id := range uint64(600) {
		q := requests[id%uint64(len(requests))]
		events := []PlacementEvent{{Kind: PlacementSent, Placement: q.placement(f, id)}}
		if id%2 == 0 {
			events = append(events, PlacementEvent{Kind: PlacementPrefilled, Placement: Placement{ID: id}})
		}
		events = append(events, PlacementEvent{Kind: PlacementEnded, Placement: Placement{ID: id},
			End: PlacementEnd{Outcome: outcomes[id%uint64(len(outcomes))]}})
		events = slices.DeleteFunc(events, func(e PlacementEvent) bool { return (e.ID+3*uint64(e.Kind))%5 == 0 })
		f.apply(&p, events...)
		f.apply(&p, events...)
		count = max(count, p.Count())
	}
	if count < 50 {
		t.Fatalf("%d requests whose end was lost", count)
	}
	p.Sync(f.Ledger, peerID, nil, Recorder{}, f.now)
	if p.requests != 0 || p.blocks != 0 {
		t.Errorf("%d requests and %d blocks are left", p.requests, p.blocks)
	}
	f.expectEmpty(t, "at the end")
}

func TestIndexedPrompts(t *testing.T) {
	f := newFleet(2)
	var p Peers
	blocks := blocksOf(1, 20)
	f.apply(&p, PlacementEvent{Kind: PlacementIndexed, Placement: Placement{Blocks: blocks}}) // on a backend that is not known
	f.apply(&p, PlacementEvent{Kind: PlacementIndexed, Placement: Placement{Backend: f.backends[1], Blocks: blocks}})
	if here, there := f.match(0, blocks), f.match(1, blocks); here != 0 || there != 20 {
		t.Errorf("%d and %d blocks match, want 0 and 20", here, there)
	}
	if p.Count() != 0 || f.index.CountPinned(1) != 0 {
		t.Errorf("%d requests are counted and %d blocks in use", p.Count(), f.index.CountPinned(1))
	}
	f.index.SetRequestedCapacity(0, 15)
	f.index.SweepAndEvict(1 << 20)
	if held := f.IndexPrompt(0, blocksOf(2, 20)); held != 15 {
		t.Errorf("%d of 20 blocks are held in room for 15", held)
	}
}

// The rule of a router records each request of a peer once.
func TestRecorder(t *testing.T) {
	f := newFleet(1)
	var p Peers
	var recorded []uint64
	r := Recorder{Sent: func(e *Entry, sent *Placement, bytesPerToken float64) {
		if !e.OfPeer || e.Prediction.PromptTokens != sent.PromptTokens || bytesPerToken != 4 {
			t.Errorf("%+v was recorded of %+v, with %v bytes a token", e, sent, bytesPerToken)
		}
		recorded = append(recorded, sent.ID)
	}}
	for _, id := range []uint64{1, 2, 1} {
		event := PlacementEvent{Kind: PlacementSent, Placement: requests[0].placement(f, id)}
		p.Apply(f.Ledger, peerID, &event, r, f.now)
	}
	if !slices.Equal(recorded, []uint64{1, 2}) {
		t.Errorf("requests %v were recorded, want each once", recorded)
	}
}
