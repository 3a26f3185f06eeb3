package index

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/zeebo/xxh3"

	"warmroute/prompt"
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
	for slot, want := range map[int]int{0: 0, 3: 6, 68: 3} {
		if got := depths(x, "abcdef")[slot]; got != want {
			t.Errorf("backend %d holds %d blocks, want %d", slot, got, want)
		}
	}
	if l, known := x.Link(chain("abcdef")[3]); !known || l.Tokens != 8 || l.KVTokens != 6 || l.KV != kvName("abc", 6) {
		t.Errorf("link of the fourth block: %v, %v", l, known)
	}
	storeAll(x, 0, "abcd") // stored after the link was made
	if got := depths(x, "abcdef")[0]; got != 3 {
		t.Errorf("backend 0 holds %d blocks, want 3: the fourth completes no KV block", got)
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
	x.RemoveApproximate(0, chain("abcdef"))
	f("not reported again", 5)
	x.RemoveKV(0, names[2])
	f("next KV block removed", 3) // the block before completes none
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
	for s, want := range map[string]int{"abcdef": 6, "uvwxyz": 0, "opqrst": 6} {
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
	t.Logf("%d entries, %d held KV blocks, %d links: %d bytes of heap; Bytes returns %d", x.entries, x.kv.heldLen, len(x.kv.links), grown,
		x.Bytes())
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
		full := seed%2 == 1 // too small for all
		if full {
			x = New(slots, entryBytes*kvShares*20)
			for slot := range slots {
				x.SetRequestedCapacity(slot, 30)
			}
		}
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
			x.RemoveApproximate(f.slot, chain(f.s))
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
		if full {
			continue
		}
		// What was approximate is sent, stored and settled again.
		for s := range linked {
			for slot := range slots {
				x.RemoveApproximate(slot, chain(s))
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

// Links of blocks that no backend holds are replaced from the last of a prompt on.
func TestLinksAreReplacedFromTheLast(t *testing.T) {
	x := New(1, 128*4*200) // 200 links
	x.SetRequestedCapacity(0, 1000)
	x.FollowKV()
	b, k := seq(0, 100)
	for i := range k {
		x.StoreKV(0, k[i])
	}
	linkSeq(x, 0, b, k)
	for i := len(k) - 1; i >= 0; i-- {
		x.RemoveKV(0, k[i]) // evicted everywhere
	}
	for n := range 11 { // other prompts of 10 blocks each, held
		b2, k2 := seq(1000*(n+1), 10)
		for i := range k2 {
			x.StoreKV(0, k2[i])
		}
		linkSeq(x, 0, b2, k2)
		if n < 10 {
			for i := len(k2) - 1; i >= 0; i-- {
				x.RemoveKV(0, k2[i])
			}
		}
	}
	_, first := x.Link(b[0])
	_, last := x.Link(b[99])
	if !first && last {
		t.Errorf("the first block is not linked, the last is")
	}
	for i := range k { // computed again
		x.StoreKV(0, k[i])
	}
	d := make([]int, 1)
	x.Match(b, d)
}

// A block is confirmed in a full index, which evicts the last successor of the block before.
func TestConfirmWhenFull(t *testing.T) {
	x := New(1, 128*4*4)
	x.SetRequestedCapacity(0, 100)
	x.FollowKV() // 8 entries, 4 links
	// parent without a whole KV block, two prompts that share it
	old := []prompt.Block{1, 2}
	x2 := []prompt.Block{1, 3}
	var p Pin
	x.Add(&p, 0, old, 0)
	x.Release(&p, nil)
	for i := range 6 { // fills the index
		var p Pin
		x.Add(&p, 0, []prompt.Block{prompt.Block(100 + i)}, 0)
		x.Release(&p, nil)
	}
	x.AddLink(0, x2, 0, Link{0, 0, 10})
	x.AddLink(0, x2, 1, Link{77, 16, 20})
	x.StoreKV(0, 77)
	d := make([]int, 1)
	x.Match(x2, d)
	for i := range 6 {
		var p Pin
		x.Add(&p, 0, []prompt.Block{prompt.Block(200 + i)}, 0)
		x.Release(&p, nil)
		x.Match(x2, d)
	}
	if x.findEntry(0, 3) != 0 && x.findEntry(0, 1) == 0 {
		t.Error("a block is held without the one before it")
	}
	x.RemoveKV(0, 77)
	for at, e := range x.caches[0].entries[1:] {
		if e.successors < 0 {
			t.Errorf("entry %d has %d successors", at+1, e.successors)
		}
	}
	check(t, x, map[prompt.Block]prompt.Block{2: 1, 3: 1}, "at the end")
}

// Blocks that are confirmed and blocks that are not are within the bound together.
func TestConfirmedBlocksWithinBound(t *testing.T) {
	x := New(3, 128*4*1000)
	for slot := range 3 {
		x.SetRequestedCapacity(slot, 1<<20)
	}
	x.FollowKV()
	for n := range 500 { // a KV block for two blocks
		b, _ := seq(100*n, 2)
		for slot := range 2 {
			x.StoreKV(slot, KVBlock(1<<40+n))
		}
		x.AddLink(0, b, 0, Link{KVBlock(1<<40 + n), 16, 16})
		x.AddLink(0, b, 1, Link{KVBlock(1<<40 + n), 16, 31})
	}
	for n := range 400 {
		b, _ := seq(1<<20+100*n, 10)
		var p Pin
		x.Add(&p, 2, b, 0)
		x.Release(&p, nil)
	}
	if x.entries > x.maxEntries {
		t.Errorf("%d entries, the bound is %d", x.entries, x.maxEntries)
	}
}

// The links before the first whole KV block are kept while blocks after them are confirmed.
func TestFirstLinksAreKept(t *testing.T) {
	x := New(2, 128*4*100)
	x.SetRequestedCapacity(0, 100)
	x.SetRequestedCapacity(1, 100)
	x.FollowKV()
	b, _ := seq(0, 8)
	for i := range b {
		l := Link{0, 0, 64 * (i + 1)}
		if i == 7 {
			l = Link{5555, 512, 512}
		}
		x.AddLink(0, b, i, l)
	}
	x.StoreKV(0, 5555)
	for n := range 30 {
		o, k := seq(1000*(n+1), 4)
		linkSeq(x, 0, o, k)
	}
	x.StoreKV(1, 5555)
	d := make([]int, 2)
	x.Match(b, d)
	if d[1] != 8 {
		t.Errorf("depths %v; both replicas hold the KV block of eight blocks", d)
	}
}

// Many prompts part between two KV blocks of a common beginning.
func TestManyPromptsAfterOneKVBlock(t *testing.T) {
	x := fleet(1, 10000)
	x.FollowKV()
	x.StoreKV(0, 1000)
	refused := 0
	for n := range 200 {
		b := []prompt.Block{1, prompt.Block(100 + n), prompt.Block(1000 + n)}
		x.AddLink(0, b, 0, Link{1000, 16, 20})
		ok := x.AddLink(0, b, 1, Link{1000, 16, 30}) // completes no further KV block
		x.StoreKV(0, KVBlock(5000+n))
		if !ok || !x.AddLink(0, b, 2, Link{KVBlock(5000 + n), 32, 40}) {
			refused++
		}
	}
	if refused > 0 {
		t.Errorf("%d of 200 prompts could not be linked, with %d of %d links in use", refused, len(x.kv.links), x.kv.maxLinks)
	}
}

// Blocks that were forgotten are evicted in their turn.
func TestForgottenBlocksAreEvicted(t *testing.T) {
	x := fleet(1, 20)
	x.FollowKV()
	b, k := seq(0, 10)
	for i := range k {
		x.StoreKV(0, k[i])
	}
	linkSeq(x, 0, b, k)
	b2 := append(append([]prompt.Block{}, b...), 999) // an approximate block follows
	var p0 Pin
	x.Add(&p0, 0, b2, 10)
	x.Release(&p0, nil)
	for i := len(k) - 1; i >= 0; i-- {
		x.ForgetKV(0, k[i])
	}
	d := make([]int, 1)
	for m := range 4 {
		o, _ := seq(10000+100*m, 5)
		var p Pin
		x.Add(&p, 0, o, 0)
		x.Release(&p, nil)
	}
	if x.Match(b, d); d[0] > 0 {
		t.Errorf("%d blocks are left after as many others as the cache holds", d[0])
	}
}

func seq(from, n int) (b []prompt.Block, k []KVBlock) {
	for i := range n {
		b = append(b, prompt.Block(from+i+1))
		k = append(k, KVBlock(1<<40+from+i+1))
	}
	return
}

func linkSeq(x *Index, slot int, b []prompt.Block, k []KVBlock) (all bool) {
	all = true
	for i := range b {
		all = x.AddLink(slot, b, i, Link{k[i], 16 * (i + 1), 16 * (i + 1)}) && all
	}
	return all
}
