package policy

import (
	"math"
	"math/rand/v2"
	"time"
)

// preble is Preble's E2 scheduling, as AIBrix has it. When more than ratio of the
// prompt matches somewhere, a backend with the longest match is chosen, the one
// with the fewest requests of the last three minutes. Otherwise the one with the
// lowest sum of the uncached tokens sent to it in the last three minutes and this
// prompt's. Whether any of that has ended does not count.
type preble struct {
	*prefixTable
	rng    *rand.Rand
	ratio  float64
	recent []window // by slot
}

func newPreble(o options) Policy {
	return &preble{prefixTable: newPrefixTable(o.maxBlocks, tailFirst), rng: o.rng, ratio: orDefault(o.MatchRatio, 0.5)}
}

func (p *preble) Choose(r *Request, candidates []Candidate) (index int) {
	matched := p.countPrefixMatches(r.Blocks, candidates)
	longest := 0
	for i := range candidates {
		longest = max(longest, matched[i])
		for len(p.recent) <= candidates[i].Slot {
			p.recent = append(p.recent, window{})
		}
		p.recent[candidates[i].Slot].advance(r.Now)
	}
	criterion := "uncached tokens of the last three minutes, plus this prompt's"
	if r.matchShare(longest) > p.ratio {
		criterion = "requests of the last three minutes, among the longest matches"
	}
	return r.pickLowest(criterion, len(candidates), p.rng, func(i int) float64 {
		w := &p.recent[candidates[i].Slot]
		if r.matchShare(longest) <= p.ratio {
			return w.tokens + r.uncachedTokens(matched[i])
		}
		if matched[i] == longest {
			return w.requests
		}
		return math.Inf(1)
	})
}

// RecordSent implements Recorder.
func (p *preble) RecordSent(r *Request, c *Candidate) {
	matched := p.countPrefixMatches(r.Blocks, []Candidate{*c})
	p.recent[c.Slot].addRequest(r.uncachedTokens(matched[0]))
	p.prefixTable.RecordSent(r, c)
}

// Forget implements Forgetter.
func (p *preble) Forget(slot int) {
	p.prefixTable.Forget(slot)
	if slot < len(p.recent) {
		p.recent[slot] = window{}
	}
}

const windowSeconds = int64(3 * time.Minute / time.Second)

// window counts what a backend was sent in the last three minutes, second by
// currentSecond.
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
		s := w.currentSecond()
		w.requests, w.tokens = w.requests-s.requests, w.tokens-s.tokens
		s.requests, s.tokens = 0, 0
	}
}

func (w *window) addRequest(tokens float64) {
	s := w.currentSecond()
	s.requests, s.tokens = s.requests+1, s.tokens+tokens
	w.requests, w.tokens = w.requests+1, w.tokens+tokens
}

func (w *window) currentSecond() *struct{ requests, tokens float64 } {
	return &w.seconds[uint64(w.now)%uint64(windowSeconds)]
}
