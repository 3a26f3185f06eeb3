package prompt

import (
	"bytes"
	"fmt"
)

// The canonical prompt of a chat is a sequence of fields, each of which starts with one
// of these marks. They are not valid UTF-8, so no text contains them. Fields have no
// end mark: a chat's canonical prompt is a prefix of that of the same chat with more
// turns.
const (
	markMessage   = 0xff // the role follows
	markField     = 0xfe // name and members of tools; in seeds, a field and its value
	markText      = 0xfd
	markImage     = 0xfc // MediaBytes of digest follow
	markReasoning = 0xfb
	markCall      = 0xfa // the name of the function called
	markArguments = 0xf9
	markTool      = 0xf8
	markQuote     = 0xf7 // around strings in minified JSON
	markAudio     = 0xf6 // MediaBytes of digest follow
	markVideo     = 0xf5 // MediaBytes of digest follow
	markMediaHash = 0xc1 // the hash of a media item beyond maxMedia follows
)

// turns is the state kept from one message to the next.
type turns struct {
	leadingEnd         int       // end of the leading system messages in Text, where tools go
	leading            bool      // only system messages so far
	assistantLast      bool      // the last message is the assistant's
	hasAssistant       bool      // some message is the assistant's
	developer          bool      // one message has the role developer
	user, previousUser int       // beginnings of the last two user messages in Text; 0: none
	movable            []movable // in their order in Text
	item               itemState
}

// finishChat ends the parsing of a chat.
func (p *Prompt) finishChat() error {
	if !p.top[fieldMessages].exists() {
		return &Error{Param: "messages", Message: "messages is missing"}
	}
	p.setSeedFromFields(formatChat)
	return nil
}

// parseMessages checks the list of messages at i, appends it to Text and returns the
// index after it.
func (p *Prompt) parseMessages(i int) (end int, err error) {
	s := &p.scan
	if s.byteAt(i) != '[' {
		if _, err := s.parseValue(i, 1); err != nil {
			return 0, err
		}
		return 0, &Error{Param: "messages", Message: "messages must be a list"}
	}
	p.turns.leading = true
	i++
	for n := 0; ; n++ {
		at, ok, err := s.nextElement(i)
		if !ok {
			return at, err
		}
		if s.byteAt(at) != '{' {
			if _, err := s.parseValue(at, 2); err != nil {
				return 0, err
			}
			return 0, &Error{Param: "messages", Message: fmt.Sprintf("messages[%d] must be an object", n)}
		}
		if p.kind == Messages {
			i, err = p.parseBlockMessage(at + 1)
		} else {
			i, err = p.parseMessage(at + 1)
		}
		if err != nil {
			return 0, err
		}
	}
}

// message holds the fields of one message but for its content. That is most of a body
// and is copied as it is checked: into Text if, as usual, only the role precedes it,
// else into p.content.
type message struct {
	role, name, reasoning, reasoningContent, toolCalls, tools value

	start, contentStart int // positions in Text; 0: the content is in p.content
}

// parseMessage appends the message whose brace is right before i and returns the index
// after it. Of equal keys the last counts, as in vLLM.
func (p *Prompt) parseMessage(i int) (end int, err error) {
	s := &p.scan
	var m message
	p.content = p.content[:0]
	for {
		key, at, ok, err := s.nextMember(i)
		if err != nil {
			return 0, err
		}
		if !ok {
			return at, p.appendMessage(&m)
		}
		var ignored value
		v := &ignored
		switch string(p.unquote(key)) {
		case "content":
			p.moveContentToBuffer(&m)
			if i, err = p.parseContent(&m, at); err != nil {
				return 0, err
			}
			continue
		case "role":
			v = &m.role
		case "name":
			v = &m.name
		case "reasoning":
			v = &m.reasoning
		case "reasoning_content":
			v = &m.reasoningContent
		case "tool_calls":
			v = &m.toolCalls
		case "tools":
			v = &m.tools
		}
		if *v, err = s.parseValue(at, 3); err != nil {
			return 0, err
		}
		i = v.end
		if v != &ignored {
			p.moveContentToBuffer(&m) // it may have to stand before the content
		}
	}
}

// parseContent checks the content at i and returns the index after it. It appends a text
// to Text if only the role is known to precede it; any other content goes to p.content.
func (p *Prompt) parseContent(m *message, i int) (end int, err error) {
	s := &p.scan
	onlyRole := m.role.exists() && *m == message{role: m.role}
	if s.byteAt(i) != '"' || !onlyRole {
		return p.bufferContent(i)
	}
	m.start = len(p.Text)
	p.Text = append(append(p.Text, markMessage), p.unquote(m.role)...)
	p.Text = append(p.Text, markText)
	m.contentStart = len(p.Text)
	if p.Text, end, err = s.appendString(p.Text, i); err == nil && bytes.HasPrefix(p.Text[m.contentStart:], []byte(billingHeader)) {
		p.moveContentToBuffer(m)
		return p.bufferContent(i)
	}
	return end, err
}

// moveContentToBuffer moves content that was appended to Text to p.content.
func (p *Prompt) moveContentToBuffer(m *message) {
	if m.contentStart > 0 {
		p.content = append(p.content[:0], p.Text[m.contentStart:]...)
		p.Text = p.Text[:m.start]
		m.start, m.contentStart = 0, 0
	}
}

// appendMessage appends a message whose content was read. What templates do not see is
// left out: ids of tool calls, and function_call.
func (p *Prompt) appendMessage(m *message) error {
	if m.contentStart == 0 {
		p.appendRoleAndContent(m)
	}
	var err error
	isSystem := false
	p.turns.assistantLast = false
	switch role := p.unquote(m.role); string(role) {
	case "user":
		p.turns.beginUserMessage(m.start)
		p.setFirstMessageHash(p.Text[m.contentStart:])
	case "assistant":
		p.turns.assistantLast, p.turns.hasAssistant = true, true
		err = p.appendToolCalls(m.toolCalls)
	case "developer":
		p.Text, err = p.appendTools(p.Text, m.tools)
		p.turns.developer, isSystem = true, true
	case "system":
		isSystem = true
	}
	if p.turns.leading = p.turns.leading && isSystem; p.turns.leading {
		p.turns.leadingEnd = len(p.Text)
	} else if isSystem {
		p.turns.movable = append(p.turns.movable, movable{start: m.start, text: m.contentStart, end: len(p.Text)})
	}
	return err
}

// beginUserMessage records that a user message begins at start in Text.
func (t *turns) beginUserMessage(start int) { t.previousUser, t.user = t.user, start }

// appendRoleAndContent appends a message up to the end of its content, which is in
// p.content.
func (p *Prompt) appendRoleAndContent(m *message) {
	m.start = len(p.Text)
	p.Text = append(append(p.Text, markMessage), p.unquote(m.role)...)
	role := p.Text[m.start+1:]
	if p.scan.firstByte(m.name) == '"' {
		p.Text = append(append(p.Text, markField), p.unquote(m.name)...)
	}
	if string(role) == "assistant" {
		p.appendReasoning(m)
	}
	p.Text = append(p.Text, markText)
	m.contentStart = len(p.Text)
	p.Text = append(p.Text, p.content...)
}

// appendReasoning appends the reasoning of an assistant message.
func (p *Prompt) appendReasoning(m *message) {
	v := m.reasoning
	if !p.scan.notNull(v) {
		v = m.reasoningContent // the old name
	}
	switch {
	case p.scan.firstByte(v) == '"':
		p.appendReasoningText(p.unquote(v))
	case len(p.reasoning) > 0: // of content blocks
		p.appendReasoningText(p.reasoning)
	}
}

// appendReasoningText appends reasoning and remembers where it is.
func (p *Prompt) appendReasoningText(text []byte) {
	start := len(p.Text)
	p.Text = append(append(p.Text, markReasoning), text...)
	p.turns.movable = append(p.turns.movable, movable{start: start, end: len(p.Text)})
}
