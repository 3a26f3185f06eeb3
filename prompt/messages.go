package prompt

import "bytes"

// The canonical prompt of a Messages body is that of the chat into which vLLM converts it:
// the system prompt and the tools first, a tool message for each tool_result before the
// text of its user message, and the tool calls of the assistant after its text.

// finishMessages ends the parsing of a Messages body. The system prompt and the tools may
// stand before or after the messages.
func (p *Prompt) finishMessages() error {
	top := &p.top
	if !top[fieldMessages].exists() {
		return &Error{Param: "messages", Message: "messages is missing"}
	}
	if err := p.readSystemPrompt(top[fieldSystem]); err != nil {
		return err
	}
	top[fieldToolChoice] = p.memberOf(top[fieldToolChoice], "type")
	top[fieldReasoningEffort] = p.memberOf(top[fieldOutputConfig], "effort")
	p.reasoningOff = string(p.unquote(p.memberOf(top[fieldThinking], "type"))) == "disabled"
	p.setSeedFromFields(formatChat)
	return nil
}

// memberOf returns the member called name of a validated value, absent unless the value is
// an object that has it.
func (p *Prompt) memberOf(v value, name string) value {
	if p.scan.firstByte(v) != '{' {
		return value{}
	}
	var found [1]value
	_, _ = p.findMembers(v.start, []string{name}, found[:]) // it was checked
	return found[0]
}

// beginSystem makes p.system the beginning of a system message.
func (p *Prompt) beginSystem() {
	p.system = appendSystemStart(p.system[:0])
}

// readSystemPrompt sets p.system to the system message of a validated system prompt, a text
// or a list of texts, which vLLM joins without a separator.
func (p *Prompt) readSystemPrompt(v value) error {
	p.system = p.system[:0]
	switch p.scan.firstByte(v) {
	case '"':
		if v.end-v.start > len(`""`) {
			p.beginSystem()
			p.system, _, _ = p.scan.appendString(p.system, v.start) // it was checked
		}
	case '[':
		p.beginSystem()
		empty := len(p.system)
		var err error
		if p.system, _, err = p.appendSystemTexts(p.system, v.start+1, validated); err != nil {
			return err
		}
		if len(p.system) == empty {
			p.system = p.system[:0]
		}
	}
	return nil
}

// appendSystemTexts appends the texts of a list whose bracket is right before i, and returns
// the index after it. Like vLLM it leaves out a text that starts with the billing header.
// depth is that of the list's elements, or validated.
func (p *Prompt) appendSystemTexts(dst []byte, i, depth int) ([]byte, int, error) {
	s := &p.scan
	for {
		at, ok, err := s.nextElement(i)
		if !ok {
			return dst, at, err
		}
		if s.byteAt(at) != '{' {
			v, err := s.parseValue(at, depth)
			if err != nil {
				return dst, 0, err
			}
			i = v.end
			continue
		}
		block := value{start: at}
		if depth != validated {
			if block, err = s.parseValue(at, depth); err != nil {
				return dst, 0, err
			}
		}
		var v [2]value
		if block.end, err = p.findMembers(at, []string{"type", "text"}, v[:]); err != nil {
			return dst, 0, err
		}
		i = block.end
		switch text := v[1]; string(p.unquote(v[0])) {
		case "text":
			if s.firstByte(text) == '"' {
				before := len(dst)
				dst, _, _ = s.appendString(dst, text.start)
				if bytes.HasPrefix(dst[before:], []byte(billingHeader)) {
					dst = dst[:before]
				}
			}
		case "tool_addition", "tool_removal":
			p.toolChanges = s.appendMinified(append(p.toolChanges, markTool), block)
		}
	}
}

// parseBlockMessage is parseMessage for the Messages API. The content is appended as it is
// read if, as usual, the role precedes it.
func (p *Prompt) parseBlockMessage(i int) (int, error) {
	s := &p.scan
	var role, content value
	written := false
	for {
		key, at, ok, err := s.nextMember(i)
		if err != nil {
			return 0, err
		}
		if !ok {
			if !written && content.exists() {
				_, err = p.appendBlockMessage(role, content.start)
			}
			return at, err
		}
		switch name := p.unquote(key); {
		case string(name) == "content" && role.exists() && !written:
			written = true
			i, err = p.appendBlockMessage(role, at)
		default:
			isRole, isContent := string(name) == "role", string(name) == "content"
			var v value
			if v, err = s.parseValue(at, 3); isRole {
				role = v
			} else if isContent {
				content = v
			}
			i = v.end
		}
		if err != nil {
			return 0, err
		}
	}
}

// appendBlockMessage appends the message whose content is at i, and returns the index after
// the content.
func (p *Prompt) appendBlockMessage(role value, i int) (end int, err error) {
	s := &p.scan
	m := message{role: role}
	p.content, p.calls, p.reasoning = p.content[:0], p.calls[:0], p.reasoning[:0]
	name := string(p.unquote(role))
	switch s.byteAt(i) {
	case '"':
		if name == "system" {
			p.content, end, err = s.appendString(p.content, i)
			if err != nil || len(p.content) == 0 || bytes.HasPrefix(p.content, []byte(billingHeader)) {
				return end, err
			}
			return end, p.appendMessage(&m)
		}
		if end, err = p.parseContent(&m, i); err != nil {
			return 0, err
		}
		return end, p.appendMessage(&m)
	case '[':
	default:
		v, err := s.parseValue(i, 3)
		return v.end, err
	}
	if name == "system" {
		if p.content, end, err = p.appendSystemTexts(p.content, i+1, 4); err != nil || len(p.content) == 0 {
			return end, err
		}
		return end, p.appendMessage(&m)
	}
	if end, err = p.parseBlocks(name == "user", i+1); err != nil || name == "user" && len(p.content) == 0 {
		return end, err
	}
	if err = p.appendMessage(&m); err != nil {
		return 0, err
	}
	for _, call := range p.calls {
		p.appendToolUse(call)
	}
	return end, nil
}

// parseBlocks reads the content blocks of a list whose bracket is right before i, and returns
// the index after it. It appends tool results of the user to Text.
func (p *Prompt) parseBlocks(user bool, i int) (int, error) {
	s := &p.scan
	joined := false // the previous block is a text
	for {
		at, ok, err := s.nextElement(i)
		if !ok {
			return at, err
		}
		if s.byteAt(at) != '{' {
			v, err := s.parseValue(at, 4)
			if err != nil {
				return 0, err
			}
			i = v.end
			continue
		}
		if i, joined, err = p.parseBlock(user, at, joined); err != nil {
			return 0, err
		}
	}
}

// parseBlock is appendContentPart for a content block. Texts and tool results are copied as they are
// checked, for they are most of a body.
func (p *Prompt) parseBlock(user bool, i int, joined bool) (end int, _ bool, err error) {
	s := &p.scan
	before := len(p.content)
	var kind, thinking, content value
	next, written := joined, false // written: a tool result
	for end = i + 1; ; {
		key, at, ok, err := s.nextMember(end)
		if err != nil {
			return 0, false, err
		}
		if !ok {
			end = at
			break
		}
		var ignored value
		v := &ignored
		switch string(p.unquote(key)) {
		case "text":
			if p.content, next = p.content[:before], joined; s.byteAt(at) == '"' {
				if end, next, err = p.appendContentText(at, joined); err != nil {
					return 0, false, err
				}
				continue
			}
		case "content":
			if user && !written && string(p.unquote(kind)) == "tool_result" {
				written = true
				if end, err = p.appendToolResult(at); err != nil {
					return 0, false, err
				}
				continue
			}
			v = &content
		case "type":
			v = &kind
		case "thinking":
			v = &thinking
		}
		if *v, err = s.parseValue(at, 5); err != nil {
			return 0, false, err
		}
		end = v.end
	}
	name := string(p.unquote(kind))
	if name == "text" {
		return end, next, nil
	}
	p.content = p.content[:before]
	switch name {
	case "tool_result":
		switch {
		case written:
		case user && content.exists():
			_, err = p.appendToolResult(content.start)
		case user:
			p.beginToolMessage()
		}
		return end, joined, err
	case "tool_use":
		p.calls = append(p.calls, value{start: i, end: end})
		return end, joined, nil
	case "thinking":
		if s.firstByte(thinking) == '"' {
			p.reasoning = append(p.reasoning, p.unquote(thinking)...)
		}
		return end, joined, nil
	case "redacted_thinking", "tool_reference", "tool_addition", "tool_removal":
		return end, joined, nil
	}
	return end, false, p.appendMediaDigest(i)
}

// appendToolResult appends the tool message of a tool_result whose content is at i, a text or
// a list of texts and images, and returns the index after the content. Images follow in a
// user message.
func (p *Prompt) appendToolResult(i int) (end int, err error) {
	s := &p.scan
	p.beginToolMessage()
	switch s.byteAt(i) {
	case '"':
		p.Text, end, err = s.appendString(p.Text, i)
		return end, err
	case '[':
	default:
		v, err := s.parseValue(i, 5)
		return v.end, err
	}
	begin := len(p.content)
	joined := false
	var images []byte
	for i++; ; {
		at, ok, err := s.nextElement(i)
		if err != nil {
			return 0, err
		}
		if !ok {
			p.Text = append(p.Text, p.content[begin:]...)
			p.content = p.content[:begin]
			if len(images) > 0 {
				p.turns.beginUserMessage(len(p.Text))
				p.Text = append(append(append(append(p.Text, markMessage), "user"...), markText), images...)
			}
			return at, nil
		}
		part, err := s.parseValue(at, 6)
		if err != nil {
			return 0, err
		}
		i = part.end
		switch text := p.memberOf(part, "text"); {
		case s.firstByte(text) == '"':
			if joined {
				p.content = append(p.content, '\n')
			}
			joined = true
			p.content, _, _ = s.appendString(p.content, text.start) // it was checked
		case string(p.unquote(p.memberOf(part, "type"))) == "image":
			mark := len(p.content)
			if err := p.appendMediaDigest(part.start); err != nil {
				return 0, err
			}
			images = append(images, p.content[mark:]...)
			p.content = p.content[:mark]
		}
	}
}

// beginToolMessage appends the beginning of a tool message, up to its content.
func (p *Prompt) beginToolMessage() {
	p.Text = append(append(append(p.Text, markMessage), "tool"...), markText)
	p.turns.leading, p.turns.assistantLast = false, false
}

// appendToolUse appends the tool call of a validated tool_use block.
func (p *Prompt) appendToolUse(block value) {
	var v [2]value
	_, _ = p.findMembers(block.start, []string{"name", "input"}, v[:]) // it was checked
	p.Text = append(append(p.Text, markCall), p.unquote(v[0])...)
	p.Text = append(p.Text, markArguments)
	if p.scan.firstByte(v[1]) == '{' {
		p.Text = p.scan.appendMinified(p.Text, v[1])
		return
	}
	p.Text = append(p.Text, "{}"...)
}
