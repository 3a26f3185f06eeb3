package router

import (
	"time"

	"warmroute/backends"
)

const (
	decodeRate      = 40 // tokens a second of one answer, until learned
	decodeRatePrior = 10 // answers that the guess above is worth
)

// cache is what a backend's KV cache has to hold: the prompts and answers of
// what runs there. The index knows the prompts' blocks, each counted once
// however many requests share it; here is the rest.
type cache struct {
	loose int64 // tokens of prompts that are in none of the index's blocks

	// Answers grow with time: answering sequences, the sum of the microseconds
	// since Router.made at which they began, and the speed.
	answering, began int64
	speed            average

	// What the last scrape said, and how that compares with our own figures.
	capacity int     // tokens; 0: unknown
	foreign  float64 // tokens in use beyond what we know of
	starving int     // requests that wait for capacity, less those that started since
	polledAt time.Time
}

// answersBegin counts a decision's answer as growing from now on.
func (r *Router) answersBegin(d *Decision, now time.Time) {
	c := &r.caches[d.Backend.Slot]
	d.answeringSince = now.Sub(r.made).Microseconds()
	c.answering += d.sequences
	c.began += d.sequences * d.answeringSince
}

// cacheSent counts what a decision's request takes. An answer that comes whole
// does not say when it begins.
func (r *Router) cacheSent(d *Decision, req *Request, now time.Time) {
	inBlocks := (len(req.Blocks) - d.placed.Left) * r.blockBytes
	d.loose = int64(float64(max(0, req.Bytes-inBlocks)) / r.texts.bytesPerToken(req.Model))
	r.caches[d.Backend.Slot].loose += d.loose
	if !d.streams {
		r.answersBegin(d, now)
	}
}

// cacheStarted notes that the engine has given a request its place.
func (r *Router) cacheStarted(d *Decision, now time.Time) {
	c := &r.caches[d.Backend.Slot]
	c.starving = max(0, c.starving-1)
	if d.streams {
		r.answersBegin(d, now)
	}
}

// cacheFreed takes back what cacheSent and answersBegin counted, and learns from
// an answer that came to its end.
func (r *Router) cacheFreed(d *Decision, o Outcome, now time.Time) {
	c := &r.caches[d.Backend.Slot]
	c.loose -= d.loose
	if d.streams && !d.started {
		return
	}
	c.answering -= d.sequences
	c.began -= d.sequences * d.answeringSince
	took := float64(now.Sub(r.made).Microseconds()-d.answeringSince) / 1e6
	if d.streams && o.End == Served && o.AnswerTokens > 1 && took > 0 {
		c.speed.add(float64(o.AnswerTokens) / float64(d.sequences) / took)
	}
}

// cacheUsed is how many tokens of a backend's cache are in use by our requests.
func (r *Router) cacheUsed(slot int, now time.Time) float64 {
	c := &r.caches[slot]
	blocks := float64(r.index.InUse(slot)*r.blockBytes) / r.lessons[slot].texts.value()
	answers := c.speed.value * float64(c.answering*now.Sub(r.made).Microseconds()-c.began) / 1e6
	return blocks + float64(c.loose) + answers
}

// cachePolled compares a scrape with our own figures. It is ahead of the engine
// for what waits in its queue, so only what is in use beyond them says something.
func (r *Router) cachePolled(b *backends.Backend, l *backends.Load, now time.Time) {
	c := &r.caches[b.Slot]
	c.polledAt = l.ScrapedAt
	c.starving, c.foreign = l.WaitingForCapacity, 0
	if l.CacheTokens > 0 {
		c.capacity = l.CacheTokens
	}
	if l.KVKnown && c.capacity > 0 {
		c.foreign = max(0, l.KVCacheUsage*float64(c.capacity)-r.cacheUsed(b.Slot, now))
	}
}

// cacheFits reports whether so many tokens fit into a backend's cache beside
// what is there, and what requests of this round have a claim to.
func (r *Router) cacheFits(slot int, tokens float64, now time.Time) bool {
	c := &r.caches[slot]
	if c.capacity == 0 {
		return true
	}
	used := r.cacheUsed(slot, now) + r.reserved[slot].cache
	if now.Sub(c.polledAt) <= foreignLasts*r.pollInterval {
		used += c.foreign
	}
	return used+tokens <= kvPressure*float64(c.capacity)
}

// cacheNeed is how many tokens of a backend's cache the request that was matched
// last would bring into use.
func (r *Router) cacheNeed(req *Request, slot int) float64 {
	depth := r.depth[slot]
	shared := depth - r.index.Idle(slot, req.Blocks[:depth])
	return float64(max(0, req.Bytes-shared*r.blockBytes)) / r.texts.bytesPerToken(req.Model)
}
