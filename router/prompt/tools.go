package prompt

import "bytes"

// tools holds the last tools met, as written and as they are in the canonical
// prompt. An agent sends the same ones with every request, often more bytes of
// them than of messages, and comparing is twenty times faster than reading.
type tools struct{ raw, text []byte }

// readTools checks the tools at i, keeps them for when the messages are known,
// and returns the index behind them. Anything that is not a list is left to the
// replica to refuse.
func (p *Prompt) readTools(i int) (int, error) {
	t := &p.tools
	// Nothing can follow a list's last bracket and belong to it, so equal
	// bytes are an equal list.
	if len(t.raw) > 0 && bytes.HasPrefix(p.scan.b[i:], t.raw) {
		return i + len(t.raw), nil
	}
	t.raw = t.raw[:0]
	list, err := p.scan.value(i, 1)
	if err != nil || p.scan.first(list) != '[' {
		return list.end, err
	}
	if t.text, err = p.appendTools(t.text[:0], list); err == nil {
		t.raw = append(t.raw, p.scan.b[list.start:list.end]...)
	}
	return list.end, err
}

// appendTools appends the tools of a list that was checked.
func (p *Prompt) appendTools(dst []byte, list value) ([]byte, error) {
	s := &p.scan
	if s.first(list) != '[' {
		return dst, nil
	}
	i := list.start + 1
	for {
		at, ok, err := s.element(i)
		if !ok {
			return dst, err
		}
		if s.b[at] == '{' {
			dst, i, err = p.appendTool(append(dst, markTool), at)
		} else {
			var v value
			v, err = s.value(at, checked)
			i = v.end
		}
		if err != nil {
			return dst, err
		}
	}
}

// appendTool appends the tool that begins at i and returns the index behind it.
func (p *Prompt) appendTool(dst []byte, i int) (_ []byte, end int, err error) {
	s := &p.scan
	for i++; ; {
		key, at, ok, err := s.member(i)
		if !ok {
			return dst, at, err
		}
		name := p.text(key)
		if string(name) == "function" && s.b[at] == '{' {
			if dst, i, err = p.appendFunction(dst, at); err != nil {
				return dst, 0, err
			}
			continue
		}
		isType := string(name) == "type"
		v, err := s.value(at, checked)
		if err != nil {
			return dst, 0, err
		}
		if i = v.end; !isType { // the type is always "function"
			dst = p.appendMember(dst, key, v)
		}
	}
}

// appendFunction appends the function that begins at i and returns the index
// behind it. Templates get its name, description and parameters in this order,
// whatever the client's, and then the rest. The order inside of the parameters
// is the client's.
func (p *Prompt) appendFunction(dst []byte, i int) (_ []byte, end int, err error) {
	s := &p.scan
	var name, description, parameters value
	others := false
	start := i + 1
	for i = start; ; {
		key, at, ok, err := s.member(i)
		if err != nil {
			return dst, 0, err
		}
		if !ok {
			end = at
			break
		}
		v, err := s.value(at, checked)
		if err != nil {
			return dst, 0, err
		}
		i = v.end
		switch string(p.text(key)) {
		case "name":
			name = v
		case "description":
			description = v
		case "parameters":
			parameters = v
		default:
			others = true
		}
	}
	dst = p.appendKnown(dst, "type:function,function:name:", name)
	dst = p.appendKnown(dst, ",description:", description)
	dst = p.appendKnown(dst, ",parameters:", parameters)
	if !others {
		return dst, end, nil
	}
	for i = start; ; {
		key, at, ok, err := s.member(i)
		if !ok {
			return dst, end, err
		}
		v, err := s.value(at, checked)
		if err != nil {
			return dst, 0, err
		}
		i = v.end
		switch string(p.text(key)) {
		case "name", "description", "parameters":
		default:
			dst = p.appendMember(dst, key, v)
		}
	}
}

// appendKnown appends a member that every function has, under the name that
// templates write out: bytes per token would be too low for tools without it.
func (p *Prompt) appendKnown(dst []byte, name string, v value) []byte {
	dst = append(dst, name...)
	if !p.scan.set(v) {
		return dst
	}
	return p.scan.appendMinified(dst, v)
}

// appendMember appends a member that is not null, as null is the same as absent.
func (p *Prompt) appendMember(dst []byte, key, v value) []byte {
	if !p.scan.set(v) {
		return dst
	}
	dst = p.scan.appendMinified(append(dst, markField), key)
	return p.scan.appendMinified(dst, v)
}

// appendCalls writes the tool calls of an assistant message.
func (p *Prompt) appendCalls(list value) error {
	s := &p.scan
	if s.first(list) != '[' {
		return nil
	}
	i := list.start + 1
	for {
		at, ok, err := s.element(i)
		if !ok {
			return err
		}
		if s.b[at] != '{' {
			v, err := s.value(at, checked)
			if err != nil {
				return err
			}
			i = v.end
			continue
		}
		var function [1]value
		if i, err = p.named(at, []string{"function"}, function[:]); err != nil {
			return err
		}
		if s.first(function[0]) != '{' {
			continue
		}
		var v [2]value
		if _, err := p.named(function[0].start, []string{"name", "arguments"}, v[:]); err != nil {
			return err
		}
		p.Text = append(append(p.Text, markCall), p.text(v[0])...)
		p.Text = append(p.Text, markArguments)
		p.Text = appendArguments(p.Text, p.text(v[1]))
	}
}

// appendArguments appends the arguments of a tool call: an object, mostly out of
// a string that held it. vLLM parses that string and gives templates {} when it
// is no object.
func appendArguments(dst, raw []byte) []byte {
	inner := scanner{b: raw}
	i := inner.space(0)
	if inner.at(i) == '{' {
		if object, err := inner.value(i, 0); err == nil && inner.space(object.end) == len(raw) {
			return inner.appendMinified(dst, object)
		}
	}
	return append(dst, "{}"...)
}
