package replay

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/tidwall/gjson"
)

const (
	maxEvent = 1 << 20  // of one line of a stream, in bytes
	maxText  = 4 << 20  // of a stream's text, which is kept and sent again
	maxWhole = 64 << 20 // of any other answer

	maxTokens = 1 << 30 // that usage can count and be believed
)

// Causes of failure that a stream can show. A stream without any ends with [DONE].
var (
	errCut   = errors.New("stream cut") // ended, or its connection broke, before [DONE]
	errEvent = errors.New("error event in the stream")
	errAbort = errors.New("answer aborted") // finish_reason "abort": the engine gave up
	errBody  = errors.New("body cut")       // of an answer that is no stream
	errJSON  = errors.New("answer is no JSON")
)

// stream takes in one answer: a streamed completion, or one that comes whole.
type stream struct {
	status int // of HTTP
	header http.Header
	begun  bool // some of the answer came

	answer      strings.Builder
	chunks      int       // that held content
	first, last time.Time // of them
	end         time.Time // when [DONE] came
	prompt      int       // tokens, as usage says; 0 without usage
	completion  int
	cached      int
	cachedKnown bool
	usage       bool
	impossible  bool             // usage says what cannot be, so nothing
	finished    string           // the first choice's finish_reason
	detail      string           // what an error says
	noticed     func(events int) // told of each event; may be nil
	events      int
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
		if s.answer.Len() > maxText {
			return errLong
		}
	}
	if err := lines.Err(); errors.Is(err, bufio.ErrTooLong) {
		return errLong
	} else if err != nil {
		s.tell(err.Error())
	}
	return errCut
}

// finish reads what follows [DONE], nothing but the body's end: a connection can
// be used again only then, and a body without one was cut.
func (s *stream) finish(body io.Reader) error {
	if _, err := io.Copy(io.Discard, body); err != nil {
		return errCut
	}
	return s.abort()
}

func (s *stream) abort() error {
	if s.finished == "abort" {
		return errAbort
	}
	return nil
}

// readWhole reads an answer that is no stream: a completion's, or any JSON object.
func (s *stream) readWhole(body io.Reader) error {
	answer, err := io.ReadAll(io.LimitReader(body, maxWhole))
	s.begun = len(answer) > 0
	if err != nil {
		s.tell(err.Error())
		return errBody
	}
	s.end = time.Now()
	s.first = s.end
	if !gjson.ValidBytes(answer) || answer[0] != '{' {
		s.tell(string(answer))
		return errJSON
	}
	s.readUsage(gjson.GetBytes(answer, "usage"))
	choice := gjson.GetBytes(answer, "choices.0")
	s.finished = choice.Get("finish_reason").Str
	s.answer.WriteString(choice.Get("message.content").Str + choice.Get("text").Str)
	return s.abort()
}

func (s *stream) readUsage(usage gjson.Result) {
	if !usage.IsObject() {
		return
	}
	prompt, completion := usage.Get("prompt_tokens").Int(), usage.Get("completion_tokens").Int()
	cached := usage.Get("prompt_tokens_details.cached_tokens")
	if outside(prompt, maxTokens) || outside(completion, maxTokens) || outside(cached.Int(), prompt) {
		s.impossible = true
		return
	}
	s.usage = true
	s.prompt, s.completion = int(prompt), int(completion)
	s.cached, s.cachedKnown = int(cached.Int()), cached.Type == gjson.Number
}

// outside reports whether a count of tokens cannot be.
func outside(n, most int64) bool { return n < 0 || n > most }

// failed is the result of an answer that did not come whole, and why.
func (s *stream) failed(err error, due time.Time) Result {
	r := Result{Err: err.Error(), Detail: s.detail, Sent: due}
	if seconds, err := strconv.Atoi(s.header.Get("Retry-After")); err == nil && seconds > 0 && s.status != http.StatusOK {
		r.RetryAfter = time.Duration(min(seconds, 3600)) * time.Second
	}
	return r
}

// tell keeps the beginning of what an error says.
func (s *stream) tell(said string) { s.detail = said[:min(len(said), 300)] }

// event takes in one event and reports false when it is an error.
func (s *stream) event(data []byte, now time.Time) bool {
	choice := gjson.GetBytes(data, "choices.0")
	if !choice.Exists() {
		if gjson.GetBytes(data, "error").Exists() {
			s.tell(string(data))
			return false
		}
		s.readUsage(gjson.GetBytes(data, "usage"))
		s.count()
		return true
	}
	defer s.count()
	delta := choice.Get("delta")
	content := delta.Get("content").Str + choice.Get("text").Str
	if content != "" || delta.Get("reasoning").Str != "" || delta.Get("tool_calls.0").Exists() {
		if s.chunks == 0 {
			s.first = now
		}
		s.last = now
		s.chunks++
		s.answer.WriteString(content)
	}
	if finish := choice.Get("finish_reason").Str; finish != "" {
		s.finished = finish
	}
	return true
}

// count notes an event that is no error.
func (s *stream) count() {
	s.begun = true
	s.events++
	if s.noticed != nil {
		s.noticed(s.events)
	}
}
