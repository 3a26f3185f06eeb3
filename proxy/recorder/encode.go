package recorder

import (
	"encoding/json"
	"slices"
	"time"

	"warmroute/prompt"
)

const (
	version       = 2
	bytesPerToken = 4 // estimate

	// How many different values keep their number at least, in a file. A block that did not occur
	// among as many others gets a new number, and its prompt looks new.
	minKnownBlocks        = 1 << 19
	minKnownConversations = 1 << 16
	minKnownModels        = 1 << 10
)

// encoder encodes requests as entries.
type encoder struct {
	start         time.Time
	blockBytes    int
	header        Header
	headerLine    []byte
	entry         entry
	blocks        blockNumbers
	conversations numbers[uint64]
	models        numbers[string]
}

func newEncoder(start time.Time, blockBytes, knownBlocks, knownConversations int) encoder {
	header := Header{version, start.UnixMilli(), blockBytes, blockBytes / bytesPerToken}
	line, _ := json.Marshal(header) // numbers always marshal
	return encoder{
		// With its monotonic reading, so that changes of the clock do not matter.
		start:         start,
		blockBytes:    blockBytes,
		header:        header,
		headerLine:    append(line, '\n'),
		blocks:        blockNumbers{minKnown: knownBlocks},
		conversations: numbers[uint64]{minKnown: knownConversations, next: 1},
		models:        numbers[string]{minKnown: minKnownModels},
	}
}

// isReplayable reports whether a request can be replayed.
func (e *encoder) isReplayable(q *Request) bool {
	within := func(n, limit int) bool { return 0 <= n && n <= limit }
	return within(q.Bytes, maxInputBytes) && within(q.ExtraBytes, maxInputBytes-q.Bytes) &&
		within(len(q.Blocks), q.Bytes/e.blockBytes) &&
		within(q.PromptTokens, maxPromptTokens) && within(q.OutputTokens, maxOutputTokens) &&
		q.Arrived.Sub(e.start) <= maxTimestamp
}

// encode returns the entry of a request. It is valid until the next call.
func (e *encoder) encode(q *Request) *entry {
	out := &e.entry
	*out = entry{runs: out.runs[:0]}
	out.timestamp = microseconds(q.Arrived.Sub(e.start))
	if out.inputLength = uint64(q.PromptTokens); q.PromptTokens == 0 {
		out.inputLength = uint64(q.Bytes+q.ExtraBytes) / bytesPerToken
	}
	out.inputBytes, out.extraBytes, out.outputLength, out.code = uint64(q.Bytes), uint64(q.ExtraBytes), uint64(q.OutputTokens), uint64(q.Code)
	out.ttft, out.duration = microseconds(q.TTFT), microseconds(q.Duration)
	if q.Streams {
		out.flags |= isStream
	}
	if q.Plain && q.PromptTokens > 0 {
		out.flags |= isCounted
	}
	if q.CachedKnown {
		out.flags |= hasCached
		out.cachedTokens = uint64(max(0, q.CachedTokens))
	}
	if q.Model != "" {
		out.flags |= hasModel
		out.model = e.models.findOrAssign(q.Model)
	}
	if q.Conversation != 0 {
		out.conversation = e.conversations.findOrAssign(q.Conversation)
	}
	for blocks := q.Blocks; len(blocks) > 0; {
		number, n := e.blocks.findOrAssign(blocks)
		out.addRun(number, uint64(n))
		blocks = blocks[n:]
	}
	return out
}

func microseconds(d time.Duration) uint64 { return uint64(max(0, d.Microseconds())) }

// blockNumbers assigns numbers to blocks as numbers does to other values. A block stands for all of a prompt up to it, so
// blocks that appeared behind each other once do so always: they are kept in runs, which take one lookup each.
type blockNumbers struct {
	minKnown   int // blocks, of which each run counts as runOverhead more
	next       uint64
	young, old map[prompt.Block]*blockRun // by their first block
	size       int                        // of young, as minKnown counts
}

// runOverhead is how many blocks take the memory that a run takes beside its blocks.
const runOverhead = 16

// blockRun is consecutive blocks of a prompt that have consecutive numbers. It is not modified.
type blockRun struct {
	first  uint64 // the number of the first block
	blocks []prompt.Block
}

// findOrAssign returns the number of the first of some consecutive blocks of a prompt, a new one if it is not remembered,
// and how many of them have that number and those behind it.
func (n *blockNumbers) findOrAssign(blocks []prompt.Block) (number uint64, count int) {
	r := n.young[blocks[0]]
	if r == nil {
		if r = n.old[blocks[0]]; r == nil {
			r = &blockRun{n.next, slices.Clone(blocks)}
			n.next += uint64(len(blocks))
		}
		n.remember(r)
	}
	for count < len(blocks) && count < len(r.blocks) && blocks[count] == r.blocks[count] {
		count++
	}
	return r.first, count
}

// remember adds a run to the young ones.
func (n *blockNumbers) remember(r *blockRun) {
	if n.young == nil || n.size >= n.minKnown {
		n.young, n.old, n.size = map[prompt.Block]*blockRun{}, n.young, 0
	}
	n.young[r.blocks[0]] = r
	n.size += len(r.blocks) + runOverhead
}

// numbers assigns a number to each value when it first occurs. It remembers at least the
// last minKnown different values, and at most twice as many, in two generations.
type numbers[K comparable] struct {
	minKnown   int
	next       uint64
	young, old map[K]uint64
}

// findOrAssign returns the number of k, a new one if k is not remembered.
func (n *numbers[K]) findOrAssign(k K) (number uint64) {
	if id, ok := n.young[k]; ok {
		return id
	}
	id, ok := n.old[k]
	if !ok {
		id = n.next
		n.next++
	}
	if n.young == nil || len(n.young) >= n.minKnown {
		n.young, n.old = make(map[K]uint64), n.young
	}
	n.young[k] = id
	return id
}
