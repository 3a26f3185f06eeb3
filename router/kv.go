package router

import (
	"time"

	"warmroute/backends"
)

const (
	decodeRate      = 40 // tokens a second of one answer, until learned
	decodeRatePrior = 10 // answers that the guess above is worth
	// longestAnswers is how many mean answers one is counted for at most. An
	// answer that is longer is seen by the next scrape.
	longestAnswers = 8
)

// cache is what a backend's KV cache has to hold: the prompts and answers of
// what runs there. The index knows the prompts' blocks, each counted once
// however many requests share it; here is the rest.
type cache struct {
	loose int64 // tokens of prompts that are in none of the index's blocks

	// Answers grow with time: answering sequences, the sum of the microseconds
	// since Router.made at which they began, and the speed; but a client that
	// reads slowly keeps open what its engine has long put out, so not beyond most.
	answering, began int64
	most             float64
	speed            average

	// What the last scrape said, and how that compares with our own figures.
	capacity int     // tokens; 0: unknown
	foreign  float64 // tokens in use beyond what we know of; below 0: so many are in use no more
	starving int     // requests that wait for capacity, less those that started since
	polledAt time.Time
}

// answersBegin counts a decision's answer as growing from now on.
func (r *Router) answersBegin(d *Decision, now time.Time) {
	c := &r.caches[d.Backend.Slot]
	d.answeringSince = now.Sub(r.made).Microseconds()
	c.answering += d.sequences
	c.began += d.sequences * d.answeringSince
	longest := longestAnswers * r.lessons[d.Backend.Slot].answer.value
	if d.maxTokens > 0 {
		longest = min(longest, float64(d.maxTokens))
	}
	d.longest = longest * float64(d.sequences)
	c.most += d.longest
}

// cacheSent counts what a decision's request takes. An answer that comes whole
// does not say when it begins.
func (r *Router) cacheSent(d *Decision, req *Request, now time.Time) {
	inBlocks := (len(req.Blocks) - d.placed.Omitted) * r.blockBytes
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
	if c.most -= d.longest; c.answering == 0 {
		c.most = 0 // no residue of rounding
	}
	took := float64(now.Sub(r.made).Microseconds()-d.answeringSince) / 1e6
	if d.streams && o.End == Completed && o.AnswerTokens > 1 && took > 0 {
		c.speed.add(float64(o.AnswerTokens) / float64(d.sequences) / took)
	}
}

// cacheUsed is how many tokens of a backend's cache are in use by our requests.
func (r *Router) cacheUsed(slot int, now time.Time) float64 {
	c := &r.caches[slot]
	blocks := float64(r.index.Pinned(slot)*r.blockBytes) / r.lessons[slot].texts.value()
	answers := c.speed.value * float64(c.answering*now.Sub(r.made).Microseconds()-c.began) / 1e6
	return blocks + float64(c.loose) + min(answers, c.most)
}

// cachePolled compares a scrape with our own figures. They are ahead of the
// engine by what waits in its queue; and by the share of the requests that it
// has done and whose clients have yet to read the answers.
func (r *Router) cachePolled(b *backends.Backend, l *backends.Load, now time.Time) {
	c := &r.caches[b.Slot]
	c.polledAt = l.ScrapedAt
	c.starving, c.foreign = l.WaitingForCapacity, 0
	if l.CacheTokens > 0 {
		c.capacity = l.CacheTokens
	}
	if l.KVKnown && c.capacity > 0 {
		used, ours := l.KVCacheUsage*float64(c.capacity), r.cacheUsed(b.Slot, now)
		c.foreign = max(0, used-ours)
		if done := l.OwnInFlight - int64(l.Running+l.Waiting); l.QueuesKnown && done > 0 {
			share := float64(done) / float64(l.OwnInFlight)
			c.foreign += min(0, max(used+r.accounts[b.Slot].unseen-ours, -share*ours))
		}
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
	shared := depth - r.index.CountUnpinned(slot, req.Blocks[:depth])
	return float64(max(0, req.Bytes-shared*r.blockBytes)) / r.texts.bytesPerToken(req.Model)
}
