package prompt

import (
	"bytes"
	"slices"
	"strconv"

	"github.com/zeebo/xxh3"
)

const (
	// maxResponseBlocks is about 65,000 tokens in blocks of the default size.
	maxResponseBlocks = 1024
	// maxPooledResponseBytes bounds the buffers that Reset keeps.
	maxPooledResponseBytes = 16 << 10
)

// Response makes the blocks that follow a prompt's in the next turn, which sends the response back.
// It takes a response event by event and keeps only the bytes of one block. Only what the next turn
// certainly contains becomes blocks: a response with reasoning, which templates drop, has none. It
// is meant to be pooled, and not safe for concurrent use.
type Response struct {
	scan     scanner
	format   responseFormat
	hash     uint64 // of the last block
	size     int    // of a block, in bytes
	text     []byte // canonical text after the last block
	blocks   []Block
	call     toolCall
	usage    []byte // value of the first "usage" in the data; nil: none
	template eventTemplate
	trace    eventTrace // of the data
}

// responseFormat says where a response has its text.
type responseFormat uint8

const (
	responseNone       responseFormat = iota // none that the next turn certainly contains
	responseChat                             // choices[].delta.content, or message.content
	responseCompletion                       // choices[].text
	responseTokenIDs                         // choices[].token_ids
	responseParts                            // content blocks, of Messages
	responseItems                            // output items, of Responses
)

// ResponseStart is the end of a prompt, which its response continues. It is meant to be pooled.
type ResponseStart struct {
	format responseFormat
	hash   uint64 // of the prompt's last block
	size   int    // of a block, in bytes
	text   []byte // canonical text after the last block
}

// Reset forgets the prompt: no response can have blocks.
func (s *ResponseStart) Reset() { s.format = responseNone }

// SetFrom takes over the end of p, after p.AppendBlocks. p is not retained.
func (s *ResponseStart) SetFrom(p *Prompt) {
	s.Reset()
	if p.chain.blockBytes == 0 || p.Sequences > 1 {
		return
	}
	s.hash, s.size = p.chain.hash, p.chain.blockBytes
	s.text = append(s.text[:0], p.Text[len(p.Text)-p.chain.rest:]...)
	switch {
	case p.format == formatText && !p.echo:
		s.format = responseCompletion
	case p.format == formatIDs && !p.echo:
		s.format = responseTokenIDs
	case p.format == formatChat && !p.turns.assistantLast && !p.dropsReasoningLater():
		// The response may continue a last message of the assistant.
		switch s.format = responseChat; p.kind {
		case Messages:
			s.format = responseParts
		case Responses:
			s.format = responseItems
		}
		s.text = beginMessage(s.text, "assistant")
	}
}

// Reset prepares r for the response to the prompt that s is the end of. It reports whether the
// response can have blocks. s is not retained.
func (r *Response) Reset(s *ResponseStart) (canHaveBlocks bool) {
	r.format, r.blocks, r.template.before = s.format, r.blocks[:0], 0
	if cap(r.text) > maxPooledResponseBytes {
		r.text = nil
	}
	if cap(r.scan.scratch)+cap(r.call.args) > maxPooledResponseBytes {
		r.scan.scratch, r.call = nil, toolCall{}
	}
	r.call = toolCall{name: r.call.name[:0], args: r.call.args[:0]}
	r.hash, r.size = s.hash, s.size
	r.text = append(r.text[:0], s.text...)
	return r.format != responseNone
}

// AddEvent takes one event of a stream, without its "data:".
func (r *Response) AddEvent(data []byte) {
	switch {
	case r.isDone():
	case r.isTyped():
		r.startParse(data)
		r.parseTypedEvent()
		r.endParse()
	case !r.parseByTemplate(data):
		r.startParse(data)
		r.scan.enter('{')
		r.parseMembers("delta")
		if r.endParse() {
			r.saveTemplate(data)
		}
	}
	r.usage = nil
}

// AddBody takes a whole response. It returns the value of "usage" in it, or nil.
func (r *Response) AddBody(body []byte) (usage []byte) {
	if r.isDone() {
		return nil
	}
	r.startParse(body)
	r.scan.enter('{')
	r.parseMembers("message")
	r.endParse()
	usage, r.usage = r.usage, nil
	return usage
}

// Invalidate records that a part of the response is missing: it has no blocks.
func (r *Response) Invalidate() { r.format = responseNone }

// Finish ends the response and returns its blocks, valid until the next Reset; nil if the
// response is invalid.
func (r *Response) Finish() []Block {
	if r.format == responseNone {
		return nil
	}
	r.flushToolCall()
	r.appendFullBlocks()
	return r.blocks
}

// TailBytes returns how many bytes of the response follow its blocks, after Finish.
func (r *Response) TailBytes() int { return len(r.text) }

// isTyped reports whether the response is a list of typed parts.
func (r *Response) isTyped() bool { return r.format == responseParts || r.format == responseItems }

// isDone reports whether the rest of the response has no effect.
func (r *Response) isDone() bool {
	return r.format == responseNone || len(r.blocks) == maxResponseBlocks
}

// startParse prepares for parsing data, a whole response or an event, which has to be an object.
func (r *Response) startParse(data []byte) {
	s := &r.scan
	s.reset(data)
	r.usage, r.trace = nil, eventTrace{}
	if s.at = s.skipSpace(0); s.peek() != '{' {
		s.failSyntax(s.at, "an object")
	}
}

// endParse ends the parsing of data: full blocks are moved, and the response becomes
// invalid if the data are. It reports whether they are valid.
func (r *Response) endParse() (valid bool) {
	if valid = r.scan.err == nil; !valid {
		r.Invalidate()
	}
	r.scan.b = nil
	r.appendFullBlocks()
	return valid
}

// parseMembers reads members of a response. In a chat, messageKey is the key of the object
// with the text: "message" or "delta".
func (r *Response) parseMembers(messageKey string) {
	s, list := &r.scan, "choices"
	switch r.format {
	case responseParts:
		list = "content"
	case responseItems:
		list = "output"
	}
	for s.nextMember() {
		name, begin := s.unquote(s.key), s.at
		isList, isUsage := string(name) == list, r.usage == nil && string(name) == "usage"
		switch {
		case isList && r.isTyped():
			r.addParts(s.readValue())
		case isList && s.enter('['):
			r.parseChoices(messageKey)
		default:
			s.readValue()
		}
		if isUsage && s.err == nil {
			r.usage = s.b[begin:s.at:s.at]
		}
		if r.trace.choices == 0 && r.trace.texts > 0 {
			r.trace.choices = s.at
		}
	}
}

// parseChoices reads the list that was entered. It has one choice, as one sequence was requested.
func (r *Response) parseChoices(messageKey string) {
	s := &r.scan
	for s.nextElement() {
		if !s.enter('{') {
			r.Invalidate()
			s.readValue()
			continue
		}
		for s.nextMember() {
			switch name := s.unquote(s.key); {
			case r.format == responseCompletion && string(name) == "text" && s.peek() == '"':
				r.readText()
			case r.format == responseTokenIDs && string(name) == "token_ids" && s.enter('['):
				r.text = s.appendTokenIDs(r.text)
			case r.format == responseTokenIDs && string(name) == "token_ids":
				r.Invalidate() // the response was requested without them
				s.readValue()
			case r.format == responseChat && string(name) == messageKey && s.enter('{'):
				r.parseMessage()
			default:
				s.readValue()
			}
		}
	}
}

// parseMessage reads the message or delta that was entered.
func (r *Response) parseMessage() {
	s := &r.scan
	for s.nextMember() {
		switch string(s.unquote(s.key)) {
		case "content":
			if s.peek() == '"' && r.call.number == 0 {
				r.readText()
			} else {
				r.readEmptyOrInvalidate() // text after a call would stand before it in the next turn
			}
		case "tool_calls":
			r.parseToolCalls()
		case "role":
			s.readValue()
		default: // reasoning, audio and others
			r.readEmptyOrInvalidate()
		}
	}
}

// readText reads the string that is next and appends it to the text.
func (r *Response) readText() {
	begin := r.scan.at + 1
	r.text = r.scan.readString(r.text)
	r.trace.texts++
	r.trace.from, r.trace.to = begin, r.scan.at
}

// readEmptyOrInvalidate reads the next value and invalidates the response unless it is null or
// empty.
func (r *Response) readEmptyOrInvalidate() {
	v := r.scan.readValue()
	switch string(r.scan.b[v.start:v.end]) {
	case "null", `""`, "[]":
	default:
		r.Invalidate()
	}
}

// appendFullBlocks moves full blocks from the text to the blocks.
func (r *Response) appendFullBlocks() {
	rest := r.text
	for len(rest) >= r.size && len(r.blocks) < maxResponseBlocks {
		r.hash = xxh3.HashSeed(rest[:r.size], r.hash)
		r.blocks = append(r.blocks, Block(r.hash))
		rest = rest[r.size:]
	}
	r.text = slices.Delete(r.text, 0, len(r.text)-len(rest))
}

// maxToolCallBytes bounds the name and arguments of a tool call, which are kept until the
// call is complete: only then is it known how templates write it.
const maxToolCallBytes = 16 << 10

// toolCall is the tool call that is being received.
type toolCall struct {
	number int // of the response's calls, from 1; 0: none
	name   []byte
	args   []byte
}

// parseToolCalls reads the list of tool calls or deltas that is next.
func (r *Response) parseToolCalls() {
	s := &r.scan
	if !s.enter('[') {
		r.readEmptyOrInvalidate()
		return
	}
	for n := 1; s.nextElement(); n++ {
		if s.peek() == '{' {
			r.parseToolCall(n)
		} else {
			r.Invalidate()
			s.readValue()
		}
	}
}

// parseToolCall reads the call or delta that is next. A delta has the index of its call, which
// takes precedence over number; both count calls of the response, number from 1.
func (r *Response) parseToolCall(number int) {
	s := &r.scan
	r.trace.calls = true
	m := s.readMembers("index", "function")
	if m[0].exists() {
		number = r.parseIndexPlusOne(m[0])
	}
	switch {
	case number == r.call.number+1:
		r.beginCall()
	case number == 0 || number != r.call.number:
		r.Invalidate() // a delta of a call that is complete, or an invalid index
	}
	function := s.findMembers(m[1], "name", "arguments")
	r.addToCall(function[0], function[1])
}

// parseIndexPlusOne returns the index of a call plus 1; 0 if it is invalid or has more
// than two digits.
func (r *Response) parseIndexPlusOne(v value) int {
	if n, err := strconv.ParseUint(string(r.scan.b[v.start:v.end]), 10, 64); err == nil && v.end-v.start <= 2 {
		return int(n) + 1
	}
	return 0
}

// beginCall ends the current call, if there is one, and begins the next.
func (r *Response) beginCall() {
	number := r.call.number + 1
	r.flushToolCall()
	r.call.number = number
}

// addToCall appends to the name and the arguments of the current call, as far as they are
// strings. A call that is too long invalidates the response.
func (r *Response) addToCall(name, arguments value) {
	r.call.name = append(r.call.name, r.scan.stringOf(name)...)
	r.call.args = append(r.call.args, r.scan.stringOf(arguments)...)
	if len(r.call.name)+len(r.call.args) > maxToolCallBytes {
		r.Invalidate()
	}
}

// flushToolCall appends the call that was being received, if any, to the text.
func (r *Response) flushToolCall() {
	c := &r.call
	if c.number == 0 {
		return
	}
	r.text = append(append(r.text, markCall), c.name...)
	r.text = appendArguments(append(r.text, markArguments), c.args)
	*c = toolCall{name: c.name[:0], args: c.args[:0]}
}

// maxTemplateBytes bounds an eventTemplate, which is kept as long as its stream.
const maxTemplateBytes = 1 << 10

// eventTemplate is the last event without its text. The events of a stream differ in
// their text alone, and perhaps after their choices; the rest need only be compared.
type eventTemplate struct {
	bytes  []byte // up to the text's opening quote, then from its closing quote to the end of choices
	before int    // bytes before the text; 0: no template
}

// eventTrace is what parsing an event records for eventTemplate.
type eventTrace struct {
	texts    int // number of texts
	from, to int // span of the last, with its closing quote
	choices  int // end of the first list of choices with a text
	calls    bool
}

// parseByTemplate reads an event that matches the template, without parsing what is equal.
// For others it returns false and does nothing.
func (r *Response) parseByTemplate(data []byte) (matched bool) {
	k := &r.template
	if k.before == 0 || r.call.number != 0 || !bytes.HasPrefix(data, k.bytes[:k.before]) {
		return false
	}
	s := &r.scan
	s.b = data
	text, end := s.appendString(r.text, k.before-1)
	rest := k.bytes[k.before:]
	if s.err != nil || !bytes.HasPrefix(data[end:], rest) {
		return false
	}
	r.text = text
	if end += len(rest); string(data[end:]) != "}" { // mostly it is
		s.position = position{at: end, open: 1}
		r.parseMembers("delta")
	}
	r.endParse()
	return true
}

// saveTemplate keeps what data, which was parsed, has around its text, if nothing else in
// it has an effect.
func (r *Response) saveTemplate(data []byte) {
	t := &r.trace
	if t.texts != 1 || t.calls || t.from+t.choices-t.to > maxTemplateBytes {
		r.template.before = 0
		return
	}
	kept := slices.Grow(r.template.bytes[:0], t.from+t.choices-t.to)
	r.template.bytes = append(append(kept, data[:t.from]...), data[t.to:t.choices]...)
	r.template.before = t.from
}
