package prompt

// The events and bodies of Messages and Responses: lists of typed parts. As in a chat,
// reasoning makes the response invalid, and so does text after a tool call.

// parseEvent reads one event of a stream of Messages or Responses.
func (r *Response) parseEvent() error {
	s := &r.scan
	i := s.skipSpace(0)
	if s.byteAt(i) != '{' {
		return s.syntaxError(i, "an object")
	}
	var kind, delta, block, item value
	for i++; ; {
		key, at, ok, err := s.nextMember(i)
		if err != nil {
			return err
		}
		if !ok {
			break
		}
		v, err := s.parseValue(at, 1)
		if err != nil {
			return err
		}
		i = v.end
		switch string(r.unquoteKey(key)) {
		case "type":
			kind = v
		case "delta":
			delta = v
		case "content_block":
			block = v
		case "item":
			item = v
		}
	}
	switch string(r.unquoteValue(kind)) {
	case "content_block_start":
		r.addPart(block)
	case "content_block_delta":
		r.addDelta(delta)
	case "response.output_text.delta":
		r.addText(delta)
	case "response.output_item.done":
		if string(r.partType(item)) != "message" { // whose text came in deltas
			r.addPart(item)
		}
	}
	return nil
}

// parseParts reads a whole response of Messages or Responses.
func (r *Response) parseParts() error {
	s := &r.scan
	i := s.skipSpace(0)
	if s.byteAt(i) != '{' {
		return s.syntaxError(i, "an object")
	}
	list := "content"
	if r.format == responseItems {
		list = "output"
	}
	for i++; ; {
		key, at, ok, err := s.nextMember(i)
		if !ok {
			return err
		}
		v, err := s.parseValue(at, 1)
		if err != nil {
			return err
		}
		i = v.end
		switch name := r.unquoteKey(key); {
		case string(name) == list:
			r.addParts(v)
		case string(name) == "usage" && r.usage == nil:
			r.usage = s.b[at:i:i]
		}
	}
}

// addParts adds the parts of a validated list.
func (r *Response) addParts(list value) {
	s := &r.scan
	if s.firstByte(list) != '[' {
		return
	}
	for i := list.start + 1; ; {
		at, ok, _ := s.nextElement(i)
		if !ok {
			return
		}
		part, _ := s.parseValue(at, validated)
		r.addPart(part)
		i = part.end
	}
}

// partType returns the type of a part, valid until the next call; empty if it has none.
func (r *Response) partType(part value) []byte { return r.unquoteValue(r.member(part, "type")) }

// unquoteValue returns the string v without escapes, valid until the next call; empty if v is
// not a string.
func (r *Response) unquoteValue(v value) []byte {
	if r.scan.firstByte(v) != '"' {
		return nil
	}
	return r.unquoteKey(v)
}

// addPart adds a content block, an output item, or a part of a message.
func (r *Response) addPart(part value) {
	switch string(r.partType(part)) {
	case "text", "output_text":
		r.addText(r.member(part, "text"))
	case "message":
		r.addParts(r.member(part, "content"))
	case "tool_use":
		r.beginCall(part)
		// In a stream the input is empty here and comes in deltas.
		if input := r.member(part, "input"); r.scan.firstByte(input) == '{' && r.scan.byteAt(r.scan.skipSpace(input.start+1)) != '}' {
			r.call.args = append(r.call.args, r.scan.b[input.start:input.end]...)
			r.boundCall()
		}
	case "function_call":
		r.beginCall(part)
		if namespace := r.member(part, "namespace"); r.scan.notNull(namespace) {
			r.Invalidate() // rare
		}
		if arguments := r.member(part, "arguments"); r.scan.firstByte(arguments) == '"' {
			r.call.args, _, _ = r.scan.appendString(r.call.args, arguments.start)
			r.boundCall()
		}
	default: // reasoning, calls of other kinds and others
		r.Invalidate()
	}
}

// addDelta adds a delta of a content block.
func (r *Response) addDelta(delta value) {
	if text := r.member(delta, "text"); text.exists() {
		r.addText(text)
		return
	}
	part := r.member(delta, "partial_json")
	if r.scan.firstByte(part) != '"' || r.call.number == 0 {
		r.Invalidate()
		return
	}
	r.call.args, _, _ = r.scan.appendString(r.call.args, part.start)
	r.boundCall()
}

// addText appends a text, which must not follow a call.
func (r *Response) addText(text value) {
	switch {
	case r.scan.firstByte(text) != '"' || text.end-text.start == len(`""`):
	case r.call.number > 0:
		r.Invalidate()
	default:
		r.text, _, _ = r.scan.appendString(r.text, text.start) // it was checked
	}
}

// beginCall ends the current call, if there is one, and begins that of part.
func (r *Response) beginCall(part value) {
	number := r.call.number + 1
	r.flushToolCall()
	r.call.number = number
	if name := r.member(part, "name"); r.scan.firstByte(name) == '"' {
		r.call.name, _, _ = r.scan.appendString(r.call.name, name.start)
	}
	r.boundCall()
}

// boundCall invalidates the response if its call is too long.
func (r *Response) boundCall() {
	if len(r.call.name)+len(r.call.args) > maxToolCallBytes {
		r.Invalidate()
	}
}

// member returns the member called name of a validated value; absent unless the value is an
// object that has it.
func (r *Response) member(v value, name string) (found value) {
	s := &r.scan
	if s.firstByte(v) != '{' {
		return value{}
	}
	for i := v.start + 1; ; {
		key, at, ok, _ := s.nextMember(i)
		if !ok {
			return found
		}
		member, _ := s.parseValue(at, validated)
		if string(r.unquoteKey(key)) == name {
			found = member
		}
		i = member.end
	}
}
