package router

import (
	"time"

	"warmroute/backends"
	"warmroute/router/estimate"
)

const (
	defaultDecodeRate = 40 // tokens a second of one answer
	decodeRateWeight  = 10 // answers that the default counts for
	// maxMeanOutputs is how many mean answers one is counted for at most. A longer one
	// is seen by the next scrape.
	maxMeanOutputs = 8
	// fullKVUsage is the share of its KV cache that a replica can use for a request to start
	// there at once: beyond it, requests that run would soon preempt each other.
	fullKVUsage = 0.95
	// maxKVUsage is the share of its KV cache up to which a replica is sent requests from the
	// queue. What ends there soon makes room for a little more than it has.
	maxKVUsage = 1.05
)

// kvCache is what a backend's KV cache has to hold: the prompts and answers of what
// runs there. The index counts the prompts' blocks, each once however many requests
// share it; this is the rest.
type kvCache struct {
	unindexed int64 // tokens of prompts that are in none of the index's blocks

	// Answers grow with time: answering sequences, the sum of the microseconds since
	// Router.start at which they began, and the rate. A client that reads slowly keeps
	// open what its engine has finished long ago, so they do not exceed maxOutput.
	answering, began int64
	maxOutput        float64
	decodeRate       estimate.Average

	// What the last scrape said.
	capacity   int     // tokens; 0: unknown
	external   float64 // tokens in use beyond what we know of; below 0: so many are not in use any more
	waiting    int     // requests that wait for capacity, less those that started since
	nearlyFull bool    // at least backends.MinWaitingKVUsage is in use, or it is unknown
	polledAt   time.Time
	expected   bool // it showed what we expected, so the next one may come later
}

// kvUse is what one request uses of it beyond the index's blocks.
type kvUse struct {
	unindexed   int64
	outputSince int64   // microseconds since Router.start
	maxOutput   float64 // tokens that its answers are counted for at most
}

func newKVCache() kvCache {
	return kvCache{decodeRate: estimate.NewAverage(defaultDecodeRate, decodeRateWeight)}
}

// startOutputGrowth counts a request's answer as growing from now on.
func (c *kvCache) startOutputGrowth(d *Decision, r *Router, now time.Time) {
	d.kv.outputSince = now.Sub(r.start).Microseconds()
	c.answering += d.prediction.Sequences
	c.began += d.prediction.Sequences * d.kv.outputSince
	most := maxMeanOutputs * r.estimates.OutputTokens(d.Backend.Slot)
	if d.request.maxOutputTokens > 0 {
		most = min(most, float64(d.request.maxOutputTokens))
	}
	d.kv.maxOutput = most * float64(d.prediction.Sequences)
	c.maxOutput += d.kv.maxOutput
}

// recordSent counts what a request uses. An answer that is not streamed does not
// say when it begins.
func (c *kvCache) recordSent(d *Decision, req *Request, r *Router, now time.Time) {
	inBlocks := (len(req.Blocks) - d.pin.Omitted) * r.blockBytes
	d.kv.unindexed += int64(float64(max(0, req.Bytes-inBlocks)) / r.decision.sizes.BytesPerToken)
	c.unindexed += d.kv.unindexed
	if !d.request.streams {
		c.startOutputGrowth(d, r, now)
	}
}

// recordPrefillDone records that the prefill of d is over: it does not wait for room any
// more, and its answer grows.
func (c *kvCache) recordPrefillDone(d *Decision, r *Router, now time.Time) {
	c.waiting = max(0, c.waiting-1)
	if d.request.streams {
		c.startOutputGrowth(d, r, now)
	}
}

// recordEnd releases what a request used, and learns from an answer that came to its
// end. sinceStart is the time since Router.start.
func (c *kvCache) recordEnd(d *Decision, o *Outcome, sinceStart time.Duration) {
	c.unindexed -= d.kv.unindexed
	if d.request.streams && !d.started {
		return
	}
	sequences := d.prediction.Sequences
	c.answering -= sequences
	c.began -= sequences * d.kv.outputSince
	if c.maxOutput -= d.kv.maxOutput; c.answering == 0 {
		c.maxOutput = 0 // no rounding error is left
	}
	took := float64(sinceStart.Microseconds()-d.kv.outputSince) / 1e6
	if d.request.streams && o.End == Completed && o.OutputTokens > 1 && took > 0 {
		c.decodeRate.Add(float64(o.OutputTokens) / float64(sequences) / took)
	}
}

// outputTokensInFlight returns how many tokens the answers in flight have at a time
// since Router.start.
func (c *kvCache) outputTokensInFlight(sinceStart time.Duration) float64 {
	return min(c.decodeRate.Value*float64(c.answering*sinceStart.Microseconds()-c.began)/1e6, c.maxOutput)
}

// ownKVTokens returns how many tokens of a backend's cache our requests use.
func (r *Router) ownKVTokens(slot int, now time.Time) float64 {
	c := &r.states[slot].kv
	blocks := float64(r.index.CountPinned(slot)*r.blockBytes) / r.estimates.BackendBytesPerToken(slot)
	return blocks + float64(c.unindexed) + c.outputTokensInFlight(now.Sub(r.start))
}

// observeKV compares a scrape with our own account. That is ahead of the engine by
// what waits in its queue, and by the requests that it has finished and whose
// clients have yet to read the answers.
func (r *Router) observeKV(b *backends.Backend, l *backends.Load, now time.Time) {
	s := &r.states[b.Slot]
	c := &s.kv
	c.polledAt = l.PolledAt
	c.waiting, c.external = l.WaitingForCapacity, 0
	c.nearlyFull = !l.KVKnown || l.KVCacheUsage >= backends.MinWaitingKVUsage
	if l.CacheTokens > 0 {
		c.capacity = l.CacheTokens
	}
	if !l.KVKnown || c.capacity == 0 {
		return
	}
	used, ours := l.KVCacheUsage*float64(c.capacity), r.ownKVTokens(b.Slot, now)
	c.external = max(0, used-ours)
	if finished := l.OwnInFlight - int64(l.Running+l.Waiting); l.QueuesKnown && finished > 0 {
		share := float64(finished) / float64(l.OwnInFlight)
		c.external += min(0, max(used+s.load.unseen-ours, -share*ours))
	}
}

// usedKVTokens returns how many tokens of a backend's cache are in use, or claimed in this
// round.
func (r *Router) usedKVTokens(slot int, now time.Time) float64 {
	s := &r.states[slot]
	used := r.ownKVTokens(slot, now) + s.claimed.kv
	if r.isRecentPoll(&s.kv, now) {
		used += s.kv.external
	}
	return used
}

// fitsKV reports whether so many tokens fit beside those in use into the share of a backend's
// cache that queued requests are sent to.
func (r *Router) fitsKV(slot int, tokens float64, now time.Time) bool {
	c := &r.states[slot].kv
	return c.capacity == 0 || r.usedKVTokens(slot, now)+tokens <= maxKVUsage*float64(c.capacity)
}

// kvWait returns about how many seconds the matched request would wait on a backend until its
// cache has room: a full cache is free again after the duration of a mean answer.
func (r *Router) kvWait(slot int, now time.Time) (seconds float64) {
	c := &r.states[slot].kv
	if c.capacity == 0 {
		return 0
	}
	free := fullKVUsage*float64(c.capacity) - r.usedKVTokens(slot, now)
	if r.decision.promptTokens() <= free {
		return 0
	}
	missing := max(0, r.requiredKVTokens(slot)-free)
	return missing / float64(c.capacity) * r.estimates.OutputTokens(slot) / c.decodeRate.Value
}

// requiredKVTokens returns how many tokens of a backend's cache the matched request would
// bring into use: what other requests use of its prompt costs nothing.
func (r *Router) requiredKVTokens(slot int) float64 {
	return r.tokensAfter(r.sharedBlocks(slot))
}

// sharedBlocks returns how many blocks of the matched request other requests use on a backend.
func (r *Router) sharedBlocks(slot int) int {
	d := &r.decision
	depth := d.matched[slot]
	return depth - r.index.CountUnpinned(slot, d.req.Blocks[:depth])
}

// unindexedMediaTokens returns how many tokens the media of the matched request have beyond those
// of their blocks. Those of media that other requests use are counted by these.
func (r *Router) unindexedMediaTokens(slot int) int64 {
	d := &r.decision
	if len(d.req.MediaItems) == 0 {
		return 0
	}
	shared := r.sharedBlocks(slot)
	bytes := shared * r.blockBytes
	text := float64(d.req.Bytes-bytes) / d.sizes.BytesPerToken
	return int64(d.countTokens(d.req.Bytes) - d.countTokens(bytes) - text)
}

// hasWaiting reports whether the replica says that requests wait there, and as many have not
// started since.
func (r *Router) hasWaiting(slot int, now time.Time) bool {
	c := &r.states[slot].kv
	return c.waiting > 0 && r.isRecentPoll(c, now)
}

// isWaitingForKV reports whether requests wait in the replica because there is no room in its
// cache.
func (r *Router) isWaitingForKV(slot int, now time.Time) bool {
	return r.states[slot].kv.nearlyFull && r.hasWaiting(slot, now)
}

// isRecentPoll reports whether a backend's last scrape still counts: at most two that should
// have followed it are missing.
func (r *Router) isRecentPoll(c *kvCache, now time.Time) bool {
	interval := r.settings.PollInterval
	if c.expected {
		interval = backends.MaxPollInterval(interval)
	}
	return now.Sub(c.polledAt) <= maxExternalLoadAge*interval
}
