package policy

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"warmroute/router/prompt"
)

func TestPrefixWeighsCacheAgainstQueueAndNeighbours(t *testing.T) {
	now := time.Unix(1000, 0)
	f := func(name string, want int, candidates ...Candidate) {
		t.Helper()
		var p Prefix
		if got := p.Choose(&Request{Blocks: []prompt.Block{7}, Now: now, AnswerTokens: 250, MeanUncached: 100}, candidates); got != want {
			t.Errorf("%s: got candidate %d, want %d", name, got, want)
		}
	}
	f("a hit beats a cold backend", 1,
		Candidate{NameHash: 1, Uncached: 2000},
		Candidate{NameHash: 2, Matched: 1900, Uncached: 100})
	// u·(1+κ) with κ = 0.5·mean(W)/u = 0.5·4000/100 = 20 → 16 for both: 100·17 + 8000 against 2000·17
	f("under pressure a hit is worth a longer queue", 1,
		Candidate{NameHash: 1, Uncached: 2000},
		Candidate{NameHash: 2, Matched: 1900, Uncached: 100, Pending: 8000})
	// δ·L̂ = 160 for each decoding neighbour: 16·(1+3) + 160·10 = 1664 against 1500
	f("a hot prompt does not pile its decodes on one backend", 0,
		Candidate{NameHash: 1, Uncached: 1500},
		Candidate{NameHash: 2, Matched: 1484, Uncached: 16, InFlight: 10})
	// 16·(1+2.7) + 160·9 = 1499.2 against 1500
	f("… but up to there it does", 1,
		Candidate{NameHash: 1, Uncached: 1500},
		Candidate{NameHash: 2, Matched: 1484, Uncached: 16, InFlight: 9})
}

func TestPressureIsAveragedOverTime(t *testing.T) {
	var p Prefix
	start := time.Unix(1000, 0)
	busy := []Candidate{{NameHash: 1, Uncached: 1000, Pending: 10000}}
	idle := []Candidate{{NameHash: 1, Uncached: 1000}}
	p.Choose(&Request{Now: start}, idle)
	p.Choose(&Request{Now: start.Add(20 * time.Second)}, busy)
	if want := 10000 * (1 - 1/math.E); math.Abs(p.pressure-want) > 1 {
		t.Errorf("after one time constant: pressure %.0f, want %.0f", p.pressure, want)
	}
	if k := p.kappa(1000); math.Abs(k-0.5*p.pressure/1000) > 1e-9 {
		t.Errorf("kappa %.3f is not half of pressure over u", k)
	}
}

func TestTiesAgreeBetweenRoutersAndSpreadOverPrompts(t *testing.T) {
	var a, b Prefix
	forward := []Candidate{{NameHash: 11, Uncached: 500}, {NameHash: 22, Uncached: 500}, {NameHash: 33, Uncached: 500}}
	backward := slices.Clone(forward)
	slices.Reverse(backward)
	count := map[uint64]int{}
	for key := range uint64(3000) {
		r := &Request{Blocks: []prompt.Block{prompt.Block(key * 0x9e3779b97f4a7c15)}, Now: time.Unix(1000, 0), AnswerTokens: 250}
		x, y := forward[a.Choose(r, forward)], backward[b.Choose(r, backward)]
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

func TestLeastLoad(t *testing.T) {
	p, _ := New("least-load", Settings{}, rand.New(rand.NewPCG(1, 1)))
	if got := p.Choose(&Request{}, []Candidate{{Requests: 3}, {Requests: 1}, {Requests: 2}}); got != 1 {
		t.Errorf("got %d, want the one with the fewest in flight", got)
	}
	seen := map[int]int{}
	for range 600 {
		seen[p.Choose(&Request{}, []Candidate{{Requests: 2}, {Requests: 1}, {Requests: 1}, {Requests: 1}})]++
	}
	if seen[0] != 0 || seen[1] < 100 || seen[2] < 100 || seen[3] < 100 {
		t.Errorf("ties are not spread: %v", seen)
	}
}

func TestRoundRobinTakesTurnsWhileBackendsComeAndGo(t *testing.T) {
	p, _ := New("round-robin", Settings{}, nil)
	a, b, c := Candidate{NameHash: 10}, Candidate{NameHash: 20}, Candidate{NameHash: 30}
	f := func(want Candidate, candidates ...Candidate) {
		t.Helper()
		if got := candidates[p.Choose(&Request{}, candidates)]; got != want {
			t.Errorf("got %d, want %d", got.NameHash, want.NameHash)
		}
	}
	f(a, a, b, c)
	f(b, c, b, a)
	f(c, a, c)
	f(a, a, b)
	f(b, a, b, c)
}

func TestUnknownPolicyIsAnErrorThatNamesTheKnown(t *testing.T) {
	if _, err := New("best", Settings{}, nil); err == nil {
		t.Error("no error")
	}
	for _, name := range Names {
		if _, err := New(name, Settings{}, rand.New(rand.NewPCG(1, 1))); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
