package ledger

import (
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/estimate"
	"warmroute/router/index"
	"warmroute/router/queue"
)

const blockBytes = 256 // 64 tokens

// fleet is a ledger of backends, with the clock of its test.
type fleet struct {
	*Ledger
	backends []*backends.Backend
	now      time.Time
}

func newFleet(n int) *fleet {
	start := time.Unix(1000, 0)
	f := &fleet{Ledger: New(blockBytes, index.New(0, 1<<20), estimate.New(blockBytes, 1.2), start), now: start}
	f.SetPollInterval(time.Second)
	for slot := range n {
		b := &backends.Backend{Name: fmt.Sprintf("b%d", slot), Slot: slot}
		f.backends = append(f.backends, b)
		f.SetBackend(slot, b)
	}
	return f
}

// poll records a poll of a backend, whose requests of ours are those in flight.
func (f *fleet) poll(slot int, l backends.Load) *backends.Load {
	l.PolledAt, l.OwnInFlight = f.now, f.backends[slot].KnownInFlight()
	f.backends[slot].SetLoad(&l)
	f.ApplyPoll(slot, &l, f.now)
	return &l
}

// blocksOf returns n blocks, all of them different for each key.
func blocksOf(key, n int) []prompt.Block {
	blocks := make([]prompt.Block, n)
	for i := range blocks {
		blocks[i] = prompt.Block(uint64(key)<<32 | uint64(i) + 1)
	}
	return blocks
}

// request is a request of a test, which this router or a peer sends.
type request struct {
	name                            string
	key, blocks                     int
	bytesBeyondBlocks               int
	sequences                       int64
	maxOutput                       int
	streams, tooLong, nonGenerative bool
	adapter                         string
	class                           queue.Class
	conversation                    uint64
}

// placement returns the request as a peer reports it, sent to the first backend.
func (q *request) placement(f *fleet, id uint64) Placement {
	p := Placement{
		ID: id, Backend: f.backends[0], Model: "m", Adapter: q.adapter, Blocks: blocksOf(q.key, q.blocks),
		Bytes:     q.blocks*blockBytes + q.bytesBeyondBlocks,
		Sequences: q.sequences, MaxOutput: q.maxOutput, Class: q.class, Conversation: q.conversation, Turn: prompt.TurnLater,
		Streams: q.streams, NonGenerative: q.nonGenerative, IsText: true, TooLong: q.tooLong,
	}
	p.PromptTokens = float64(p.Bytes) / 4
	p.UncachedTokens = max(estimate.MinUncachedTokens, p.PromptTokens-float64(f.match(0, p.Blocks)*blockBytes)/4)
	if q.tooLong {
		p.Blocks, p.UncachedTokens = nil, estimate.MinUncachedTokens
	}
	return p
}

// beginOwn accounts for the request as one of this router.
func (f *fleet) beginOwn(q *request) *Entry {
	p := q.placement(f, 0)
	matched := f.match(0, p.Blocks)
	sizes := f.estimates.TokenSizes(p.Model, p.TextClass)
	e := &Entry{
		SentAt: f.now, Adapter: p.Adapter, Class: p.Class, Streams: p.Streams, NonGenerative: p.NonGenerative, MaxOutputTokens: p.MaxOutput,
		Conversation: queue.ConversationID{Key: q.conversation},
		Prediction: estimate.Prediction{
			Model: p.Model, Bytes: p.Bytes, PromptTokens: p.PromptTokens, Sequences: p.Sequences, MatchedBlocks: matched,
			MatchedTokens: int(min(sizes.CountTokens(matched*blockBytes, nil), p.PromptTokens)), Uncached: p.UncachedTokens,
			IsText: true, IsTooLong: p.TooLong,
		},
	}
	f.Begin(e, Prompt{Blocks: p.Blocks, Bytes: p.Bytes, BytesPerToken: sizes.BytesPerToken}, !q.tooLong, f.now)
	return e
}

// tracker expects another turn of each conversation.
type tracker struct{}

func (tracker) LaterTurnProbability() float64 { return 1 }

// outcomes are how requests end.
var outcomes = []Outcome{
	{End: Completed, OutputTokens: 300, PromptTokens: 700, CachedTokens: 64, CachedKnown: true, Reply: blocksOf(99, 2)},
	{End: Completed, OutputTokens: 1 << 40}, // more than an engine generates
	{End: NotProcessed, Failed: true, QueueFull: true},
	{End: ClientDisconnected, OutputTokens: 3},
	{End: Truncated, Failed: true},
}

// requests are of all kinds that accounts tell apart.
var requests = []request{
	{name: "stream", key: 1, blocks: 10, sequences: 1, streams: true},
	{name: "whole response", key: 2, blocks: 20, sequences: 1},
	{name: "shared prompt", key: 1, blocks: 12, bytesBeyondBlocks: 100, sequences: 3, streams: true, maxOutput: 20},
	{name: "low priority with an adapter", key: 3, blocks: 5, sequences: 2, adapter: "sql", class: queue.LowPriority},
	{name: "too long", key: 4, blocks: 7000, sequences: 1, streams: true, tooLong: true},
	{name: "conversation", key: 5, blocks: 3, sequences: 1, streams: true, conversation: 77, adapter: "sql"},
	{name: "no blocks", bytesBeyondBlocks: 3000, sequences: 1, nonGenerative: true},
}

// requestStep is a step of one of two requests.
type requestStep struct {
	request int
	kind    PlacementEventKind
}

// stepOrders returns all orders of the steps of two requests.
func stepOrders(prefilled [2]bool) (orders [][]requestStep) {
	var left [2][]PlacementEventKind
	for i := range left {
		left[i] = []PlacementEventKind{PlacementSent, PlacementEnded}
		if prefilled[i] {
			left[i] = []PlacementEventKind{PlacementSent, PlacementPrefilled, PlacementEnded}
		}
	}
	var addNext func(order []requestStep, at [2]int)
	addNext = func(order []requestStep, at [2]int) {
		if at[0] == len(left[0]) && at[1] == len(left[1]) {
			orders = append(orders, slices.Clone(order))
		}
		for i := range at {
			if at[i] < len(left[i]) {
				next := at
				next[i]++
				addNext(append(order, requestStep{i, left[i][at[i]]}), next)
			}
		}
	}
	addNext(nil, [2]int{})
	return orders
}

// TestAccountsReturnToZero takes the steps of two requests in all orders, with all of their ends, as
// requests of this router and as those of a peer: the figures are equal after each step, and zero in
// the end. The ledgers are the same for all of them, so an error of one account shows in the next.
func TestAccountsReturnToZero(t *testing.T) {
	own, peer := newFleet(1), newFleet(1)
	var peers Peers
	const peerID = 7
	id := uint64(0)
	take := func(pair [2]*request, ends [2]*Outcome, order []requestStep) {
		fail := func(format string, args ...any) {
			t.Helper()
			t.Fatalf("%s and %s, steps %v, ends %d and %d: %s", pair[0].name, pair[1].name, order, ends[0].End, ends[1].End,
				fmt.Sprintf(format, args...))
		}
		var entries [2]*Entry
		id += 2
		for _, s := range order {
			event := PlacementEvent{Kind: s.kind, Placement: Placement{ID: id + uint64(s.request)}}
			switch s.kind {
			case PlacementSent:
				event.Placement = pair[s.request].placement(peer, event.ID)
				entries[s.request] = own.beginOwn(pair[s.request])
			case PlacementPrefilled:
				own.Prefilled(entries[s.request], own.now)
				own.Prefilled(entries[s.request], own.now) // it counts once
			case PlacementEnded:
				event.End.Outcome = *ends[s.request]
				outcome := *ends[s.request]
				own.End(entries[s.request], &outcome, tracker{}, own.now)
			}
			for range 2 { // as often as it is reported
				peers.Apply(peer.Ledger, peerID, &event, Recorder{Tracker: tracker{}}, peer.now)
			}
			if x, y := own.Figures(0, own.now), peer.Figures(0, peer.now); x != y {
				fail("figures of own requests %+v, of a peer's %+v", x, y)
			}
			if x, y := own.backends[0].KnownInFlight(), peer.backends[0].KnownInFlight(); x != y {
				fail("%d own sequences are in flight, and %d of the peer", x, y)
			}
			if x, y := own.CountOwn(0), peer.CountOwn(0); x != own.accounts[0].prefill.requests || y != 0 {
				fail("%d and %d requests count as this router's", x, y)
			}
			own.now, peer.now = own.now.Add(7*time.Millisecond), peer.now.Add(7*time.Millisecond)
		}
		if peers.requests != 0 || peers.blocks != 0 {
			fail("%d requests and %d blocks of the peer are left", peers.requests, peers.blocks)
		}
		own.expectEmpty(t, "own requests")
		peer.expectEmpty(t, "those of a peer")
		if t.Failed() {
			fail("something is left")
		}
	}
	for _, prefilled := range [][2]bool{{false, false}, {false, true}, {true, false}, {true, true}} {
		for _, order := range stepOrders(prefilled) {
			for i := range requests {
				for j := range requests {
					for k := range outcomes {
						other := &outcomes[(k+int(id)/10)%len(outcomes)]
						take([2]*request{&requests[i], &requests[j]}, [2]*Outcome{&outcomes[k], other}, order)
					}
				}
			}
		}
	}
	for _, f := range []*fleet{own, peer} {
		f.now = f.now.Add(time.Hour)
		if f.HasRecentInteractive(f.now) {
			t.Error("interactive requests are in flight at the end")
		}
		if n := f.CountReservedForOthers(0, queue.ConversationID{}, nil, nil, f.now); n != 0 {
			t.Errorf("%d tokens are reserved for next turns after an hour", n)
		}
	}
}

// expectEmpty checks that nothing is in the account of the first backend.
func (f *fleet) expectEmpty(t *testing.T, when string) {
	t.Helper()
	p, kv, b := f.accounts[0].prefill, f.accounts[0].kv, f.backends[0]
	if len(p.pending) != 0 || len(p.adapters) != 0 {
		t.Errorf("%s: %d requests are pending, and %d adapters in use", when, len(p.pending), len(p.adapters))
	}
	p.pending, p.adapters, p.since, p.sent, p.sentDepth = nil, nil, time.Time{}, 0, 0
	if !reflect.DeepEqual(p, requestAccount{}) {
		t.Errorf("%s: the account of prefills is %+v", when, p)
	}
	if kv.unindexed != 0 || kv.sequences != 0 || kv.began != 0 || kv.maxOutput != 0 || kv.prompts != 0 {
		t.Errorf("%s: the account of the KV cache is %+v", when, kv)
	}
	if own, ofPeers := b.InFlight.Load(), b.PeerInFlight.Load(); own != 0 || ofPeers != 0 {
		t.Errorf("%s: %d and %d sequences are in flight", when, own, ofPeers)
	}
	if n := f.index.CountPinned(0); n != 0 {
		t.Errorf("%s: %d blocks are in use", when, n)
	}
	figures := f.Figures(0, f.now)
	figures.DecodeRate, figures.NearlyFull = 0, false // these are no sums
	if figures != (Figures{}) {
		t.Errorf("%s: the figures are %+v", when, figures)
	}
}

// Of a removed backend nothing is learned, and the account of its slot's next one is not changed.
func TestOrphanedEntries(t *testing.T) {
	for _, q := range requests {
		for _, prefilled := range []bool{false, true} {
			for _, outcome := range outcomes {
				f := newFleet(1)
				removed := f.backends[0]
				e := f.beginOwn(&q)
				if prefilled {
					f.Prefilled(e, f.now)
				}
				f.backends[0] = &backends.Backend{Name: "next"}
				f.SetBackend(0, f.backends[0])
				if !f.IsOrphaned(e) || f.Has(removed) || !f.Has(f.backends[0]) {
					t.Errorf("%s: the entry of a removed backend is orphaned: %v", q.name, f.IsOrphaned(e))
				}
				estimates, mean := f.estimates.Summary(0), f.estimates.MeanUncachedTokensOfAll()
				f.Prefilled(e, f.now)
				f.End(e, &outcome, tracker{}, f.now)
				f.expectEmpty(t, q.name)
				if f.estimates.Summary(0) != estimates || f.estimates.MeanUncachedTokensOfAll() != mean || f.DecodeRate(0) != DefaultDecodeRate {
					t.Errorf("%s: the next backend's estimates have changed", q.name)
				}
				if n := removed.KnownInFlight(); n != 0 {
					t.Errorf("%s: %d sequences are in flight on the removed backend", q.name, n)
				}
				if f.HasRecentInteractive(f.now.Add(time.Hour)) {
					t.Errorf("%s: it is in flight for ever", q.name)
				}
			}
		}
	}
}

func TestNoEngineInFlight(t *testing.T) {
	f := newFleet(1)
	e := new(Entry)
	f.BeginNoEngine(e)
	if n := f.backends[0].NoEngineInFlight.Load(); n != 1 {
		t.Errorf("%d requests without an engine, want 1", n)
	}
	f.expectEmpty(t, "in flight")
	b := f.backends[0]
	f.SetBackend(0, nil)
	f.EndNoEngine(e)
	if n := b.NoEngineInFlight.Load(); n != 0 {
		t.Errorf("%d requests without an engine at the end, want 0", n)
	}
}

func TestRequestCounts(t *testing.T) {
	f := newFleet(1)
	check := func(when string, requests int, pending ...float64) { // tokens of each
		t.Helper()
		tokens, attention := 0.0, 0.0
		for _, n := range pending {
			tokens, attention = tokens+n, attention+n*n/2
		}
		got := f.Figures(0, f.now)
		if got.Requests != requests || got.Pending != len(pending) || got.UnstartedTokens != tokens || f.UnstartedTokens(0) != tokens ||
			got.UnstartedAttention != attention {
			t.Errorf("%s: %+v, want %d requests, %d of them pending with %.0f tokens that attend to %.0f", when, got, requests, len(pending), tokens,
				attention)
		}
	}
	send := func(key, blocks int) *Entry {
		return f.beginOwn(&request{key: key, blocks: blocks, sequences: 1, streams: true})
	}
	a, b, d := send(1, 10), send(2, 20), send(3, 30)
	check("three sent", 3, 640, 1280, 1920)
	f.now = f.now.Add(time.Hour)
	check("time alone changes nothing", 3, 640, 1280, 1920)
	f.Prefilled(a, f.now)
	f.Prefilled(a, f.now)
	check("the first one's first event", 3, 1280, 1920)
	f.End(b, &Outcome{End: ClientDisconnected}, nil, f.now)
	check("the second one's client disconnected", 2, 1920)
	f.End(a, &Outcome{End: Completed}, nil, f.now)
	f.End(d, &Outcome{End: Completed}, nil, f.now)
	check("all completed", 0)
}

// Requests of which there is output do not wait in the replica any more.
func TestWaitingRequestsStart(t *testing.T) {
	f := newFleet(1)
	first, second, whole := f.beginOwn(&requests[0]), f.beginOwn(&requests[2]), f.beginOwn(&requests[1])
	f.poll(0, backends.Load{QueuesKnown: true, Running: 1, Waiting: 2, WaitingForCapacity: 2})
	for i, step := range []func(){func() { f.Prefilled(first, f.now) }, func() { f.Prefilled(first, f.now) }, func() {
		f.End(whole, &Outcome{End: Truncated}, nil, f.now)
	}, func() { f.Prefilled(second, f.now) }} {
		if !f.Figures(0, f.now).HasWaiting {
			t.Errorf("none waits before step %d", i)
		}
		step()
	}
	if f.Figures(0, f.now).HasWaiting {
		t.Error("some wait after all have started")
	}
}

func TestExternalLoad(t *testing.T) {
	f := newFleet(1)
	f.estimates.RecordUncached("", 1)
	check := func(name string, age time.Duration, l backends.Load, requests, queued float64) {
		t.Helper()
		l.PolledAt = f.now
		a, b := f.External(&l, f.now.Add(age))
		if math.Abs(a-requests) > 1e-9 || math.Abs(b-queued) > 1e-9 {
			t.Errorf("%s: %.3f requests, %.3f of them waiting; want %.3f, %.3f", name, a, b, requests, queued)
		}
	}
	check("all are ours", 0, backends.Load{QueuesKnown: true, Running: 3, Waiting: 2, OwnInFlight: 5}, 0, 0)
	check("ours are being sent", 0, backends.Load{QueuesKnown: true, Running: 3, OwnInFlight: 5}, 0, 0)
	check("some are not", 0, backends.Load{QueuesKnown: true, Running: 7, Waiting: 3, OwnInFlight: 4}, 6, 3)
	check("more requests wait than are external", 0, backends.Load{QueuesKnown: true, Running: 7, Waiting: 3, OwnInFlight: 9}, 1, 1)
	check("not known", 0, backends.Load{Running: 7, Waiting: 3}, 0, 0)
	others := backends.Load{QueuesKnown: true, Running: 8, Waiting: 2}
	check("after two intervals", 2*time.Second, others, 10/math.E, 2/math.E)
	check("after three missed polls", 3001*time.Millisecond, others, 0, 0)
	if a, b := f.External(nil, f.now); a != 0 || b != 0 {
		t.Errorf("not polled: %.3f, %.3f", a, b)
	}
}

// TestFiguresChangeNothing has requests of all kinds in flight, more of which should be prefilled the
// later it is: Figures neither removes these nor returns anything else than it does after these are worked off.
func TestFiguresChangeNothing(t *testing.T) {
	f := newFleet(1)
	f.poll(0, backends.Load{QueuesKnown: true, Running: 1, Waiting: 3, KVKnown: true, CacheTokens: 100_000, KVCacheUsage: 0.9,
		WaitingForCapacity: 2})
	f.Prefilled(f.beginOwn(&requests[0]), f.now)
	for range 3 {
		f.beginOwn(&requests[1]) // before any stream that is not prefilled
	}
	for range 2 {
		for i := range requests {
			f.beginOwn(&requests[i])
		}
	}
	workedOff := 0
	for range 200 {
		f.now = f.now.Add(3 * time.Millisecond)
		before := *f.accounts[0]
		before.prefill.pending, before.prefill.adapters = slices.Clone(before.prefill.pending), maps.Clone(before.prefill.adapters)
		turns := maps.Clone(f.nextTurns)
		figures := f.Figures(0, f.now)
		f.External(f.backends[0].Load(), f.now)
		f.AdapterCost(0, "other", f.backends[0].Load())
		f.CountShared(0, blocksOf(1, 10))
		f.CountReservedForOthers(0, queue.ConversationID{}, nil, nil, f.now)
		if !reflect.DeepEqual(*f.accounts[0], before) || !maps.Equal(f.nextTurns, turns) {
			t.Fatalf("the account was %+v and is %+v", before, *f.accounts[0])
		}
		var after Figures
		f.ReadFigures(&after, 0, f.estimates.PrefillRate(0), f.now, true)
		if after != figures {
			t.Errorf("the figures are %+v, and %+v where requests are worked off", figures, after)
		}
		workedOff += len(before.prefill.pending) - len(f.accounts[0].prefill.pending)
		after = f.Figures(0, f.now)
		if math.Abs(after.QueuedTokens-figures.QueuedTokens) > 0.001 { // times are whole nanoseconds
			t.Errorf("%v tokens are queued, and %v once some are worked off", figures.QueuedTokens, after.QueuedTokens)
		}
		if math.Abs(after.QueuedSeconds-figures.QueuedSeconds) > 1e-6 {
			t.Errorf("%v s of prefill are queued, and %v once some are worked off", figures.QueuedSeconds, after.QueuedSeconds)
		}
		if after.QueuedTokens, after.QueuedSeconds = figures.QueuedTokens, figures.QueuedSeconds; after != figures {
			t.Errorf("the figures are %+v, and %+v once some are worked off", figures, after)
		}
	}
	if workedOff == 0 {
		t.Error("nothing was worked off")
	}
}

// Rooms are computed on a copy for a request that is only explained.
func TestCopiedClasses(t *testing.T) {
	f := newFleet(2)
	f.beginOwn(&requests[0])
	f.now = f.now.Add(time.Second)
	slots := slices.Values([]int{0, 1})
	before := []account{*f.accounts[0], *f.accounts[1]}
	c := f.WithCopiedClasses()
	h := c.ReserveForInteractive(slots, 0.05, f.now)
	type room struct{ has, shared bool }
	roomsOf := func(l *Ledger, h queue.Headroom) (rooms [2]room) {
		for slot := range rooms {
			rooms[slot].has, rooms[slot].shared = l.CheckLowPriorityRoom(slot, h, f.now)
		}
		return rooms
	}
	copied := roomsOf(c, h)
	for slot := range before {
		if !reflect.DeepEqual(*f.accounts[slot], before[slot]) {
			t.Errorf("the account was %+v and is %+v", before[slot], *f.accounts[slot])
		}
	}
	if got := roomsOf(f.Ledger, f.ReserveForInteractive(slots, 0.05, f.now)); got != copied {
		t.Errorf("the rooms are %v, and %v by the copy", got, copied)
	}
}

// Of twelve prompts of ten blocks, the GPU has room for ten. The others have to be fetched, as long as their requests are not
// prefilled, and so has what a peer expects in a store.
func TestQueuedFetchTokens(t *testing.T) {
	f := newFleet(1)
	blockTokens := blockBytes / f.estimates.BackendBytesPerToken(0)
	f.poll(0, backends.Load{CacheTokens: int(100 * blockTokens), HostHits: 1, HostHitsKnown: true})
	for key := range 12 {
		f.IndexPrompt(0, blocksOf(key, 10))
	}
	var peers Peers
	for id, tc := range []struct {
		key       int
		uncached  float64 // as the peer expects; 0: what the index says
		offloaded float64
	}{
		{11, 0, 0},
		{0, 0, 10 * blockTokens},
		{20, 4 * blockTokens, 6 * blockTokens},
	} {
		q := request{key: tc.key, blocks: 10, sequences: 1, streams: true}
		event := PlacementEvent{Kind: PlacementSent, Placement: q.placement(f, uint64(id))}
		if tc.uncached > 0 {
			event.Placement.UncachedTokens = tc.uncached
		}
		peers.Apply(f.Ledger, 1, &event, Recorder{}, f.now)
		if got := f.Figures(0, f.now).QueuedFetchTokens; math.Abs(got-tc.offloaded) > 1 {
			t.Errorf("prompt %d: %v tokens to fetch, want %v", tc.key, got, tc.offloaded)
		}
		event = PlacementEvent{Kind: PlacementPrefilled, Placement: Placement{ID: uint64(id)}}
		peers.Apply(f.Ledger, 1, &event, Recorder{}, f.now)
		if got := f.Figures(0, f.now).QueuedFetchTokens; got != 0 {
			t.Errorf("prompt %d: %v tokens to fetch after its prefill", tc.key, got)
		}
	}
}
