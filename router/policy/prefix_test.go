package policy

import (
	"math"
	"slices"
	"testing"
	"time"

	"warmroute/prompt"
)

// choose makes p choose among candidates that are plain where they say nothing else, and record
// the choice.
func choose(p *Prefix, r Request, candidates ...Candidate) int {
	for i := range candidates {
		if candidates[i].NameHash == 0 {
			candidates[i].NameHash = uint64(i + 1)
		}
		if candidates[i].Weight == 0 {
			candidates[i].Weight = 1
		}
		if candidates[i].Slot == 0 {
			candidates[i].Slot = i
		}
		if candidates[i].PrefillRate == 0 {
			candidates[i].PrefillRate = 8000
		}
	}
	if r.Now.IsZero() {
		r.Now = time.Unix(1000, 0)
	}
	r.MeanOutputTokens = 250
	index := p.Choose(&r, candidates)
	p.RecordSent(&r, &candidates[index])
	return index
}

func TestPrefixCost(t *testing.T) {
	f := func(name string, want int, candidates ...Candidate) {
		t.Helper()
		var p Prefix
		if got := choose(&p, Request{Blocks: []prompt.Block{7}, MeanUncachedTokens: 100}, candidates...); got != want {
			t.Errorf("%s: got candidate %d, want %d", name, got, want)
		}
	}
	f("a hit beats a cold backend", 1,
		Candidate{UncachedTokens: 2000},
		Candidate{MatchedTokens: 1900, UncachedTokens: 100})
	// κ = 2·mean(W)/u = 2·4000/100 = 80 → 64 for both: 100·65 + 8000 against 2000·65
	f("under pressure a hit is worth a longer queue", 1,
		Candidate{UncachedTokens: 2000},
		Candidate{MatchedTokens: 1900, UncachedTokens: 100, QueuedTokens: 8000})
	// 16 tokens beside ten sequences: 16·(1+min(θ·10, 4)) + δ·L̂·10
	beside10 := 16*(1+min(stallPerDecode*10, maxStall)) + decodeCost*250*10
	f("a hot prompt does not pile its decodes on one backend", 0,
		Candidate{UncachedTokens: beside10 - 1},
		Candidate{MatchedTokens: 1484, UncachedTokens: 16, InFlight: 10})
	f("… but up to there it does", 1,
		Candidate{UncachedTokens: beside10 + 1},
		Candidate{MatchedTokens: 1484, UncachedTokens: 16, InFlight: 10})
	f("a wait for room costs more than a queue", 0,
		Candidate{UncachedTokens: 500, QueuedTokens: 2000},
		Candidate{UncachedTokens: 500, KVWaitTokens: 2001 / kvWaitCost})
	f("a long match is worth a short wait for room", 1,
		Candidate{UncachedTokens: 2000},
		Candidate{MatchedTokens: 1900, UncachedTokens: 100, KVWaitTokens: 1800 / kvWaitCost})
}

func TestPrefixPressureAverage(t *testing.T) {
	var p Prefix
	start := time.Unix(1000, 0)
	choose(&p, Request{Now: start}, Candidate{UncachedTokens: 1000})
	choose(&p, Request{Now: start.Add(20 * time.Second)}, Candidate{UncachedTokens: 1000, QueuedTokens: 10000})
	if got, want := p.queued[0].tokens, 10000*(1-1/math.E); math.Abs(got-want) > 1 {
		t.Errorf("after one time constant: pressure %.0f, want %.0f", got, want)
	}
	if k := kappaFor(p.queued[0].tokens, 1000); math.Abs(k-kappaScale*p.queued[0].tokens/1000) > 1e-9 {
		t.Errorf("kappa %.3f is not in proportion to pressure over u", k)
	}
	if k := kappaFor(1e9, 1000); k != maxKappa {
		t.Errorf("kappa %.3f under any pressure, want %d", k, maxKappa)
	}
	// A model on another backend has the pressure of that one.
	r := Request{Now: start.Add(20 * time.Second), MeanUncachedTokens: 1000, Trace: new(Trace)}
	if choose(&p, r, Candidate{Slot: 1, UncachedTokens: 1000}); r.Trace.Kappa != 0 {
		t.Errorf("kappa %.3f for an idle backend beside a busy one of another model", r.Trace.Kappa)
	}
	p.ForgetBackend(0)
	if p.queued[0] != (averagedQueue{}) {
		t.Errorf("a forgotten backend has pressure %+v", p.queued[0])
	}
}

func TestPrefixTies(t *testing.T) {
	var a, b Prefix
	forward := []Candidate{{NameHash: 11, UncachedTokens: 500}, {NameHash: 22, UncachedTokens: 500}, {NameHash: 33, UncachedTokens: 500}}
	backward := slices.Clone(forward)
	slices.Reverse(backward)
	count := map[uint64]int{}
	for key := range uint64(3000) {
		r := Request{Blocks: []prompt.Block{prompt.Block(key * 0x9e3779b97f4a7c15)}}
		x, y := forward[choose(&a, r, forward...)], backward[choose(&b, r, backward...)]
		if x.NameHash != y.NameHash {
			t.Fatalf("key %d: two routers disagree", key)
		}
		count[x.NameHash]++
	}
	for name, n := range count {
		if n < 800 || n > 1200 {
			t.Errorf("backend %d got %d of 3000 cold prompts", name, n)
		}
	}
}

func TestPrefixSessionBreaksTiesOnly(t *testing.T) {
	var a, b Prefix
	equal := []Candidate{{NameHash: 11, UncachedTokens: 500}, {NameHash: 22, UncachedTokens: 500}, {NameHash: 33, UncachedTokens: 500}}
	reversed := slices.Clone(equal)
	slices.Reverse(reversed)
	cheaper := slices.Clone(equal)
	cheaper[1].UncachedTokens--
	count := map[uint64]int{}
	for key := range uint64(3000) {
		session := (key + 1) * 0x9e3779b97f4a7c15
		x := equal[choose(&a, Request{Session: session, Blocks: []prompt.Block{7}}, equal...)]
		if y := reversed[choose(&b, Request{Session: session, Blocks: []prompt.Block{8}}, reversed...)]; x.NameHash != y.NameHash {
			t.Fatalf("session %d: two routers disagree on prompts that differ", key)
		}
		if got := choose(&a, Request{Session: session, Blocks: []prompt.Block{7}}, cheaper...); got != 1 {
			t.Fatalf("session %d: sent to candidate %d, though another is a token cheaper", key, got)
		}
		count[x.NameHash]++
	}
	for name, n := range count {
		if n < 800 || n > 1200 {
			t.Errorf("backend %d got %d of 3000 sessions with the same prompt", name, n)
		}
	}
}

func TestPrefixAdapterCost(t *testing.T) {
	f := func(name string, want int, candidates ...Candidate) {
		t.Helper()
		var p Prefix
		if got := choose(&p, Request{}, candidates...); got != want {
			t.Errorf("%s: got candidate %d, want %d", name, got, want)
		}
	}
	f("who has it first", 1, Candidate{UncachedTokens: 500, AdapterTokens: 2000}, Candidate{UncachedTokens: 500})
	// 16·(1+2) + 160·8 = 1328 against 2016, then 16·(1+3.25) + 160·13 = 2148
	f("… while it is not too busy", 1, Candidate{UncachedTokens: 16, AdapterTokens: 2000}, Candidate{UncachedTokens: 16, InFlight: 8})
	f("… and no longer", 0, Candidate{UncachedTokens: 16, AdapterTokens: 2000}, Candidate{UncachedTokens: 16, InFlight: 13})
}

func TestPrefixSlowBackends(t *testing.T) {
	f := func(name string, want int, candidates ...Candidate) {
		t.Helper()
		var p Prefix
		if got := choose(&p, Request{}, candidates...); got != want {
			t.Errorf("%s: got candidate %d, want %d", name, got, want)
		}
	}
	f("a cold prompt goes to the faster", 1, Candidate{UncachedTokens: 1000, PrefillRate: 4000}, Candidate{UncachedTokens: 1000})
	f("the slower has less than twice to compute", 0, Candidate{UncachedTokens: 450, PrefillRate: 4000}, Candidate{UncachedTokens: 1000})
	f("the slower has more than half to compute", 1, Candidate{UncachedTokens: 550, PrefillRate: 4000}, Candidate{UncachedTokens: 1000})
	// (2000+1000)·0.75 against 1000·1.5
	f("a queue on the faster", 0, Candidate{UncachedTokens: 1000, PrefillRate: 4000}, Candidate{UncachedTokens: 1000, QueuedTokens: 2000})
	f("what a request costs its neighbours is not stretched", 0, Candidate{UncachedTokens: 16, InFlight: 6, PrefillRate: 4000}, Candidate{UncachedTokens: 16, InFlight: 11})
}

// The learned rate of a uniform fleet is another number than the default. It
// must not change a single choice.
func TestPrefixEqualRates(t *testing.T) {
	var a, b Prefix
	start := time.Unix(1000, 0)
	state := uint64(7)
	draw := func(n uint64) float64 { state = RendezvousRank(state, 99); return float64(state % n) }
	for i := range 5000 {
		plain := make([]Candidate, 1+int(draw(8)))
		for j := range plain {
			plain[j] = Candidate{NameHash: uint64(j + 1), QueuedTokens: draw(9000), UncachedTokens: 16 + draw(3000), InFlight: draw(20)}
		}
		learned := slices.Clone(plain)
		for j := range learned {
			learned[j].PrefillRate = 5417.3
		}
		r := Request{Now: start.Add(time.Duration(i) * time.Second), MeanUncachedTokens: 700, Blocks: []prompt.Block{prompt.Block(i)}}
		if x, y := choose(&a, r, plain...), choose(&b, r, learned...); x != y {
			t.Fatalf("request %d: candidate %d at the default rate, %d at another", i, x, y)
		}
	}
}

func TestPrefixWeight(t *testing.T) {
	count := map[int]int{}
	var p Prefix
	candidates := []Candidate{{UncachedTokens: 500}, {UncachedTokens: 500, Weight: 3}}
	for range 400 { // sequences that never end
		i := choose(&p, Request{}, candidates...)
		candidates[i].InFlight++
		count[i]++
	}
	if share := float64(count[1]) / 400; share < 0.73 || share > 0.77 {
		t.Errorf("a backend of three times the weight got %.2f of the requests, want about 3 of 4", share)
	}
}

func TestPrefixSLO(t *testing.T) {
	f := func(name string, want int, candidates ...Candidate) {
		t.Helper()
		p := Prefix{SLO: time.Second}
		if got := choose(&p, Request{}, candidates...); got != want {
			t.Errorf("%s: got candidate %d, want %d", name, got, want)
		}
	}
	f("the most cached tokens win, whatever the queue", 0,
		Candidate{QueuedTokens: 7000, MatchedTokens: 3000, UncachedTokens: 500}, Candidate{MatchedTokens: 2900, UncachedTokens: 600})
	f("… where the SLO is met", 1,
		Candidate{QueuedTokens: 7600, MatchedTokens: 3000, UncachedTokens: 500}, Candidate{MatchedTokens: 0, UncachedTokens: 3500})
	f("a slower backend takes longer", 1,
		Candidate{MatchedTokens: 3000, UncachedTokens: 4500, PrefillRate: 4000}, Candidate{MatchedTokens: 0, UncachedTokens: 7500})
	f("so does an adapter to be loaded", 1,
		Candidate{MatchedTokens: 1, UncachedTokens: 7000, AdapterTokens: 2000}, Candidate{UncachedTokens: 7001})
	f("so does a wait for room", 1,
		Candidate{MatchedTokens: 1, UncachedTokens: 7000, KVWaitTokens: 2000}, Candidate{UncachedTokens: 7001})
	f("among equals the cheapest", 1,
		Candidate{QueuedTokens: 100, UncachedTokens: 500}, Candidate{UncachedTokens: 500}, Candidate{QueuedTokens: 200, UncachedTokens: 500})
	f("none meets it: the cheapest", 1,
		Candidate{QueuedTokens: 30_000, MatchedTokens: 7000, UncachedTokens: 2000}, Candidate{MatchedTokens: 0, UncachedTokens: 9000})
}
