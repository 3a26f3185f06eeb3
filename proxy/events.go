package proxy

import (
	"bytes"
	"net/http"
	"strings"

	"github.com/tidwall/gjson"

	"warmroute/router/prompt"
)

// longestLine is how much of one line of a stream is looked at: a scanner must
// not become a buffer. An event longer than that counts as content, unread.
const longestLine = 64 << 10

// eventScanner watches a stream of server-sent events as it passes. It keeps
// only the line that is cut off at the end of a chunk, up to longestLine of it.
type eventScanner struct {
	format  format
	reply   *prompt.Reply // takes the answer's text; nil: nobody does
	partial []byte        // the beginning of a line whose end has not come

	events   int    // data events that the engine's output made
	content  bool   // an event carried content, reasoning or a tool call
	finished bool   // an event said why the answer ended, other than by an abort
	aborted  bool   // … by an abort
	done     bool   // [DONE]
	failed   []byte // the first error event's data
	usage    usage
}

// usage is what an answer says of itself.
type usage struct {
	known                                    bool
	cachedTold                               bool // cachedTokens was there, so 0 means none
	promptTokens, cachedTokens, answerTokens int
}

// scan looks at the next bytes of the stream. How they are cut makes no difference.
func (s *eventScanner) scan(b []byte) {
	for len(b) > 0 {
		end := bytes.IndexByte(b, '\n')
		if end < 0 {
			s.keep(b)
			return
		}
		line := b[:end]
		b = b[end+1:]
		if len(s.partial) > 0 {
			s.keep(line)
			line = s.partial
		}
		s.line(line[:min(len(line), longestLine)])
		if s.partial = s.partial[:0]; cap(s.partial) > chunkBytes {
			s.partial = nil // one long line must not cost memory for the whole stream
		}
	}
}

func (s *eventScanner) keep(b []byte) {
	s.partial = append(s.partial, b[:min(len(b), longestLine-len(s.partial))]...)
}

func (s *eventScanner) line(line []byte) {
	data, ok := bytes.CutPrefix(line, []byte("data:"))
	if !ok {
		return // a comment, a name, or the empty line between events
	}
	data = bytes.TrimSpace(data)
	switch {
	case len(data) == 0:
	case string(data) == "[DONE]":
		s.done = true
	case isErrorEvent(data):
		s.fail(data)
	case len(line) == longestLine:
		s.events++
		s.content = true
		if s.reply != nil {
			s.reply.Lost()
		}
	default:
		s.event(data)
	}
}

func (s *eventScanner) fail(data []byte) {
	if s.failed == nil {
		s.failed = bytes.Clone(data)
	}
}

func (s *eventScanner) event(data []byte) {
	if !s.content && !s.finished && !s.look(data) {
		return
	}
	s.events++
	if s.reply != nil {
		s.reply.Event(data)
	}
	if bytes.Contains(data, []byte(`"usage":`)) {
		for _, path := range usagePaths[s.format] {
			s.usage.read(gjson.GetBytes(data, path), s.format)
		}
	}
}

// usagePaths is where the events of each format carry usage.
var usagePaths = [...][]string{
	chatFormat:       {"usage"},
	completionFormat: {"usage"},
	responsesFormat:  {"response.usage"},
	messagesFormat:   {"message.usage", "usage"},
}

// isErrorEvent tells an error from any other event by its beginning: chunks of
// all formats begin with other keys.
func isErrorEvent(data []byte) bool {
	return bytes.HasPrefix(data, []byte(`{"error":`)) || bytes.HasPrefix(data, []byte(`{"type":"error"`))
}

// look sees whether an event carries the first content, or ends the answer. It
// returns false for an event that a replica sends before its engine put
// anything out, and for an error.
func (s *eventScanner) look(data []byte) bool {
	switch s.format {
	case chatFormat:
		s.lookAtChoices(data, "delta", deltaHasContent)
	case completionFormat:
		s.lookAtChoices(data, "text", func(text gjson.Result) bool { return text.Raw != "" && text.Raw != `""` })
	case responsesFormat, messagesFormat:
		switch kind := gjson.GetBytes(data, "type").Str; kind {
		case "response.created", "response.in_progress", "response.queued", "ping":
			return false
		case "error":
			s.fail(data)
			return false
		case "response.completed", "response.incomplete", "response.failed", "message_stop":
			s.finished = true
		default:
			s.content = strings.HasSuffix(kind, ".delta") || kind == "content_block_delta"
		}
	default:
		s.content = true
	}
	return true
}

// deltaHasContent goes by any field but the role: content, reasoning, tool calls,
// whatever they will be called.
func deltaHasContent(delta gjson.Result) bool {
	has := false
	delta.ForEach(func(key, value gjson.Result) bool {
		has = key.Str != "role" && value.Type != gjson.Null && value.Raw != `""` && value.Raw != `[]`
		return !has
	})
	return has
}

func (s *eventScanner) lookAtChoices(data []byte, key string, hasContent func(gjson.Result) bool) {
	gjson.GetBytes(data, "choices").ForEach(func(_, choice gjson.Result) bool {
		if hasContent(choice.Get(key)) {
			s.content = true
		}
		switch reason := choice.Get("finish_reason"); {
		case reason.Type != gjson.String:
		case reason.Str == "abort":
			s.aborted = true
		default:
			s.finished = true
		}
		return true
	})
}

// read takes over what a usage object says.
func (u *usage) read(v gjson.Result, f format) {
	if !v.IsObject() {
		return
	}
	in, out, details, cached := "prompt_tokens", "completion_tokens", "prompt_tokens_details", ""
	switch f {
	case responsesFormat:
		in, out, details = "input_tokens", "output_tokens", "input_tokens_details"
	case messagesFormat:
		in, out, details, cached = "input_tokens", "output_tokens", "", "cache_read_input_tokens"
	}
	u.known = true
	// One walk: to ask for each of the three costs three.
	v.ForEach(func(key, value gjson.Result) bool {
		switch key.Str {
		case "":
		case in:
			u.promptTokens = max(u.promptTokens, int(value.Int()))
		case out:
			u.answerTokens = max(u.answerTokens, int(value.Int()))
		case details:
			u.readCached(value.Get("cached_tokens"))
		case cached:
			u.readCached(value)
		}
		return true
	})
}

func (u *usage) readCached(told gjson.Result) {
	if told.Type == gjson.Number {
		u.cachedTold = true
		u.cachedTokens = max(u.cachedTokens, int(told.Int()))
	}
}

// answerTokens is the length of the answer: as the replica counted it, or about
// one token an event.
func (s *eventScanner) answerTokens() int {
	if s.usage.answerTokens > 0 {
		return s.usage.answerTokens
	}
	return s.events
}

// failedStatus is what the error event would have been as an HTTP status.
func (s *eventScanner) failedStatus() int {
	code := gjson.GetBytes(s.failed, "error.code").Int()
	if code < 400 || code > 599 {
		code = http.StatusInternalServerError
	}
	return int(code)
}
