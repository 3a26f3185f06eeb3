package loadgen

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

	"warmroute/lab/replay"
)

const (
	maxEventBytes  = 1 << 20  // of one line of a stream
	maxTextBytes   = 4 << 20  // of a stream's text, which is kept and sent again
	maxBodyBytes   = 64 << 20 // of any other response
	maxUsageTokens = 1 << 30  // above it usage is invalid
	maxDetailBytes = 300
)

// responseReader reads one response, streamed or not, and measures it.
type responseReader struct {
	status int
	header http.Header
	begun  bool // some of the response arrived
	id     string

	text                      strings.Builder
	chunks                    int // with content
	firstContent, lastContent time.Time
	gaps                      []time.Duration // between chunks with content
	end                       time.Time       // of [DONE]
	finishReason              string          // the first choice's
	detail                    string          // of an error

	usage                      bool // present and valid; the figures are 0 otherwise
	invalidUsage               bool
	prompt, completion, cached int // tokens
	cachedKnown                bool

	onEvent func(events int) // called after each event; may be nil
	events  int
}

// readStream reads events to the end of the stream.
func (s *responseReader) readStream(body io.Reader) error {
	lines := bufio.NewScanner(body)
	lines.Buffer(make([]byte, 0, 2048), maxEventBytes)
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data:"))
		if !ok {
			continue // a comment or an empty line
		}
		data = bytes.TrimSpace(data)
		last, err := s.readEvent(data, time.Now())
		if err != nil {
			return err
		}
		if last {
			s.end = time.Now()
			// Read to the body's end: without one it was truncated, and the
			// connection cannot be reused.
			if _, err := io.Copy(io.Discard, body); err != nil {
				return failure(StreamTruncated)
			}
			return s.checkAborted()
		}
		if s.text.Len() > maxTextBytes {
			return failure(TooLong)
		}
	}
	if err := lines.Err(); errors.Is(err, bufio.ErrTooLong) {
		return failure(TooLong)
	} else if err != nil {
		s.setDetail(err.Error())
	}
	return failure(StreamTruncated)
}

// readEvent reads one event and reports whether it is the stream's last one. It fails if
// the event is an error of the server.
func (s *responseReader) readEvent(data []byte, receivedAt time.Time) (last bool, err error) {
	if string(data) == "[DONE]" {
		return true, nil
	}
	event := gjson.ParseBytes(data)
	if s.id == "" {
		s.id = event.Get("id").Str
	}
	choice := event.Get("choices.0")
	if kind := event.Get("type").Str; kind != "" && !choice.Exists() {
		last, err = s.readTypedEvent(kind, event, receivedAt)
	} else if !choice.Exists() {
		if event.Get("error").Exists() {
			s.setDetail(string(data))
			return false, failure(StreamError)
		}
		s.readUsage(event.Get("usage"))
	} else {
		delta := choice.Get("delta")
		content := delta.Get("content").Str + choice.Get("text").Str
		if content != "" || delta.Get("reasoning").Str != "" || delta.Get("tool_calls.0").Exists() {
			s.addContent(content, receivedAt)
		}
		if finish := choice.Get("finish_reason").Str; finish != "" {
			s.finishReason = finish
		}
	}
	if err == nil {
		s.countEventAndNotify()
	}
	return last, err
}

// readTypedEvent is readEvent for the Messages and Responses APIs, whose events have a type.
func (s *responseReader) readTypedEvent(kind string, event gjson.Result, receivedAt time.Time) (last bool, err error) {
	switch kind {
	case "content_block_delta":
		s.addContent(event.Get("delta.text").Str, receivedAt)
	case "response.output_text.delta":
		s.addContent(event.Get("delta").Str, receivedAt)
	case "message_delta":
		s.finishReason = event.Get("delta.stop_reason").Str
		s.readUsage(event.Get("usage"))
	case "response.completed", "response.incomplete":
		s.finishReason = event.Get("response.status").Str
		s.readUsage(event.Get("response.usage"))
		return true, nil
	case "message_stop":
		return true, nil
	case "error", "response.failed":
		s.setDetail(event.Raw)
		return false, failure(StreamError)
	}
	return false, nil
}

// addContent adds the content of a chunk, whose text may be empty.
func (s *responseReader) addContent(text string, receivedAt time.Time) {
	if s.chunks == 0 {
		s.firstContent = receivedAt
	} else {
		s.gaps = append(s.gaps, receivedAt.Sub(s.lastContent))
	}
	s.lastContent = receivedAt
	s.chunks++
	s.text.WriteString(text)
}

// countEventAndNotify counts an event that was read and calls onEvent.
func (s *responseReader) countEventAndNotify() {
	s.begun = true
	s.events++
	if s.onEvent != nil {
		s.onEvent(s.events)
	}
}

// readJSON reads a response that is not a stream: a completion or any JSON object.
func (s *responseReader) readJSON(body io.Reader) error {
	raw, err := io.ReadAll(io.LimitReader(body, maxBodyBytes))
	s.begun = len(raw) > 0
	if err != nil {
		s.setDetail(err.Error())
		return failure(BodyTruncated)
	}
	s.end = time.Now()
	s.firstContent = s.end
	if !gjson.ValidBytes(raw) || raw[0] != '{' {
		s.setDetail(string(raw))
		return failure(NotJSON)
	}
	s.id = gjson.GetBytes(raw, "id").Str
	s.readUsage(gjson.GetBytes(raw, "usage"))
	choice := gjson.GetBytes(raw, "choices.0")
	s.finishReason = choice.Get("finish_reason").Str
	s.text.WriteString(choice.Get("message.content").Str + choice.Get("text").Str)
	return s.checkAborted()
}

func (s *responseReader) checkAborted() error {
	if s.finishReason == "abort" {
		return failure(ResponseAborted)
	}
	return nil
}

func (s *responseReader) readUsage(usage gjson.Result) {
	if !usage.IsObject() {
		return
	}
	prompt, completion := usage.Get("prompt_tokens").Int(), usage.Get("completion_tokens").Int()
	cached := usage.Get("prompt_tokens_details.cached_tokens")
	if input := usage.Get("input_tokens"); input.Exists() { // Messages and Responses
		prompt, completion = input.Int(), usage.Get("output_tokens").Int()
		cached = usage.Get("input_tokens_details.cached_tokens")
		if read := usage.Get("cache_read_input_tokens"); read.Exists() { // Messages, whose input_tokens are the others
			cached = read
			prompt += read.Int() + usage.Get("cache_creation_input_tokens").Int()
		}
	}
	within := func(n, most int64) bool { return n >= 0 && n <= most }
	if !within(prompt, maxUsageTokens) || !within(completion, maxUsageTokens) || !within(cached.Int(), prompt) {
		s.invalidUsage = true
		return
	}
	s.usage = true
	s.prompt, s.completion = int(prompt), int(completion)
	s.cached, s.cachedKnown = int(cached.Int()), cached.Type == gjson.Number
}

// failedResult returns the result of a response that failed with err.
func (s *responseReader) failedResult(err error, latencyStart time.Time) replay.Result {
	r := replay.Result{Err: err.Error(), Detail: s.detail, Sent: latencyStart}
	if seconds, err := strconv.Atoi(s.header.Get("Retry-After")); err == nil && seconds > 0 && s.status != http.StatusOK {
		r.RetryAfter = time.Duration(min(seconds, 3600)) * time.Second
	}
	return r
}

// setDetail keeps the beginning of an error's text.
func (s *responseReader) setDetail(text string) { s.detail = text[:min(len(text), maxDetailBytes)] }
