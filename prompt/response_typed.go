package prompt

// The events and bodies of Messages and Responses: lists of typed parts. As in a chat,
// reasoning makes the response invalid, and so does text after a tool call.

// parseTypedEvent reads one event of a stream of Messages or Responses.
func (r *Response) parseTypedEvent() {
	s := &r.scan
	m := s.readMembers("type", "delta", "content_block", "item")
	eventType, delta, block, item := m[0], m[1], m[2], m[3]
	switch string(s.stringOf(eventType)) {
	case "content_block_start":
		r.addPart(block)
	case "content_block_delta":
		r.addDelta(delta)
	case "response.output_text.delta":
		r.addText(delta)
	case "response.output_item.done":
		if string(s.stringOf(s.member(item, "type"))) != "message" { // whose text came in deltas
			r.addPart(item)
		}
	}
}

// addParts adds the parts of a list.
func (r *Response) addParts(list value) {
	for part := range r.scan.elements(list) {
		r.addPart(part)
	}
}

// addPart adds a content block, an output item, or a part of a message.
func (r *Response) addPart(part value) {
	s := &r.scan
	m := s.findMembers(part, "type", "text", "content", "name", "input")
	switch string(s.stringOf(m[0])) {
	case "text", "output_text":
		r.addText(m[1])
	case "message":
		r.addParts(m[2])
	case "tool_use":
		r.beginCall()
		// In a stream the input is empty here and comes in deltas.
		if input := m[4]; s.firstByte(input) == '{' && s.byteAt(s.skipSpace(input.start+1)) != '}' {
			r.call.args = append(r.call.args, s.b[input.start:input.end]...)
		}
		r.addToCall(m[3], value{})
	case "function_call":
		m := s.findMembers(part, "name", "arguments", "namespace")
		r.beginCall()
		r.addToCall(m[0], m[1])
		if s.notNull(m[2]) {
			r.Invalidate() // rare
		}
	default: // reasoning, calls of other kinds and others
		r.Invalidate()
	}
}

// addDelta adds a delta of a content block.
func (r *Response) addDelta(delta value) {
	m := r.scan.findMembers(delta, "text", "partial_json")
	switch {
	case m[0].exists():
		r.addText(m[0])
	case r.scan.firstByte(m[1]) != '"' || r.call.number == 0:
		r.Invalidate()
	default:
		r.addToCall(value{}, m[1])
	}
}

// addText appends a text, which must not follow a call.
func (r *Response) addText(text value) {
	if t := r.scan.stringOf(text); len(t) > 0 && r.call.number > 0 {
		r.Invalidate()
	} else {
		r.text = append(r.text, t...)
	}
}
