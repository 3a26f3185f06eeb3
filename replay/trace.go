// Package replay runs workloads, recorded traces and generated ones, in virtual
// time on the router's own code and simulated engines.
//
// All times in a workload and in its results are the replicas' own: a simulated
// replica that runs five times faster than a real one still gives figures that
// compare with those of a real one.
package replay

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

// CharsPerToken is how much text stands for one token in this package and in
// package loadgen. English comes close to it with today's tokenizers.
const CharsPerToken = 4

const (
	// mooncakeBlock is the length in tokens of what one id of Mooncake's traces stands for.
	mooncakeBlock = 512
	// maxTracePrompt bounds a prompt in tokens: 16 MiB of text.
	maxTracePrompt = 4 << 20
	// maxTraceAnswer bounds an answer in tokens.
	maxTraceAnswer = 1 << 20
	// maxTraceLine holds the ids of the longest prompt, with room.
	maxTraceLine = 1 << 20
	// maxTraceStamp bounds a stamp, in milliseconds, to a year.
	maxTraceStamp = 365 * 24 * 3600 * 1000
	// stampGrid is the longest stretch over which requests of one stamp are
	// spread; the stamps of Mooncake's traces lie 3 s apart.
	stampGrid = 3100 * time.Millisecond
	// nominalRate is the prefill speed of a replica, in tokens a second, that
	// loads are stated for, whatever the speed of the replicas at hand.
	nominalRate = 8000
)

// TraceRequest is one recorded request.
type TraceRequest struct {
	At           time.Duration // since the trace began
	PromptTokens int
	AnswerTokens int
	// Blocks names the prompt's blocks, Trace.BlockTokens long, the last one
	// possibly partial. Requests with equal leading blocks share that prefix.
	Blocks []uint64

	Session uint64 // what names its session; 0: nothing does
	Whole   bool   // its answer came whole, not as a stream
}

// Trace is a recorded stretch of traffic, in order of arrival. It is played as
// it came: a slow answer delays no later request.
type Trace struct {
	BlockTokens int // the length in tokens of what one id of Blocks stands for
	Requests    []TraceRequest

	continuing sync.Mutex      // guards later
	later      []*TraceRequest // see continuations; nil until they are asked for
}

// ParseTrace reads Mooncake's format, a JSON object a line with timestamp (in
// ms), input_length, output_length (in tokens) and hash_ids, or what a proxy
// recorded, which begins with a line that says so. An error names the line it
// was found in.
func ParseTrace(r io.Reader) (*Trace, error) {
	t := &Trace{BlockTokens: mooncakeBlock}
	var recorded *recording // nil: it is Mooncake's
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxTraceLine)
	n := 0
	for lines.Scan() {
		n++
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		if recorded == nil && len(t.Requests) == 0 && isRecording(lines.Bytes()) {
			recorded = new(recording)
		}
		if recorded != nil {
			if err := recorded.add(lines.Bytes()); err != nil {
				return nil, fmt.Errorf("trace line %d: %w", n, err)
			}
			continue
		}
		req, err := parseTraceLine(lines.Bytes())
		if err != nil {
			return nil, fmt.Errorf("trace line %d: %w", n, err)
		}
		if k := len(t.Requests); k > 0 && req.At < t.Requests[k-1].At {
			return nil, fmt.Errorf("trace line %d: timestamp %d is earlier than that of the request before it; sort the trace by timestamp", n, req.At.Milliseconds())
		}
		t.Requests = append(t.Requests, req)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("trace line %d: %w", n+1, err)
	}
	if recorded != nil {
		return recorded.trace()
	}
	if len(t.Requests) == 0 {
		return nil, errors.New("the trace holds no request")
	}
	return t, nil
}

func parseTraceLine(line []byte) (TraceRequest, error) {
	var f struct {
		Timestamp    *float64 `json:"timestamp"`
		InputLength  int      `json:"input_length"`
		OutputLength int      `json:"output_length"`
		HashIDs      []uint64 `json:"hash_ids"`
	}
	if err := json.Unmarshal(line, &f); err != nil {
		return TraceRequest{}, err
	}
	switch {
	case f.Timestamp == nil:
		return TraceRequest{}, errors.New("timestamp is missing")
	case *f.Timestamp < 0 || *f.Timestamp > maxTraceStamp:
		return TraceRequest{}, fmt.Errorf("timestamp %g is not between 0 and %d ms", *f.Timestamp, maxTraceStamp)
	case f.InputLength < 1 || f.InputLength > maxTracePrompt:
		return TraceRequest{}, fmt.Errorf("input_length %d is not between 1 and %d", f.InputLength, maxTracePrompt)
	case f.OutputLength < 0 || f.OutputLength > maxTraceAnswer:
		return TraceRequest{}, fmt.Errorf("output_length %d is not between 0 and %d", f.OutputLength, maxTraceAnswer)
	}
	if want := (f.InputLength + mooncakeBlock - 1) / mooncakeBlock; len(f.HashIDs) != want {
		return TraceRequest{}, fmt.Errorf("input_length %d makes %d blocks of %d tokens, hash_ids has %d", f.InputLength, want, mooncakeBlock, len(f.HashIDs))
	}
	return TraceRequest{
		At:           time.Duration(*f.Timestamp * float64(time.Millisecond)),
		PromptTokens: f.InputLength,
		// A server generates one token at least.
		AnswerTokens: max(1, f.OutputLength),
		Blocks:       f.HashIDs,
	}, nil
}

// Spread replaces equal stamps, which a coarse clock left, by sorted uniform
// draws up to the next distinct one. The same seed draws the same.
func (t *Trace) Spread(seed uint64) {
	draw := rand.New(rand.NewPCG(seed, 0))
	for i := 0; i < len(t.Requests); {
		at, end := t.Requests[i].At, i+1
		for end < len(t.Requests) && t.Requests[end].At == at {
			end++
		}
		if end-i > 1 {
			room := stampGrid
			if end < len(t.Requests) {
				room = min(room, t.Requests[end].At-at)
			}
			offsets := make([]time.Duration, end-i)
			for k := range offsets {
				offsets[k] = time.Duration(draw.Float64() * float64(room))
			}
			slices.SortFunc(offsets, cmp.Compare)
			for k, o := range offsets {
				t.Requests[i+k].At = at + o
			}
		}
		i = end
	}
}

// Head drops all but the first n requests.
func (t *Trace) Head(n int) {
	t.later = nil
	t.Requests = t.Requests[:min(n, len(t.Requests))]
}

// Load is what the trace offers so many backends: its prompt tokens over what
// they could prefill in its span, 8,000 a second each, without any cache. It is
// infinite when all arrive at once.
func (t *Trace) Load(backends int) float64 {
	tokens := 0
	for _, r := range t.Requests {
		tokens += r.PromptTokens
	}
	return float64(tokens) / (t.span().Seconds() * float64(backends) * nominalRate)
}

// Stretch moves the arrivals apart, or together, until Load is load.
func (t *Trace) Stretch(load float64, backends int) {
	factor := t.Load(backends) / load
	if math.IsInf(factor, 1) {
		return // one instant cannot be stretched
	}
	first := t.Requests[0].At
	for i := range t.Requests {
		r := &t.Requests[i]
		r.At = time.Duration(float64(r.At-first) * factor)
	}
}

func (t *Trace) span() time.Duration {
	return t.Requests[len(t.Requests)-1].At - t.Requests[0].At
}
