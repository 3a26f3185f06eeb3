package estimate

import (
	"math"

	"warmroute/router/index"
)

const (
	// minResetMisses is how many requests have to miss the blocks that they reuse: a single miss may have another cause.
	minResetMisses  = 3
	minMissedTokens = 256 // of one request
	// maxResetDistance is up to which share of what a cache holds blocks are near enough not to have been evicted,
	// even if nothing was seen of them.
	maxResetDistance = 0.1
	missShareDecay   = 0.875 // per request
	// maxUsualMisses is the share of requests above which misses say nothing: several caches may be behind the backend.
	maxUsualMisses = 0.3
)

// cacheReset finds that a replica has lost its prefix cache although it does not say so, as after vLLM's
// /reset_prefix_cache. A request that hits blocks shows that they were not lost between their last use and its own.
// One that misses blocks which cannot have been evicted shows that they were. Times are counted in uses of
// the cache, as in index.Pin.Use.
type cacheReset struct {
	after, before uint64  // the last use before a reset and the first after it, as far as is known
	misses        int     // requests that show it; 0: none does
	missShare     float64 // of all requests that show either, decaying
}

// addHit records a request that hit blocks.
func (r *cacheReset) addHit(lastUse, use uint64) {
	r.missShare *= missShareDecay
	switch {
	case use <= r.after || lastUse >= r.before:
		return // it says nothing about the time between
	case lastUse <= r.after:
		r.after = use
	case use >= r.before:
		r.before = lastUse
	}
	if r.after >= r.before {
		r.misses = 0
	}
}

// addMisses records requests that missed blocks, all of the last use or earlier. use is that of the first of them.
func (r *cacheReset) addMisses(lastUse, use uint64, requests int) {
	usual := r.missShare > maxUsualMisses
	r.missShare = 1 - (1-r.missShare)*math.Pow(missShareDecay, float64(requests))
	switch {
	case r.misses == 0 && usual, r.misses > 0 && use <= r.after:
	case r.misses == 0, lastUse >= r.before: // a later reset
		r.after, r.before, r.misses = lastUse, use, requests
	default:
		r.after, r.before = max(r.after, lastUse), min(r.before, use)
		r.misses += requests
	}
}

// take returns the first use after a reset, if enough requests show one, and forgets it.
func (r *cacheReset) take() (before uint64, found bool) {
	if r.misses < minResetMisses {
		return 0, false
	}
	before = r.before
	r.after, r.before, r.misses = 0, 0, 0
	return before, true
}

// TakeCacheReset reports, once, that a backend's replica seems to have lost its prefix cache before a use of it.
func (f *Estimates) TakeCacheReset(slot int) (before uint64, found bool) {
	until, found := f.takeLostRestored(slot)
	if before = until + 1; !found {
		before, found = f.backends[slot].reset.take()
	}
	if found {
		f.backends[slot].lostUntil = before - 1
	}
	return before, found
}

// reusesLost reports whether a request was expected to reuse blocks that were found to be lost after it was sent.
func (f *Estimates) reusesLost(slot int, p *Prediction) bool {
	return p.reusesUntil(f.backends[slot].lostUntil)
}

// reusesUntil reports whether a request was expected to reuse blocks with that last use or an earlier one.
func (p *Prediction) reusesUntil(use uint64) bool {
	for i := range p.Reused {
		if s := &p.Reused[i]; s.Blocks > 0 && s.LastUse <= use {
			return true
		}
	}
	return false
}

// findsResets reports whether hits and misses of a backend show resets. Several engines have a cache each.
func (f *Estimates) findsResets(slot int) bool { return !f.disabled && f.backends[slot].engines <= 1 }

// isNear reports whether blocks were used so recently that a replica cannot have evicted them, whatever else it did.
func (f *Estimates) isNear(slot int, s *index.ReusedSpan) bool {
	return f.isWithin(slot, s, maxResetDistance)
}

// isWithin reports whether blocks were used so recently that a replica of which only a share of the cache is ours cannot have
// evicted them.
func (f *Estimates) isWithin(slot int, s *index.ReusedSpan, share float64) bool {
	return float64(s.Distance) <= share*float64(min(f.IndexCapacity(slot), f.cacheBlocks(slot, 1)))
}

// isKept reports whether a replica has kept blocks of that reuse distance, as its responses have shown.
func (f *Estimates) isKept(slot int, s *index.ReusedSpan) bool {
	return f.backends[slot].capacity.keeps(float64(s.Distance) / float64(max(1, f.cacheBlocks(slot, 1))))
}

// nearSpans returns the spans that a request reused, but for those that the replica may have evicted.
func (f *Estimates) nearSpans(slot int, p *Prediction) (near [index.MaxReusedSpans]index.ReusedSpan) {
	n := 0
	for i := range p.Reused {
		if s := &p.Reused[i]; s.Blocks > 0 && f.isNear(slot, s) {
			near[n] = *s
			n++
		}
	}
	return near
}

// recordReuse records which of the blocks that a request reused were hits: the first hitTokens of its prompt, give
// or take margin.
func (f *Estimates) recordReuse(slot int, p *Prediction, hitTokens, promptTokens, margin float64) {
	if !f.findsResets(slot) {
		return
	}
	perBlock := float64(f.blockBytes) / float64(p.Bytes) * promptTokens
	var hit, missed *index.ReusedSpan // the deepest that has hits, and the first that has none
	end := float64(p.MatchedBlocks) * perBlock
	for i := range p.Reused {
		s := &p.Reused[i]
		begin := end - float64(s.Blocks)*perBlock
		switch {
		case s.Blocks == 0:
		case hitTokens > begin+margin:
			if hit == nil {
				hit = s
			}
		case end-begin-margin >= minMissedTokens && (f.isNear(slot, s) || f.isKept(slot, s)):
			missed = s
		}
		end = begin
	}
	r := &f.backends[slot].reset
	switch {
	case missed != nil:
		r.addMisses(missed.LastUse, p.Use, 1)
	case hit != nil:
		r.addHit(hit.LastUse, p.Use)
	}
}

// reused sums up, over the requests of a counter window, the blocks that were last used before it began.
type reused struct {
	tokens                     float64
	requests                   int    // with such blocks
	firstUse, lastUse          uint64 // of the requests
	earliestReuse, latestReuse uint64 // last uses of the blocks
}

// addRequest adds a request. Of the blocks that it reused those count that were last used before windowBegin.
func (r *reused) addRequest(s *startedRequest, windowBegin uint64) {
	tokens, latest, earliest := 0.0, uint64(0), uint64(math.MaxUint64)
	for i := range s.reused {
		if span := &s.reused[i]; span.Blocks > 0 && span.LastUse < windowBegin {
			tokens += float64(span.Blocks) * s.blockTokens
			latest, earliest = max(latest, span.LastUse), min(earliest, span.LastUse)
		}
	}
	if tokens < minMissedTokens {
		return
	}
	if r.requests == 0 {
		r.firstUse, r.earliestReuse = math.MaxUint64, math.MaxUint64
	}
	r.requests++
	r.tokens += tokens
	r.firstUse, r.lastUse = min(r.firstUse, s.use), max(r.lastUse, s.use)
	r.earliestReuse, r.latestReuse = min(r.earliestReuse, earliest), max(r.latestReuse, latest)
}

// recordWindowReuse records whether a counter window shows that its requests hit the blocks that were last used
// before it began, or that they hit none of them.
func (f *Estimates) recordWindowReuse(slot int, w *counterWindow, hitTokens, margin float64) {
	u := &w.reused
	if !f.findsResets(slot) || u.requests == 0 || u.tokens < minMissedTokens+2*margin {
		return
	}
	others := w.predictions.tokens - u.tokens
	r := &f.backends[slot].reset
	switch {
	case hitTokens <= others+margin:
		r.addMisses(u.latestReuse, u.firstUse, u.requests)
	case hitTokens >= others+u.tokens-margin:
		r.addHit(u.earliestReuse, u.lastUse)
	}
}
