package decide

import (
	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/estimate"
)

// Query is a request to be decided, with what was looked up for it.
type Query struct {
	*Request
	Tried    []*backends.Backend // excluded
	Promoted bool                // it has been overtaken in the queue for as long as it may be

	Sizes   estimate.TokenSizes
	Matched []int // leading blocks of the prompt that each backend holds, by slot
	Linked  LinkedPrefix
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

// matchedTokens returns how many tokens of the request a backend is thought to hold.
func (f *Fleet) matchedTokens(q *Query, b *Backend) float64 {
	matched := q.Matched[b.Slot]
	tokens := f.tokensBefore(q, matched)
	if matched == 0 || b.RestoredUntil == 0 {
		return tokens
	}
	used := f.tokensBefore(q, matched-f.Ledger.CountUnusedSince(b.Slot, q.Blocks[:matched], b.RestoredUntil+1))
	return used + b.RestoredShare*(tokens-used)
}

// tokensAfter returns how many tokens of the prompt come after so many blocks, about.
func (f *Fleet) tokensAfter(q *Query, blocks int) float64 {
	return max(0, q.promptTokens()-f.tokensBefore(q, blocks))
}

// UncachedTokens returns how many tokens of the request a backend would have to compute.
func (f *Fleet) UncachedTokens(q *Query, slot int) float64 {
	return max(estimate.MinUncachedTokens, f.tokensAfter(q, q.Matched[slot]))
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
