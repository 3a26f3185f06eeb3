package replay

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/tidwall/gjson"
)

const (
	bailianBlockTokens = 16
	// maxTraceBlockTokens bounds the block size that a trace names itself.
	maxTraceBlockTokens = 1 << 16
	// liteLLMTimeLayout is that of PostgreSQL; most exports have RFC 3339.
	liteLLMTimeLayout = "2006-01-02 15:04:05.999999999"
)

// traceNames are the names that a format has for what all formats have.
type traceNames struct{ at, input, output string }

var (
	lengthNames  = traceNames{"timestamp", "input_length", "output_length"}
	wekaNames    = traceNames{"t", "in", "out"}
	liteLLMNames = traceNames{"startTime", "prompt_tokens", "completion_tokens"}
)

// newRequest returns a request without blocks, or an error if a value is out of range.
func (n *traceNames) newRequest(atMillis float64, input, output int) (TraceRequest, error) {
	switch {
	case !(atMillis >= 0 && atMillis <= maxTimestampMillis): // nor NaN
		return TraceRequest{}, fmt.Errorf("%s %g is not between 0 and %d ms", n.at, atMillis, maxTimestampMillis)
	case input < 1 || input > maxPromptTokens:
		return TraceRequest{}, fmt.Errorf("%s %d is not between 1 and %d", n.input, input, maxPromptTokens)
	case output < 0 || output > maxOutputTokens:
		return TraceRequest{}, fmt.Errorf("%s %d is not between 0 and %d", n.output, output, maxOutputTokens)
	}
	return TraceRequest{
		At:           time.Duration(atMillis * float64(time.Millisecond)),
		PromptTokens: input,
		OutputTokens: max(1, output), // a server generates at least one token
	}, nil
}

// addBlocks gives the request of a number the ids of its blocks, of which the last one, if it is partial, may be left out.
func (q *TraceRequest) addBlocks(ids []uint64, blockTokens, number int) error {
	all := blockCount(q.PromptTokens, blockTokens)
	if len(ids) != all && len(ids) != q.PromptTokens/blockTokens {
		return fmt.Errorf("%d tokens make %d blocks of %d tokens, there are ids of %d", q.PromptTokens, all, blockTokens, len(ids))
	}
	q.Blocks = ids
	if len(ids) < all { // no other prompt has it
		q.Blocks = append(q.Blocks, mixBits(firstUniqueID+uint64(number)))
	}
	return nil
}

// sortedTrace returns a trace of requests, of which the first one arrives at 0.
func sortedTrace(requests []TraceRequest, blockTokens int) (*Trace, error) {
	if len(requests) == 0 {
		return nil, errors.New("trace without requests")
	}
	slices.SortStableFunc(requests, func(a, b TraceRequest) int { return cmp.Compare(a.At, b.At) })
	for i := range slices.Backward(requests) {
		requests[i].At -= requests[0].At
	}
	return &Trace{BlockTokens: blockTokens, Requests: requests}, nil
}

// bailianTrace collects a trace of Alibaba's Bailian: timestamp (in s), input_length, output_length, hash_ids of the text of each block,
// and the chat that a request continues.
type bailianTrace struct {
	requests []TraceRequest
	sessions map[int64]uint64 // by chat id, of any request
}

func newBailianTrace() *bailianTrace { return &bailianTrace{sessions: map[int64]uint64{}} }

func (t *bailianTrace) addLine(line []byte) error {
	var f struct {
		ChatID       int64    `json:"chat_id"`
		ParentChatID int64    `json:"parent_chat_id"`
		Timestamp    *float64 `json:"timestamp"`
		InputLength  int      `json:"input_length"`
		OutputLength int      `json:"output_length"`
		HashIDs      []uint64 `json:"hash_ids"`
	}
	if err := json.Unmarshal(line, &f); err != nil {
		return err
	}
	if f.Timestamp == nil {
		return errors.New("timestamp is missing")
	}
	r, err := lengthNames.newRequest(1000**f.Timestamp, f.InputLength, f.OutputLength)
	if err != nil {
		return err
	}
	chained := uint64(0)
	for i, id := range f.HashIDs { // equal texts have equal ids, whatever is before them
		chained = chainHash(chained, id)
		f.HashIDs[i] = chained
	}
	if err := r.addBlocks(f.HashIDs, bailianBlockTokens, len(t.requests)); err != nil {
		return fmt.Errorf("hash_ids: %w", err)
	}
	session, known := t.sessions[f.ParentChatID]
	if !known {
		session = uint64(len(t.requests) + 1)
	}
	t.sessions[f.ChatID] = session
	r.Conversation = session
	t.requests = append(t.requests, r)
	return nil
}

func (t *bailianTrace) toTrace() (*Trace, error) { return sortedTrace(t.requests, bailianBlockTokens) }

// wekaTrace collects the sessions of coding agents as kv-cache-tester of Weka records them: a line has a session with its requests,
// those of subagents within it.
type wekaTrace struct {
	blockTokens int
	sessions    [][]TraceRequest
	count       int // of requests
	agents      uint64
}

// wekaRequest is a request of a session, or the requests of a subagent.
type wekaRequest struct {
	Seconds  *float64      `json:"t"`
	Type     string        `json:"type"` // n: not streamed, s: streamed, subagent
	Input    int           `json:"in"`
	Output   int           `json:"out"`
	HashIDs  []uint64      `json:"hash_ids"`
	Requests []wekaRequest `json:"requests"`
}

func (t *wekaTrace) addLine(line []byte) error {
	var f struct {
		BlockSize int           `json:"block_size"`
		Scope     string        `json:"hash_id_scope"`
		Requests  []wekaRequest `json:"requests"`
	}
	if err := json.Unmarshal(line, &f); err != nil {
		return err
	}
	switch {
	case f.BlockSize < 1 || f.BlockSize > maxTraceBlockTokens:
		return fmt.Errorf("block_size %d is not between 1 and %d", f.BlockSize, maxTraceBlockTokens)
	case t.blockTokens != 0 && t.blockTokens != f.BlockSize:
		return fmt.Errorf("block_size changes from %d to %d: replay the sessions separately", t.blockTokens, f.BlockSize)
	case f.Scope != "" && f.Scope != "local" && f.Scope != "global":
		return fmt.Errorf("hash_id_scope %q is neither local nor global", f.Scope)
	}
	t.blockTokens = f.BlockSize
	scope := uint64(0)
	if f.Scope != "global" { // other sessions give the same ids to other blocks
		scope = uint64(len(t.sessions) + 1)
	}
	session, err := t.appendAgent(nil, f.Requests, scope, 0)
	if err != nil {
		return err
	}
	t.sessions = append(t.sessions, session)
	return nil
}

// appendAgent appends the requests of an agent, and of its subagents, to those of a session. Their times begin at seconds.
func (t *wekaTrace) appendAgent(session []TraceRequest, requests []wekaRequest, scope uint64, seconds float64) ([]TraceRequest, error) {
	t.agents++
	agent := t.agents
	for i := range requests {
		q := &requests[i]
		var err error
		switch {
		case q.Seconds == nil:
			err = errors.New("t is missing")
		case q.Type == "subagent":
			// In some recordings the times of its requests begin with it, in others with the session.
			begin := 0.0
			if len(q.Requests) > 0 && q.Requests[0].Seconds != nil && *q.Requests[0].Seconds < *q.Seconds {
				begin = seconds + *q.Seconds
			}
			session, err = t.appendAgent(session, q.Requests, scope, begin)
		case q.Type == "n" || q.Type == "s":
			var r TraceRequest
			if r, err = wekaNames.newRequest(1000*(seconds+*q.Seconds), q.Input, q.Output); err != nil {
				break
			}
			for i, id := range q.HashIDs {
				q.HashIDs[i] = chainHash(scope, id)
			}
			if err = r.addBlocks(q.HashIDs, t.blockTokens, t.count); err != nil {
				err = fmt.Errorf("hash_ids: %w", err)
			}
			r.Conversation, r.NotStreamed = agent, q.Type == "n"
			session, t.count = append(session, r), t.count+1
		default:
			err = fmt.Errorf("type %q is neither n, s nor subagent", q.Type)
		}
		if err != nil {
			return nil, fmt.Errorf("requests[%d]: %w", i, err)
		}
	}
	return session, nil
}

// toTrace spreads the beginnings of the sessions, which are not recorded, evenly over the longest one.
func (t *wekaTrace) toTrace() (*Trace, error) {
	longest := time.Duration(0)
	for _, session := range t.sessions {
		for i := range session {
			longest = max(longest, session[i].At)
		}
	}
	var all []TraceRequest
	for i, session := range t.sessions {
		for _, r := range session {
			r.At += longest / time.Duration(len(t.sessions)) * time.Duration(i)
			all = append(all, r)
		}
	}
	return sortedTrace(all, t.blockTokens)
}

// liteLLMTrace collects rows of LiteLLM's spend logs whose metadata have the ids that its callback prefix_block_hashes adds. The other
// rows are left out.
type liteLLMTrace struct {
	rows      []liteLLMRow
	sessions  map[string]uint64
	blockSize int // that the metadata name; 0: none
}

type liteLLMRow struct {
	started       time.Time
	input, output int
	ids           []uint64 // each stands for all blocks before it too
	session       uint64
}

func newLiteLLMTrace() *liteLLMTrace { return &liteLLMTrace{sessions: map[string]uint64{}} }

func (t *liteLLMTrace) addLine(line []byte) error {
	var f struct {
		Started   string          `json:"startTime"`
		Input     int             `json:"prompt_tokens"`
		Output    int             `json:"completion_tokens"`
		SessionID string          `json:"session_id"`
		Metadata  json.RawMessage `json:"metadata"`
	}
	if err := json.Unmarshal(line, &f); err != nil {
		return err
	}
	started, err := time.Parse(time.RFC3339Nano, f.Started)
	if err != nil {
		if started, err = time.Parse(liteLLMTimeLayout, f.Started); err != nil {
			return fmt.Errorf("startTime %q is not a time like 2026-11-29T10:00:00.5Z", f.Started)
		}
	}
	if _, err := liteLLMNames.newRequest(0, f.Input, f.Output); err != nil {
		return err
	}
	ids, blockSize, err := parseLiteLLMHashes(f.Metadata)
	switch {
	case err != nil:
		return fmt.Errorf("metadata: prefix_block_hashes: %w", err)
	case len(ids) == 0:
		return nil
	case blockSize != 0 && t.blockSize != 0 && t.blockSize != blockSize:
		return fmt.Errorf("metadata: prefix_block_hashes: the block size changes from %d to %d", t.blockSize, blockSize)
	}
	t.blockSize = max(t.blockSize, blockSize)
	row := liteLLMRow{started: started, input: f.Input, output: f.Output, ids: ids}
	if f.SessionID != "" {
		if t.sessions[f.SessionID] == 0 {
			t.sessions[f.SessionID] = uint64(len(t.sessions) + 1)
		}
		row.session = t.sessions[f.SessionID]
	}
	t.rows = append(t.rows, row)
	return nil
}

// parseLiteLLMHashes returns the ids in metadata, which are an object or a string with one: an array, or the array in an object whose
// number is the block size. blockSize is 0 if there is none.
func parseLiteLLMHashes(metadata json.RawMessage) (ids []uint64, blockSize int, err error) {
	m := gjson.ParseBytes(metadata)
	if m.Type == gjson.String {
		m = gjson.Parse(m.Str)
	}
	hashes := m.Get("prefix_block_hashes")
	array := hashes
	if hashes.IsObject() {
		array = gjson.Result{}
		hashes.ForEach(func(_, member gjson.Result) bool {
			switch {
			case member.IsArray():
				array = member
			case member.Type == gjson.Number:
				if blockSize = int(member.Num); blockSize < 1 || member.Num > maxTraceBlockTokens {
					err = fmt.Errorf("block size %s is not between 1 and %d", member.Raw, maxTraceBlockTokens)
				}
			}
			return err == nil
		})
	}
	array.ForEach(func(_, id gjson.Result) bool {
		var n uint64
		if n, err = strconv.ParseUint(id.Str, 16, 64); err != nil {
			err = fmt.Errorf("%.40s is not a string of at most 16 hexadecimal digits", id.Raw)
		}
		ids = append(ids, n)
		return err == nil
	})
	return ids, blockSize, err
}

func (t *liteLLMTrace) toTrace() (*Trace, error) {
	if len(t.rows) == 0 {
		return nil, errors.New("no request has prefix_block_hashes in its metadata: enable the callback of that name in LiteLLM")
	}
	blockTokens := t.blockSize
	if blockTokens == 0 { // a power of two, by the longest prompt
		longest := slices.MaxFunc(t.rows, func(a, b liteLLMRow) int { return cmp.Compare(len(a.ids), len(b.ids)) })
		perBlock := float64(longest.input) / (float64(len(longest.ids)) - 0.5)
		blockTokens = 1 << int(min(max(0, math.Round(math.Log2(perBlock))), math.Log2(maxTraceBlockTokens)))
	}
	first := slices.MinFunc(t.rows, func(a, b liteLLMRow) int { return a.started.Compare(b.started) }).started
	var requests []TraceRequest
	for i := range t.rows {
		row := &t.rows[i]
		// LiteLLM counts tokens with a tokenizer of its own: the length is one that has as many blocks as it has counted.
		row.ids = row.ids[:min(len(row.ids), maxPromptTokens/blockTokens)]
		input := min(max(row.input, (len(row.ids)-1)*blockTokens+1), len(row.ids)*blockTokens)
		r, err := liteLLMNames.newRequest(float64(row.started.Sub(first).Milliseconds()), input, row.output)
		if err != nil {
			return nil, err
		}
		r.Blocks, r.Conversation = row.ids, row.session
		requests = append(requests, r)
	}
	return sortedTrace(requests, blockTokens)
}

// WriteMooncake writes the trace in Mooncake's format. Two of its blocks have one id if the blocks of the trace up to the end of both are
// the same.
func (t *Trace) WriteMooncake(w io.Writer) error {
	type line struct {
		Timestamp    int64    `json:"timestamp"`
		InputLength  int      `json:"input_length"`
		OutputLength int      `json:"output_length"`
		HashIDs      []uint64 `json:"hash_ids"`
		Session      *uint64  `json:"session,omitempty"`
	}
	out := json.NewEncoder(w)
	ids := map[uint64]uint64{} // by the hash of all blocks up to there
	for i := range t.Requests {
		q := &t.Requests[i]
		l := line{Timestamp: q.At.Milliseconds(), InputLength: q.PromptTokens, OutputLength: q.OutputTokens, HashIDs: []uint64{}}
		if q.Conversation != 0 {
			session := q.Conversation - 1
			l.Session = &session
		}
		chained, blocks := uint64(0), 0
		for end := mooncakeBlockTokens; end < q.PromptTokens+mooncakeBlockTokens; end += mooncakeBlockTokens {
			for ; blocks < min(len(q.Blocks), blockCount(end, t.BlockTokens)); blocks++ {
				chained = chainHash(chained, q.Blocks[blocks])
			}
			id, known := ids[chained]
			if !known {
				id = uint64(len(ids))
				ids[chained] = id
			}
			l.HashIDs = append(l.HashIDs, id)
		}
		if err := out.Encode(l); err != nil {
			return err
		}
	}
	return nil
}
