package decide

import (
	"slices"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/estimate"
	"warmroute/router/index"
)

// Query is a request to be decided, with what was looked up for it.
type Query struct {
	*Request
	Tried    []*backends.Backend // excluded
	Promoted bool                // it has been overtaken in the queue for as long as it may be

	Sizes   estimate.TokenSizes
	Held    []int // leading blocks of the prompt that each backend holds, by slot
	Matched []int // of these, those that it can reuse
	// Checkpoints are where what each backend can reuse ends, by slot; nil: no backend keeps checkpoints.
	Checkpoints []index.Checkpoint
	Linked      LinkedPrefix

	mostMatched int // of Matched, plus 1; 0: not looked up
}

// LinkedPrefix is the longest prefix of a prompt that a backend holds and whose number of
// tokens is known from KV events.
type LinkedPrefix struct {
	Blocks, Bytes    int
	Tokens, KVTokens float64 // those in whole KV blocks are KVTokens
}

// Links tell the number of tokens of blocks that KV events have related to KV blocks.
type Links interface {
	// KVTokens returns how many tokens of the prompt up to the end of a block are in whole KV blocks.
	KVTokens(b prompt.Block) (tokens int, known bool)
}

// minDueSeconds replaces the time left to a deadline that has passed: 0 means no target.
const minDueSeconds = 0.001

// dueSeconds returns how many seconds are left until the first token is due; 0: the request has no target.
func (f *Fleet) dueSeconds(q *Query) float64 {
	if q.FirstTokenDue.IsZero() || q.NoEngine || !f.Policy.Reads("slo.ttft") {
		return 0
	}
	return max(minDueSeconds, q.FirstTokenDue.Sub(f.Now).Seconds())
}

// promptTokens returns how long the prompt is, about.
func (q *Query) promptTokens() float64 {
	return q.Linked.Tokens + q.countTokens(q.Bytes) - q.countTokens(q.Linked.Bytes)
}

// countTokens returns how many tokens the first bytes of the prompt have, about.
func (q *Query) countTokens(bytes int) float64 { return q.Sizes.CountTokens(bytes, q.MediaItems) }

// tokensBefore returns how many tokens of the request a replica that holds its first
// blocks need not compute, about.
func (f *Fleet) tokensBefore(q *Query, blocks int) float64 {
	linked := &q.Linked
	switch {
	case blocks == linked.Blocks:
		return linked.KVTokens
	case blocks > linked.Blocks:
		return linked.Tokens + q.countTokens(blocks*f.BlockBytes) - q.countTokens(linked.Bytes)
	case blocks == 0:
		return 0
	}
	if tokens, known := f.Links.KVTokens(q.Blocks[blocks-1]); known {
		return float64(tokens)
	}
	return linked.Tokens * float64(blocks) / float64(linked.Blocks)
}

// matchedTokens returns how many tokens of the request a backend is thought to have cached.
func (f *Fleet) matchedTokens(q *Query, b *Backend) float64 {
	matched := q.Matched[b.Slot]
	tokens := f.reusableTokens(q, b.Slot)
	switch {
	case matched == 0 || b.RestoredUntil == 0:
		return tokens
	case q.hasCheckpoint(b.Slot):
		if q.Checkpoints[b.Slot].LastUse > b.RestoredUntil {
			return tokens
		}
		return b.RestoredShare * tokens
	}
	used := b.alignHit(q, f.tokensBefore(q, matched-f.Ledger.CountUnusedSince(b.Slot, q.Blocks[:matched], b.RestoredUntil+1)))
	return used + b.RestoredShare*(tokens-used)
}

// TokensElsewhere returns how many tokens of the request a backend has to compute, about, that another one need not, as far as
// the index says.
func (f *Fleet) TokensElsewhere(q *Query, slot int) float64 {
	if q.mostMatched == 0 {
		q.mostMatched = 1 + slices.Max(q.Matched)
	}
	most := q.mostMatched - 1
	if most <= q.Matched[slot] {
		return 0
	}
	return max(0, min(f.tokensBefore(q, most), q.promptTokens())-f.reusableTokens(q, slot))
}

// offloadedTokens returns how many of the matched tokens are not on a backend's GPU, about.
func (f *Fleet) offloadedTokens(q *Query, b *Backend, matched float64) float64 {
	blocks := q.Blocks[:q.Matched[b.Slot]]
	offloaded := f.Ledger.CountUnusedSince(b.Slot, blocks, b.Offloading.Before)
	if offloaded == 0 {
		return 0
	}
	return max(0, matched-f.tokensBefore(q, len(blocks)-offloaded))
}

// hasCheckpoint reports whether a backend can reuse what is before a checkpoint.
func (q *Query) hasCheckpoint(slot int) bool {
	return q.Checkpoints != nil && q.Checkpoints[slot].Tokens > 0
}

// reusableTokens returns how many tokens of the request a backend need not compute, about, if it has what the index says.
func (f *Fleet) reusableTokens(q *Query, slot int) float64 {
	if q.hasCheckpoint(slot) {
		return float64(q.Checkpoints[slot].Tokens)
	}
	return f.Backends[slot].alignHit(q, f.tokensBefore(q, q.Matched[slot]))
}

// tokensAfter returns how many tokens of the prompt come after so many blocks, about.
func (f *Fleet) tokensAfter(q *Query, blocks int) float64 {
	return max(0, q.promptTokens()-f.tokensBefore(q, blocks))
}

// UncachedTokens returns how many tokens of the request a backend would have to compute.
func (f *Fleet) UncachedTokens(q *Query, slot int) float64 {
	return max(estimate.MinUncachedTokens, q.promptTokens()-f.reusableTokens(q, slot))
}

// requiredKVTokens returns how many tokens of a backend's cache the request would bring into use:
// what other requests use of its prompt costs nothing.
func (f *Fleet) requiredKVTokens(q *Query, slot int) float64 {
	return f.tokensAfter(q, f.sharedBlocks(q, slot))
}

// sharedBlocks returns how many blocks of the request other requests use on a backend.
func (f *Fleet) sharedBlocks(q *Query, slot int) int {
	return f.Ledger.CountShared(slot, q.Blocks[:q.Matched[slot]])
}

// UnindexedMediaTokens returns how many tokens the media of the request have beyond those
// of their blocks. Those of media that other requests use are counted by these.
func (f *Fleet) UnindexedMediaTokens(q *Query, slot int) int64 {
	if len(q.MediaItems) == 0 {
		return 0
	}
	bytes := f.sharedBlocks(q, slot) * f.BlockBytes
	text := float64(q.Bytes-bytes) / q.Sizes.BytesPerToken
	return int64(q.countTokens(q.Bytes) - q.countTokens(bytes) - text)
}

// kvWait returns about how many seconds the request would wait on a backend until its
// cache has room: a full cache is free again after the duration of a mean response.
func (f *Fleet) kvWait(q *Query, b *Backend) (seconds float64) {
	if b.Capacity == 0 {
		return 0
	}
	free := fullKVUsage*float64(b.Capacity) - (b.UsedKVTokens + b.Claimed.KV)
	if q.promptTokens() <= free {
		return 0
	}
	missing := max(0, f.requiredKVTokens(q, b.Slot)-free)
	return missing / float64(b.Capacity) * f.Estimates.OutputTokens(b.Slot) / b.DecodeRate
}
