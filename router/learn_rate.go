package router

import (
	"slices"
	"time"
)

const (
	prefillRate = 8000 // tokens a second of an 8B-class model on one GPU, until learned

	speedSamples = 64
	speedFirst   = 8   // samples, before which the guess above stands
	speedRank    = 0.9 // most prefills share their steps with others' decodes; the fast ones tell

	// Beyond these a prefill says something of its speed.
	leastPrefill     = 1024 // tokens
	leastPrefillTime = 100 * time.Millisecond

	leastRate, mostRate = 10, 1e6
	// alike is by how much speeds may differ from the fleet's and be taken for
	// equal: what is left is noise, and must not decide who gets more.
	alike = 0.25
)

// speed is how fast a backend prefills, by the time its first events took.
type speed struct {
	samples [speedSamples]float64 // tokens a second; the newest at seen-1, around
	seen    int
	learned float64 // 0: not yet
}

// add takes in that so many uncached tokens, with those sent before, took so
// long, and reports whether the speed is known now.
func (s *speed) add(tokens float64, took time.Duration) (learned bool) {
	if tokens < leastPrefill || took < leastPrefillTime {
		return false
	}
	s.samples[s.seen%speedSamples] = max(leastRate, min(mostRate, tokens/took.Seconds()))
	s.seen++
	if s.seen < speedFirst {
		return false
	}
	sorted := s.samples
	n := min(s.seen, speedSamples)
	slices.Sort(sorted[:n])
	s.learned = sorted[int(speedRank*float64(n-1))]
	return true
}

// rate is how many tokens a backend prefills in a second. Where the fleet's
// speeds are alike, all have the fleet's.
func (r *Router) rate(slot int) float64 {
	own := r.lessons[slot].speed.learned
	switch {
	case own == 0 || r.noLearning:
		return r.fleetRate
	case own > r.fleetRate*(1-alike) && own < r.fleetRate*(1+alike):
		return r.fleetRate
	}
	return own
}

// learnRate renews what the fleet's rate is: the median of its backends'.
func (r *Router) learnRate() {
	if r.noLearning {
		return
	}
	known := r.sorted[:0]
	for slot := range r.lessons {
		if own := r.lessons[slot].speed.learned; own > 0 {
			known = append(known, own)
		}
	}
	r.sorted = known
	if len(known) > 0 {
		slices.Sort(known)
		r.fleetRate = known[len(known)/2]
	}
}
