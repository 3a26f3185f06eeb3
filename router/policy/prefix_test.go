package policy

import (
	"cmp"
	"math"
	"slices"
	"testing"
	"time"

	"warmroute/prompt"
	"warmroute/router/step"
)

// testStep is how long the steps of the backends take in tests.
var testStep = step.Model{Base: 0.008, Rate: 8000, Sequence: 1e-3, Context: 24e-9}

// choose makes p choose among candidates that are plain where they say nothing else, and record
// the choice.
func choose(p *Prefix, r Request, candidates ...Candidate) int {
	for i := range candidates {
		c := &candidates[i]
		if c.NameHash == 0 {
			c.NameHash = uint64(i + 1)
		}
		if c.Weight == 0 {
			c.Weight = 1
		}
		if c.Slot == 0 {
			c.Slot = i
		}
		model := testStep
		if c.PrefillRate > 0 {
			model.Rate = c.PrefillRate
		}
		c.Engines, c.Step, c.PrefillSeconds = max(1, c.Engines), &model, c.UncachedTokens/model.Rate
	}
	if r.Now.IsZero() {
		r.Now = time.Unix(1000, 0)
	}
	r.MeanOutputTokens = cmp.Or(r.MeanOutputTokens, 250)
	index := p.Choose(&r, candidates)
	p.RecordSent(&r, &candidates[index])
	return index
}

func TestPrefixCost(t *testing.T) {
	f := func(name string, want int, r Request, candidates ...Candidate) {
		t.Helper()
		var p Prefix
		r.Blocks, r.MeanUncachedTokens = []prompt.Block{7}, 100
		if got := choose(&p, r, candidates...); got != want {
			t.Errorf("%s: got candidate %d, want %d", name, got, want)
		}
	}
	f("a hit beats a cold backend", 1, Request{},
		Candidate{UncachedTokens: 2000},
		Candidate{MatchedTokens: 1900, UncachedTokens: 100})
	f("a hit behind a long queue does not", 0, Request{},
		Candidate{UncachedTokens: 2000},
		Candidate{MatchedTokens: 1900, UncachedTokens: 100, QueuedSeconds: 1})
	// Eight requests wait, four for each: 0.25·(1+4) against 1 + 0.0125·(1+4)
	f("unless others wait: a prompt that is computed twice delays them", 1, Request{Waiting: 8},
		Candidate{UncachedTokens: 2000},
		Candidate{MatchedTokens: 1900, UncachedTokens: 100, QueuedSeconds: 1})
	// 16 tokens beside ten outputs: 0.002·(1 + 10/2) + 250·2·0.001·10/4
	beside10 := 8000 * (0.002*6 + 1.25)
	f("a hot prompt does not pile its outputs on one backend", 0, Request{},
		Candidate{UncachedTokens: beside10 - 1},
		Candidate{MatchedTokens: 1484, UncachedTokens: 16, InFlight: 10})
	f("… but up to there it does", 1, Request{},
		Candidate{UncachedTokens: beside10 + 1},
		Candidate{MatchedTokens: 1484, UncachedTokens: 16, InFlight: 10})
	f("a wait for room costs more than a queue", 0, Request{},
		Candidate{UncachedTokens: 500, QueuedSeconds: 0.25},
		Candidate{UncachedTokens: 500, KVWaitSeconds: 0.2501 / kvWaitCost})
	f("a long match is worth a short wait for room", 1, Request{},
		Candidate{UncachedTokens: 2000},
		Candidate{MatchedTokens: 1900, UncachedTokens: 100, KVWaitSeconds: 0.2 / kvWaitCost})
	// 100,000 tokens more beside it: 250·24e-9·100,000/4 = 0.15 s, and 0.05 s for what the 33,333 of its own do to two
	f("long contexts beside it slow its output down", 1, Request{PromptTokens: 33_333},
		Candidate{UncachedTokens: 100, InFlight: 2, ContextTokens: 100_000},
		Candidate{UncachedTokens: 1600})
	f("… by what they have", 0, Request{PromptTokens: 33_333},
		Candidate{UncachedTokens: 100, InFlight: 2, ContextTokens: 100_000},
		Candidate{UncachedTokens: 10_000})
	f("several engines share what it has", 1, Request{},
		Candidate{UncachedTokens: 500, InFlight: 3},
		Candidate{UncachedTokens: 500, InFlight: 4, Engines: 2})
}

// TestPrefixSharedDevice chooses among backends of which two share a GPU: what one has to do delays the other.
func TestPrefixSharedDevice(t *testing.T) {
	f := func(name string, want int, candidates ...Candidate) {
		t.Helper()
		var p Prefix
		if got := choose(&p, Request{}, candidates...); got != want {
			t.Errorf("%s: got candidate %d, want %d", name, got, want)
		}
	}
	f("an idle one beside a busy one is not idle", 2,
		Candidate{UncachedTokens: 500, Device: 1, QueuedSeconds: 1, InFlight: 4},
		Candidate{UncachedTokens: 500, Device: 1},
		Candidate{UncachedTokens: 500, Device: 2, QueuedSeconds: 0.1})
	f("the match decides between two that share one", 0,
		Candidate{MatchedTokens: 400, UncachedTokens: 100, Device: 1, QueuedSeconds: 0.05, InFlight: 4},
		Candidate{UncachedTokens: 500, Device: 1})
	f("but not between two that do not", 1,
		Candidate{MatchedTokens: 400, UncachedTokens: 100, QueuedSeconds: 0.05, InFlight: 4},
		Candidate{UncachedTokens: 500})
	f("an idle one has its share of the device at once", 1,
		Candidate{MatchedTokens: 400, UncachedTokens: 100, Device: 1, QueuedSeconds: 1, InFlight: 4},
		Candidate{UncachedTokens: 500, Device: 1})
}

func TestArrivals(t *testing.T) {
	var a arrivals
	start := time.Unix(1000, 0)
	all := []Candidate{{Slot: 0}, {Slot: 1}}
	for i := range 3000 { // ten a second, of which each takes 50 ms
		a.add(i%2, 0.05, start.Add(time.Duration(i)*100*time.Millisecond))
	}
	end := start.Add(300 * time.Second)
	mean := func(at time.Time, candidates []Candidate) arrivalRate {
		rates := a.ratesAt(at)
		return rates.meanRate(candidates)
	}
	if m := mean(end, all); math.Abs(m.requests-5) > 0.2 || math.Abs(m.prefill-0.25) > 0.01 {
		t.Errorf("%.2f requests a second and a utilization of %.3f for each backend, want 5 and 0.25", m.requests, m.prefill)
	}
	if m := mean(end.Add(arrivalWindow*time.Second), all); math.Abs(m.requests-5/math.E) > 0.1 {
		t.Errorf("%.2f requests a second after a pause, want %.2f", m.requests, 5/math.E)
	}
	a.forget(1)
	if m := mean(end, all[1:]); m.requests != 0 {
		t.Errorf("%.2f requests a second for a backend that was forgotten", m.requests)
	}
}

// TestPrefixInterruptedOutput chooses between an engine that prefills half of the time and holds a part of the prompt, and one that
// does neither.
func TestPrefixInterruptedOutput(t *testing.T) {
	f := func(name string, want int, prefilled, matched float64, r Request) {
		t.Helper()
		var p Prefix
		r.Now = time.Unix(1000, 0)
		p.arrivals.add(0, prefilled, r.Now.Add(-time.Millisecond))
		got := choose(&p, r, Candidate{MatchedTokens: matched, UncachedTokens: 20_000 - matched}, Candidate{UncachedTokens: 20_000})
		if got != want {
			t.Errorf("%s: got candidate %d, want %d", name, got, want)
		}
	}
	busy := arrivalWindow * (0.5 + quietShare)
	// Interrupted for as long as it takes alone.
	output := 8000 * 250 * testStep.Base
	f("an output is not sent where it is interrupted", 1, busy, 0.7*output, Request{})
	f("… for a longer match it is", 0, busy, 1.2*output, Request{})
	f("one turn of many weighs less", 0, busy, 0.7*output, Request{Turn: prompt.TurnFirst})
	f("a later turn stays", 0, busy, 0.7*output, Request{Turn: prompt.TurnLater})
	f("for a long output the recent share counts less", 0, busy, 10*output, Request{MeanOutputTokens: 20 * 250})
	f("a little prefill costs nothing", 0, arrivalWindow*quietShare, 1, Request{})

	var p Prefix
	p.arrivals.add(0, busy, time.Unix(1000, 0))
	shared := []Candidate{{Device: 1, MatchedTokens: 1, UncachedTokens: 19_999}, {Device: 1, UncachedTokens: 20_000}}
	if got := choose(&p, Request{}, shared...); got != 0 {
		t.Errorf("of two engines that share a GPU, whose prefill interrupts the outputs of both, candidate %d was chosen, want 0", got)
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

func TestConversationBreaksTiesOnly(t *testing.T) {
	var a, b Prefix
	equal := []Candidate{{NameHash: 11, UncachedTokens: 500}, {NameHash: 22, UncachedTokens: 500}, {NameHash: 33, UncachedTokens: 500}}
	reversed := slices.Clone(equal)
	slices.Reverse(reversed)
	cheaper := slices.Clone(equal)
	cheaper[1].UncachedTokens--
	count := map[uint64]int{}
	for key := range uint64(3000) {
		conversation := (key + 1) * 0x9e3779b97f4a7c15
		now := time.Unix(int64(key)*60, 0)
		x := equal[choose(&a, Request{Now: now, Conversation: conversation, Blocks: []prompt.Block{7}}, equal...)]
		y := reversed[choose(&b, Request{Now: now, Conversation: conversation, Blocks: []prompt.Block{8}}, reversed...)]
		if x.NameHash != y.NameHash {
			t.Fatalf("conversation %d: two routers disagree on prompts that differ", key)
		}
		if got := choose(&a, Request{Now: now, Conversation: conversation, Blocks: []prompt.Block{7}}, cheaper...); got != 1 {
			t.Fatalf("conversation %d: sent to candidate %d, though another is a token cheaper", key, got)
		}
		count[x.NameHash]++
	}
	for name, n := range count {
		if n < 800 || n > 1200 {
			t.Errorf("backend %d got %d of 3000 conversations with the same prompt", name, n)
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
	f("who has it first", 1, Candidate{UncachedTokens: 500, AdapterSeconds: 0.25}, Candidate{UncachedTokens: 500})
	// Beside n outputs: 0.002·(1 + n/2) + 250·2·0.001·n/4
	f("… while it is not too busy", 1, Candidate{UncachedTokens: 16, AdapterSeconds: 0.25}, Candidate{UncachedTokens: 16, InFlight: 1})
	f("… and no longer", 0, Candidate{UncachedTokens: 16, AdapterSeconds: 0.25}, Candidate{UncachedTokens: 16, InFlight: 3})
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
	f("a queue on the faster", 0, Candidate{UncachedTokens: 1000, PrefillRate: 4000}, Candidate{UncachedTokens: 1000, QueuedSeconds: 0.25})
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
	// It divides the cost and is no share: an idle fleet never uses one with a tenth.
	for queued, want := range map[float64]int{0: 0, 0.3: 0, 2: 1} {
		var p Prefix
		if i := choose(&p, Request{}, Candidate{UncachedTokens: 500, QueuedSeconds: queued},
			Candidate{UncachedTokens: 500, Weight: 0.1}); i != want {
			t.Errorf("behind %v s the request goes to backend %d, want %d", queued, i, want)
		}
	}
}

func TestPrefixTarget(t *testing.T) {
	choices := func(name string, due float64, want int, candidates ...Candidate) {
		t.Helper()
		var p Prefix
		if got := choose(&p, Request{DueSeconds: due}, candidates...); got != want {
			t.Errorf("%s, due in %v s: got candidate %d, want %d", name, due, got, want)
		}
	}
	// One costs 1 s and has the first token after 1 s, the other costs 1.25 s and has it after 0.5 s.
	queued, uncached := Candidate{QueuedSeconds: 0.9, UncachedTokens: 800}, Candidate{UncachedTokens: 4000, InFlight: 2}
	for due, want := range map[float64]int{0: 0, 0.001: 1, 0.4: 1, 0.7: 1, 0.99: 1, 1: 0, 2: 0} {
		choices("a late backend costs more", due, want, queued, uncached)
	}
	choices("both are in time: the cheapest", 60, 1, Candidate{QueuedSeconds: 0.0125, UncachedTokens: 500}, Candidate{UncachedTokens: 500})
}
