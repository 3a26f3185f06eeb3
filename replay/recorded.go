package replay

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
)

const (
	// recordVersion is that of the format which a proxy records in.
	recordVersion = 1
	// recordMark begins the first line of a recording.
	recordMark = `{"warmroute_record":`
	// maxRecordID bounds an id of a block or a session.
	maxRecordID = 1 << 40
	// maxUnnamed bounds the blocks of all prompts whose blocks are not recorded.
	maxUnnamed = 1 << 24
	// unnamed is the first id given to those: nobody else has it.
	unnamed = 1 << 62
)

// recording collects a proxy's recorded requests, in whatever order they ended
// and whatever runs of the proxy they are from.
type recording struct {
	blockBytes int
	started    int64 // of the run being read, ms since 1970
	blocks     space
	sessions   space
	lines      []recordedLine
}

// recordedLine is a request as it stands in a recording. Its ids are no other
// run's.
type recordedLine struct {
	Timestamp *float64 `json:"timestamp"` // ms since the run began
	Input     int      `json:"input_length"`
	Bytes     int      `json:"input_bytes"` // of the canonical prompt, each 256 or so a block
	Extra     int      `json:"extra_bytes"` // of what was asked for beside it
	Counted   bool     `json:"counted"`     // Input is the replica's word, on Bytes alone
	Output    int      `json:"output_length"`
	Blocks    []uint64 `json:"hash_ids"` // full ones, from the first; none where nothing can be shared
	Session   uint64   `json:"session"`  // 0: none
	Stream    bool     `json:"stream"`
	Code      int      `json:"code"`

	at float64 // ms since 1970
}

// space numbers things anew, so that two runs' equal numbers differ.
type space struct{ from, most uint64 }

func (s *space) next() { s.from = s.most }

func (s *space) number(id uint64) uint64 {
	id += s.from
	s.most = max(s.most, id+1)
	return id
}

// isRecording tells a proxy's recording from a trace of Mooncake's.
func isRecording(line []byte) bool {
	return bytes.HasPrefix(bytes.TrimSpace(line), []byte(recordMark))
}

func (r *recording) add(line []byte) error {
	if isRecording(line) {
		return r.begin(line)
	}
	l := recordedLine{}
	if err := json.Unmarshal(line, &l); err != nil {
		return err
	}
	switch {
	case l.Timestamp == nil:
		return errors.New("timestamp is missing")
	case *l.Timestamp < 0 || *l.Timestamp > maxTraceStamp:
		return fmt.Errorf("timestamp %g is not between 0 and %d ms", *l.Timestamp, maxTraceStamp)
	case l.Input < 0 || l.Input > maxTracePrompt:
		return fmt.Errorf("input_length %d is not between 0 and %d", l.Input, maxTracePrompt)
	case l.Output < 0 || l.Output > maxTraceAnswer:
		return fmt.Errorf("output_length %d is not between 0 and %d", l.Output, maxTraceAnswer)
	case l.Bytes < 0 || l.Bytes > maxTracePrompt*CharsPerToken:
		return fmt.Errorf("input_bytes %d is not between 0 and %d", l.Bytes, maxTracePrompt*CharsPerToken)
	case l.Extra < 0 || l.Extra > maxTracePrompt*CharsPerToken-l.Bytes:
		return fmt.Errorf("extra_bytes %d is not between 0 and what input_bytes leaves of %d", l.Extra, maxTracePrompt*CharsPerToken)
	case len(l.Blocks) > l.Bytes/r.blockBytes:
		return fmt.Errorf("input_bytes %d makes %d blocks of %d bytes, hash_ids has %d", l.Bytes, l.Bytes/r.blockBytes, r.blockBytes, len(l.Blocks))
	case l.Session > maxRecordID || slices.ContainsFunc(l.Blocks, func(id uint64) bool { return id > maxRecordID }):
		return fmt.Errorf("an id is above %d", uint64(maxRecordID))
	}
	l.at = float64(r.started) + *l.Timestamp
	for i, id := range l.Blocks {
		l.Blocks[i] = r.blocks.number(id)
	}
	if l.Session != 0 {
		l.Session = r.sessions.number(l.Session)
	}
	r.lines = append(r.lines, l)
	return nil
}

// begin reads the line that stands before each run's requests, and again where
// a run goes on in another file.
func (r *recording) begin(line []byte) error {
	var h struct {
		Version    int   `json:"warmroute_record"`
		Started    int64 `json:"started_ms"`
		BlockBytes int   `json:"block_bytes"`
	}
	if err := json.Unmarshal(line, &h); err != nil {
		return err
	}
	switch {
	case h.Version != recordVersion:
		return fmt.Errorf("recorded in version %d of the format, this program reads %d", h.Version, recordVersion)
	case h.BlockBytes < 64 || h.BlockBytes > 4096:
		return fmt.Errorf("block_bytes %d is not between 64 and 4096", h.BlockBytes)
	case r.blockBytes != 0 && r.blockBytes != h.BlockBytes:
		return fmt.Errorf("block_bytes changes from %d to %d; replay the two recordings apart", r.blockBytes, h.BlockBytes)
	case h.Started < 0 || h.Started > 1<<48:
		return fmt.Errorf("started_ms %d is no time", h.Started)
	}
	if h.Started != r.started {
		r.blocks.next()
		r.sessions.next()
	}
	r.blockBytes, r.started = h.BlockBytes, h.Started
	return nil
}

// trace makes of the requests what can be played. Those that were refused for
// what they asked are left out; those refused for want of room asked for an
// answer of nobody knows what length, and get the mean one.
func (r *recording) trace() (*Trace, error) {
	lines := slices.DeleteFunc(r.lines, func(l recordedLine) bool { return !l.played() })
	if len(lines) == 0 {
		return nil, errors.New("the recording holds no request that was answered")
	}
	slices.SortStableFunc(lines, func(a, b recordedLine) int { return cmp.Compare(a.at, b.at) })
	first := lines[0].at
	if span := lines[len(lines)-1].at - first; span > maxTraceStamp {
		return nil, fmt.Errorf("its requests lie %v apart; more than a year is a mistake", time.Duration(span/1000)*time.Second)
	}
	perToken, answer := measure(lines)
	t := &Trace{BlockTokens: max(1, int(math.Round(float64(r.blockBytes)/perToken)))}
	free := uint64(unnamed)
	for i := range lines {
		l := &lines[i]
		req := TraceRequest{
			At:           time.Duration((l.at - first) * float64(time.Millisecond)),
			PromptTokens: l.tokens(t.BlockTokens, r.blockBytes, perToken),
			AnswerTokens: max(1, l.Output),
			Session:      l.Session,
			Whole:        !l.Stream,
		}
		if l.Output == 0 && l.Code >= 300 {
			req.AnswerTokens = max(1, int(math.Round(answer)))
		}
		req.Blocks = l.Blocks[:min(len(l.Blocks), blocksOf(req.PromptTokens, t.BlockTokens))]
		for len(req.Blocks) < blocksOf(req.PromptTokens, t.BlockTokens) {
			req.Blocks = append(req.Blocks, free)
			free++
		}
		if free > unnamed+maxUnnamed {
			return nil, fmt.Errorf("more than %d blocks of its prompts have no id", maxUnnamed)
		}
		t.Requests = append(t.Requests, req)
	}
	return t, nil
}

// played says whether the request was work, or would have been had there been room.
func (l *recordedLine) played() bool {
	switch l.Code {
	case 429, 499, 502, 503, 504:
		return true
	}
	return l.Code >= 200 && l.Code < 300
}

// measure returns the bytes of a prompt's token and the tokens of an answer.
func measure(lines []recordedLine) (perToken, answer float64) {
	var size, tokens, answers, answered float64
	for i := range lines {
		if l := &lines[i]; l.Code < 300 {
			answers += float64(l.Output)
			answered++
			if l.Counted && l.Input > 0 {
				size += float64(l.Bytes)
				tokens += float64(l.Input)
			}
		}
	}
	perToken = CharsPerToken
	if size > 0 && tokens > 0 {
		perToken = min(max(size/tokens, 0.5), 16)
	}
	return perToken, answers / max(1, answered)
}

// tokens is the prompt's length. A block has one length in tokens throughout a
// trace, though text is not everywhere as dense; so that shared prefixes stay
// what they were, the length yields to the number of blocks and not they to it.
// What was asked for beside the prompt comes behind it, as dense.
func (l *recordedLine) tokens(blockTokens, blockBytes int, perToken float64) int {
	n, behind := l.Input, 0
	if !l.Counted && l.Bytes > 0 {
		n, behind = int(float64(l.Bytes)/perToken), int(float64(l.Extra)/perToken)
	}
	full := min(len(l.Blocks), maxTracePrompt/blockTokens)
	n = max(n, full*blockTokens, 1)
	if full > 0 && full == l.Bytes/blockBytes {
		n = min(n, (full+1)*blockTokens-1)
	}
	return min(n+behind, maxTracePrompt)
}

func blocksOf(tokens, blockTokens int) int { return (tokens + blockTokens - 1) / blockTokens }
