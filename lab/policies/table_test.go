package policies

import (
	"slices"
	"testing"
	"time"

	"warmroute/prompt"
	"warmroute/router/policy"
)

func TestForgetSlot(t *testing.T) {
	blocks := make([]prompt.Block, 20)
	for i := range blocks {
		blocks[i] = prompt.Block(i + 1)
	}
	candidates := []policy.Candidate{{Slot: 0}, {Slot: 1}, {Slot: 70}}
	now := time.Unix(1000, 0)
	f := func(name string, match func() []int, add func(slot int), forget func(slot int)) {
		t.Helper()
		forget(500) // an unused slot
		for _, c := range candidates {
			add(c.Slot)
		}
		for forgotten, c := range candidates {
			forget(c.Slot)
			forget(c.Slot)
			for i, depth := range match() {
				if want := 20; i == forgotten && depth != 0 || i != forgotten && depth != want {
					t.Errorf("%s, slot %d forgotten: candidate %d has %d blocks", name, c.Slot, i, depth)
				}
			}
			add(c.Slot)
		}
	}
	l := newPrefixTable(1000, tailFirst)
	f("prefixTable", func() []int {
		return l.countPrefixMatches(blocks, candidates)
	}, func(slot int) { l.addBlocks(slot, blocks, now) }, l.ForgetBackend)
	if l.used != 3 {
		t.Errorf("%d backends in use, want 3", l.used)
	}
	shared := newSharedTable(1000, tailFirst)
	f("sharedTable", func() []int {
		return shared.countPrefixMatches(blocks, candidates)
	}, func(slot int) { shared.addBlocks(slot, blocks, now) }, shared.ForgetBackend)
}

func TestPrefixTableShares(t *testing.T) {
	l := newPrefixTable(100, tailFirst)
	blocks := make([]prompt.Block, 200)
	for i := range blocks {
		blocks[i] = prompt.Block(i + 1)
	}
	f := func(slot int, want ...int) {
		t.Helper()
		l.addBlocks(slot, blocks, epoch)
		for slot, n := range want {
			if got := l.blockCount(slot); got != n {
				t.Errorf("backend %d has %d blocks, want %d", slot, got, n)
			}
		}
		// The heads are left, and the sets agree with the LRUs.
		for i, depth := range l.countPrefixMatches(blocks, idle(len(want))) {
			if depth != want[i] {
				t.Errorf("backend %d leads with %d blocks, want %d", i, depth, want[i])
			}
		}
	}
	f(0, 100)
	f(1, 50, 50)
	f(3, 33, 33, 0, 33)
	l.limitBlocks(1, 10)
	f(3, 33, 10, 0, 33)
}

func TestBlockSetsBeyond64Slots(t *testing.T) {
	var s blockSets
	for i, b := range blocksOf("abc") {
		s.insert(b, 129)
		if i != 1 {
			s.insert(b, 3)
		}
	}
	candidates := idle(130)
	some := []policy.Candidate{candidates[129], candidates[3], candidates[70]}
	if got := s.countPrefixMatches(blocksOf("abcd"), some); !slices.Equal(got, []int{3, 1, 0}) {
		t.Errorf("leading: %v, want 3, 1 and 0", got)
	}
	if got := s.countScatteredMatches(blocksOf("abcd"), some); !slices.Equal(got, []int{3, 2, 0}) {
		t.Errorf("scattered: %v, want 3, 2 and 0", got)
	}
	if got := s.countScatteredMatches(blocksOf("xabc"), some); !slices.Equal(got, []int{0, 0, 0}) {
		t.Errorf("scattered after a block that no backend holds: %v", got)
	}
	s.remove(blocksOf("a")[0], 129)
	if got := s.countPrefixMatches(blocksOf("abcd"), some); !slices.Equal(got, []int{0, 1, 0}) {
		t.Errorf("beheaded: %v, want 0, 1 and 0", got)
	}
	s.removeFromAll(blocksOf("a")[0])
	if got := s.countPrefixMatches(blocksOf("abcd"), some); !slices.Equal(got, []int{0, 0, 0}) {
		t.Errorf("dropped: %v", got)
	}
}

func TestEPPTableEvictsHeads(t *testing.T) {
	p := newTester(t, "weighted", policy.Settings{})
	small := idle(1)
	small[0].CacheTokens = 4 * 64 // four blocks: c, d, e and f stay
	r := requestFor("abcdef")
	chooseAndRecord(p, &r, small)
	// No backend holds the first block, so none is credited with anything.
	p.expect("no backend holds the head", requestFor("abcdef"), fleet(policy.Candidate{KVUsage: 0.1}, policy.Candidate{}), 1)
	p = newTester(t, "weighted", policy.Settings{})
	chooseAndRecord(p, &r, small)
	p.send(requestFor("ab"), 1)
	// 3·4/6 = 2, though a replica could use none of it, against 3·2/6 = 1.
	p.expect("another does", requestFor("abcdef"), idle(2), 0)
}

func TestEPPTableBounds(t *testing.T) {
	p := newTester(t, "weighted", policy.Settings{})
	// 31,250 blocks of 64 tokens are 4 blocks of 500,000, and a prompt's part that
	// is looked at, 131,072 tokens, is one.
	large := func(s string) policy.Request {
		r := requestFor(s)
		r.BlockTokens, r.PromptTokens = 500_000, float64(500_000*len(s))
		return r
	}
	for _, s := range []string{"a1", "b2", "c3", "d4", "e5"} {
		p.send(large(s), 0)
	}
	busier := func() []policy.Candidate { return fleet(policy.Candidate{KVUsage: 0.5}, policy.Candidate{}) }
	p.expect("b is the fourth last", large("bxyz"), busier(), 0) // 3·1 + 1 against 2
	p.expect("a is the fifth", large("a"), busier(), 1)
}

func TestSGLangTreeTruncation(t *testing.T) {
	for _, name := range []string{"cache-threshold", "cache-threshold-old", "smg"} {
		p := newTester(t, name, policy.Settings{MatchRatio: 0.7})
		// 67,108,864 characters are 4 blocks of 4,194,304 tokens.
		at := func(s string, after time.Duration) policy.Request {
			r := requestFor(s)
			r.BlockTokens, r.PromptTokens, r.Now = 4<<20, float64(4<<20*len(s)), epoch.Add(after)
			return r
		}
		p.send(at("abcdefgh", 0), 0)
		p.send(at("x", 119*time.Second), 1)
		p.expect(name+": before the walk 6 of 8 are held", at("abcdef12", 119*time.Second), busy(1, 0), 0)
		p.send(at("x", 120*time.Second), 1)
		p.expect(name+": after it the first 4 are: 4 of 5", at("abcd3", 120*time.Second), busy(1, 0), 0)
		p.expect(name+": 4 of 6", at("abcdef", 120*time.Second), busy(1, 0), 1)
	}
}
