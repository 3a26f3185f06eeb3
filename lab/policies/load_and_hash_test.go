package policies

import (
	"math/rand/v2"
	"testing"

	"warmroute/prompt"
	"warmroute/router/policy"
)

func TestLeastLoad(t *testing.T) {
	p := mustNew(t, "least-load", policy.Settings{}, rand.New(rand.NewPCG(1, 1)))
	if got := chooseAndRecord(p, &policy.Request{}, []policy.Candidate{{Requests: 3}, {Requests: 1}, {Requests: 2}}); got != 1 {
		t.Errorf("got %d, want the one with the fewest in flight", got)
	}
	seen := map[int]int{}
	for range 600 {
		seen[chooseAndRecord(p, &policy.Request{}, []policy.Candidate{{Requests: 2}, {Requests: 1}, {Requests: 1}, {Requests: 1}})]++
	}
	if seen[0] != 0 || seen[1] < 100 || seen[2] < 100 || seen[3] < 100 {
		t.Errorf("ties are not spread: %v", seen)
	}
}

func TestRoundRobin(t *testing.T) {
	p := mustNew(t, "round-robin", policy.Settings{}, nil)
	a, b, c := policy.Candidate{NameHash: 10}, policy.Candidate{NameHash: 20}, policy.Candidate{NameHash: 30}
	f := func(want policy.Candidate, candidates ...policy.Candidate) {
		t.Helper()
		if got := candidates[chooseAndRecord(p, &policy.Request{}, candidates)]; got != want {
			t.Errorf("got %d, want %d", got.NameHash, want.NameHash)
		}
	}
	f(a, a, b, c)
	f(b, c, b, a)
	f(c, a, c)
	f(a, a, b)
	f(b, a, b, c)
}

func TestPowerOfTwo(t *testing.T) {
	p := newTester(t, "power-of-two", policy.Settings{})
	candidates := busy(1, 2, 3)
	seen := map[int]int{}
	for range 3000 {
		seen[chooseAndRecord(p, &policy.Request{}, candidates)]++
	}
	// Of the three pairs two hold backend 0, one holds 1 and 2.
	if seen[2] != 0 || seen[0] < 1900 || seen[0] > 2100 {
		t.Errorf("of 3,000 requests %v went to backends with 1, 2 and 3 in flight; want 2,000, 1,000 and none", seen)
	}
}

func TestSession(t *testing.T) {
	p := newTester(t, "session", policy.Settings{})
	counts := map[int]int{}
	for key := range uint64(1000) {
		r := policy.Request{Conversation: policy.RendezvousRank(key, 1<<40), Now: epoch}
		first := chooseAndRecord(p, &r, idle(4))
		counts[first]++
		crowded := idle(4)
		crowded[first].Requests = 1000
		p.expect("a thousand in flight", r, crowded, first)
		gone := (first + 1) % 4
		p.expect("another backend has gone", r, append(idle(4)[:gone:gone], idle(4)[gone+1:]...), first)
	}
	for first, n := range counts {
		if n < 200 || n > 300 {
			t.Errorf("backend %d is first to %d of 1,000 conversations", first, n)
		}
	}
	a, b := requestFor("abc"), requestFor("abd")
	a.PromptKey, b.PromptKey = 77, 77
	p.expect("no conversation: the head of the prompt", a, idle(4), chooseAndRecord(p, &b, idle(4)))
	a.PromptKey, b.PromptKey = 0, 0
	p.expect("no head: the first block", a, idle(4), chooseAndRecord(p, &b, idle(4)))
	p.expect("nothing to go by: the fewest in flight", policy.Request{}, busy(3, 2, 1, 2), 2)
}

func TestSessionClientAffinity(t *testing.T) {
	p, plain := newTester(t, "session", policy.Settings{ClientAffinity: true}), newTester(t, "session", policy.Settings{})
	counts := map[int]int{}
	for client := range uint64(1000) {
		r := policy.Request{Client: policy.RendezvousRank(client, 1<<41), PromptKey: 77}
		first := chooseAndRecord(p, &r, idle(4))
		counts[first]++
		r.PromptKey = client
		p.expect("another prompt of the same client", r, idle(4), first)
	}
	for first, n := range counts {
		if n < 200 || n > 300 {
			t.Errorf("backend %d is first to %d of 1,000 clients", first, n)
		}
	}
	for key := range uint64(100) {
		hash := policy.RendezvousRank(key, 1<<42)
		named, prompt := policy.Request{Conversation: hash, PromptKey: 77}, policy.Request{PromptKey: hash}
		p.expect("no address: the head of the prompt", prompt, idle(4), chooseAndRecord(plain, &prompt, idle(4)))
		first := chooseAndRecord(plain, &named, idle(4))
		named.Client, prompt.Client = 5, 5
		p.expect("the conversation counts before the client", named, idle(4), first)
		plain.expect("the address does not count by default", prompt, idle(4), chooseAndRecord(p, &policy.Request{PromptKey: hash}, idle(4)))
	}
}

func TestCHWBLBoundsLoads(t *testing.T) {
	r := requestFor("abcdefghij")
	r.PromptKey = 4711
	p := newTester(t, "chwbl", policy.Settings{})
	first := chooseAndRecord(p, &r, idle(2))
	loads := func(here, there float64) []policy.Candidate {
		c := busy(here, here)
		c[1-first].Requests = there
		return c
	}
	// Accepted up to (10+1)/2 × 1.25 = 6.875 of ten in flight.
	p.expect("6 of 10", r, loads(6, 4), first)
	p.expect("7 of 10", r, loads(7, 3), 1-first)
	p.expect("none has any", r, loads(0, 0), first)
	tight := newTester(t, "chwbl", policy.Settings{LoadFactor: 1})
	// (10+1)/2 × 1 = 5.5
	tight.expect("6 of 10 at a load factor of 1", r, loads(6, 4), 1-first)
	unmeetable := newTester(t, "chwbl", policy.Settings{LoadFactor: 0.5})
	// (10+1)/2 × 0.5 = 2.75
	unmeetable.expect("nothing fits", r, loads(5, 5), first)
}

func TestCHWBLKeepsKeysWhenBackendLeaves(t *testing.T) {
	p := newTester(t, "chwbl", policy.Settings{})
	counts := map[int]int{}
	for key := range uint64(1000) {
		r := policy.Request{PromptKey: policy.RendezvousRank(key, 1<<40), Now: epoch}
		first := chooseAndRecord(p, &r, idle(4))
		counts[first]++
		if first != 3 {
			p.expect("backend 3 has gone", r, idle(4)[:3], first)
		}
	}
	for first, n := range counts {
		if n < 180 || n > 320 {
			t.Errorf("backend %d is first to %d of 1,000 keys", first, n)
		}
	}
}

func TestRingMemberLimit(t *testing.T) {
	p := newCHWBL(policy.Options{}).(*chwbl)
	candidates := idle(maxRingMembers)
	chooseAndRecord(p, &policy.Request{PromptKey: 1}, candidates)
	chooseAndRecord(p, &policy.Request{PromptKey: 1}, candidates[:1])
	if n := len(p.ring.members); n != maxRingMembers {
		t.Fatalf("the ring remembers %d backends of %d that may come back", n, maxRingMembers)
	}
	chooseAndRecord(p, &policy.Request{PromptKey: 1}, []policy.Candidate{{NameHash: 4711}})
	if members, points := len(p.ring.members), len(p.ring.points); members != 1 || points != virtualNodes {
		t.Errorf("after one more it remembers %d, with %d points", members, points)
	}
}

func TestSimHash(t *testing.T) {
	p := newTester(t, "simhash", policy.Settings{})
	counts := map[int]int{}
	for i := range 400 {
		r := requestFor(string(rune('a'+i%26)) + string(rune('a'+i/26)) + "xyz")
		first := chooseAndRecord(p, &r, idle(4))
		counts[first]++
		crowded := idle(4)
		crowded[first].Requests = 1000
		p.expect("a thousand in flight", r, crowded, first)
	}
	if len(counts) != 4 {
		t.Errorf("400 prompts went to %v of 4 backends", counts)
	}
	long := make([]prompt.Block, 1000)
	for i := range long {
		long[i] = prompt.Block(policy.RendezvousRank(uint64(i), 1))
	}
	a := similarityHash(&policy.Request{Blocks: long})
	b := similarityHash(&policy.Request{Blocks: long[:990]})
	c := similarityHash(&policy.Request{Blocks: blocksOf("another")})
	if near, far := distance(a, b), distance(a, c); near >= far {
		t.Errorf("fingerprints of 1,000 blocks and 990 of them differ in %d bits, of strangers in %d", near, far)
	}
}

func distance(a, b uint64) (n int) {
	for x := a ^ b; x != 0; x &= x - 1 {
		n++
	}
	return n
}
