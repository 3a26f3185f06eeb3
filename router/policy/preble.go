package policy

import (
	"math"
	"math/rand/v2"
	"time"
)

// preble is Preble's E2 scheduling, as AIBrix has it. When more than half of the
// prompt is held somewhere, the backend that holds the most gets it, with the
// fewest requests of the last three minutes among equals. Otherwise the lowest
// sum of the uncached tokens that were placed there in the last three minutes
// and this prompt's. How long anything takes, or whether it has ended, does not
// count.
type preble struct {
	rng    *rand.Rand
	ratio  float64
	tree   *ledger
	recent []window // by slot
}

func newPreble(o options) Policy {
	return &preble{rng: o.rng, ratio: or(o.MatchRatio, 0.5), tree: newLedger(o.maxBlocks, losesTails)}
}

func (p *preble) Choose(r *Request, candidates []Candidate) int {
	depths := p.tree.leading(r.Blocks, candidates)
	longest := 0
	for i := range candidates {
		longest = max(longest, depths[i])
		for len(p.recent) <= candidates[i].Slot {
			p.recent = append(p.recent, window{})
		}
		p.recent[candidates[i].Slot].advance(r.Now)
	}
	what := "uncached tokens of the last three minutes, with this prompt's"
	if r.share(longest) > p.ratio {
		what = "requests of the last three minutes, among those that were sent the most of the prompt"
	}
	chosen := r.lowest(what, len(candidates), p.rng, func(i int) float64 {
		w := &p.recent[candidates[i].Slot]
		if r.share(longest) <= p.ratio {
			return w.tokens + r.uncached(depths[i])
		}
		if depths[i] == longest {
			return w.requests
		}
		return math.Inf(1)
	})
	slot := candidates[chosen].Slot
	if r.Trace != nil {
		return chosen
	}
	p.recent[slot].add(r.uncached(depths[chosen]))
	p.tree.add(slot, r.Blocks, r.Now)
	return chosen
}

// Forget implements Forgetful.
func (p *preble) Forget(slot int) {
	p.tree.Forget(slot)
	if slot < len(p.recent) {
		p.recent[slot] = window{}
	}
}

// windowSeconds is how long a window remembers.
const windowSeconds = int64(3 * time.Minute / time.Second)

// window counts what a backend was sent in the last three minutes, to a second:
// its memory does not grow with the traffic.
type window struct {
	requests, tokens float64 // in all
	seconds          [windowSeconds]struct{ requests, tokens float64 }
	now              int64
}

func (w *window) advance(now time.Time) {
	to := now.Unix()
	if to-w.now >= windowSeconds {
		*w = window{now: to}
	}
	for w.now < to {
		w.now++
		s := w.second()
		w.requests, w.tokens = w.requests-s.requests, w.tokens-s.tokens
		s.requests, s.tokens = 0, 0
	}
}

func (w *window) add(tokens float64) {
	s := w.second()
	s.requests, s.tokens = s.requests+1, s.tokens+tokens
	w.requests, w.tokens = w.requests+1, w.tokens+tokens
}

func (w *window) second() *struct{ requests, tokens float64 } {
	return &w.seconds[uint64(w.now)%uint64(windowSeconds)]
}
