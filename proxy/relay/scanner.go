// Package relay reads the response of a replica and writes it to the client: it scans and rewrites streams of
// server-sent events, buffers whole
// bodies within bounds, reads usage, and blanks the parameters of KV transfers.
package relay

import (
	"bytes"
	"encoding/json"
	"strings"

	"github.com/tidwall/gjson"

	"warmroute/backends/vllm"
	"warmroute/prompt"
	"warmroute/proxy/api"
)

// MaxLineBytes bounds what is buffered of a line. Of a longer event, which counts as content, the last MaxTailBytes are read.
const MaxLineBytes = 64 << 10

// maxWholeErrorBytes is the length of an error event up to which a decode request's is read before a part of it is relayed.
const maxWholeErrorBytes = ChunkBytes / 4

// Scanner reads a stream of server-sent events as it passes, and removes its comments. It keeps only the line that is split at
// the end of a chunk, up to MaxLineBytes of it.
type Scanner struct {
	Format        api.Format
	reply         *prompt.Response // takes the text of the response; may be nil
	line          lineKind         // of the incomplete line
	inEvent       bool             // the current event has a line
	afterCR       feedKind         // what a line feed at the beginning of the next chunk is
	PartialLine   []byte           // the beginning of an incomplete line
	lineTruncated bool             // PartialLine lacks bytes before its last MaxTailBytes
	isFinalEvent  bool             // the name of the event, which precedes its data, is that of the last one of a response
	isEarlyEvent  bool             // it is that of an event before the engine's output

	ScannedBytes int64 // without comments
	EventOffset  int64 // of these, before the current event

	Events      int    // data events from the output of the engine
	Content     bool   // an event carried content, reasoning or a tool call
	Finished    bool   // an event had a reason for the end, other than an abort
	Aborted     bool   // the engine aborted the response
	Unexplained bool   // the last event has come without a reason for the end: the engine may have aborted the response
	AbortOffset int64  // bytes before the first event that says so, from which on nothing is relayed
	Done        bool   // the last event has come
	ErrorEvent  []byte // the first error event's data
	ErrorOffset int64  // bytes before that event

	NextSequence int64 // the sequence_number after that of the last event, of those before an abort; 0: none had one

	ResponseID string // as the first events name it; "": unknown
	Background bool   // according to these events, the replica completes the response even if nobody reads it
	Usage      Usage
	Metadata   *Metadata // of the response; nil: it is not read
	message    messageEnd
}

// lineKind is what is known of a line from its beginning.
type lineKind uint8

const (
	lineNotBegun lineKind = iota
	lineComment
	lineField
)

// feedKind is what a line feed is after a carriage return that ended a chunk, and a line: with it a part of the same line end.
type feedKind uint8

const (
	feedOfItself feedKind = iota // there was none
	feedKept
	feedRemoved
)

// messageEnd is what message_delta events say of the end of a message.
type messageEnd struct {
	hasDelta      bool // there was such an event
	hasStopReason bool // one had a stop_reason
	zeroTokens    bool // the last one counted no output token
}

// Usage is the usage that a response reports.
type Usage struct {
	Known                                        bool
	HasCached                                    bool // CachedTokens was reported, so that 0 means none
	PromptTokens, CachedTokens, CompletionTokens int
}

// NewScanner returns a scanner of a stream of that format, which adds the text of the response to reply; nil: to none.
func NewScanner(f api.Format, reply *prompt.Response) Scanner {
	return Scanner{Format: f, reply: reply}
}

// ForgetReply makes the scanner add no more text to the reply, whose memory others may use from now on.
func (s *Scanner) ForgetReply() { s.reply = nil }

// Scan reads the next bytes of the stream, however it is split into chunks. It removes from them, in place, comments and the empty
// lines after them that end no event, and returns the rest. A line ends with a line feed, a carriage return or both.
func (s *Scanner) Scan(b []byte) (kept []byte) {
	kept = b[:0]
	if s.afterCR != feedOfItself && len(b) > 0 {
		if b[0] == '\n' {
			if s.afterCR == feedKept {
				kept = append(kept, '\n')
				s.ScannedBytes++
				if !s.inEvent {
					s.EventOffset = s.ScannedBytes
				}
			}
			b = b[1:]
		}
		s.afterCR = feedOfItself
	}
	for len(b) > 0 {
		end, next := LineEnd(b)
		part, kind, endsEvent := b[:next], s.line, false
		if kind == lineNotBegun {
			switch {
			case end == 0:
				endsEvent = true
			case b[0] == ':':
				kind = lineComment
			default:
				kind, s.inEvent = lineField, true
			}
		}
		isKept := kind == lineField || endsEvent && s.inEvent
		complete := next > end
		if complete && next == len(b) && b[next-1] == '\r' {
			if s.afterCR = feedRemoved; isKept {
				s.afterCR = feedKept
			}
		}
		b = b[next:]
		if isKept {
			s.ScannedBytes += int64(len(part))
			if kind == lineField {
				s.scanPart(part[:end], complete)
			}
			kept = append(kept, part...) // may overwrite it
		}
		if endsEvent {
			s.inEvent, s.EventOffset, s.isFinalEvent, s.isEarlyEvent = false, s.ScannedBytes, false, false
		}
		if s.line = kind; complete {
			s.line = lineNotBegun
		}
	}
	return kept
}

// LineEnd returns the index of the first line end in b and that of the byte after it. Both are the length of b if there is none.
func LineEnd(b []byte) (end, next int) {
	end = len(b)
	if i := bytes.IndexByte(b, '\n'); i >= 0 {
		end = i
	}
	if i := bytes.IndexByte(b[:end], '\r'); i >= 0 {
		end = i
	}
	switch {
	case end == len(b):
		return end, end
	case b[end] == '\r' && end+1 < len(b) && b[end+1] == '\n':
		return end, end + 2
	}
	return end, end + 1
}

// scanPart reads a line, or a part of one that may complete it.
func (s *Scanner) scanPart(part []byte, complete bool) {
	line := part
	if !complete || len(s.PartialLine) > 0 || len(part) > MaxLineBytes {
		s.bufferPartialLine(part)
		line = s.PartialLine
	}
	if !complete {
		return
	}
	s.scanLine(line)
	if s.PartialLine = s.PartialLine[:0]; cap(s.PartialLine) > ChunkBytes {
		s.PartialLine = nil // frees the memory of a long line
	}
	s.lineTruncated = false
}

// ScanLastLine reads a last line without a line end.
func (s *Scanner) ScanLastLine() {
	if len(s.PartialLine) > 0 {
		s.scanLine(s.PartialLine)
		s.PartialLine, s.lineTruncated = nil, false
	}
}

// HasWholeLastLine reports whether a last line without a line end cannot be the beginning of a longer one.
func (s *Scanner) HasWholeLastLine() bool {
	data, ok := bytes.CutPrefix(s.PartialLine, []byte("data:"))
	data = bytes.TrimSpace(data)
	return ok && !s.lineTruncated && (string(data) == "[DONE]" || json.Valid(data))
}

func (s *Scanner) bufferPartialLine(b []byte) {
	n := min(len(b), MaxLineBytes-len(s.PartialLine))
	s.PartialLine = append(s.PartialLine, b[:n]...)
	if b = b[n:]; len(b) == 0 {
		return
	}
	s.lineTruncated = true
	tail := s.PartialLine[MaxLineBytes-MaxTailBytes:]
	b = b[max(0, len(b)-MaxTailBytes):]
	copy(tail[copy(tail, tail[len(b):]):], b)
}

func (s *Scanner) scanLine(line []byte) {
	if name, ok := bytes.CutPrefix(line, []byte("event:")); ok && (s.Format == api.ResponsesFormat || s.Format == api.StoredFormat) {
		kind := string(bytes.TrimSpace(name))
		s.isFinalEvent, s.isEarlyEvent = endsResponse(kind), precedesOutput(kind)
		return
	}
	data, ok := bytes.CutPrefix(line, []byte("data:"))
	if !ok {
		return
	}
	data = bytes.TrimSpace(data)
	switch {
	case len(data) == 0:
	case string(data) == "[DONE]":
		s.Done = true
		// vLLM ends the stream like this if it aborts the request before the first token.
		if s.Format.HasChoices() && !s.Content && !s.Finished && s.ErrorEvent == nil {
			s.markAborted()
		}
	case isErrorEvent(data):
		s.recordErrorEvent(data)
	case s.lineTruncated && s.isEarlyEvent: // it repeats long instructions and tools
		s.readResponseID(data)
		if s.Metadata != nil {
			s.Metadata.readIDAndModel(s.Format, data[:min(len(data), MaxLineBytes/2)])
		}
	case s.lineTruncated:
		s.scanTruncatedEvent(data[len(data)-min(len(data), MaxTailBytes):])
	default:
		s.scanEvent(data)
	}
	if (s.Format == api.ResponsesFormat || s.Format == api.StoredFormat) && !s.Aborted && !s.Unexplained {
		s.countSequence(data)
	}
}

// countSequence sets NextSequence to what follows the event. That of a long one may be in the part that is not known.
func (s *Scanner) countSequence(data []byte) {
	switch n := gjson.GetBytes(data, "sequence_number"); {
	case n.Type == gjson.Number:
		s.NextSequence = max(n.Int(), -1) + 1
	case s.lineTruncated:
		s.NextSequence++
	}
}

// scanTruncatedEvent reads an event of which only the end is known.
func (s *Scanner) scanTruncatedEvent(tail []byte) {
	s.Events++
	s.Content = true
	if s.reply != nil {
		s.reply.Invalidate()
	}
	if s.Format.HasChoices() && hasFinishReason(tail) {
		s.Finished = true
	}
	if !s.isFinalEvent {
		return
	}
	if s.Format == api.StoredFormat {
		s.Done = true
		return
	}
	// Quotes in a text are escaped, so this is none.
	if bytes.Contains(tail, []byte(`"status":"cancelled"`)) {
		s.markUnexplained()
	}
	s.Done, s.Finished = true, !s.Aborted && !s.Unexplained
	if _, object, found := bytes.Cut(tail, []byte(`"usage":`)); found {
		s.Usage.Parse(gjson.ParseBytes(object), s.Format)
	}
}

// recordErrorEvent records an error event. On endpoints without [DONE] it is the last event.
func (s *Scanner) recordErrorEvent(data []byte) {
	if s.ErrorEvent == nil {
		s.ErrorEvent, s.ErrorOffset = bytes.Clone(data), s.EventOffset
	}
	s.Done = s.Done || s.Format == api.ResponsesFormat || s.Format == api.StoredFormat || s.Format == api.MessagesFormat
}

// BeginsLongError reports whether the incomplete line is an error that may be relayed in parts.
func (s *Scanner) BeginsLongError() bool {
	data, ok := bytes.CutPrefix(s.PartialLine, []byte("data:"))
	return ok && len(data) > maxWholeErrorBytes && isErrorEvent(bytes.TrimSpace(data))
}

func (s *Scanner) markAborted() {
	if !s.Aborted {
		s.Aborted, s.AbortOffset = true, s.EventOffset
	}
}

// markUnexplained records that the current event ends the response without a reason.
func (s *Scanner) markUnexplained() {
	if !s.Aborted && !s.Unexplained {
		s.Unexplained, s.AbortOffset = true, s.EventOffset
	}
}

func (s *Scanner) scanEvent(data []byte) {
	if s.Metadata != nil {
		s.Metadata.addEvent(s.Format, data)
	}
	look := s.inspectEvent
	if s.Content || s.Finished {
		look = s.inspectAfterContent
	}
	if !look(data) {
		return
	}
	s.Events++
	if s.reply != nil {
		s.reply.AddEvent(data)
	}
	if bytes.Contains(data, []byte(`usage":`)) { // a search for a quote stops at every key
		for _, path := range usagePaths[s.Format] {
			s.Usage.Parse(gjson.GetBytes(data, path), s.Format)
		}
	}
}

// usagePaths are the paths of usage in the events of each format.
var usagePaths = [...][]string{
	api.ChatFormat:       {"usage"},
	api.CompletionFormat: {"usage"},
	api.TokensFormat:     {"usage"},
	api.ResponsesFormat:  {"response.usage"},
	api.MessagesFormat:   {"message.usage", "usage"},
	api.StoredFormat:     nil,
}

// isErrorEvent recognizes an error by its beginning: events of all formats begin with other keys, or with an error that is null.
func isErrorEvent(data []byte) bool {
	if bytes.HasPrefix(data, []byte(`{"error":`)) {
		e := gjson.GetBytes(data, "error")
		return e.Type != gjson.Null && e.Type != gjson.False && e.Raw != `""`
	}
	return bytes.HasPrefix(data, []byte(`{"type":"error"`))
}

// inspectEvent records whether an event carries the first content, or ends the response. It returns false for an error and an event
// that precedes the engine's output.
func (s *Scanner) inspectEvent(data []byte) (fromEngine bool) {
	s.readResponseID(data)
	switch s.Format {
	case api.ChatFormat:
		s.inspectChoices(data, "delta", deltaHasContent)
	case api.CompletionFormat:
		s.inspectChoices(data, "text", func(text gjson.Result) bool { return text.Raw != "" && text.Raw != `""` })
	case api.TokensFormat:
		s.inspectChoices(data, "token_ids", func(ids gjson.Result) bool { return ids.IsArray() && ids.Raw != "[]" })
	case api.ResponsesFormat, api.MessagesFormat:
		return s.inspectTypedEvent(data)
	case api.StoredFormat:
		s.Content = true
		s.inspectStoredEvent(data)
	default:
		s.Content = true
		s.inspectPlainEvent(data)
	}
	return true
}

// inspectPlainEvent records whether an event is the last one, as far as the formats of audio have one.
func (s *Scanner) inspectPlainEvent(data []byte) {
	s.Finished = s.Finished || hasFinishReason(data)
	if bytes.Contains(data, []byte(transcriptDone)) && gjson.GetBytes(data, "type").Str == transcriptDone {
		s.Done = true
	}
}

// transcriptDone is the type of the last event of a transcription.
const transcriptDone = "transcript.text.done"

// inspectStoredEvent records whether an event is the last one of a stored response.
func (s *Scanner) inspectStoredEvent(data []byte) {
	if bytes.Contains(data, []byte(`"response":`)) && endsResponse(gjson.GetBytes(data, "type").Str) {
		s.Done = true
	}
}

// inspectAfterContent is inspectEvent once content has come: events that cannot be the end of the response are not parsed.
func (s *Scanner) inspectAfterContent(data []byte) (fromEngine bool) {
	switch s.Format {
	case api.ChatFormat, api.CompletionFormat, api.TokensFormat:
		if hasFinishReason(data) {
			s.inspectChoices(data, "", func(gjson.Result) bool { return false })
		}
	case api.ResponsesFormat:
		if bytes.Contains(data, []byte(`"response":`)) || bytes.Contains(data, []byte(`"error"`)) {
			return s.inspectTypedEvent(data)
		}
	case api.MessagesFormat:
		if !bytes.HasPrefix(data, []byte(`{"type":"content_block_delta"`)) {
			return s.inspectTypedEvent(data)
		}
	case api.StoredFormat:
		s.inspectStoredEvent(data)
	case api.PlainFormat:
		s.inspectPlainEvent(data)
	}
	return true
}

// hasFinishReason reports whether a choice in data has a finish_reason. A quote in a text is escaped, so a text never matches.
func hasFinishReason(data []byte) bool {
	for found := true; found; {
		_, data, found = bytes.Cut(data, []byte(`finish_reason"`))
		if value := bytes.TrimLeft(data, ": \t"); found && len(value) > 0 && value[0] == '"' {
			return true
		}
	}
	return false
}

// inspectTypedEvent is inspectEvent for formats whose events have a type.
func (s *Scanner) inspectTypedEvent(data []byte) (fromEngine bool) {
	kind := gjson.GetBytes(data, "type").Str
	if precedesOutput(kind) {
		return false
	}
	switch kind {
	case "ping":
		return false
	case "error":
		s.recordErrorEvent(data)
		return false
	case "response.failed":
		s.recordErrorEvent(data)
		return s.Content
	case "message_delta":
		s.message.hasDelta = true
		s.message.hasStopReason = s.message.hasStopReason || gjson.GetBytes(data, "delta.stop_reason").Type == gjson.String
		s.message.zeroTokens = gjson.GetBytes(data, "usage.output_tokens").Raw == "0"
	case "message_stop":
		s.Done = true
		switch {
		case s.message.hasDelta && s.message.zeroTokens && !s.Content:
			s.markAborted()
		case s.message.hasDelta && !s.message.hasStopReason:
			s.markUnexplained()
		default:
			s.Finished = true
		}
	default:
		switch {
		case endsResponse(kind):
			s.Done = true
			switch vllm.EndOfResponse(gjson.GetBytes(data, "response")) {
			case vllm.EndAborted:
				s.markAborted()
			case vllm.EndUnexplained:
				s.markUnexplained()
			default:
				s.Finished = true
			}
		case strings.HasSuffix(kind, ".delta"), kind == "content_block_delta":
			s.Content = true
		}
	}
	return true
}

// precedesOutput reports whether an event of that type precedes the engine's output in a stream of /v1/responses.
func precedesOutput(eventType string) bool {
	return eventType == "response.created" || eventType == "response.in_progress" || eventType == "response.queued"
}

// readResponseID reads the id of the response from the beginning of an early event.
func (s *Scanner) readResponseID(data []byte) {
	if s.ResponseID == "" {
		s.ResponseID = readEventID(data)
		s.Background = s.Format == api.ResponsesFormat && gjson.GetBytes(data, "response.background").Bool()
	}
}

// endsResponse reports whether an event of that type is the last of a stream of /v1/responses.
func endsResponse(eventType string) bool {
	return eventType == "response.completed" || eventType == "response.incomplete" || eventType == "response.failed"
}

// deltaHasContent reports whether a delta has any field but the role: content, reasoning, tool calls or what is added to them.
func deltaHasContent(delta gjson.Result) bool {
	has := false
	delta.ForEach(func(key, value gjson.Result) bool {
		has = key.Str != "role" && value.Type != gjson.Null && value.Raw != `""` && value.Raw != `[]`
		return !has
	})
	return has
}

func (s *Scanner) inspectChoices(data []byte, key string, hasContent func(gjson.Result) bool) {
	gjson.GetBytes(data, "choices").ForEach(func(_, choice gjson.Result) bool {
		if hasContent(choice.Get(key)) {
			s.Content = true
		}
		switch reason := choice.Get("finish_reason"); {
		case reason.Type != gjson.String:
		case reason.Str == vllm.FinishReasonAbort:
			s.markAborted()
		default:
			s.Finished = true
		}
		return true
	})
}

// maxTokenCount bounds the counts that a replica reports.
const maxTokenCount = 1 << 30

// Parse takes over what a usage object says. The prompt of a chat, a completion or a response includes the cached tokens. That of a
// message is input_tokens and both cache_ figures together, where a replica sends these: vLLM does so only at the end of a stream,
// whose first event has the whole prompt in input_tokens.
func (u *Usage) Parse(object gjson.Result, f api.Format) {
	if !object.IsObject() {
		return
	}
	in, out, details, cached, created := "prompt_tokens", "completion_tokens", "prompt_tokens_details", "", ""
	switch f {
	case api.ResponsesFormat:
		in, out, details = "input_tokens", "output_tokens", "input_tokens_details"
	case api.MessagesFormat:
		in, out, details, cached, created = "input_tokens", "output_tokens", "", "cache_read_input_tokens", "cache_creation_input_tokens"
	}
	u.Known = true
	prompt, counted := 0, false
	// One walk: asking for each of the three costs three.
	object.ForEach(func(key, value gjson.Result) bool {
		switch key.Str {
		case "":
		case in:
			prompt, counted = prompt+tokenCount(value), true
		case out:
			u.CompletionTokens = max(u.CompletionTokens, tokenCount(value))
		case details:
			u.parseCached(value.Get("cached_tokens"))
		case cached:
			u.parseCached(value)
			prompt += tokenCount(value)
		case created:
			prompt += tokenCount(value)
		}
		return true
	})
	if counted && prompt > 0 {
		u.PromptTokens = prompt
	}
}

// tokenCount returns the number in v, 0 for anything else.
func tokenCount(v gjson.Result) int {
	if v.Type != gjson.Number {
		return 0
	}
	return int(min(max(v.Int(), 0), maxTokenCount))
}

func (u *Usage) parseCached(v gjson.Result) {
	if v.Type == gjson.Number {
		u.HasCached = true
		u.CachedTokens = max(u.CachedTokens, tokenCount(v))
	}
}

// CompletionTokens returns the length of the response: as reported, else about one token per event.
func (s *Scanner) CompletionTokens() int {
	if s.Usage.CompletionTokens > 0 {
		return s.Usage.CompletionTokens
	}
	return s.Events
}

// ErrorStatus returns the HTTP status that the error event stands for.
func (s *Scanner) ErrorStatus() int { return vllm.ErrorEventStatus(s.ErrorEvent) }

// ReadBodyID returns the id of a response, "" if it has none.
func ReadBodyID(body []byte) string {
	for _, key := range [...]string{"id", "request_id"} {
		if id := gjson.GetBytes(body, key); id.Type == gjson.String {
			return id.Str
		}
	}
	return ""
}

// readEventID returns the id of the response that an event of a stream names, "" if it has none.
func readEventID(event []byte) string {
	for _, path := range [...]string{"response.id", "message.id"} {
		if id := gjson.GetBytes(event, path); id.Type == gjson.String {
			return id.Str
		}
	}
	return ReadBodyID(event)
}

// EndOfBody returns how a complete response ended.
func EndOfBody(f api.Format, body []byte) vllm.ResponseEnd {
	switch f {
	case api.ChatFormat, api.CompletionFormat, api.TokensFormat:
		if vllm.HasAbortedChoice(body) {
			return vllm.EndAborted
		}
	case api.ResponsesFormat:
		return vllm.EndOfResponse(gjson.ParseBytes(body))
	case api.MessagesFormat:
		return vllm.EndOfMessage(body)
	}
	return vllm.EndExplained
}
