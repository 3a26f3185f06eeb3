package recorder

import (
	"encoding/json"
	"strconv"
	"time"

	"warmroute/prompt"
)

const (
	version       = 2
	bytesPerToken = 4 // estimate

	// How many different values keep their number at least, in a file. A block that did not occur
	// among as many others gets a new number, and its prompt looks new.
	minKnownBlocks   = 1 << 19
	minKnownSessions = 1 << 16
	minKnownModels   = 1 << 10
)

// encoder encodes requests as lines.
type encoder struct {
	start      time.Time
	blockBytes int
	header     Header
	headerLine []byte
	line       []byte
	blocks     numbers[prompt.Block]
	sessions   numbers[uint64]
	models     numbers[string]
}

func newEncoder(start time.Time, blockBytes, knownBlocks, knownSessions int) encoder {
	header := Header{version, start.UnixMilli(), blockBytes, blockBytes / bytesPerToken}
	line, _ := json.Marshal(header) // numbers always marshal
	return encoder{
		// With its monotonic reading, so that changes of the clock do not matter.
		start:      start,
		blockBytes: blockBytes,
		header:     header,
		headerLine: append(line, '\n'),
		blocks:     numbers[prompt.Block]{minKnown: knownBlocks},
		sessions:   numbers[uint64]{minKnown: knownSessions, next: 1},
		models:     numbers[string]{minKnown: minKnownModels},
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

// encode returns the line of a request. It is valid until the next call.
func (e *encoder) encode(q *Request) []byte {
	b := append(e.line[:0], `{"timestamp":`...)
	b = appendMillis(b, max(0, q.Arrived.Sub(e.start)))
	tokens := q.PromptTokens
	if tokens == 0 {
		tokens = (q.Bytes + q.ExtraBytes) / bytesPerToken
	}
	b = appendInt(b, `,"input_length":`, tokens)
	b = appendInt(b, `,"input_bytes":`, q.Bytes)
	if q.ExtraBytes > 0 {
		b = appendInt(b, `,"extra_bytes":`, q.ExtraBytes)
	}
	if q.Plain && q.PromptTokens > 0 {
		b = append(b, `,"counted":true`...)
	}
	b = appendInt(b, `,"output_length":`, q.OutputTokens)
	if q.CachedKnown {
		b = appendInt(b, `,"cached_tokens":`, q.CachedTokens)
	}
	b = appendInt(b, `,"code":`, q.Code)
	b = strconv.AppendBool(append(b, `,"stream":`...), q.Streams)
	if q.Model != "" {
		b = strconv.AppendUint(append(b, `,"model":`...), e.models.findOrAssign(q.Model), 10)
	}
	if q.Session != 0 {
		b = strconv.AppendUint(append(b, `,"session":`...), e.sessions.findOrAssign(q.Session), 10)
	}
	if q.TTFT > 0 {
		b = appendMillis(append(b, `,"ttft_ms":`...), q.TTFT)
	}
	b = appendMillis(append(b, `,"duration_ms":`...), q.Duration)
	b = append(b, `,"block_runs":[`...)
	b = e.appendRuns(b, q.Blocks)
	e.line = append(b, "]}\n"...)
	return e.line
}

// appendRuns appends the numbers of blocks: for each run of consecutive ones the first, and how many they are.
func (e *encoder) appendRuns(b []byte, blocks []prompt.Block) []byte {
	var first, count uint64
	end := func() {
		if b[len(b)-1] != '[' {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, first, 10)
		b = strconv.AppendUint(append(b, ','), count, 10)
	}
	for i, block := range blocks {
		number := e.blocks.findOrAssign(block)
		if i > 0 && number == first+count {
			count++
			continue
		}
		if i > 0 {
			end()
		}
		first, count = number, 1
	}
	if len(blocks) > 0 {
		end()
	}
	return b
}

func appendInt(b []byte, key string, n int) []byte {
	return strconv.AppendInt(append(b, key...), int64(n), 10)
}

// appendMillis appends milliseconds with microseconds, so that the requests of a burst
// have different timestamps.
func appendMillis(b []byte, d time.Duration) []byte {
	return strconv.AppendFloat(b, float64(d.Microseconds())/1000, 'f', -1, 64)
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
