package kvevents

import (
	"math"
	"runtime"
	"time"

	"warmroute/router"
	"warmroute/router/index"
)

const (
	// confirmTimeout is how long after its first output what a request was expected to leave in a
	// cache counts where the replica has not reported it.
	confirmTimeout = 2 * time.Second
	// maxFinishedRequests of a backend wait for their events to be read. What more there are stays approximate.
	maxFinishedRequests = 4096
)

// finishedRequest is a request whose blocks are to be linked to KV blocks.
type finishedRequest struct {
	router.KVRequest
	due time.Time
}

// RecordEnd implements router.KVFollower.
func (f *Follower) RecordEnd(q router.KVRequest, now time.Time) {
	if len(f.finished) >= maxFinishedRequests {
		return
	}
	done := finishedRequest{q, now.Add(confirmTimeout)}
	if !q.StartedAt.IsZero() {
		done.due = q.StartedAt.Add(confirmTimeout)
	}
	f.finished = append(f.finished, done)
}

// Settle links the blocks of requests that have ended to the KV blocks that they used, and
// removes what they were expected to leave in the cache and have not.
func (f *Follower) Settle() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for !f.closed {
		q, linked, more := f.nextFinished()
		if !more {
			return
		}
		f.settle(&q, linked)
	}
}

// nextFinished returns the next request that is due, and the prefix of it that is linked.
func (f *Follower) nextFinished() (q finishedRequest, linked index.LinkedPrefix, more bool) {
	f.update(func(x *index.Index, now time.Time) {
		if len(f.finished) == 0 || f.finished[0].due.After(now) {
			return
		}
		q, more = f.finished[0], true
		f.finished[0] = finishedRequest{}
		if f.finished = f.finished[1:]; len(f.finished) == 0 {
			f.finished = nil
		}
		linked = x.LinkedPrefix(q.Blocks, nil)
	})
	return q, linked, more
}

// settle links the blocks of a request after those that are linked.
func (f *Follower) settle(q *finishedRequest, linked index.LinkedPrefix) {
	if q.contradicts(linked) {
		linked = index.LinkedPrefix{}
	}
	sequence := f.tracker.removeSequence(q.Session, linked.KV)
	if q.PromptTokens == 0 && q.OutputTokens == 0 {
		return // how many tokens the prompt has is not known, nor the response, before which it ends
	}
	if linked.Blocks > 0 && len(sequence) > 0 && sequence[0].kv != linked.KV {
		linked = f.findCommonPrefix(q, linked.Blocks, sequence)
	}
	if f.addLinks(q, linked, sequence) && f.tracker.isComplete() {
		f.removeApproximate(q, len(sequence) > 0)
	}
}

// contradicts reports whether the prompt has so many tokens that those of its linked prefix cannot be right.
func (q *finishedRequest) contradicts(linked index.LinkedPrefix) bool {
	bytes := linked.Blocks * q.BlockBytes
	if q.PromptTokens == 0 || linked.Blocks == 0 || bytes > q.PromptBytes {
		return false
	}
	const most = 1.3 // times what is expected: the tokens of one part of a prompt can be shorter than those of the rest
	tokens, expected := float64(linked.Tokens), float64(q.PromptTokens)*float64(bytes)/float64(q.PromptBytes)
	isNearlyAll := q.PromptBytes-bytes < q.PromptBytes/10
	return linked.Tokens > q.PromptTokens || isNearlyAll && (tokens > most*expected || most*tokens < expected)
}

// findCommonPrefix returns the longest prefix of the first n blocks that is linked to KV blocks of a sequence.
func (f *Follower) findCommonPrefix(q *finishedRequest, n int, sequence []sequenceBlock) (linked index.LinkedPrefix) {
	common := map[index.KVBlock]bool{0: true}
	for _, b := range sequence {
		common[b.kv] = true
	}
	f.update(func(x *index.Index, _ time.Time) {
		linked = x.LinkedPrefix(q.Blocks[:n], func(l index.Link) bool { return common[l.KV] })
	})
	return linked
}

// addLinks links the blocks after a prefix to the KV blocks of a sequence. It reports false if some
// could not be linked.
func (f *Follower) addLinks(q *finishedRequest, linked index.LinkedPrefix, sequence []sequenceBlock) (ok bool) {
	ok = true
	links := q.interpolateLinks(linked, sequence)
	for at := 0; ok && at < len(links); runtime.Gosched() {
		known := f.update(func(x *index.Index, _ time.Time) {
			for last := min(len(links), at+maxChangesPerLock); ok && at < last; at++ {
				ok = x.AddLink(f.backend.Slot, q.Blocks, linked.Blocks+at, links[at])
			}
		})
		ok = ok && known
	}
	return ok
}

// point is a place in a prompt and its response.
type point struct {
	bytes  int
	tokens float64
}

// interpolateLinks returns the links of the blocks after a prefix, as far as the sequence has the KV
// blocks that they complete. Places between those whose number of tokens is known (the end of the
// prefix, that of the prompt, and that of the response) are interpolated.
func (q *finishedRequest) interpolateLinks(linked index.LinkedPrefix, sequence []sequenceBlock) (links []index.Link) {
	if len(sequence) == 0 {
		return nil
	}
	last := sequence[len(sequence)-1]
	promptTokens := q.PromptTokens
	if promptTokens == 0 { // the last block is in the midst of the last KV block, in the mean
		promptTokens = last.tokens + last.size/2 - q.OutputTokens
	}
	from := point{linked.Blocks * q.BlockBytes, float64(linked.Tokens)}
	promptEnd := point{q.PromptBytes, float64(promptTokens)}
	replyEnd := point{q.PromptBytes + q.ReplyBytes, float64(promptTokens + q.OutputTokens)}
	to := promptEnd
	var link index.Link
	for i := linked.Blocks; i < len(q.Blocks); i++ {
		at := (i + 1) * q.BlockBytes
		if at > q.PromptBytes && to == promptEnd {
			if from.bytes <= q.PromptBytes { // else the prefix ends in the response
				from = promptEnd
			}
			to = replyEnd
		}
		tokens := from.tokens + (to.tokens-from.tokens)*float64(at-from.bytes)/float64(to.bytes-from.bytes)
		link.Tokens = int(math.Round(tokens))
		for len(sequence) > 0 && sequence[0].tokens <= link.Tokens {
			link.KV, link.KVTokens = sequence[0].kv, sequence[0].tokens
			sequence = sequence[1:]
		}
		if link.Tokens > last.tokens+last.size {
			break
		}
		links = append(links, link)
	}
	return links
}

// removeApproximate removes the blocks of a request that the replica does not hold. hasStored says
// that events named the request.
func (f *Follower) removeApproximate(q *finishedRequest, hasStored bool) {
	f.update(func(x *index.Index, _ time.Time) {
		linked := x.LinkedPrefix(q.Blocks, nil)
		// Without events, all of the prompt may have been cached but for less than one KV block.
		isCached := len(q.Blocks)-linked.Blocks <= 2 ||
			q.PromptTokens > 0 && q.PromptTokens+q.OutputTokens-linked.KVTokens < f.tracker.kvBlockTokens
		if hasStored || isCached {
			x.RemoveApproximate(f.backend.Slot, q.Blocks)
		}
	})
}
