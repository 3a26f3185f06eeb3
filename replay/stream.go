package replay

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/tidwall/gjson"
)

// maxEvent bounds one line of a stream.
const maxEvent = 1 << 20

// Causes of failure that a stream can show. A stream without any ends with [DONE].
var (
	errCut   = errors.New("stream cut") // ended, or its connection broke, before [DONE]
	errEvent = errors.New("error event in the stream")
	errAbort = errors.New("answer aborted") // finish_reason "abort": the engine gave up
)

// stream takes in one streamed chat completion.
type stream struct {
	answer      strings.Builder
	chunks      int       // that held content
	first, last time.Time // of them
	end         time.Time // when [DONE] came
	prompt      int       // tokens, as usage says; 0 without usage
	completion  int
	cached      int
	aborted     bool
}

// read reads events to the end of the stream and says what was wrong with it.
func (s *stream) read(body io.Reader) error {
	lines := bufio.NewScanner(body)
	lines.Buffer(make([]byte, 0, 2048), maxEvent)
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data:"))
		if !ok {
			continue // a comment or an empty line
		}
		data = bytes.TrimSpace(data)
		if string(data) == "[DONE]" {
			s.end = time.Now()
			return s.finish(body)
		}
		if !s.event(data, time.Now()) {
			return errEvent
		}
	}
	return errCut
}

// finish reads what follows [DONE], nothing but the body's end: a connection can
// be used again only then, and a body without one was cut.
func (s *stream) finish(body io.Reader) error {
	if _, err := io.Copy(io.Discard, body); err != nil {
		return errCut
	}
	if s.aborted {
		return errAbort
	}
	return nil
}

// event takes in one event and reports false when it is an error.
func (s *stream) event(data []byte, now time.Time) bool {
	choice := gjson.GetBytes(data, "choices.0")
	if !choice.Exists() {
		if gjson.GetBytes(data, "error").Exists() {
			return false
		}
		if usage := gjson.GetBytes(data, "usage"); usage.IsObject() {
			s.prompt = int(usage.Get("prompt_tokens").Int())
			s.completion = int(usage.Get("completion_tokens").Int())
			s.cached = int(usage.Get("prompt_tokens_details.cached_tokens").Int())
		}
		return true
	}
	delta := choice.Get("delta")
	content := delta.Get("content").Str
	if content != "" || delta.Get("reasoning").Str != "" || delta.Get("tool_calls.0").Exists() {
		if s.chunks == 0 {
			s.first = now
		}
		s.last = now
		s.chunks++
		s.answer.WriteString(content)
	}
	if choice.Get("finish_reason").Str == "abort" {
		s.aborted = true
	}
	return true
}
