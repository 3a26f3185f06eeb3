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

	"warmroute/lab/sim/engine"
	"warmroute/prompt"
)

// CharsPerToken is how much text stands for one token in this package and in
// package loadgen. English comes close to it with today's tokenizers.
const CharsPerToken = 4

const (
	mooncakeBlockTokens = 512                    // of each id of Mooncake's traces
	maxPromptTokens     = 4 << 20                // of a trace: 16 MiB of text
	maxOutputTokens     = 1 << 20                // of a trace
	maxTraceLineBytes   = 64 << 20               // holds a session of Weka's with 1,000 long prompts
	maxTimestampMillis  = 365 * 24 * 3600 * 1000 // a year

	// maxSpread bounds the time over which requests with one timestamp are spread;
	// the timestamps of Mooncake's traces are 3 s apart.
	maxSpread = 3100 * time.Millisecond
	// nominalRate is the prefill rate of a replica, in tokens per second, that loads
	// refer to, whatever that of the replicas in use.
	nominalRate = engine.DefaultPrefillRate
)

// TraceRequest is one recorded request.
type TraceRequest struct {
	At           time.Duration // since the trace began
	PromptTokens int
	OutputTokens int
	// Blocks identifies the prompt's blocks of Trace.BlockTokens, the last of which
	// can be partial. Requests with equal leading blocks share that prefix.
	Blocks []uint64

	Conversation uint64 // number of its session, from 1; 0: unknown
	ModelNumber  uint64 // of its model in a recording
	Model        int    // which replicas serve it; see Scenario.ModelOf
	NotStreamed  bool   // its response was not a stream
}

// Trace is recorded traffic in order of arrival. It is replayed as an open loop, in which a
// slow response delays no later request, or as closed loops of its sessions.
type Trace struct {
	BlockTokens int // of each of Blocks
	Requests    []TraceRequest

	continuing sync.Mutex      // guards later
	later      []*TraceRequest // see continuations; nil until needed
}

// traceLines collects the requests of a trace in one format, from its lines.
type traceLines interface {
	addLine(line []byte) error
	toTrace() (*Trace, error)
}

// ParseTrace reads a trace with a JSON object on each line: a proxy's recording, or one of Mooncake's, Bailian's, Weka's or LiteLLM's
// formats. The first line tells which. Its errors name the line.
func ParseTrace(r io.Reader) (*Trace, error) {
	var t traceLines
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxTraceLineBytes)
	n := 0
	for lines.Scan() {
		n++
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		if t == nil {
			t = newTraceLines(lines.Bytes())
		}
		if err := t.addLine(lines.Bytes()); err != nil {
			return nil, fmt.Errorf("trace line %d: %w", n, err)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("trace line %d: %w", n+1, err)
	}
	if t == nil {
		return nil, errors.New("trace without requests")
	}
	return t.toTrace()
}

// newTraceLines returns what collects the lines of a trace that begins with the first one.
func newTraceLines(first []byte) traceLines {
	var members struct {
		Requests *json.RawMessage `json:"requests"`
		ChatID   *json.RawMessage `json:"chat_id"`
		Tokens   *json.RawMessage `json:"prompt_tokens"`
	}
	_ = json.Unmarshal(first, &members) // addLine returns the error
	switch {
	case isRecordingHeader(first):
		return new(recording)
	case members.Requests != nil:
		return new(wekaTrace)
	case members.ChatID != nil:
		return newBailianTrace()
	case members.Tokens != nil:
		return newLiteLLMTrace()
	}
	return new(mooncakeTrace)
}

// mooncakeTrace collects a trace in Mooncake's format: timestamp (in ms), input_length, output_length (in tokens), hash_ids and
// optionally the number of a session.
type mooncakeTrace struct{ requests []TraceRequest }

func (t *mooncakeTrace) addLine(line []byte) error {
	req, err := parseMooncakeLine(line)
	if err != nil {
		return err
	}
	if k := len(t.requests); k > 0 && req.At < t.requests[k-1].At {
		return fmt.Errorf("timestamp %d is earlier than the previous one: sort the trace by timestamp", req.At.Milliseconds())
	}
	t.requests = append(t.requests, req)
	return nil
}

func (t *mooncakeTrace) toTrace() (*Trace, error) {
	return &Trace{BlockTokens: mooncakeBlockTokens, Requests: t.requests}, nil
}

func parseMooncakeLine(line []byte) (TraceRequest, error) {
	var f struct {
		Timestamp    *float64 `json:"timestamp"`
		InputLength  int      `json:"input_length"`
		OutputLength int      `json:"output_length"`
		HashIDs      []uint64 `json:"hash_ids"`
		Conversation *uint64  `json:"session"`
	}
	if err := json.Unmarshal(line, &f); err != nil {
		return TraceRequest{}, err
	}
	if f.Timestamp == nil {
		return TraceRequest{}, errors.New("timestamp is missing")
	}
	if want := blockCount(f.InputLength, mooncakeBlockTokens); f.InputLength > 0 && len(f.HashIDs) != want {
		return TraceRequest{}, fmt.Errorf("input_length %d makes %d blocks of %d tokens, hash_ids has %d", f.InputLength, want,
			mooncakeBlockTokens, len(f.HashIDs))
	}
	r, err := lengthNames.newRequest(*f.Timestamp, f.InputLength, f.OutputLength)
	if err != nil {
		return TraceRequest{}, err
	}
	r.Blocks = f.HashIDs
	if f.Conversation != nil {
		if *f.Conversation > maxRecordID {
			return TraceRequest{}, fmt.Errorf("session %d is above %d", *f.Conversation, uint64(maxRecordID))
		}
		r.Conversation = 1 + *f.Conversation // some traces count from 0
	}
	return r, nil
}

// SpreadTimestamps replaces equal timestamps of a coarse clock by sorted uniform
// draws up to the next distinct one. The same seed gives the same.
func (t *Trace) SpreadTimestamps(seed uint64) {
	draw := rand.New(rand.NewPCG(seed, 0))
	for i := 0; i < len(t.Requests); {
		at, end := t.Requests[i].At, i+1
		for end < len(t.Requests) && t.Requests[end].At == at {
			end++
		}
		if end-i > 1 {
			room := maxSpread
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

// Truncate removes all but the first n requests.
func (t *Trace) Truncate(n int) {
	t.later = nil
	t.Requests = t.Requests[:min(n, len(t.Requests))]
}

// AssignModels sets the Model of each request to what modelOf has for its ModelNumber, and removes requests for which it
// has nothing.
func (t *Trace) AssignModels(modelOf map[uint64]int) {
	t.later = nil
	kept := t.Requests[:0]
	for _, q := range t.Requests {
		if model, ok := modelOf[q.ModelNumber]; ok {
			q.Model = model
			kept = append(kept, q)
		}
	}
	t.Requests = kept
}

// Load returns the load of the trace on this many backends: the time that its requests take on one replica, over
// that of all in its span. It is infinite when all requests arrive at once.
func (t *Trace) Load(backends int) float64 {
	seconds := 0.0
	for i := range t.Requests {
		seconds += t.Requests[i].nominalSeconds()
	}
	return seconds / (t.span().Seconds() * float64(backends))
}

// nominalSeconds returns how long the request takes on a replica without a cache: its prompt at nominalRate, and what
// each token of the output adds to a step of the default engine.
func (q *TraceRequest) nominalSeconds() float64 {
	e := engine.Config{}.WithDefaults()
	prompt, output := float64(q.PromptTokens), float64(q.OutputTokens)
	return prompt/nominalRate + output*(e.DecodeTime.Seconds()+(prompt+output/2)*e.ContextTime.Seconds())
}

// ScaleToLoad scales the times of arrival so that Load is load.
func (t *Trace) ScaleToLoad(load float64, backends int) {
	factor := t.Load(backends) / load
	if math.IsInf(factor, 1) {
		return // one instant cannot be scaled
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

// Traced is the workload of a trace.
type Traced struct {
	Trace *Trace  // not modified; with its recorded timestamps
	Load  float64 // that the arrivals are scaled to; 0: as recorded
}

// Requests spreads equal timestamps, and takes outputs for parts of the later prompts
// that continue them.
func (w Traced) Requests(backends int, seed uint64) (*Requests, error) {
	if w.Trace == nil || len(w.Trace.Requests) == 0 {
		return nil, errors.New("trace without requests")
	}
	t := &Trace{BlockTokens: w.Trace.BlockTokens, Requests: slices.Clone(w.Trace.Requests)}
	t.SpreadTimestamps(seed)
	if w.Load > 0 {
		t.ScaleToLoad(w.Load, backends)
	}
	return &Requests{BlockTokens: t.BlockTokens, Total: len(t.Requests), Open: t.newJobs(w.Trace.continuations())}, nil
}

// newJobs returns a job for each request, in their order and at their times since the first one. later are the
// continuations.
func (t *Trace) newJobs(later []*TraceRequest) []*Job {
	jobs := make([]*Job, len(t.Requests))
	places := findConversations(t.Requests, t.BlockTokens)
	for i := range t.Requests {
		jobs[i] = t.Requests[i].newJob(t.BlockTokens, uint64(i), later[i], places[i])
		jobs[i].At -= t.Requests[0].At
	}
	return jobs
}

// newJob returns a job for the request. Its output's blocks are those of the request
// that continues it, or unique if continuation is nil.
func (q *TraceRequest) newJob(blockTokens int, number uint64, continuation *TraceRequest, place conversationPlace) *Job {
	full, all := q.PromptTokens/blockTokens, (q.PromptTokens+q.OutputTokens)/blockTokens
	c := chain{names: make([]prompt.Block, 0, all), cache: make([]engine.BlockHash, 0, all)}
	for _, id := range q.Blocks[:full] {
		c.add(id)
	}
	for i := full; i < all; i++ {
		if continuation != nil && i < len(continuation.Blocks) {
			c.add(continuation.Blocks[i])
		} else {
			c.add(mixBits(number)) // unlike any id of a trace
		}
	}
	job := c.newJob(q.At, q.PromptTokens, q.OutputTokens, blockTokens)
	job.NotStreamed, job.Model = q.NotStreamed, q.Model
	if q.Conversation != 0 {
		job.Conversation, job.PromptKey, job.Turn = mixBits(q.Conversation), place.key, place.turn
		return job
	}
	// All requests of Mooncake's traces begin with the same block.
	job.PromptKey = mixBits(q.Blocks[min(1, len(q.Blocks)-1)])
	job.Conversation = job.PromptKey
	return job
}

// continuations returns for each request the next one whose prompt continues its
// prompt and output, or nil. It does not depend on timestamps, so one result serves
// every seed and load. Safe for concurrent use.
func (t *Trace) continuations() []*TraceRequest {
	t.continuing.Lock()
	defer t.continuing.Unlock()
	if t.later == nil {
		t.later = findContinuations(t.Requests, t.BlockTokens)
	}
	return t.later
}

// findContinuations does the work of Trace.continuations, in time linear in the blocks
// of all prompts, but for a logarithm.
// Prompts of one full block are ignored: all share the first.
func findContinuations(requests []TraceRequest, blockTokens int) []*TraceRequest {
	heads := make([]uint64, len(requests)) // hash of all full blocks of a prompt
	// For each of these hashes, the requests seen so far, from the last to the first,
	// whose prompts begin with it. Only those longer than all after them in the list
	// are kept: a shorter one is never the next that is long enough.
	longer := make(map[uint64][]int32)
	for i := range requests {
		if q := &requests[i]; q.PromptTokens/blockTokens >= 2 {
			for _, id := range q.Blocks[:q.PromptTokens/blockTokens] {
				heads[i] = chainHash(heads[i], id)
			}
			longer[heads[i]] = nil
		}
	}
	later := make([]*TraceRequest, len(requests))
	for i, q := range slices.Backward(requests) {
		if heads[i] != 0 {
			later[i] = nextLonger(requests, longer[heads[i]], q.PromptTokens+q.OutputTokens)
		}
		head := uint64(0)
		for _, id := range q.Blocks[:q.PromptTokens/blockTokens] {
			head = chainHash(head, id)
			list, wanted := longer[head]
			if !wanted {
				continue
			}
			for n := len(list); n > 0 && requests[list[n-1]].PromptTokens <= q.PromptTokens; n-- {
				list = list[:n-1]
			}
			longer[head] = append(list, int32(i))
		}
	}
	return later
}

// nextLonger returns the last request of candidates, in which prompts get shorter, with
// more than this many tokens.
func nextLonger(requests []TraceRequest, candidates []int32, tokens int) *TraceRequest {
	n, _ := slices.BinarySearchFunc(candidates, tokens, func(k int32, tokens int) int {
		if requests[k].PromptTokens > tokens {
			return -1
		}
		return 1
	})
	if n == 0 {
		return nil
	}
	return &requests[candidates[n-1]]
}
