package policy

import (
	"math/rand/v2"
	"testing"
	"time"

	"warmroute/router/prompt"
)

// dawn is when tests begin.
var dawn = time.Unix(1_000_000, 0)

// letters makes the blocks of a prompt that is written as a string, one byte a
// block, so that "abc" and "abd" share two.
func letters(s string) []prompt.Block {
	var out []prompt.Block
	h := uint64(14695981039346656037)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
		out = append(out, prompt.Block(h))
	}
	return out
}

// about is a request for the prompt s, whose blocks are of 64 tokens.
func about(s string) Request {
	return Request{Now: dawn, Blocks: letters(s), BlockTokens: 64, PromptTokens: float64(64 * len(s))}
}

// fleet gives candidates the slots from 0 on, and names.
func fleet(candidates ...Candidate) []Candidate {
	for i := range candidates {
		candidates[i].Slot, candidates[i].NameHash = i, rendezvous(uint64(i+1), 0)
		if candidates[i].PrefillRate == 0 {
			candidates[i].PrefillRate = 8000
		}
	}
	return candidates
}

func idle(n int) []Candidate { return fleet(make([]Candidate, n)...) }

func busy(requests ...float64) []Candidate {
	out := make([]Candidate, len(requests))
	for i := range out {
		out[i].Requests, out[i].InFlight = requests[i], requests[i]
	}
	return fleet(out...)
}

// rival is a policy under test.
type rival struct {
	*testing.T
	Policy
}

func newRival(t *testing.T, name string, s Settings) rival {
	t.Helper()
	p := mustNew(t, name, s, rand.New(rand.NewPCG(1, 1)))
	return rival{t, p}
}

// send has the policy send r to the backend of that slot, since no other is there.
func (p rival) send(r Request, slot int) {
	p.Choose(&r, idle(slot + 1)[slot:])
}

// expect asks where r goes; want are the slots that it may go to, each of which
// it does in a hundred times. The policy takes each answer for sent, so that
// rules which remember come to know r on all of want.
func (p rival) expect(why string, r Request, candidates []Candidate, want ...int) {
	p.Helper()
	seen := map[int]bool{}
	for range 100 * (len(want) - 1) {
		seen[candidates[p.Choose(&r, candidates)].Slot] = true
	}
	seen[candidates[p.Choose(&r, candidates)].Slot] = true
	for _, slot := range want {
		if !seen[slot] {
			p.Errorf("%s: never went to backend %d of %v, but to %v", why, slot, want, seen)
		}
		delete(seen, slot)
	}
	if len(seen) > 0 {
		p.Errorf("%s: went to %v, want %v alone", why, seen, want)
	}
}

func TestPowerOfTwoTakesTheLessLoadedOfTwo(t *testing.T) {
	p := newRival(t, "power-of-two", Settings{})
	candidates := busy(1, 2, 3)
	seen := map[int]int{}
	for range 3000 {
		seen[p.Choose(&Request{}, candidates)]++
	}
	// Of the three pairs two hold backend 0, one holds 1 and 2.
	if seen[2] != 0 || seen[0] < 1900 || seen[0] > 2100 {
		t.Errorf("of 3,000 requests %v went to backends with 1, 2 and 3 in flight; want 2,000, 1,000 and none", seen)
	}
}

func TestSessionStaysWhateverTheLoad(t *testing.T) {
	p := newRival(t, "session", Settings{})
	homes := map[int]int{}
	for key := range uint64(1000) {
		r := Request{Session: rendezvous(key, 1<<40), Now: dawn}
		home := p.Choose(&r, idle(4))
		homes[home]++
		crowded := idle(4)
		crowded[home].Requests = 1000
		p.expect("a thousand in flight", r, crowded, home)
		gone := (home + 1) % 4
		p.expect("another backend has gone", r, append(idle(4)[:gone:gone], idle(4)[gone+1:]...), home)
	}
	for home, n := range homes {
		if n < 200 || n > 300 {
			t.Errorf("backend %d is home to %d of 1,000 sessions", home, n)
		}
	}
	a, b := about("abc"), about("abd")
	a.PromptKey, b.PromptKey = 77, 77
	p.expect("no session: the head of the prompt", a, idle(4), p.Choose(&b, idle(4)))
	a.PromptKey, b.PromptKey = 0, 0
	p.expect("no head: the first block", a, idle(4), p.Choose(&b, idle(4)))
	p.expect("nothing to go by: the fewest in flight", Request{}, busy(3, 2, 1, 2), 2)
}

func TestCHWBLBoundsLoads(t *testing.T) {
	r := about("abcdefghij")
	r.PromptKey = 4711
	p := newRival(t, "chwbl", Settings{})
	home := p.Choose(&r, idle(2))
	loads := func(here, there float64) []Candidate {
		c := busy(here, here)
		c[1-home].Requests = there
		return c
	}
	// Accepted up to (10+1)/2 × 1.25 = 6.875 of ten in flight.
	p.expect("6 of 10", r, loads(6, 4), home)
	p.expect("7 of 10", r, loads(7, 3), 1-home)
	p.expect("nobody has any", r, loads(0, 0), home)
	tight := newRival(t, "chwbl", Settings{LoadFactor: 1})
	// (10+1)/2 × 1 = 5.5
	tight.expect("6 of 10 at a load factor of 1", r, loads(6, 4), 1-home)
	unmeetable := newRival(t, "chwbl", Settings{LoadFactor: 0.5})
	// (10+1)/2 × 0.5 = 2.75
	unmeetable.expect("nothing fits", r, loads(5, 5), home)
}

func TestCHWBLMovesNoOtherKeysWhenABackendGoes(t *testing.T) {
	p := newRival(t, "chwbl", Settings{})
	homes := map[int]int{}
	for key := range uint64(1000) {
		r := Request{PromptKey: rendezvous(key, 1<<40), Now: dawn}
		home := p.Choose(&r, idle(4))
		homes[home]++
		if home != 3 {
			p.expect("backend 3 has gone", r, idle(4)[:3], home)
		}
	}
	for home, n := range homes {
		if n < 180 || n > 320 {
			t.Errorf("backend %d is home to %d of 1,000 keys", home, n)
		}
	}
}

func TestSimHashGoesByContentAlone(t *testing.T) {
	p := newRival(t, "simhash", Settings{})
	homes := map[int]int{}
	for i := range 400 {
		r := about(string(rune('a'+i%26)) + string(rune('a'+i/26)) + "xyz")
		home := p.Choose(&r, idle(4))
		homes[home]++
		crowded := idle(4)
		crowded[home].Requests = 1000
		p.expect("a thousand in flight", r, crowded, home)
	}
	if len(homes) != 4 {
		t.Errorf("400 prompts went to %v of 4 backends", homes)
	}
	long := make([]prompt.Block, 1000)
	for i := range long {
		long[i] = prompt.Block(rendezvous(uint64(i), 1))
	}
	a := fingerprint(&Request{Blocks: long})
	b := fingerprint(&Request{Blocks: long[:990]})
	c := fingerprint(&Request{Blocks: letters("another")})
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
