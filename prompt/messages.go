package prompt

import "bytes"

// The canonical prompt of a Messages body is that of the chat into which vLLM converts it:
// the system prompt and the tools first, a tool message for each tool_result before the
// text of its user message, and the tool calls of the assistant after its text.

// finishMessages ends the parsing of a Messages body. The system prompt and the tools may
// stand before or after the messages.
func (p *Prompt) finishMessages() {
	s, top := &p.scan, &p.top
	p.setSystemPrompt(top[fieldSystem])
	top[fieldToolChoice] = s.member(top[fieldToolChoice], "type")
	top[fieldReasoningEffort] = s.member(top[fieldOutputConfig], "effort")
	thinking := s.findMembers(top[fieldThinking], "type", "budget_tokens")
	p.reasoningOff, p.thinkingBudget = string(s.unquote(thinking[0])) == "disabled", s.notNull(thinking[1])
	p.setSeedFromFields(formatChat)
}

// setSystemPrompt sets p.system to the system message of a system prompt, a text or a list of
// texts, which vLLM joins without a separator. There is none if the text is empty.
func (p *Prompt) setSystemPrompt(v value) {
	s := &p.scan
	p.system = beginMessage(p.system[:0], "system")
	empty := len(p.system)
	switch s.firstByte(v) {
	case '"':
		p.system = append(p.system, s.unquote(v)...)
	case '[':
		s.reread(v, func() { p.system = p.readSystemTexts(p.system) })
	}
	if len(p.system) == empty {
		p.system = p.system[:0]
	}
}

// readSystemTexts reads the list that is next and appends its texts. Like vLLM it leaves out a
// text that starts with the billing header.
func (p *Prompt) readSystemTexts(dst []byte) []byte {
	s := &p.scan
	for s.enter('['); s.nextElement(); {
		block, before := value{start: s.at}, len(dst)
		m := s.readMembers("type", "text")
		block.end = s.at
		switch string(s.unquote(m[0])) {
		case "text":
			if dst = append(dst, s.stringOf(m[1])...); bytes.HasPrefix(dst[before:], []byte(billingHeader)) {
				dst = dst[:before]
			}
		case "tool_addition", "tool_removal":
			p.toolChanges = s.appendMinified(append(p.toolChanges, markTool), block)
		}
	}
	return dst
}

// parseBlockMessage is parseMessage for the Messages API. The content is appended as it is
// read if, as usual, the role precedes it.
func (p *Prompt) parseBlockMessage() {
	s := &p.scan
	var role, content value
	appended := false
	for s.nextMember() {
		switch name := s.unquote(s.key); {
		case string(name) == "content" && role.exists() && !appended:
			appended = true
			p.appendBlockMessage(role)
		case string(name) == "content":
			content = s.readValue()
		case string(name) == "role":
			role = s.readValue()
		default:
			s.readValue()
		}
	}
	if !appended && content.exists() {
		s.reread(content, func() { p.appendBlockMessage(role) })
	}
}

// appendBlockMessage reads the content of a message and appends the message.
func (p *Prompt) appendBlockMessage(role value) {
	s := &p.scan
	m := message{role: role}
	p.content, p.calls, p.reasoning = p.content[:0], p.calls[:0], p.reasoning[:0]
	isSystem, isUser := string(s.unquote(role)) == "system", string(s.unquote(role)) == "user"
	switch c := s.peek(); {
	case c == '"' && isSystem:
		p.content = s.readString(p.content)
		if len(p.content) == 0 || bytes.HasPrefix(p.content, []byte(billingHeader)) {
			return
		}
	case c == '"':
		p.parseContent(&m)
	case c != '[':
		s.readValue()
		return
	case isSystem:
		if p.content = p.readSystemTexts(p.content); len(p.content) == 0 {
			return
		}
	default:
		joined := false // the previous block is a text
		for s.enter('['); s.nextElement(); {
			if s.peek() == '{' {
				joined = p.parseBlock(isUser, joined)
			} else {
				s.readValue()
			}
		}
		if isUser && len(p.content) == 0 {
			return
		}
	}
	p.appendMessage(&m)
	for _, call := range p.calls {
		m := s.findMembers(call, "name", "input")
		p.Text = append(append(p.Text, markCall), s.unquote(m[0])...)
		p.Text = append(p.Text, markArguments)
		if s.firstByte(m[1]) == '{' {
			p.Text = s.appendMinified(p.Text, m[1])
		} else {
			p.Text = append(p.Text, "{}"...)
		}
	}
}

// parseBlock is readContentPart for a content block. It appends tool results of the user to
// Text, as they are checked: with the texts they are most of a body.
func (p *Prompt) parseBlock(user, joined bool) (endsInText bool) {
	s := &p.scan
	block, before := value{start: s.at}, len(p.content)
	var blockType, thinking, content value
	next, appended := joined, false // appended: a tool result
	for s.enter('{'); s.nextMember(); {
		switch string(s.unquote(s.key)) {
		case "text":
			if p.content, next = p.content[:before], joined; s.peek() == '"' {
				next = p.readContentText(joined)
			} else {
				s.readValue()
			}
		case "content":
			if user && !appended && string(s.unquote(blockType)) == "tool_result" {
				appended = true
				p.appendToolResult()
			} else {
				content = s.readValue()
			}
		case "type":
			blockType = s.readValue()
		case "thinking":
			thinking = s.readValue()
		default:
			s.readValue()
		}
	}
	block.end = s.at
	name := string(s.unquote(blockType))
	if name == "text" {
		return next
	}
	p.content = p.content[:before]
	switch name {
	case "tool_result":
		if user && !appended && content.exists() {
			s.reread(content, p.appendToolResult)
		} else if user && !appended {
			p.beginToolMessage()
		}
	case "tool_use":
		p.calls = append(p.calls, block)
	case "thinking":
		p.reasoning = append(p.reasoning, s.stringOf(thinking)...)
	case "redacted_thinking", "tool_reference", "tool_addition", "tool_removal":
	default:
		p.appendMediaDigest(block)
		return false
	}
	return joined
}

// appendToolResult reads the content of a tool_result, a text or a list of texts and images,
// and appends its tool message. Images follow in a user message.
func (p *Prompt) appendToolResult() {
	s := &p.scan
	p.beginToolMessage()
	switch {
	case s.peek() == '"':
		p.Text = s.readString(p.Text)
		return
	case !s.enter('['):
		s.readValue()
		return
	}
	begin := len(p.content)
	joined := false
	var images []byte
	for s.nextElement() {
		part := value{start: s.at}
		m := s.readMembers("text", "type")
		part.end = s.at
		if s.firstByte(m[0]) == '"' {
			if joined {
				p.content = append(p.content, '\n')
			}
			joined = true
			p.content = append(p.content, s.unquote(m[0])...)
		} else if string(s.unquote(m[1])) == "image" {
			mark := len(p.content)
			p.appendMediaDigest(part)
			images = append(images, p.content[mark:]...)
			p.content = p.content[:mark]
		}
	}
	p.Text = append(p.Text, p.content[begin:]...)
	p.content = p.content[:begin]
	if len(images) > 0 {
		p.turns.beginUserMessage(len(p.Text))
		p.Text = append(beginMessage(p.Text, "user"), images...)
	}
}

// beginToolMessage appends the beginning of a tool message, up to its content.
func (p *Prompt) beginToolMessage() {
	p.Text = beginMessage(p.Text, "tool")
	p.turns.leading, p.turns.assistantLast = false, false
}
