package policy

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"warmroute/router/prompt"
)

// crowd draws requests and candidates as they come: prompts that share
// beginnings, or are empty, backends that come, go and are left out, up to 130
// of them, and numbers of all sizes.
type crowd struct {
	*rand.Rand
	now time.Time
}

func (d *crowd) request() *Request {
	d.now = d.now.Add(time.Duration(d.IntN(5000)) * time.Millisecond)
	r := &Request{Now: d.now, BlockTokens: 64, MeanAnswerTokens: 250, MeanUncachedTokens: 500}
	topic, n := uint64(d.IntN(20)), max(0, d.IntN(60)-5)
	for i := range n {
		if d.IntN(40) == 0 {
			topic = d.Uint64()
		}
		r.Blocks = append(r.Blocks, prompt.Block(rendezvous(topic, uint64(i))))
	}
	r.PromptTokens = float64(64*n + d.IntN(64))
	if d.IntN(3) == 0 {
		r.PromptKey, r.Session = rendezvous(topic, 1), uint64(d.IntN(50))
	}
	return r
}

func (d *crowd) candidates() []Candidate {
	fleet := 1 << d.IntN(8)
	var out []Candidate
	for slot := range fleet + fleet/60 {
		if d.IntN(4) == 0 && len(out) > 0 {
			continue
		}
		out = append(out, Candidate{
			Slot: slot, NameHash: rendezvous(uint64(slot), 9), Weight: 1, PrefillRate: 8000 * d.Float64(),
			MatchedTokens: float64(64 * d.IntN(50)), UncachedTokens: float64(16 + d.IntN(5000)), QueuedTokens: float64(d.IntN(50_000)),
			InFlight: float64(d.IntN(100)), ContextTokens: float64(d.IntN(1_000_000)),
			Requests: float64(d.IntN(100)), UnstartedTokens: float64(d.IntN(400_000)),
			Running: float64(d.IntN(100)), Waiting: float64(d.IntN(10)), KVUsage: d.Float64(), CacheTokens: float64(64 * d.IntN(2) * (1 + d.IntN(100))),
		})
	}
	d.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

func TestEveryPolicyChoosesOneOfThoseThereAreAndTheSameForASeed(t *testing.T) {
	for _, name := range Names() {
		run := func(seed uint64) (chosen []int) {
			p := mustNew(t, name, Settings{}, rand.New(rand.NewPCG(seed, 0)))
			draw := &crowd{rand.New(rand.NewPCG(5, 5)), dawn}
			for range 2000 {
				r, candidates := draw.request(), draw.candidates()
				kept, offered := slices.Clone(r.Blocks), slices.Clone(candidates)
				i := p.Choose(r, candidates)
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

func TestEveryPolicyUsesTheGatesThatItSaysAndNoOthers(t *testing.T) {
	gates := map[string]Settings{
		"match_ratio": {MatchRatio: 0.99}, "imbalance_abs": {ImbalanceAbs: 0.5},
		"imbalance_ratio": {ImbalanceRatio: 1000}, "load_factor": {LoadFactor: 0.01},
	}
	run := func(name string, s Settings) (chosen []int) {
		p := mustNew(t, name, s, rand.New(rand.NewPCG(1, 0)))
		draw := &crowd{rand.New(rand.NewPCG(6, 6)), dawn}
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
			chosen = append(chosen, p.Choose(r, candidates))
		}
		return chosen
	}
	for _, definition := range registry {
		name := definition.Name
		plain := run(name, Settings{})
		for gate, s := range gates {
			moved := !slices.Equal(plain, run(name, s))
			if says := definition.Reads("routing." + gate); moved != says {
				t.Errorf("%s: %s makes a difference: %v; Reads says %v", name, gate, moved, says)
			}
		}
	}
}

// The bound is in bytes, so the bytes are looked at: the heap grown by a million
// different blocks where no more than 16,384 may be remembered.
func TestEveryPolicyIsBoundedInMemory(t *testing.T) {
	const most = 1 << 14
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	blocks := make([]prompt.Block, 250)
	for _, definition := range registry {
		name, before := definition.Name, heap()
		p := definition.build(options{rng: rand.New(rand.NewPCG(1, 1)), maxBlocks: most})
		candidates := idle(8)
		next := uint64(0)
		for range 1_000_000 / len(blocks) {
			for i := range blocks {
				next++
				blocks[i] = prompt.Block(rendezvous(next, 3))
			}
			r := Request{Now: dawn.Add(time.Duration(next)), Blocks: blocks, BlockTokens: 64, PromptTokens: 16_000, PromptKey: next, Session: next}
			p.Choose(&r, candidates)
		}
		// 160 bytes a block, a map that may be half empty, and what rings and windows have.
		if grown := heap() - before; grown > 2*160*most+1<<20 {
			t.Errorf("%s: %d bytes for at most %d blocks", name, grown, most)
		}
		runtime.KeepAlive(p)
	}
}

func TestABackendsShareShrinksAsOthersCome(t *testing.T) {
	l := newLedger(100, losesTails)
	blocks := make([]prompt.Block, 200)
	for i := range blocks {
		blocks[i] = prompt.Block(i + 1)
	}
	f := func(slot int, want ...int) {
		t.Helper()
		l.add(slot, blocks, dawn)
		for slot, n := range want {
			if got := l.len(slot); got != n {
				t.Errorf("backend %d has %d blocks, want %d", slot, got, n)
			}
		}
		// The heads are what is left, and the sets say the same.
		for i, depth := range l.leading(blocks, idle(len(want))) {
			if depth != want[i] {
				t.Errorf("backend %d leads with %d blocks, want %d", i, depth, want[i])
			}
		}
	}
	f(0, 100)
	f(1, 50, 50)
	f(3, 33, 33, 0, 33)
	l.limit(1, 10)
	f(3, 33, 10, 0, 33)
}

func TestOwnersOfMoreThan64Backends(t *testing.T) {
	var o owners
	for i, b := range letters("abc") {
		o.note(b, 129)
		if i != 1 {
			o.note(b, 3)
		}
	}
	candidates := idle(130)
	some := []Candidate{candidates[129], candidates[3], candidates[70]}
	if got := o.leading(letters("abcd"), some); !slices.Equal(got, []int{3, 1, 0}) {
		t.Errorf("leading: %v, want 3, 1 and 0", got)
	}
	if got := o.scattered(letters("abcd"), some); !slices.Equal(got, []int{3, 2, 0}) {
		t.Errorf("scattered: %v, want 3, 2 and 0", got)
	}
	if got := o.scattered(letters("xabc"), some); !slices.Equal(got, []int{0, 0, 0}) {
		t.Errorf("scattered after a block of nobody's: %v", got)
	}
	o.forget(letters("a")[0], 129)
	if got := o.leading(letters("abcd"), some); !slices.Equal(got, []int{0, 1, 0}) {
		t.Errorf("beheaded: %v, want 0, 1 and 0", got)
	}
	o.drop(letters("a")[0])
	if got := o.leading(letters("abcd"), some); !slices.Equal(got, []int{0, 0, 0}) {
		t.Errorf("dropped: %v", got)
	}
}

func TestARingForgetsBackendsThatNeverComeBack(t *testing.T) {
	p := newCHWBL(options{}).(*chwbl)
	candidates := idle(mostMembers)
	p.Choose(&Request{PromptKey: 1}, candidates)
	p.Choose(&Request{PromptKey: 1}, candidates[:1])
	if n := len(p.ring.members); n != mostMembers {
		t.Fatalf("the ring remembers %d backends of %d that may come back", n, mostMembers)
	}
	p.Choose(&Request{PromptKey: 1}, []Candidate{{NameHash: 4711}})
	if members, points := len(p.ring.members), len(p.ring.points); members != 1 || points != virtualNodes {
		t.Errorf("after one more it remembers %d, with %d points", members, points)
	}
}

func BenchmarkChoose(b *testing.B) {
	for _, name := range Names() {
		for _, n := range []int{24, 240, 2000} {
			b.Run(fmt.Sprintf("%s/blocks=%d", name, n), func(b *testing.B) {
				p := mustNew(b, name, Settings{}, rand.New(rand.NewPCG(1, 1)))
				blocks := make([]prompt.Block, n)
				for i := range blocks {
					blocks[i] = prompt.Block(rendezvous(uint64(i), 2))
				}
				r := Request{Now: dawn, Blocks: blocks, BlockTokens: 64, PromptTokens: float64(64 * n), PromptKey: 1, Session: 2}
				candidates := idle(8)
				b.ReportAllocs()
				for b.Loop() {
					p.Choose(&r, candidates)
				}
			})
		}
	}
}
