package index

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/zeebo/xxh3"

	"warmroute/router/prompt"
)

// In these tests a block of a prompt is a character with two tokens, and a KV block has three.
const (
	charTokens = 2
	kvTokens   = 3
)

// kvName returns the name of the KV block that ends after so many tokens of s.
func kvName(s string, tokens int) KVBlock {
	return KVBlock(xxh3.HashString(fmt.Sprint(s[:(tokens+charTokens-1)/charTokens], tokens)))
}

// kvChain returns the KV blocks that s fills.
func kvChain(s string) (names []KVBlock) {
	for tokens := kvTokens; tokens <= charTokens*len(s); tokens += kvTokens {
		names = append(names, kvName(s, tokens))
	}
	return names
}

// linkAs links the blocks of s to the KV blocks that they would complete if their tokens were
// those of other.
func linkAs(x *Index, slot int, s, other string) {
	blocks, names := chain(s), append([]KVBlock{0}, kvChain(other)...)
	for i := range blocks {
		tokens := charTokens * (i + 1)
		whole := tokens / kvTokens
		x.AddLink(slot, blocks, i, Link{names[whole], whole * kvTokens, tokens})
	}
}

func linkAll(x *Index, s string) { linkAs(x, 0, s, s) }

func storeAll(x *Index, slot int, s string) {
	for _, k := range kvChain(s) {
		x.StoreKV(slot, k)
	}
}

func TestLinkShowsAllHolders(t *testing.T) {
	x := fleet(70, 100)
	x.FollowKV()
	storeAll(x, 3, "abcdef")
	storeAll(x, 68, "abcxyz")
	linkAll(x, "abcdef")
	for slot, want := range map[int]int{0: 0, 3: 6, 68: 4} {
		if got := depths(x, "abcdef")[slot]; got != want {
			t.Errorf("backend %d holds %d blocks, want %d", slot, got, want)
		}
	}
	if l, known := x.Link(chain("abcdef")[3]); !known || l.Tokens != 8 || l.KVTokens != 6 || l.KV != kvName("abc", 6) {
		t.Errorf("link of the fourth block: %v, %v", l, known)
	}
	storeAll(x, 0, "abcd") // stored after the link was made
	if got := depths(x, "abcdef")[0]; got != 4 {
		t.Errorf("backend 0 holds %d blocks, want 4", got)
	}
}

func TestRemoveKV(t *testing.T) {
	x := fleet(1, 100)
	x.FollowKV()
	storeAll(x, 0, "abcdef")
	linkAll(x, "abcdef")
	names := kvChain("abcdef")
	f := func(when string, want int) {
		t.Helper()
		if got := depths(x, "abcdef")[0]; got != want {
			t.Errorf("%s: %d blocks, want %d", when, got, want)
		}
	}
	p := add(x, 0, "abcdef")
	x.RemoveKV(0, names[3])
	f("removed while in use", 6)
	x.Release(p, nil)
	f("released", 6)
	x.RemoveUnconfirmed(0, chain("abcdef"))
	f("not reported again", 5)
	x.RemoveKV(0, names[2])
	f("next KV block removed", 4)
	x.StoreKV(0, names[2])
	f("stored again", 5)
	x.RemoveKV(0, names[1]) // before its successor
	f("removed with a successor", 5)
	x.RemoveKV(0, names[2])
	f("and the successor", 2)
	x.ForgetKV(0, names[0])
	f("forgotten", 2)
	x.SetRequestedCapacity(0, 0)
	x.SweepAndEvict(100)
	f("evicted as approximate", 1)
	x.SweepAndEvict(100)
	f("the block before has no whole KV block", 0)
}

func TestConfirmedBlocksAreNotEvicted(t *testing.T) {
	x := fleet(1, 8)
	x.FollowKV()
	storeAll(x, 0, "abcdef")
	linkAll(x, "abcdef")
	use(x, 0, "uvwxyz")
	use(x, 0, "opqrst")
	for s, want := range map[string]int{"abcdef": 6, "uvwxyz": 2, "opqrst": 6} {
		if got := depths(x, s)[0]; got != want {
			t.Errorf("%q: %d, want %d", s, got, want)
		}
	}
}

func TestLinkChanges(t *testing.T) {
	x := fleet(4, 100)
	x.FollowKV()
	f := func(when string, want ...int) {
		t.Helper()
		if got := depths(x, "abcdef"); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", when, got, want)
		}
	}
	storeAll(x, 0, "abcdef")
	linkAll(x, "abcdef")
	storeAll(x, 0, "mnopqr")
	linkAs(x, 0, "abcdef", "mnopqr")
	f("the same replica has other tokens now", 6, 0, 0, 0)
	x.RemoveKV(0, kvChain("abcdef")[3])
	f("those before are of no importance", 6, 0, 0, 0)
	storeAll(x, 1, "ghijkl")
	linkAs(x, 1, "abcdef", "ghijkl")
	f("another replica disagrees", 6, 0, 0, 0)
	storeAll(x, 2, "ghijkl")
	linkAs(x, 2, "abcdef", "ghijkl")
	f("two disagree", 0, 6, 6, 0)
	linkAs(x, 0, "abcdef", "mnopqr")
	f("one disagrees with two", 0, 6, 6, 0)
}

func TestKVMemoryBound(t *testing.T) {
	const bound = 32 << 20
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	x := New(8, bound)
	for slot := range 8 {
		x.SetRequestedCapacity(slot, 1<<30)
	}
	x.FollowKV()
	rng := rand.New(rand.NewPCG(1, 2))
	b := make([]prompt.Block, 1000)
	for range 400 {
		slot := rng.IntN(8)
		for i := range b {
			b[i] = prompt.Block(rng.Uint64())
			k := KVBlock(rng.Uint64())
			x.StoreKV(slot, k)
			x.StoreKV(slot, KVBlock(rng.Uint64()))
			x.AddLink(slot, b, i, Link{k, i, i})
		}
		var p Pin
		for i := range b {
			b[i] = prompt.Block(rng.Uint64())
		}
		x.Add(&p, slot, b, 0)
		x.Release(&p, nil)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	grown := int64(after.HeapAlloc) - int64(before.HeapAlloc)
	t.Logf("%d entries, %d held KV blocks, %d links: %d bytes of heap; Bytes returns %d", x.entries, x.kv.heldLen, len(x.kv.links), grown, x.Bytes())
	if x.Bytes() > bound || grown > bound {
		t.Errorf("the index takes %d bytes (Bytes returns %d), more than its bound of %d", grown, x.Bytes(), bound)
	}
	runtime.KeepAlive(x)
}

// Random requests on replicas that report what they store and evict, compared with what they
// hold.
func TestAgainstReplicas(t *testing.T) {
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 3))
		const slots = 3
		x := fleet(slots, 30)
		x.FollowKV()
		type kv struct {
			name   KVBlock
			tokens int
		}
		truth := make([]map[KVBlock]int, slots) // name → tokens
		for i := range truth {
			truth[i] = map[KVBlock]int{}
		}
		linked := map[string]bool{}
		type sent struct {
			p    *Pin
			slot int
			s    string
		}
		var open []sent
		preds := predecessors()
		evict := func(slot int, op func(int, KVBlock)) {
			longest := kv{}
			for name, tokens := range truth[slot] {
				if tokens > longest.tokens || tokens == longest.tokens && name < longest.name {
					longest = kv{name, tokens}
				}
			}
			if longest.tokens > 0 {
				delete(truth[slot], longest.name)
				op(slot, longest.name)
			}
		}
		settle := func(f sent) {
			x.Release(f.p, nil)
			linkAs(x, f.slot, f.s, f.s)
			linked[f.s] = true
			x.RemoveUnconfirmed(f.slot, chain(f.s))
		}
		for step := range 300 {
			slot := rng.IntN(slots)
			switch op := rng.IntN(12); {
			case op < 5:
				s := make([]byte, 1+rng.IntN(9))
				for i := range s {
					s[i] = "ab"[rng.IntN(2)]
				}
				for b, before := range predecessors(string(s)) {
					preds[b] = before
				}
				open = append(open, sent{add(x, slot, string(s)), slot, string(s)})
				for i, name := range kvChain(string(s)) {
					truth[slot][name] = kvTokens * (i + 1)
					x.StoreKV(slot, name)
				}
			case op < 9 && len(open) > 0:
				i := rng.IntN(len(open))
				f := open[i]
				open = slices.Delete(open, i, i+1)
				settle(f)
			case op < 11:
				for range rng.IntN(4) {
					evict(slot, x.RemoveKV)
				}
			case rng.IntN(8) == 0:
				for len(truth[slot]) > 0 {
					evict(slot, x.ForgetKV)
				}
			case rng.IntN(8) == 0:
				for len(truth[slot]) > 0 {
					evict(slot, x.RemoveKV)
				}
				x.DropCache(slot)
			}
			check(t, x, preds, fmt.Sprintf("seed %d step %d", seed, step))
		}
		for _, f := range open {
			settle(f)
		}
		// What was approximate is sent, stored and settled again.
		for s := range linked {
			for slot := range slots {
				x.RemoveUnconfirmed(slot, chain(s))
			}
		}
		for s := range linked {
			for slot, depth := range depths(x, s) {
				got, want := 0, 0
				if depth > 0 {
					l, _ := x.Link(chain(s)[depth-1])
					got = l.KVTokens
				}
				for end := kvTokens; end <= charTokens*len(s) && truth[slot][kvName(s, end)] > 0; end += kvTokens {
					want = end
				}
				if got != want {
					t.Fatalf("seed %d: backend %d holds %d tokens of %q, the index says %d", seed, slot, want, s, got)
				}
			}
		}
	}
}
