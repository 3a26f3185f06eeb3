package proxy

import (
	"bytes"

	"github.com/tidwall/gjson"
)

// longestLine is how much of one line of a stream is looked at. A longer one
// passes through unread: a scanner must not become a buffer.
const longestLine = 64 << 10

// eventScanner watches a stream of server-sent events as it passes. It keeps
// only what is cut off at the end of a chunk, and no more than longestLine.
type eventScanner struct {
	format  format
	partial []byte // the beginning of a line whose end has not come
	skip    bool   // the line under way is too long
	midLine bool   // the last byte seen was not the end of a line

	events   int    // data events so far, [DONE] left out
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
	promptTokens, cachedTokens, answerTokens int
}

// scan looks at the next bytes of the stream.
func (s *eventScanner) scan(b []byte) {
	for len(b) > 0 {
		end := bytes.IndexByte(b, '\n')
		if end < 0 {
			s.midLine = true
			s.keep(b)
			return
		}
		line := b[:end]
		b = b[end+1:]
		s.midLine = false
		if len(s.partial) > 0 {
			s.keep(line)
			line = s.partial
		}
		if !s.skip {
			s.line(line)
		}
		s.partial, s.skip = s.partial[:0], false
	}
}

func (s *eventScanner) keep(b []byte) {
	if s.skip || len(s.partial)+len(b) > longestLine {
		s.skip = true
		return
	}
	s.partial = append(s.partial, b...)
}

func (s *eventScanner) line(line []byte) {
	data, ok := bytes.CutPrefix(line, []byte("data:"))
	if !ok {
		return // a comment, a name, or the empty line between events
	}
	data = bytes.TrimSpace(data)
	if len(data) == 0 {
		return
	}
	if string(data) == "[DONE]" {
		s.done = true
		return
	}
	if s.failed == nil && isErrorEvent(data) {
		s.failed = bytes.Clone(data)
		return
	}
	s.events++
	if !s.content && !s.finished {
		s.look(data)
	}
	if bytes.Contains(data, []byte(`"usage":{`)) {
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

// look sees whether an event carries the first content, or ends the answer.
func (s *eventScanner) look(data []byte) {
	switch s.format {
	case chatFormat:
		s.lookAtChoices(data, "delta", func(delta gjson.Result) bool {
			has := false
			delta.ForEach(func(key, value gjson.Result) bool {
				has = key.Str != "role" && value.Type != gjson.Null && value.Raw != `""` && value.Raw != `[]`
				return !has
			})
			return has
		})
	case completionFormat:
		s.lookAtChoices(data, "text", func(text gjson.Result) bool { return text.Raw != "" && text.Raw != `""` })
	case responsesFormat, messagesFormat:
		kind := gjson.GetBytes(data, "type").Str
		s.content = len(kind) > 6 && kind[len(kind)-6:] == ".delta" || kind == "content_block_delta"
	default:
		s.content = true
	}
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
	in, out, cached := "prompt_tokens", "completion_tokens", "prompt_tokens_details.cached_tokens"
	switch f {
	case responsesFormat:
		in, out, cached = "input_tokens", "output_tokens", "input_tokens_details.cached_tokens"
	case messagesFormat:
		in, out, cached = "input_tokens", "output_tokens", "cache_read_input_tokens"
	}
	u.known = true
	u.promptTokens = max(u.promptTokens, int(v.Get(in).Int()))
	u.answerTokens = max(u.answerTokens, int(v.Get(out).Int()))
	u.cachedTokens = max(u.cachedTokens, int(v.Get(cached).Int()))
}

// answerTokens is the length of the answer: as the replica counted it, or about
// one token an event.
func (s *eventScanner) answerTokens() int {
	if s.usage.answerTokens > 0 {
		return s.usage.answerTokens
	}
	return s.events
}

// failure is the error event as an HTTP status and an error body.
func (s *eventScanner) failure() (status int, body []byte) {
	code := gjson.GetBytes(s.failed, "error.code").Int()
	if code < 400 || code > 599 {
		code = 500
	}
	return int(code), s.failed
}
