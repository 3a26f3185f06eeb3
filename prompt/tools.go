package prompt

import "bytes"

// tools caches the last tools, as written and in canonical form: agents send the same
// ones with every request, and comparing is twenty times faster than reading.
type tools struct {
	kind      Kind
	raw, text []byte
	builtIn   bool // of Responses: the replica may call one itself
}

// parseTools reads the tools and keeps them for ApplyLayout. What is not a list is left for
// the replica to reject.
func (p *Prompt) parseTools() {
	s, t := &p.scan, &p.tools
	// A list ends at its bracket, so equal bytes are an equal list.
	if len(t.raw) > 0 && t.kind == p.kind && bytes.HasPrefix(s.b[s.at:], t.raw) {
		s.at += len(t.raw)
		return
	}
	t.kind, t.raw = p.kind, t.raw[:0]
	if list := s.readValue(); s.firstByte(list) == '[' {
		t.text = p.appendTools(t.text[:0], list)
		t.raw = append(t.raw, s.b[list.start:list.end]...)
		t.builtIn = p.kind == Responses && p.hasBuiltInTool(list)
	}
}

// hasBuiltInTool reports whether a list that was read has a tool that the client does not call itself.
func (p *Prompt) hasBuiltInTool(list value) bool {
	s := &p.scan
	for tool := range s.elements(list) {
		switch string(s.unquote(s.member(tool, "type"))) {
		case "function", "custom":
		default:
			return true
		}
	}
	return false
}

// appendTools appends the tools of a list that was read.
func (p *Prompt) appendTools(dst []byte, list value) []byte {
	s := &p.scan
	for tool := range s.elements(list) {
		switch {
		case s.firstByte(tool) != '{':
		case p.kind == Messages, p.kind == Responses: // a tool is itself the function
			dst = p.appendFunction(append(dst, markTool), tool)
		default:
			dst = append(dst, markTool)
			for key, v := range s.members(tool) {
				switch name := s.unquote(key); {
				case string(name) == "function" && s.firstByte(v) == '{':
					dst = p.appendFunction(dst, v)
				case string(name) != "type": // always "function"
					dst = s.appendMember(dst, key, v)
				}
			}
		}
	}
	return dst
}

// appendFunction appends a function. Templates get its name, description and parameters in
// this order, then the rest.
func (p *Prompt) appendFunction(dst []byte, function value) []byte {
	s := &p.scan
	var known [functionParameters + 1]value
	others := false
	for key, v := range s.members(function) {
		if m := p.functionMemberOf(key); m <= functionParameters {
			known[m] = v
		} else {
			others = others || m == functionOther
		}
	}
	for m, label := range [...]string{"type:function,function:name:", ",description:", ",parameters:"} {
		// Templates write the names of members that every function has.
		dst = append(dst, label...)
		if s.notNull(known[m]) {
			dst = s.appendMinified(dst, known[m])
		}
	}
	if !others {
		return dst
	}
	for key, v := range s.members(function) {
		if p.functionMemberOf(key) == functionOther {
			dst = s.appendMember(dst, key, v)
		}
	}
	return dst
}

// functionMember is what a member of a function is to templates.
type functionMember uint8

const (
	functionName functionMember = iota
	functionDescription
	functionParameters
	functionOther
	functionIgnored
)

// functionMemberOf returns what the member called key is.
func (p *Prompt) functionMemberOf(key value) functionMember {
	parameters := "parameters"
	if p.kind == Messages {
		parameters = "input_schema"
	}
	switch name := p.scan.unquote(key); {
	case string(name) == "name":
		return functionName
	case string(name) == "description":
		return functionDescription
	case string(name) == parameters:
		return functionParameters
	case string(name) == "strict", string(name) == "defer_loading", p.kind != Messages && p.kind != Responses:
		return functionOther
	}
	return functionIgnored
}

// appendMember appends a member unless its value is null, which is the same as absent.
func (s *scanner) appendMember(dst []byte, key, v value) []byte {
	if !s.notNull(v) {
		return dst
	}
	return s.appendMinified(s.appendMinified(append(dst, markField), key), v)
}

// appendToolCalls appends the tool calls of an assistant message.
func (p *Prompt) appendToolCalls(calls value) {
	s := &p.scan
	for call := range s.elements(calls) {
		if function := s.member(call, "function"); s.firstByte(function) == '{' {
			m := s.findMembers(function, "name", "arguments")
			p.Text = append(append(p.Text, markCall), s.unquote(m[0])...)
			p.Text = appendArguments(append(p.Text, markArguments), s.unquote(m[1]))
		}
	}
}

// appendArguments appends the arguments of a tool call, an object that is mostly written
// in a string. Like vLLM it takes anything else for {}.
func appendArguments(dst, raw []byte) []byte {
	inner := scanner{b: raw}
	if inner.at = inner.skipSpace(0); inner.peek() == '{' {
		if object := inner.readValue(); object.exists() && inner.skipSpace(inner.at) == len(raw) {
			return inner.appendMinified(dst, object)
		}
	}
	return append(dst, "{}"...)
}
