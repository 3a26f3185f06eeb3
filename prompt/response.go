package prompt

import (
	"bytes"
	"slices"

	"github.com/zeebo/xxh3"
)

const (
	// maxResponseBlocks is about 65,000 tokens in blocks of the default size.
	maxResponseBlocks = 1024
	// maxPooledResponseBytes bounds the buffers that Reset keeps.
	maxPooledResponseBytes = 16 << 10
)

// Response makes the blocks that follow a prompt's in the next turn, which sends the
// response back. It takes a response event by event and keeps only the bytes of one
// block. Only what the next turn certainly contains becomes blocks: a response with
// reasoning, which templates drop, has none. It is meant to be pooled, and not safe for
// concurrent use.
type Response struct {
	scan     scanner
	format   responseFormat
	hash     uint64 // of the last block
	size     int    // of a block, in bytes
	text     []byte // canonical text after the last block
	blocks   []Block
	call     toolCall
	key      []byte // scratch of unquoteKey
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
		s.text = append(append(s.text, markMessage), "assistant"...)
		s.text = append(s.text, markText)
	}
}

// Reset prepares r for the response to the prompt that s is the end of. It reports whether the
// response can have blocks. s is not retained.
func (r *Response) Reset(s *ResponseStart) (canHaveBlocks bool) {
	r.format, r.blocks, r.template.before = s.format, r.blocks[:0], 0
	if cap(r.text) > maxPooledResponseBytes {
		r.text = nil
	}
	if cap(r.key)+cap(r.call.args) > maxPooledResponseBytes {
		r.key, r.call = nil, toolCall{}
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
		r.scan.b = data
		r.endParse(r.parseEvent())
	case !r.parseByTemplate(data) && r.parse(data, "delta"):
		r.saveTemplate(data)
	}
	r.usage = nil
}

// AddBody takes a whole response. It returns the value of "usage" in it, or nil.
func (r *Response) AddBody(body []byte) (usage []byte) {
	switch {
	case r.isDone():
	case r.isTyped():
		r.scan.b, r.usage = body, nil
		r.endParse(r.parseParts())
	default:
		r.parse(body, "message")
	}
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

// parse reads data, a whole response or an event, and reports whether it is valid. In a
// chat, messageKey is the key of the object with the text: "message" or "delta".
func (r *Response) parse(data []byte, messageKey string) (valid bool) {
	r.scan.b, r.usage, r.trace = data, nil, eventTrace{}
	return r.endParse(r.parseObject(messageKey))
}

// endParse ends the parsing of data: full blocks are moved, and the response becomes
// invalid if err is not nil. It reports whether err is nil.
func (r *Response) endParse(err error) (valid bool) {
	if err != nil {
		r.Invalidate()
	}
	r.scan.b = nil
	r.appendFullBlocks()
	return err == nil
}

func (r *Response) parseObject(messageKey string) error {
	i := r.scan.skipSpace(0)
	if r.scan.byteAt(i) != '{' {
		return r.scan.syntaxError(i, "an object")
	}
	return r.parseMembers(i+1, messageKey)
}

// parseMembers reads a response after its opening brace or one of its members.
func (r *Response) parseMembers(i int, messageKey string) error {
	s := &r.scan
	for {
		key, at, ok, err := s.nextMember(i)
		if !ok {
			return err
		}
		name := r.unquoteKey(key)
		choices, usage := string(name) == "choices", r.usage == nil && string(name) == "usage"
		if choices && s.byteAt(at) == '[' {
			i, err = r.parseChoices(at+1, messageKey)
		} else {
			i, err = s.skipValue(at)
		}
		if err != nil {
			return err
		}
		if usage {
			r.usage = s.b[at:i:i]
		}
		if r.trace.choices == 0 && r.trace.texts > 0 {
			r.trace.choices = i
		}
	}
}

// parseChoices reads the list whose bracket is right before i. It has one choice, as one
// sequence was requested.
func (r *Response) parseChoices(i int, messageKey string) (end int, err error) {
	for {
		at, ok, err := r.scan.nextElement(i)
		if !ok {
			return at, err
		}
		if r.scan.byteAt(at) != '{' {
			r.Invalidate()
			i, err = r.scan.skipValue(at)
		} else {
			i, err = r.parseChoice(at+1, messageKey)
		}
		if err != nil {
			return 0, err
		}
	}
}

func (r *Response) parseChoice(i int, messageKey string) (end int, err error) {
	s := &r.scan
	for {
		key, at, ok, err := s.nextMember(i)
		if !ok {
			return at, err
		}
		name := r.unquoteKey(key)
		switch {
		case r.format == responseCompletion && string(name) == "text" && s.byteAt(at) == '"':
			i, err = r.appendText(at)
		case r.format == responseTokenIDs && string(name) == "token_ids" && s.byteAt(at) == '[':
			r.text, i, err = s.appendTokenIDs(r.text, at+1, validated)
		case r.format == responseTokenIDs && string(name) == "token_ids":
			i, err = s.skipValue(at)
			r.Invalidate() // the response was requested without them
		case r.format == responseChat && string(name) == messageKey && s.byteAt(at) == '{':
			i, err = r.parseMessage(at + 1)
		default:
			i, err = s.skipValue(at)
		}
		if err != nil {
			return 0, err
		}
	}
}

// parseMessage reads the object whose brace is right before i, a message or a delta.
func (r *Response) parseMessage(i int) (end int, err error) {
	s := &r.scan
	for {
		key, at, ok, err := s.nextMember(i)
		if !ok {
			return at, err
		}
		switch string(r.unquoteKey(key)) {
		case "content":
			if s.byteAt(at) == '"' && r.call.number == 0 {
				i, err = r.appendText(at)
				break
			}
			i, err = r.invalidateUnlessEmpty(at) // text after a call would stand before it in the next turn
		case "tool_calls":
			i, err = r.parseToolCalls(at)
		case "role":
			i, err = s.skipValue(at)
		default: // reasoning, audio and others
			i, err = r.invalidateUnlessEmpty(at)
		}
		if err != nil {
			return 0, err
		}
	}
}

// appendText appends the string at i to the text.
func (r *Response) appendText(i int) (end int, err error) {
	r.text, end, err = r.scan.appendString(r.text, i)
	r.trace.texts++
	r.trace.from, r.trace.to = i+1, end
	return end, err
}

// unquoteKey returns a key without escapes, valid until the next call.
func (r *Response) unquoteKey(key value) []byte {
	if !key.escaped {
		return r.scan.b[key.start+1 : key.end-1]
	}
	r.key, _, _ = r.scan.appendString(r.key[:0], key.start) // it was checked
	return r.key
}

// invalidateUnlessEmpty skips the value at i and invalidates the response unless the value is null
// or empty.
func (r *Response) invalidateUnlessEmpty(i int) (end int, err error) {
	end, err = r.scan.skipValue(i)
	if err == nil {
		switch string(r.scan.b[i:end]) {
		case "null", `""`, "[]":
		default:
			r.Invalidate()
		}
	}
	return end, err
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

// parseToolCalls reads the list of tool calls or deltas at i.
func (r *Response) parseToolCalls(i int) (end int, err error) {
	s := &r.scan
	if s.byteAt(i) != '[' {
		return r.invalidateUnlessEmpty(i)
	}
	i++
	for n := 1; ; n++ {
		at, ok, err := s.nextElement(i)
		if !ok {
			return at, err
		}
		if s.byteAt(at) != '{' {
			r.Invalidate()
			i, err = s.skipValue(at)
		} else {
			i, err = r.parseToolCall(at, n)
		}
		if err != nil {
			return 0, err
		}
	}
}

// parseToolCall reads the call or delta at i. A delta has the index of its call, which
// takes precedence over number; both count calls of the response, number from 1.
func (r *Response) parseToolCall(i, number int) (end int, err error) {
	s := &r.scan
	r.trace.calls = true
	var index, function value
	end = i + 1
	for {
		key, at, ok, err := s.nextMember(end)
		if err != nil {
			return 0, err
		}
		if !ok {
			end = at
			break
		}
		v, err := s.parseValue(at, validated)
		if err != nil {
			return 0, err
		}
		switch string(r.unquoteKey(key)) {
		case "index":
			index = v
		case "function":
			function = v
		}
		end = v.end
	}
	if index.exists() {
		number = r.parseIndexPlusOne(index)
	}
	switch {
	case number == r.call.number+1:
		r.flushToolCall()
		r.call.number = number
	case number == 0 || number != r.call.number:
		r.Invalidate() // a delta of a call that is complete, or an invalid index
	}
	if s.firstByte(function) == '{' {
		r.appendNameAndArguments(function.start + 1)
	}
	return end, nil
}

// appendNameAndArguments reads the validated function whose brace is right before i, and
// appends its name and arguments to those of the call that is being received.
func (r *Response) appendNameAndArguments(i int) {
	s := &r.scan
	for {
		key, at, ok, _ := s.nextMember(i)
		if !ok {
			return
		}
		into := (*[]byte)(nil)
		switch string(r.unquoteKey(key)) {
		case "name":
			into = &r.call.name
		case "arguments":
			into = &r.call.args
		}
		if into == nil || s.byteAt(at) != '"' {
			i, _ = s.skipValue(at)
			continue
		}
		if *into, i, _ = s.appendString(*into, at); len(*into) > maxToolCallBytes {
			r.Invalidate()
		}
	}
}

// parseIndexPlusOne returns the index of a call plus 1; 0 if it is invalid or has more
// than two digits.
func (r *Response) parseIndexPlusOne(v value) int {
	if d := r.scan.b[v.start]; v.end == v.start+1 && isDigit(d) {
		return int(d-'0') + 1
	}
	if v.end == v.start+2 && isDigit(r.scan.b[v.start]) && isDigit(r.scan.b[v.start+1]) {
		return int(r.scan.b[v.start]-'0')*10 + int(r.scan.b[v.start+1]-'0') + 1
	}
	return 0
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
	had := len(r.text)
	r.scan.b = data
	text, end, err := r.scan.appendString(r.text, k.before-1)
	r.text = text[:had]
	rest := k.bytes[k.before:]
	if err != nil || !bytes.HasPrefix(data[end:], rest) {
		return false
	}
	r.text = text
	r.endParse(r.parseMembers(end+len(rest), "delta"))
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
