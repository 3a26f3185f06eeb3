package policies

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"warmroute/prompt"
	"warmroute/router/policy"
	"warmroute/router/step"
)

// mustNew makes the policy of that name.
func mustNew(t testing.TB, name string, s policy.Settings, rng *rand.Rand) policy.Policy {
	t.Helper()
	d, err := All().Lookup(name)
	if err != nil {
		t.Fatal(err)
	}
	return d.New(policy.Options{Settings: s, Rand: rng})
}

var epoch = time.Unix(1_000_000, 0)

// blocksOf returns one chained block for each byte of s: "abc" and "abd" share two.
func blocksOf(s string) []prompt.Block {
	var out []prompt.Block
	h := uint64(14695981039346656037)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
		out = append(out, prompt.Block(h))
	}
	return out
}

// requestFor returns a request with the prompt s, whose blocks have 64 tokens.
func requestFor(s string) policy.Request {
	return policy.Request{Now: epoch, Blocks: blocksOf(s), BlockTokens: 64, PromptTokens: float64(64 * len(s))}
}

// fleet sets the slots, names, steps and default rates of candidates.
func fleet(candidates ...policy.Candidate) []policy.Candidate {
	steps := step.Default()
	for i := range candidates {
		candidates[i].Engines, candidates[i].Step = 1, &steps
		candidates[i].Slot, candidates[i].NameHash = i, policy.RendezvousRank(uint64(i+1), 0)
		if candidates[i].PrefillRate == 0 {
			candidates[i].PrefillRate = 8000
		}
	}
	return candidates
}

func idle(n int) []policy.Candidate { return fleet(make([]policy.Candidate, n)...) }

func busy(requests ...float64) []policy.Candidate {
	out := make([]policy.Candidate, len(requests))
	for i := range out {
		out[i].Requests, out[i].InFlight = requests[i], requests[i]
	}
	return fleet(out...)
}

// chooseAndRecord lets a policy choose, and record that the request is sent there.
func chooseAndRecord(p policy.Policy, r *policy.Request, candidates []policy.Candidate) (index int) {
	index = p.Choose(r, candidates)
	if t, ok := p.(tester); ok {
		p = t.Policy
	}
	if p, ok := p.(policy.Recorder); ok {
		p.RecordSent(r, &candidates[index])
	}
	return index
}

// tester is a policy under test.
type tester struct {
	*testing.T
	policy.Policy
}

func newTester(t *testing.T, name string, s policy.Settings) tester {
	t.Helper()
	p := mustNew(t, name, s, rand.New(rand.NewPCG(1, 1)))
	return tester{t, p}
}

// send makes the policy choose the backend of that slot, the only candidate.
func (p tester) send(r policy.Request, slot int) {
	chooseAndRecord(p, &r, idle(slot + 1)[slot:])
}

// expect fails unless r goes to the slots want and to no others, each of them at
// least once in a hundred times. Every choice is recorded by the policy.
func (p tester) expect(why string, r policy.Request, candidates []policy.Candidate, want ...int) {
	p.Helper()
	seen := map[int]bool{}
	for range 100 * (len(want) - 1) {
		seen[candidates[chooseAndRecord(p, &r, candidates)].Slot] = true
	}
	seen[candidates[chooseAndRecord(p, &r, candidates)].Slot] = true
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

// generator draws requests whose prompts share beginnings or are empty, and up to
// 130 candidates with numbers of all sizes.
type generator struct {
	*rand.Rand
	now time.Time
}

func (d *generator) request() *policy.Request {
	d.now = d.now.Add(time.Duration(d.IntN(5000)) * time.Millisecond)
	r := &policy.Request{Now: d.now, BlockTokens: 64, MeanOutputTokens: 250, MeanUncachedTokens: 500}
	topic, n := uint64(d.IntN(20)), max(0, d.IntN(60)-5)
	for i := range n {
		if d.IntN(40) == 0 {
			topic = d.Uint64()
		}
		r.Blocks = append(r.Blocks, prompt.Block(policy.RendezvousRank(topic, uint64(i))))
	}
	r.PromptTokens, r.Client = float64(64*n+d.IntN(64)), policy.RendezvousRank(topic, 2)
	if d.IntN(3) == 0 {
		r.PromptKey, r.Conversation = policy.RendezvousRank(topic, 1), uint64(d.IntN(50))
	}
	return r
}

func (d *generator) candidates() []policy.Candidate {
	fleet := 1 << d.IntN(8)
	var out []policy.Candidate
	steps := step.Default()
	for slot := range fleet + fleet/60 {
		if d.IntN(4) == 0 && len(out) > 0 {
			continue
		}
		out = append(out, policy.Candidate{
			Slot: slot, NameHash: policy.RendezvousRank(uint64(slot), 9), Weight: 1, PrefillRate: 8000 * d.Float64(), Engines: 1, Step: &steps,
			MatchedTokens: float64(64 * d.IntN(50)), UncachedTokens: float64(16 + d.IntN(5000)), QueuedSeconds: float64(d.IntN(50_000)),
			InFlight: float64(d.IntN(100)), KVTokens: float64(d.IntN(1_000_000)),
			Requests: float64(d.IntN(100)), UnstartedTokens: float64(d.IntN(400_000)),
			Waiting: float64(d.IntN(10)), KVUsage: d.Float64(), CacheTokens: float64(64 * d.IntN(2) * (1 + d.IntN(100))),
		})
	}
	d.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

// scenario makes candidates and requests from a seed, so that two policies can be
// shown the same.
func scenario(seed uint64) func(step int) (*policy.Request, []policy.Candidate) {
	rng, steps := rand.New(rand.NewPCG(seed, 1)), step.Default()
	return func(step int) (*policy.Request, []policy.Candidate) {
		r := &policy.Request{
			Now: time.Unix(1000, 0).Add(time.Duration(step) * 5 * time.Second), BlockTokens: 64,
			PromptKey: uint64(rng.IntN(5)), MeanOutputTokens: 250, MeanUncachedTokens: 500,
		}
		for i := range 1 + rng.IntN(6) {
			r.Blocks = append(r.Blocks, prompt.Block(100*rng.IntN(3)+i+1))
		}
		r.PromptTokens = float64(len(r.Blocks)) * 64
		var all []policy.Candidate
		for slot := range 5 {
			if rng.IntN(6) > 0 || slot == 0 {
				n := float64(rng.IntN(20))
				all = append(all, policy.Candidate{
					Slot: slot, NameHash: uint64(slot*7919 + 13), Weight: 1, UncachedTokens: 64 + float64(rng.IntN(500)),
					QueuedSeconds: float64(rng.IntN(9000)),
					InFlight:      n, Requests: n, UnstartedTokens: 100 * n, PrefillRate: 8000, Engines: 1, Step: &steps, Waiting: float64(rng.IntN(4)),
					KVUsage: rng.Float64(),
				})
			}
		}
		return r, all
	}
}

func TestChooseIsValidAndDeterministic(t *testing.T) {
	for _, name := range All().Names() {
		run := func(seed uint64) (chosen []int) {
			p := mustNew(t, name, policy.Settings{}, rand.New(rand.NewPCG(seed, 0)))
			draw := &generator{rand.New(rand.NewPCG(5, 5)), epoch}
			for range 2000 {
				r, candidates := draw.request(), draw.candidates()
				kept, offered := slices.Clone(r.Blocks), slices.Clone(candidates)
				i := chooseAndRecord(p, r, candidates)
				if i < 0 || i >= len(candidates) {
					t.Fatalf("%s chose %d of %d candidates", name, i, len(candidates))
				}
				if !slices.Equal(kept, r.Blocks) || !slices.Equal(offered, candidates) {
					t.Fatalf("%s changed what it was given", name)
				}
				chosen = append(chosen, i)
			}
			return chosen
		}
		if !slices.Equal(run(1), run(1)) {
			t.Errorf("%s: two runs of the same seed differ", name)
		}
	}
}

func TestDefinitionSettingsHaveEffect(t *testing.T) {
	evicting := policy.Settings{EvictionThreshold: 40_000}
	without := map[string]policy.Settings{"eviction_target": evicting, "eviction_interval": evicting}
	gates := map[string]policy.Settings{
		"match_ratio": {MatchRatio: 0.99}, "match_tokens": {MatchTokens: 1000}, "imbalance_abs": {ImbalanceAbs: 0.5},
		"client_affinity": {ClientAffinity: true}, "imbalance_ratio": {ImbalanceRatio: 1000}, "load_factor": {LoadFactor: 0.01},
		"eviction_threshold": evicting, "eviction_target": {EvictionThreshold: 40_000, EvictionTarget: 1},
		"eviction_interval": {EvictionThreshold: 40_000, EvictionInterval: time.Second},
	}
	run := func(name string, s policy.Settings) (chosen []int) {
		p := mustNew(t, name, s, rand.New(rand.NewPCG(1, 0)))
		draw := &generator{rand.New(rand.NewPCG(6, 6)), epoch}
		for range 1000 {
			r := draw.request()
			loads, scale := make([]float64, 8), []int{4, 30, 300}[draw.IntN(3)]
			for i := range loads {
				loads[i] = float64(draw.IntN(scale))
			}
			candidates := busy(loads...)
			for i := range candidates {
				candidates[i].MatchedTokens = r.PromptTokens * draw.Float64()
				candidates[i].UncachedTokens = r.PromptTokens - candidates[i].MatchedTokens
			}
			chosen = append(chosen, chooseAndRecord(p, r, candidates))
		}
		return chosen
	}
	for _, definition := range All().All() {
		name := definition.Name
		for gate, s := range gates {
			moved := !slices.Equal(run(name, without[gate]), run(name, s))
			if says := definition.Reads("routing." + gate); moved != says {
				t.Errorf("%s: %s makes a difference: %v; Reads says %v", name, gate, moved, says)
			}
		}
	}
}

// A policy that did not forget would always send the prompt to the slot's next
// backend.
func TestForgetAllPolicies(t *testing.T) {
	r := &policy.Request{Now: time.Unix(1000, 0), Blocks: []prompt.Block{1, 2, 3}, BlockTokens: 64, PromptTokens: 192, MeanOutputTokens: 100}
	forgetters, steps := 0, step.Default()
	for _, name := range All().Names() {
		other := false
		for seed := range uint64(50) {
			p := mustNew(t, name, policy.Settings{}, rand.New(rand.NewPCG(seed, 2)))
			forgetter, ok := p.(policy.Forgetter)
			if !ok {
				other = true
				break
			}
			candidates := []policy.Candidate{{Slot: 0, NameHash: 1, Weight: 1, PrefillRate: 8000, Engines: 1, Step: &steps},
				{Slot: 1, NameHash: 2, Weight: 1, PrefillRate: 8000, Engines: 1, Step: &steps}}
			for range 5 {
				chooseAndRecord(p, r, candidates[:1])
			}
			forgetter.ForgetBackend(0)
			other = other || chooseAndRecord(p, r, candidates) == 1
			forgetters++
		}
		if !other {
			t.Errorf("%s matches the next backend of a slot by the blocks of its first", name)
		}
	}
	if forgetters != 12*50 {
		t.Errorf("%d policies keep state by slot, want 12", forgetters/50)
	}
}

// A million different blocks may not grow the heap by more than the 16,384 blocks
// that may be remembered.
func TestMemoryBound(t *testing.T) {
	const most = 1 << 14
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	blocks := make([]prompt.Block, 250)
	for _, definition := range definitions(most).All() {
		name, before := definition.Name, heap()
		p := definition.New(policy.Options{Rand: rand.New(rand.NewPCG(1, 1))})
		candidates := idle(8)
		next := uint64(0)
		for range 1_000_000 / len(blocks) {
			for i := range blocks {
				next++
				blocks[i] = prompt.Block(policy.RendezvousRank(next, 3))
			}
			r := policy.Request{Now: epoch.Add(time.Duration(next)), Blocks: blocks, BlockTokens: 64, PromptTokens: 16_000, PromptKey: next,
				Conversation: next}
			chooseAndRecord(p, &r, candidates)
		}
		// 160 bytes a block, a map that may be half empty, rings and windows.
		if grown := heap() - before; grown > 2*160*most+1<<20 {
			t.Errorf("%s: %d bytes for at most %d blocks", name, grown, most)
		}
		runtime.KeepAlive(p)
	}
}

// Of two equal policies, one makes dry runs before each choice, also of a later time and with a backend
// more: that of the present predicts the choice, one that is repeated chooses the same, and both policies
// choose the same to the end.
func TestTraceIsADryRun(t *testing.T) {
	for _, name := range All().Names() {
		t.Run(name, func(t *testing.T) {
			asked, plain := rand.NewPCG(3, 4), rand.NewPCG(3, 4)
			one := mustNew(t, name, policy.Settings{}, rand.New(asked))
			other := mustNew(t, name, policy.Settings{}, rand.New(plain))
			first, second := scenario(9), scenario(9)
			for step := range 300 {
				r, all := first(step)
				dryRun := func(delay time.Duration, candidates []policy.Candidate) (index int, trace policy.Trace) {
					chance := *asked
					request := *r
					request.Now, request.Trace = r.Now.Add(delay), &trace
					index = one.Choose(&request, candidates)
					*asked = chance
					return index, trace
				}
				more := append(slices.Clone(all), policy.Candidate{Slot: 70, NameHash: 70, Weight: 1, PrefillRate: 8000, Engines: 1, Step: all[0].Step})
				later := time.Duration(1+step) * time.Minute
				once, _ := dryRun(later, more)
				if again, _ := dryRun(later, more); again != once {
					t.Fatalf("step %d: a dry run chose %d, and then %d", step, once, again)
				}
				dry, trace := dryRun(0, all)
				if trace.Criterion == "" || trace.Scores != nil && len(trace.Scores) != len(all) {
					t.Fatalf("step %d: trace %+v for %d candidates", step, trace, len(all))
				}
				chosen := chooseAndRecord(one, r, all)
				r, all = second(step)
				if want := chooseAndRecord(other, r, all); chosen != want || dry != want {
					t.Fatalf("step %d: the dry run chose %d, then Choose %d; without a dry run %d", step, dry, chosen, want)
				}
			}
		})
	}
}

// Where nothing but the scores decides, the choice has the best score.
func TestTraceScores(t *testing.T) {
	for _, name := range []string{"prefix", "least-load", "weighted", "dynamo", "lmetric", "hashtrie", "llmd-guide", "cache-threshold",
		"cache-threshold-old"} {
		p := mustNew(t, name, policy.Settings{}, rand.New(rand.NewPCG(1, 1)))
		next := scenario(2)
		for step := range 200 {
			r, all := next(step)
			var trace policy.Trace
			r.Trace = &trace
			chosen := p.Choose(r, all)
			best := slices.Min(trace.Scores)
			if trace.HighestWins {
				best = slices.Max(trace.Scores)
			}
			if trace.Scores[chosen] != best {
				t.Fatalf("%s: chose %d by %+v", name, chosen, trace)
			}
			for i, terms := range trace.Terms {
				sum := 0.0
				for _, term := range terms {
					sum += term.Seconds
				}
				if sum/all[i].Weight != trace.Scores[i] {
					t.Fatalf("candidate %d: the terms %v add up to %v, not to the cost %v", i, terms, sum, trace.Scores[i])
				}
			}
			r.Trace = nil
			chooseAndRecord(p, r, all)
		}
	}
}

func BenchmarkChoose(b *testing.B) {
	for _, name := range All().Names() {
		for _, n := range []int{24, 240, 2000} {
			b.Run(fmt.Sprintf("%s/blocks=%d", name, n), func(b *testing.B) {
				p := mustNew(b, name, policy.Settings{}, rand.New(rand.NewPCG(1, 1)))
				blocks := make([]prompt.Block, n)
				for i := range blocks {
					blocks[i] = prompt.Block(policy.RendezvousRank(uint64(i), 2))
				}
				r := policy.Request{Now: epoch, Blocks: blocks, BlockTokens: 64, PromptTokens: float64(64 * n), PromptKey: 1, Conversation: 2}
				candidates := idle(8)
				b.ReportAllocs()
				for b.Loop() {
					chooseAndRecord(p, &r, candidates)
				}
			})
		}
	}
}
