package prompt

import "bytes"

// tools caches the last tools, as written and in canonical form: agents send the same
// ones with every request, and comparing is twenty times faster than reading.
type tools struct {
	kind      Kind
	raw, text []byte
}

// parseTools checks the tools at i, keeps them for finishChat, and returns the index after
// them. What is not a list is left for the replica to reject.
func (p *Prompt) parseTools(i int) (end int, err error) {
	t := &p.tools
	// A list ends at its bracket, so equal bytes are an equal list.
	if len(t.raw) > 0 && t.kind == p.kind && bytes.HasPrefix(p.scan.b[i:], t.raw) {
		return i + len(t.raw), nil
	}
	t.kind, t.raw = p.kind, t.raw[:0]
	list, err := p.scan.parseValue(i, 1)
	if err != nil || p.scan.firstByte(list) != '[' {
		return list.end, err
	}
	if t.text, err = p.appendTools(t.text[:0], list); err == nil {
		t.raw = append(t.raw, p.scan.b[list.start:list.end]...)
	}
	return list.end, err
}

// appendTools appends the tools of a validated list.
func (p *Prompt) appendTools(dst []byte, list value) ([]byte, error) {
	s := &p.scan
	if s.firstByte(list) != '[' {
		return dst, nil
	}
	i := list.start + 1
	for {
		at, ok, err := s.nextElement(i)
		if !ok {
			return dst, err
		}
		switch {
		case s.b[at] != '{':
			var v value
			v, err = s.parseValue(at, validated)
			i = v.end
		case p.kind == Messages, p.kind == Responses:
			dst, i, err = p.appendFunction(append(dst, markTool), at)
		default:
			dst, i, err = p.appendTool(append(dst, markTool), at)
		}
		if err != nil {
			return dst, err
		}
	}
}

// appendTool appends the tool at i and returns the index after it.
func (p *Prompt) appendTool(dst []byte, i int) (_ []byte, end int, err error) {
	s := &p.scan
	for i++; ; {
		key, at, ok, err := s.nextMember(i)
		if !ok {
			return dst, at, err
		}
		name := p.unquote(key)
		if string(name) == "function" && s.b[at] == '{' {
			if dst, i, err = p.appendFunction(dst, at); err != nil {
				return dst, 0, err
			}
			continue
		}
		isType := string(name) == "type"
		v, err := s.parseValue(at, validated)
		if err != nil {
			return dst, 0, err
		}
		if i = v.end; !isType { // the type is always "function"
			dst = p.appendMember(dst, key, v)
		}
	}
}

// appendFunction appends the function at i and returns the index after it. Templates get
// its name, description and parameters in this order, then the rest. In Messages and
// Responses a tool is itself the function.
func (p *Prompt) appendFunction(dst []byte, i int) (_ []byte, end int, err error) {
	s := &p.scan
	var name, description, parameters value
	others := false
	start := i + 1
	for i = start; ; {
		key, at, ok, err := s.nextMember(i)
		if err != nil {
			return dst, 0, err
		}
		if !ok {
			end = at
			break
		}
		v, err := s.parseValue(at, validated)
		if err != nil {
			return dst, 0, err
		}
		i = v.end
		switch p.functionMemberOf(key) {
		case functionName:
			name = v
		case functionDescription:
			description = v
		case functionParameters:
			parameters = v
		case functionOther:
			others = true
		}
	}
	dst = p.appendLabeledValue(dst, "type:function,function:name:", name)
	dst = p.appendLabeledValue(dst, ",description:", description)
	dst = p.appendLabeledValue(dst, ",parameters:", parameters)
	if !others {
		return dst, end, nil
	}
	for i = start; ; {
		key, at, ok, err := s.nextMember(i)
		if !ok {
			return dst, end, err
		}
		v, err := s.parseValue(at, validated)
		if err != nil {
			return dst, 0, err
		}
		i = v.end
		if p.functionMemberOf(key) == functionOther {
			dst = p.appendMember(dst, key, v)
		}
	}
}

// functionMember is what a member of a function is to templates.
type functionMember uint8

const (
	functionIgnored functionMember = iota
	functionName
	functionDescription
	functionParameters
	functionOther
)

// functionMemberOf returns what the member called key is.
func (p *Prompt) functionMemberOf(key value) functionMember {
	switch name := p.unquote(key); string(name) {
	case "name":
		return functionName
	case "description":
		return functionDescription
	case "parameters":
		if p.kind != Messages {
			return functionParameters
		}
	case "input_schema":
		if p.kind == Messages {
			return functionParameters
		}
	case "strict", "defer_loading":
		return functionOther
	}
	if p.kind == Messages || p.kind == Responses {
		return functionIgnored
	}
	return functionOther
}

// appendLabeledValue appends label and v, or only label if v is absent or null: templates
// write the names of members that every function has.
func (p *Prompt) appendLabeledValue(dst []byte, label string, v value) []byte {
	dst = append(dst, label...)
	if !p.scan.notNull(v) {
		return dst
	}
	return p.scan.appendMinified(dst, v)
}

// appendMember appends a member unless its value is null, which is the same as absent.
func (p *Prompt) appendMember(dst []byte, key, v value) []byte {
	if !p.scan.notNull(v) {
		return dst
	}
	dst = p.scan.appendMinified(append(dst, markField), key)
	return p.scan.appendMinified(dst, v)
}

// appendToolCalls appends the tool calls of an assistant message.
func (p *Prompt) appendToolCalls(calls value) error {
	s := &p.scan
	if s.firstByte(calls) != '[' {
		return nil
	}
	i := calls.start + 1
	for {
		at, ok, err := s.nextElement(i)
		if !ok {
			return err
		}
		if s.b[at] != '{' {
			v, err := s.parseValue(at, validated)
			if err != nil {
				return err
			}
			i = v.end
			continue
		}
		var function [1]value
		if i, err = p.findMembers(at, []string{"function"}, function[:]); err != nil {
			return err
		}
		if s.firstByte(function[0]) != '{' {
			continue
		}
		var v [2]value
		if _, err := p.findMembers(function[0].start, []string{"name", "arguments"}, v[:]); err != nil {
			return err
		}
		p.Text = append(append(p.Text, markCall), p.unquote(v[0])...)
		p.Text = append(p.Text, markArguments)
		p.Text = appendArguments(p.Text, p.unquote(v[1]))
	}
}

// appendArguments appends the arguments of a tool call, an object that is mostly written
// in a string. Like vLLM it takes anything else for {}.
func appendArguments(dst, raw []byte) []byte {
	inner := scanner{b: raw}
	i := inner.skipSpace(0)
	if inner.byteAt(i) == '{' {
		if object, err := inner.parseValue(i, 0); err == nil && inner.skipSpace(object.end) == len(raw) {
			return inner.appendMinified(dst, object)
		}
	}
	return append(dst, "{}"...)
}
