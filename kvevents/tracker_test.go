package kvevents

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"

	"warmroute/kvevents/wire"
	"warmroute/router/index"
)

const blockSize = 4

// stored returns an event that stores the tokens first, first+1 ... as blocks with these hashes.
func stored(parent uint64, first uint32, hashes ...uint64) wire.Event {
	e := wire.Event{Kind: wire.Stored, Parent: parent, HasParent: parent != 0, Hashes: hashes, BlockSize: blockSize}
	for i := range blockSize * len(hashes) {
		e.Tokens = append(e.Tokens, first+uint32(i))
	}
	return e
}

// newRoom returns room for so many blocks.
func newRoom(blocks int64) *atomic.Int64 {
	var room atomic.Int64
	room.Store(blocks)
	return &room
}

func removed(hashes ...uint64) wire.Event {
	return wire.Event{Kind: wire.Removed, Hashes: hashes}
}

func with(e wire.Event, change func(*wire.Event)) wire.Event {
	change(&e)
	return e
}

func onCPU(e *wire.Event) { e.Offloaded, e.Tokens = true, nil }

// holding replays changes: it has the blocks that are held, and whether they are usable.
type holding map[index.KVBlock]bool

func (h holding) apply(t *testing.T, changes []change) {
	t.Helper()
	for _, c := range changes {
		usable, held := h[c.kv]
		switch {
		case c.op == kvCleared && len(h) > 0:
			t.Errorf("cleared with %d blocks left", len(h))
		case c.op == kvCleared:
		case held == (c.op == kvStored):
			t.Errorf("change %v of a block that is held: %v", c.op, held)
		case c.op == kvStored:
			h[c.kv] = false
		case c.op == kvUsable || c.op == kvUnusable:
			if usable == (c.op == kvUsable) {
				t.Errorf("change %v of a block that is usable: %v", c.op, usable)
			}
			h[c.kv] = !usable
		case usable:
			t.Errorf("change %v of a block that is usable", c.op)
		default:
			delete(h, c.kv)
		}
	}
}

func TestApply(t *testing.T) {
	group := func(n int, noPrefix bool) func(*wire.Event) {
		return func(e *wire.Event) { e.Group, e.NoPrefix = n, noPrefix }
	}
	tests := []struct {
		name     string
		events   []wire.Event
		held     int
		complete bool
	}{
		{"chain", []wire.Event{stored(0, 1, 10, 11), stored(11, 9, 12)}, 3, true},
		{"removed", []wire.Event{stored(0, 1, 10, 11), removed(11)}, 1, true},
		{"two copies, one removed", []wire.Event{stored(0, 1, 10), stored(0, 1, 10), removed(10)}, 1, true},
		{"two copies removed", []wire.Event{stored(0, 1, 10), stored(0, 1, 10), removed(10, 10)}, 0, true},
		{"removed twice", []wire.Event{stored(0, 1, 10, 11), removed(11, 11)}, 1, true},
		{"also on the CPU", []wire.Event{stored(0, 1, 10), with(stored(0, 1, 10), onCPU), removed(10)}, 1, true},
		{"on the CPU no more", []wire.Event{stored(0, 1, 10), with(stored(0, 1, 10), onCPU), removed(10), with(removed(10), onCPU)}, 0, true},
		{"never on the GPU", []wire.Event{with(stored(0, 1, 10), onCPU)}, 0, true},
		{"unknown parent", []wire.Event{stored(77, 1, 10)}, 0, false},
		{"predecessor removed before", []wire.Event{stored(0, 1, 10, 11), removed(10), stored(11, 9, 12), removed(11)}, 1, true},
		{"predecessor stored again", []wire.Event{stored(0, 1, 10, 11), removed(10), stored(0, 1, 10)}, 2, true},
		{"partial block", []wire.Event{stored(0, 1, 10), with(stored(10, 5, 11), func(e *wire.Event) {
			e.BlockSize, e.Tokens = 2, e.Tokens[:2]
		})}, 2, true},
		{"blocks without content left out", []wire.Event{with(stored(0, 1, 10, 11), func(e *wire.Event) { e.Tokens = e.Tokens[:6] })}, 0, false},
		{"sliding window", []wire.Event{
			with(stored(0, 1, 10), group(0, true)), with(stored(0, 1, 20), group(1, false)),
			removed(10),
		}, 1, true},
		{"two groups of full attention", []wire.Event{
			with(stored(0, 1, 10), group(1, false)), with(stored(0, 1, 10), group(2, false)),
			with(removed(10), group(1, false)),
		}, 0, true},
		{"held by another replica", []wire.Event{with(stored(0, 1, 10), func(e *wire.Event) { e.Remote = true })}, 0, true},
		{"cleared", []wire.Event{stored(0, 1, 10, 11), {Kind: wire.Cleared}, stored(0, 1, 10)}, 1, true},
		{"cleared but for the CPU", []wire.Event{stored(0, 1, 10, 11), with(stored(0, 1, 10), onCPU), {Kind: wire.Cleared}}, 1, true},
		{"cleared after an unknown parent", []wire.Event{stored(77, 1, 10), {Kind: wire.Cleared}}, 0, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tr, h := newTracker(1, "", 1, newRoom(100)), holding{}
			h.apply(t, tr.restart(0, true))
			for i := range tt.events {
				h.apply(t, tr.apply(0, tt.events[i:i+1]))
			}
			if len(h) != tt.held || tr.blocks != tt.held {
				t.Errorf("%d blocks by the changes, Len %d, want %d", len(h), tr.blocks, tt.held)
			}
			if tr.isComplete() != tt.complete {
				t.Errorf("complete: %v", tr.isComplete())
			}
		})
	}
}

func TestRestart(t *testing.T) {
	tr := newTracker(1, "", 1, newRoom(100))
	if tr.isComplete() {
		t.Error("complete before an engine has said so")
	}
	tr.apply(0, []wire.Event{stored(0, 1, 10, 11, 12)})
	changes := slices.Clone(tr.restart(0, false))
	if len(changes) != 3 || changes[0].op != kvForgotten || tr.isComplete() || tr.blocks != 0 {
		t.Errorf("after lost events: %v, complete %v", changes, tr.isComplete())
	}
	stores := slices.Clone(tr.apply(0, []wire.Event{stored(0, 1, 10, 11, 12)}))
	for i, s := range stores {
		if changes[2-i].kv != s.kv {
			t.Error("forgotten in another order than from the last to the first")
		}
	}
	changes = tr.restart(0, true)
	if len(changes) != 4 || changes[0].op != kvRemoved || changes[3].op != kvCleared || !tr.isComplete() {
		t.Errorf("after a restart of the replica: %v, complete %v", changes, tr.isComplete())
	}
}

func TestNames(t *testing.T) {
	name := func(seed uint64, events ...wire.Event) (last index.KVBlock) {
		for _, c := range newTracker(seed, "", 1, newRoom(100)).apply(0, events) {
			last = c.kv
		}
		return last
	}
	base := name(1, stored(0, 1, 10, 11))
	if other := name(1, stored(0, 1, 98), stored(98, 1+blockSize, 99)); other != base {
		t.Error("equal blocks have different names under other hashes")
	}
	for what, other := range map[string]index.KVBlock{
		"another seed":        name(2, stored(0, 1, 10, 11)),
		"another predecessor": name(1, stored(0, 9, 10), stored(10, 1+blockSize, 11)),
		"no predecessor":      name(1, stored(0, 1+blockSize, 11)),
		"an adapter":          name(1, with(stored(0, 1, 10, 11), func(e *wire.Event) { e.LoRA = "sql" })),
		"a cache salt":        name(1, with(stored(0, 1, 10, 11), func(e *wire.Event) { e.Extra = []uint64{7, 0} })),
		"an image":            name(1, with(stored(0, 1, 10, 11), func(e *wire.Event) { e.Extra = []uint64{0, 7} })),
	} {
		if other == base {
			t.Errorf("the name is the same with %s", what)
		}
	}
}

func TestDataParallelEngines(t *testing.T) {
	tr, h := newTracker(1, "", 1, newRoom(100)), holding{}
	for rank := range 2 {
		h.apply(t, tr.restart(rank, true))
		e := stored(0, 1, uint64(10+rank))
		h.apply(t, tr.apply(rank, []wire.Event{e}))
	}
	if len(h) != 1 || tr.blocks != 2 {
		t.Errorf("%d blocks held, %d counted; want 1 and 2", len(h), tr.blocks)
	}
	h.apply(t, tr.apply(0, []wire.Event{removed(10)}))
	if len(h) != 1 {
		t.Error("the block of the other engine is gone")
	}
	h.apply(t, tr.restart(1, true))
	if len(h) != 0 || tr.blocks != 0 {
		t.Errorf("%d blocks held, %d counted", len(h), tr.blocks)
	}
	if tr.apply(maxEngines, []wire.Event{stored(0, 1, 10)}) != nil || tr.restart(-1, true) != nil {
		t.Error("an impossible rank has changes")
	}
}

func TestTrackerBound(t *testing.T) {
	tr := newTracker(1, "", 1, newRoom(3))
	tr.restart(0, true)
	tr.apply(0, []wire.Event{stored(0, 1, 10, 11, 12, 13), stored(0, 90, 20)})
	if tr.blocks != 3 || tr.isComplete() {
		t.Errorf("%d blocks, complete %v", tr.blocks, tr.isComplete())
	}
	tr.apply(0, []wire.Event{removed(12), stored(0, 90, 20)})
	if tr.blocks != 3 {
		t.Errorf("%d blocks after one has made room", tr.blocks)
	}
}

func TestSequence(t *testing.T) {
	tr := newTracker(1, "ours-", 1, newRoom(100))
	session := func(name string) func(*wire.Event) {
		return func(e *wire.Event) { e.Session = name }
	}
	tr.apply(0, []wire.Event{
		with(stored(0, 1, 10, 11), session("theirs")),
		with(stored(11, 9, 12), session("ours-1")),
		with(stored(12, 13, 13), session("ours-1")),
	})
	e := tr.engines[0]
	last := e.blocks[e.byHash[12]].kv
	tr.apply(0, []wire.Event{removed(13, 12)})
	all := tr.removeSequence("ours-1", 0)
	if len(all) != 4 || all[0].tokens != blockSize || all[3].tokens != 4*blockSize || all[3].size != blockSize {
		t.Fatalf("%v", all)
	}
	if len(e.byHash) != 2 || e.blocks[e.free].kv != 0 || e.free == 0 {
		t.Error("the blocks that were removed are kept after the sequence was taken")
	}
	if tr.removeSequence("ours-1", 0) != nil || tr.removeSequence("theirs", 0) != nil || tr.removeSequence("ours-2", 0) != nil {
		t.Error("a sequence that was taken, or of another session")
	}
	tr.apply(0, []wire.Event{with(stored(11, 9, 12, 13), session("ours-1"))})
	if part := tr.removeSequence("ours-1", last); len(part) != 2 || part[0] != all[2] {
		t.Errorf("from the third block: %v", part)
	}
	for i := range 2 * maxSequences {
		tr.apply(0, []wire.Event{with(stored(0, 1, 10), session(fmt.Sprint("ours-x", i)))})
	}
	if n := tr.sequences.Len(); n != maxSequences {
		t.Errorf("%d sequences are remembered, of at most %d", n, maxSequences)
	}
}

// Random events, with duplicates and in any order, against a plain count.
func TestTrackerAgainstCount(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 0))
		tr, h := newTracker(1, "", 1, newRoom(1000)), holding{}
		h.apply(t, tr.restart(0, true))
		copies := map[uint64]int{}
		for range 400 {
			n := 1 + rng.Uint64N(20) // block n follows block n/2
			switch {
			case rng.IntN(2) == 0 && (n == 1 || copies[n/2] > 0) && copies[n] < maxCopies:
				e := stored(n/2, uint32(n), n)
				h.apply(t, tr.apply(0, []wire.Event{e}))
				copies[n]++
			case copies[n] > 0:
				h.apply(t, tr.apply(0, []wire.Event{removed(n)}))
				copies[n]--
			}
			held := 0
			for _, c := range copies {
				held += min(1, c)
			}
			if tr.blocks != held || len(h) != held {
				t.Fatalf("seed %d: Len %d, %d by the changes, want %d", seed, tr.blocks, len(h), held)
			}
		}
		for n := range copies {
			for range copies[n] {
				tr.apply(0, []wire.Event{removed(n)})
			}
		}
		e, unused := tr.engines[0], 0
		for at := e.free; at != 0; at = e.blocks[at].parent {
			unused++
		}
		if unused != len(e.blocks)-1 || tr.places != 0 {
			t.Fatalf("seed %d: %d of %d places are free at the end", seed, unused, len(e.blocks)-1)
		}
	}
}

func BenchmarkApply(b *testing.B) {
	tr := newTracker(1, "ours-", 1, newRoom(1<<20))
	var events []wire.Event
	n := uint64(1)
	for b.Loop() {
		events = events[:0]
		e := stored(0, uint32(n), n, n+1, n+2, n+3)
		e.BlockSize = 16
		for len(e.Tokens) < 64 {
			e.Tokens = append(e.Tokens, uint32(n))
		}
		events = append(events, e)
		if n > 1<<19 {
			events = append(events, removed(n-1<<19+3, n-1<<19+2, n-1<<19+1, n-1<<19))
		}
		tr.apply(0, events)
		n += 4
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n), "ns/block")
}

// Sequences that are not taken do not take the room of blocks.
func TestUntakenSequences(t *testing.T) {
	tr := newTracker(1, "our", 1, newRoom(100))
	tr.restart(0, true)
	for n := range 25 { // as a replay of what was settled before
		var e wire.Event
		e.BlockSize, e.Session = 1, fmt.Sprint("our", n)
		for i := range 5 {
			e.Hashes = append(e.Hashes, uint64(10*n+i+1))
			e.Tokens = append(e.Tokens, uint32(10*n+i))
		}
		tr.apply(0, []wire.Event{e, {Kind: wire.Removed, Hashes: e.Hashes}})
	}
	if tr.blocks != 0 {
		t.Fatal(tr.blocks)
	}
	if !tr.isComplete() {
		t.Errorf("no room for a block although none is held: %d of %d places are taken", tr.places, 100)
	}
}

// An engine that is silent leaves the account incomplete.
func TestCompleteWithAllEngines(t *testing.T) {
	tr := newTracker(1, "", 2, newRoom(100))
	tr.restart(0, true)
	if tr.isComplete() {
		t.Error("complete although the second engine has not said anything")
	}
	if tr.restart(1, true); !tr.isComplete() {
		t.Error("incomplete although both engines announce all that they hold")
	}
}

// A restart is noticed although events were lost before.
func TestRestartAfterLostEvents(t *testing.T) {
	tr := newTracker(1, "our", 1, newRoom(100))
	tr.restart(0, true)
	tr.apply(0, []wire.Event{{Kind: wire.Stored, Hashes: []uint64{1}, Tokens: []uint32{1}, BlockSize: 1}})
	tr.restart(0, false)
	changes := tr.restart(0, true)
	if len(changes) == 0 {
		t.Error("no Cleared after a restart")
	}
}

// usableTokens returns the ends of the usable blocks of an engine, in tokens of their sequences.
func (e *engine) usableTokens() (ends []int) {
	for h := range e.usable {
		ends = append(ends, int(e.blocks[e.byHash[h]].tokens))
	}
	slices.Sort(ends)
	return ends
}

// TestUsableBlocks checks which blocks end a prefix that can be reused where the model has groups beside full attention.
func TestUsableBlocks(t *testing.T) {
	of := func(group, window int, e wire.Event) wire.Event {
		e.Group, e.NoPrefix, e.Window = group, group < 2, window
		return e
	}
	sparse := func(hashes ...uint64) wire.Event { return wire.Event{Hashes: hashes} }
	full := of(2, 0, stored(0, 1, 10, 11, 12, 13)) // four blocks of four tokens
	tests := []struct {
		name   string
		events [][]wire.Event // messages
		usable []int          // tokens
	}{
		{"state at the end", [][]wire.Event{{of(0, 0, sparse(13)), of(1, 0, sparse(13)), full}}, []int{16}},
		{"state in one of two groups", [][]wire.Event{{of(0, 0, sparse(13)), of(1, 0, sparse()), full}}, nil},
		{"state in a later message", [][]wire.Event{{of(0, 0, sparse(13)), of(1, 0, sparse()), full}, {of(1, 0, sparse(11, 13))}}, []int{16}},
		{"state of a block that is not held", [][]wire.Event{{of(0, 0, sparse(20)), of(1, 0, sparse(20))}, {full}}, nil},
		{"state removed", [][]wire.Event{
			{of(0, 0, sparse(11, 13)), of(1, 0, sparse(11, 13)), full}, {of(0, 0, removed(13))},
		}, []int{8}},
		{"block removed", [][]wire.Event{
			{of(0, 0, sparse(11, 13)), of(1, 0, sparse(11, 13)), full}, {of(2, 0, removed(13, 12))},
		}, []int{8}},
		{"window of two blocks", [][]wire.Event{{of(0, 6, sparse(10, 12, 13)), full}}, []int{4, 16}}, // from the head, a shorter one will do
		{"a block of the window removed", [][]wire.Event{{of(0, 6, sparse(10, 12, 13)), full}, {of(0, 6, removed(12))}}, []int{4}},
		{"window of two blocks and a token", [][]wire.Event{{of(0, 10, sparse(12, 13)), full}}, nil},
		{"cleared", [][]wire.Event{{of(0, 0, sparse(13)), of(1, 0, sparse(13)), full}, {{Kind: wire.Cleared}}}, nil},
		{"one group", [][]wire.Event{{full}}, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tr, h := newTracker(1, "", 1, newRoom(100)), holding{}
			h.apply(t, tr.restart(0, true))
			for _, message := range tt.events {
				h.apply(t, tr.apply(0, message))
			}
			if got := tr.engines[0].usableTokens(); !slices.Equal(got, tt.usable) {
				t.Errorf("usable up to %d tokens, want %d", got, tt.usable)
			}
			usable := 0
			for _, is := range h {
				if is {
					usable++
				}
			}
			if usable != len(tt.usable) {
				t.Errorf("%d usable blocks by the changes, want %d", usable, len(tt.usable))
			}
		})
	}
}
