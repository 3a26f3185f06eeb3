package policies

import (
	"math"
	"math/rand/v2"
	"time"

	"warmroute/router/policy"
)

// preble is Preble's E2 scheduling, as AIBrix has it. When a match exceeds the
// threshold, a backend with the longest match is chosen, the one
// with the fewest requests of the last three minutes. Otherwise the one with the
// lowest sum of the uncached tokens sent to it in the last three minutes and this
// prompt's. Whether any of that has ended does not count.
type preble struct {
	*prefixTable
	rng    *rand.Rand
	match  matchThreshold
	recent []window // by slot
}

func newPreble(o options) policy.Policy {
	return &preble{prefixTable: newPrefixTable(o.maxBlocks, tailFirst), rng: o.Rand, match: newMatchThreshold(o.Settings, 0.5)}
}

func (p *preble) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	matched := p.countPrefixMatches(r.Blocks, candidates)
	longest := 0
	for i := range candidates {
		longest = max(longest, matched[i])
	}
	criterion := "uncached tokens of the last three minutes, plus this prompt's"
	isMatch := p.match.isExceeded(r, longest)
	if isMatch {
		criterion = "requests of the last three minutes, among the longest matches"
	}
	return pickLowest(r, criterion, len(candidates), p.rng, func(i int) float64 {
		requests, tokens := p.countRecent(candidates[i].Slot, r.Now)
		if !isMatch {
			return tokens + uncachedTokens(r, matched[i])
		}
		if matched[i] == longest {
			return requests
		}
		return math.Inf(1)
	})
}

// RecordSent implements Recorder.
func (p *preble) RecordSent(r *policy.Request, c *policy.Candidate) {
	matched := p.countPrefixMatches(r.Blocks, []policy.Candidate{*c})
	for len(p.recent) <= c.Slot {
		p.recent = append(p.recent, window{})
	}
	w := &p.recent[c.Slot]
	w.advance(r.Now)
	w.addRequest(uncachedTokens(r, matched[0]))
	p.prefixTable.RecordSent(r, c)
}

// countRecent returns what a backend was sent in the three minutes before now.
func (p *preble) countRecent(slot int, now time.Time) (requests, tokens float64) {
	if slot >= len(p.recent) {
		return 0, 0
	}
	return p.recent[slot].countAt(now)
}

// ForgetBackend implements Forgetter.
func (p *preble) ForgetBackend(slot int) {
	p.prefixTable.ForgetBackend(slot)
	if slot < len(p.recent) {
		p.recent[slot] = window{}
	}
}

const windowSeconds = int64(3 * time.Minute / time.Second)

// window counts what a backend was sent in the three minutes before now, second by second.
type window struct {
	sum     sentCount
	seconds [windowSeconds]sentCount
	now     int64
}

// sentCount counts what was sent.
type sentCount struct{ requests, tokens float64 }

// advance moves the window to its end at a time.
func (w *window) advance(now time.Time) {
	to := now.Unix()
	if to-w.now >= windowSeconds {
		*w = window{now: to}
	}
	for w.now < to {
		w.now++
		s := w.second(w.now)
		w.sum.requests, w.sum.tokens = w.sum.requests-s.requests, w.sum.tokens-s.tokens
		*s = sentCount{}
	}
}

// countAt returns what the window has after advance to a time.
func (w *window) countAt(now time.Time) (requests, tokens float64) {
	to := now.Unix()
	if to-w.now >= windowSeconds {
		return 0, 0
	}
	sum := w.sum
	for at := w.now + 1; at <= to; at++ {
		s := w.second(at)
		sum.requests, sum.tokens = sum.requests-s.requests, sum.tokens-s.tokens
	}
	return sum.requests, sum.tokens
}

func (w *window) addRequest(tokens float64) {
	for _, s := range []*sentCount{w.second(w.now), &w.sum} {
		s.requests, s.tokens = s.requests+1, s.tokens+tokens
	}
}

func (w *window) second(at int64) *sentCount { return &w.seconds[uint64(at)%uint64(windowSeconds)] }
