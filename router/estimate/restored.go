package estimate

import (
	"math"

	"warmroute/backends"
	"warmroute/router/index"
)

const (
	// restoredDecay is by what each request in a row that missed restored blocks reduces what others count; twice by one
	// whose blocks cannot have been evicted.
	restoredDecay = 0.5
	// maxRestoredDistance is up to which share of what a cache holds restored blocks are near enough not to have been
	// evicted by a replica that has kept its cache.
	maxRestoredDistance = 0.5
)

// restored is what is known of the blocks that were restored, and not used since: the replica may have lost its cache
// meanwhile. They count in full until requests miss such blocks. A hit shows that the replica has kept its cache, and with it
// what was used later than the blocks that were hit.
type restored struct {
	until  uint64 // the last use of restored blocks that no hit has confirmed; 0: there are none
	misses int    // requests in a row that missed such blocks
	near   int    // of these, those whose blocks the replica cannot have evicted
}

// addHit records a request that hit blocks of that last use.
func (r *restored) addHit(lastUse uint64) { *r = restored{until: lastUse - 1} }

// addMiss records a request that missed blocks. near: they cannot have been evicted.
func (r *restored) addMiss(near bool) {
	r.misses++
	if near {
		r.near++
	}
}

// SetRestored records that the blocks of a backend whose last use is until or earlier were restored.
func (f *Estimates) SetRestored(slot int, until uint64) {
	f.backends[slot].restored = restored{until: until}
}

// RestoredShare returns which share of a backend's blocks with the last use until or earlier counts as cached: they were
// restored, and requests missed such blocks. until is 0 if nothing speaks against them.
func (f *Estimates) RestoredShare(slot int) (share float64, until uint64) {
	r := &f.backends[slot].restored
	if f.disabled || r.misses == 0 {
		return 1, 0
	}
	return math.Pow(restoredDecay, float64(r.misses+r.near)), r.until
}

// takeLostRestored reports, once, that a backend's replica does not have the cache from which blocks were restored.
func (f *Estimates) takeLostRestored(slot int) (until uint64, lost bool) {
	b := &f.backends[slot]
	if b.restored.near < minResetMisses*max(1, b.engines) { // a miss may be due to a request's being on another engine
		return 0, false
	}
	until = b.restored.until
	b.restored = restored{}
	return until, true
}

// reusesRestored reports whether a request reused restored blocks.
func (f *Estimates) reusesRestored(slot int, p *Prediction) bool {
	return p.reusesUntil(f.backends[slot].restored.until)
}

// recordRestored records, once, which of the restored blocks that a request reused were hits: the first hitTokens of its
// prompt, give or take margin. With atMost fewer may have been hits: that shows misses alone.
func (f *Estimates) recordRestored(slot int, p *Prediction, hitTokens, promptTokens, margin float64, atMost bool) {
	r := &f.backends[slot].restored
	if p.restoredRecorded {
		return
	}
	perBlock := float64(f.blockBytes) / float64(p.Bytes) * promptTokens
	var hit, missed *index.ReusedSpan // the deepest that has hits, and the first that has none
	missedTokens, end := 0.0, float64(p.MatchedBlocks)*perBlock
	for i := range p.Reused {
		s := &p.Reused[i]
		begin := end - float64(s.Blocks)*perBlock
		if s.Blocks > 0 && s.LastUse <= r.until {
			if hitTokens > begin+margin {
				hit = s
				break
			}
			missed = s
			missedTokens += end - begin
		}
		end = begin
	}
	if hit != nil && atMost {
		return
	}
	p.restoredRecorded = true
	if hit != nil {
		r.addHit(hit.LastUse)
	}
	if missedTokens >= minMissedTokens+margin {
		r.addMiss(f.isWithin(slot, missed, maxRestoredDistance))
	}
}

// RecordSent records in p what the replica had counted by the last poll before the request was sent; nil: there was none.
func (p *Prediction) RecordSent(last *backends.Load) {
	if last != nil && last.PrefixKnown {
		p.hitsBefore, p.hitsKnown = last.PrefixHits, true
	}
}

// RecordStarted records what a poll shows of the restored blocks that a request reused which an engine has started: the
// request has at most the hits that were counted since the last poll before it was sent.
func (f *Estimates) RecordStarted(slot int, p *Prediction, l *backends.Load, c CacheInfo) {
	if f.disabled || !l.PrefixKnown || !p.hitsKnown || l.PrefixHits < p.hitsBefore || !p.IsText || p.IsTooLong || !f.reusesRestored(slot, p) {
		return
	}
	var matched predictions
	tokens := float64(p.MatchedBlocks*f.blockBytes) / float64(p.Bytes) * p.PromptTokens
	matched.addPrediction(f.distanceBucket(slot, p), UsableHitTokens(tokens, p.PromptTokens, c.Alignment), p.PromptTokens)
	f.recordRestored(slot, p, l.PrefixHits-p.hitsBefore, p.PromptTokens, matched.hitTokensMargin(c), true)
}
