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
	recordVersion = 2 // of the format in which a proxy records
	// recordMark begins the first line of a recording.
	recordMark  = `{"warmroute_record":`
	maxRecordID = 1 << 40 // of a block or a session
	// maxUniqueBlocks bounds the blocks without a recorded id.
	maxUniqueBlocks = 1 << 24
	// firstUniqueID is the first id given to those, above all recorded ones.
	firstUniqueID = 1 << 62
)

// recording collects the requests of a proxy's recording, which are in order of their
// ends and can be from several runs of the proxy.
type recording struct {
	blockBytes int
	started    int64 // of the run being read, ms since 1970
	blocks     idSpace
	sessions   idSpace
	lines      []recordedLine
}

// recordedLine is one request of a recording. Its ids are unique over all runs.
type recordedLine struct {
	Timestamp    *float64 `json:"timestamp"` // ms since the run began
	Input        int      `json:"input_length"`
	Bytes        int      `json:"input_bytes"` // of the canonical prompt
	Extra        int      `json:"extra_bytes"` // of the request beyond it
	Counted      bool     `json:"counted"`     // Input was reported by the replica, for Bytes alone
	Output       int      `json:"output_length"`
	Runs         []uint64 `json:"block_runs"` // of full blocks, from the first: the first id and the number of consecutive ones
	Model        uint64   `json:"model"`
	Conversation uint64   `json:"session"` // 0: none
	Stream       bool     `json:"stream"`
	Code         int      `json:"code"`

	at     float64  // ms since 1970
	blocks []uint64 // the ids of Runs; none if not cacheable
}

// idSpace maps the ids of each run to unique ones.
type idSpace struct{ first, next uint64 }

func (s *idSpace) beginRun() { s.first = s.next }

func (s *idSpace) toUnique(id uint64) uint64 {
	id += s.first
	s.next = max(s.next, id+1)
	return id
}

// isRecordingHeader reports whether a line begins the recording of a proxy, or of a
// further run of it.
func isRecordingHeader(line []byte) bool {
	return bytes.HasPrefix(bytes.TrimSpace(line), []byte(recordMark))
}

// addLine parses, validates and adds a line: a request, or the header of a run.
func (r *recording) addLine(line []byte) error {
	if isRecordingHeader(line) {
		return r.beginRun(line)
	}
	l := recordedLine{}
	if err := json.Unmarshal(line, &l); err != nil {
		return err
	}
	switch {
	case l.Timestamp == nil:
		return errors.New("timestamp is missing")
	case *l.Timestamp < 0 || *l.Timestamp > maxTimestampMillis:
		return fmt.Errorf("timestamp %g is not between 0 and %d ms", *l.Timestamp, maxTimestampMillis)
	case l.Input < 0 || l.Input > maxPromptTokens:
		return fmt.Errorf("input_length %d is not between 0 and %d", l.Input, maxPromptTokens)
	case l.Output < 0 || l.Output > maxOutputTokens:
		return fmt.Errorf("output_length %d is not between 0 and %d", l.Output, maxOutputTokens)
	case l.Bytes < 0 || l.Bytes > maxPromptTokens*CharsPerToken:
		return fmt.Errorf("input_bytes %d is not between 0 and %d", l.Bytes, maxPromptTokens*CharsPerToken)
	case l.Extra < 0 || l.Extra > maxPromptTokens*CharsPerToken-l.Bytes:
		return fmt.Errorf("extra_bytes %d and input_bytes together exceed %d", l.Extra, maxPromptTokens*CharsPerToken)
	case l.Conversation > maxRecordID || l.Model > maxRecordID:
		return fmt.Errorf("an id is above %d", uint64(maxRecordID))
	}
	l.at = float64(r.started) + *l.Timestamp
	if err := l.expandRuns(r.blockBytes); err != nil {
		return err
	}
	for i, id := range l.blocks {
		l.blocks[i] = r.blocks.toUnique(id)
	}
	if l.Conversation != 0 {
		l.Conversation = r.sessions.toUnique(l.Conversation)
	}
	r.lines = append(r.lines, l)
	return nil
}

// expandRuns sets the blocks to the ids of the runs.
func (l *recordedLine) expandRuns(blockBytes int) error {
	if len(l.Runs)%2 != 0 {
		return fmt.Errorf("block_runs has %d numbers, expected pairs", len(l.Runs))
	}
	all := uint64(l.Bytes / blockBytes)
	for i := 0; i < len(l.Runs); i += 2 {
		first, count := l.Runs[i], l.Runs[i+1]
		switch {
		case count > all-uint64(len(l.blocks)):
			return fmt.Errorf("input_bytes %d makes %d blocks of %d bytes, block_runs has more", l.Bytes, all, blockBytes)
		case first > maxRecordID:
			return fmt.Errorf("an id is above %d", uint64(maxRecordID))
		}
		for id := first; id < first+count; id++ {
			l.blocks = append(l.blocks, id)
		}
	}
	return nil
}

// beginRun reads the line before the requests of each run, and of each file of it.
func (r *recording) beginRun(header []byte) error {
	var h struct {
		Version    int   `json:"warmroute_record"`
		Started    int64 `json:"started_ms"`
		BlockBytes int   `json:"block_bytes"`
	}
	if err := json.Unmarshal(header, &h); err != nil {
		return err
	}
	switch {
	case h.Version != recordVersion:
		return fmt.Errorf("recording has format version %d, this program reads %d", h.Version, recordVersion)
	case h.BlockBytes < 64 || h.BlockBytes > 4096:
		return fmt.Errorf("block_bytes %d is not between 64 and 4096", h.BlockBytes)
	case r.blockBytes != 0 && r.blockBytes != h.BlockBytes:
		return fmt.Errorf("block_bytes changes from %d to %d: replay the two recordings separately", r.blockBytes, h.BlockBytes)
	case h.Started < 0 || h.Started > 1<<48:
		return fmt.Errorf("started_ms %d is out of range", h.Started)
	}
	if h.Started != r.started {
		r.blocks.beginRun()
		r.sessions.beginRun()
	}
	r.blockBytes, r.started = h.BlockBytes, h.Started
	return nil
}

// toTrace returns the requests as a Trace. Invalid requests are left out; for those
// refused for lack of capacity the output's length is unknown, and the mean is taken.
func (r *recording) toTrace() (*Trace, error) {
	lines := slices.DeleteFunc(r.lines, func(l recordedLine) bool { return !l.isReplayable() })
	if len(lines) == 0 {
		return nil, errors.New("recording without a request that was completed")
	}
	slices.SortStableFunc(lines, func(a, b recordedLine) int { return cmp.Compare(a.at, b.at) })
	first := lines[0].at
	if span := lines[len(lines)-1].at - first; span > maxTimestampMillis {
		return nil, fmt.Errorf("requests are %v apart, more than a year", time.Duration(span/1000)*time.Second)
	}
	perToken, output := meanLengths(lines)
	t := &Trace{BlockTokens: max(1, int(math.Round(float64(r.blockBytes)/perToken)))}
	free := uint64(firstUniqueID)
	for i := range lines {
		l := &lines[i]
		req := TraceRequest{
			At:           time.Duration((l.at - first) * float64(time.Millisecond)),
			PromptTokens: l.promptTokens(t.BlockTokens, r.blockBytes, perToken),
			OutputTokens: max(1, l.Output),
			Conversation: l.Conversation,
			ModelNumber:  l.Model,
			NotStreamed:  !l.Stream,
		}
		if l.Output == 0 && l.Code >= 300 {
			req.OutputTokens = max(1, int(math.Round(output)))
		}
		req.Blocks = l.blocks[:min(len(l.blocks), blockCount(req.PromptTokens, t.BlockTokens))]
		for len(req.Blocks) < blockCount(req.PromptTokens, t.BlockTokens) {
			req.Blocks = append(req.Blocks, free)
			free++
		}
		if free > firstUniqueID+maxUniqueBlocks {
			return nil, fmt.Errorf("more than %d blocks have no id", maxUniqueBlocks)
		}
		t.Requests = append(t.Requests, req)
	}
	return t, nil
}

// isReplayable reports whether the request was processed, or would have been with
// more capacity.
func (l *recordedLine) isReplayable() bool {
	switch l.Code {
	case 429, 499, 502, 503, 504:
		return true
	}
	return l.Code >= 200 && l.Code < 300
}

// meanLengths returns the mean bytes per prompt token and tokens per response.
func meanLengths(lines []recordedLine) (bytesPerToken, outputTokens float64) {
	var size, tokens, outputs, completed float64
	for i := range lines {
		if l := &lines[i]; l.Code < 300 {
			outputs += float64(l.Output)
			completed++
			if l.Counted && l.Input > 0 {
				size += float64(l.Bytes)
				tokens += float64(l.Input)
			}
		}
	}
	bytesPerToken = CharsPerToken
	if size > 0 && tokens > 0 {
		bytesPerToken = min(max(size/tokens, 0.5), 16)
	}
	return bytesPerToken, outputs / max(1, completed)
}

// promptTokens returns the prompt's length. All blocks of a trace have one length in tokens,
// though text varies: to preserve shared prefixes, the length is adapted to the
// number of blocks. The request's extra bytes are appended at the same density.
func (l *recordedLine) promptTokens(blockTokens, blockBytes int, bytesPerToken float64) int {
	n, behind := l.Input, 0
	if !l.Counted && l.Bytes > 0 {
		n, behind = int(float64(l.Bytes)/bytesPerToken), int(float64(l.Extra)/bytesPerToken)
	}
	full := min(len(l.blocks), maxPromptTokens/blockTokens)
	n = max(n, full*blockTokens, 1)
	if full > 0 && full == l.Bytes/blockBytes {
		n = min(n, (full+1)*blockTokens-1)
	}
	return min(n+behind, maxPromptTokens)
}

func blockCount(tokens, blockTokens int) int { return (tokens + blockTokens - 1) / blockTokens }
