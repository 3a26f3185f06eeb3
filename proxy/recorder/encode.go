package recorder

import (
	"fmt"
	"strconv"
	"time"

	"warmroute/router/prompt"
)

const (
	version       = 1
	bytesPerToken = 4 // about, where the replica does not count

	// How many of a kind keep their number at least: a block that was not seen
	// for so many others gets a new one, and its prompt looks new.
	blocksKnown   = 1 << 19
	sessionsKnown = 1 << 16
	modelsKnown   = 1 << 10
)

// encoder makes lines of requests.
type encoder struct {
	start      time.Time
	blockBytes int
	header     []byte
	line       []byte
	blocks     numbers[prompt.Block]
	sessions   numbers[uint64]
	models     numbers[string]
}

func newEncoder(start time.Time, blockBytes int) encoder {
	return encoder{
		// Whole, with its monotonic reading: a clock that is set moves no request.
		start:      start,
		blockBytes: blockBytes,
		header: fmt.Appendf(nil, `{"warmroute_record":%d,"started_ms":%d,"block_bytes":%d,"block_tokens":%d}`+"\n",
			version, start.UnixMilli(), blockBytes, blockBytes/bytesPerToken),
		blocks:   numbers[prompt.Block]{most: blocksKnown},
		sessions: numbers[uint64]{most: sessionsKnown, next: 1},
		models:   numbers[string]{most: modelsKnown},
	}
}

// fits says whether a request can be replayed.
func (e *encoder) fits(q *Request) bool {
	within := func(n, most int) bool { return 0 <= n && n <= most }
	return within(q.Bytes, mostBytes) && within(q.ExtraBytes, mostBytes-q.Bytes) &&
		within(len(q.Blocks), q.Bytes/e.blockBytes) &&
		within(q.PromptTokens, mostPrompt) && within(q.AnswerTokens, mostAnswer) &&
		q.Arrived.Sub(e.start) <= mostStamp
}

// request returns a line, valid until the next call.
func (e *encoder) request(q *Request) []byte {
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
	b = appendInt(b, `,"output_length":`, q.AnswerTokens)
	if q.CachedKnown {
		b = appendInt(b, `,"cached_tokens":`, q.CachedTokens)
	}
	b = appendInt(b, `,"code":`, q.Code)
	b = strconv.AppendBool(append(b, `,"stream":`...), q.Streams)
	if q.Model != "" {
		b = strconv.AppendUint(append(b, `,"model":`...), e.models.of(q.Model), 10)
	}
	if q.Session != 0 {
		b = strconv.AppendUint(append(b, `,"session":`...), e.sessions.of(q.Session), 10)
	}
	if q.TTFT > 0 {
		b = appendMillis(append(b, `,"ttft_ms":`...), q.TTFT)
	}
	b = appendMillis(append(b, `,"duration_ms":`...), q.Duration)
	b = append(b, `,"hash_ids":[`...)
	for i, block := range q.Blocks {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, e.blocks.of(block), 10)
	}
	e.line = append(b, "]}\n"...)
	return e.line
}

func appendInt(b []byte, key string, n int) []byte {
	return strconv.AppendInt(append(b, key...), int64(n), 10)
}

// appendMillis writes milliseconds to the microsecond: requests of a burst must
// not share a stamp.
func appendMillis(b []byte, d time.Duration) []byte {
	return strconv.AppendFloat(b, float64(d.Microseconds())/1000, 'f', -1, 64)
}

// numbers gives each thing a number when it is first seen. It knows the last
// most different things for certain, and twice as many at most: when the young
// ones have become so many, they are the old ones, and the old ones forgotten.
type numbers[K comparable] struct {
	most       int
	next       uint64
	young, old map[K]uint64
}

func (n *numbers[K]) of(k K) uint64 {
	if id, ok := n.young[k]; ok {
		return id
	}
	id, ok := n.old[k]
	if !ok {
		id = n.next
		n.next++
	}
	if n.young == nil || len(n.young) >= n.most {
		n.young, n.old = make(map[K]uint64), n.young
	}
	n.young[k] = id
	return id
}
