package prompt

import (
	"bytes"
	"fmt"
)

// The canonical prompt of a chat is a sequence of fields, each of which starts with one of these
// marks. They are not valid UTF-8, so no text contains them. Fields have no end mark: a chat's
// canonical prompt is a prefix of that of the same chat with more turns.
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

// parseMessages reads the list of messages and appends them to Text.
func (p *Prompt) parseMessages() {
	s := &p.scan
	if !s.enter('[') {
		s.readValue()
		s.fail("messages", "messages must be a list")
	}
	p.turns.leading = true
	for n := 0; s.nextElement(); n++ {
		if !s.enter('{') {
			s.readValue()
			s.fail("messages", fmt.Sprintf("messages[%d] must be an object", n))
		}
		if p.kind == Messages {
			p.parseBlockMessage()
		} else {
			p.parseMessage()
		}
	}
}

// message holds the fields of one message but for its content. That is most of a body and is copied
// as it is checked: into Text if, as usual, only the role precedes it, else into p.content.
type message struct {
	role, name, reasoning, reasoningContent, toolCalls, tools value

	start, contentStart int // positions in Text; 0: the content is in p.content
}

// parseMessage reads the message that was entered and appends it to Text. Of equal keys the
// last counts, as in vLLM.
func (p *Prompt) parseMessage() {
	s := &p.scan
	var m message
	p.content = p.content[:0]
	for s.nextMember() {
		var v *value
		switch string(s.unquote(s.key)) {
		case "content":
			p.moveContentToBuffer(&m)
			p.parseContent(&m)
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
		default:
			s.readValue()
			continue
		}
		*v = s.readValue()
		p.moveContentToBuffer(&m) // it may have to stand before the content
	}
	p.appendMessage(&m)
}

// parseContent reads the content of a message. It appends a text to Text if only the role is
// known to precede it; any other content goes to p.content.
func (p *Prompt) parseContent(m *message) {
	s := &p.scan
	onlyRole := m.role.exists() && *m == message{role: m.role}
	if s.peek() != '"' || !onlyRole {
		p.bufferContent()
		return
	}
	begin := s.at
	m.start = len(p.Text)
	p.Text = append(append(p.Text, markMessage), s.unquote(m.role)...)
	p.Text = append(p.Text, markText)
	m.contentStart = len(p.Text)
	p.Text = s.readString(p.Text)
	if bytes.HasPrefix(p.Text[m.contentStart:], []byte(billingHeader)) {
		p.moveContentToBuffer(m)
		s.at = begin
		p.bufferContent()
	}
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
func (p *Prompt) appendMessage(m *message) {
	if m.contentStart == 0 {
		p.appendRoleAndContent(m)
	}
	isSystem := false
	p.turns.assistantLast = false
	switch role := p.scan.unquote(m.role); string(role) {
	case "user":
		p.turns.beginUserMessage(m.start)
		p.setFirstMessageHash(p.Text[m.contentStart:])
	case "assistant":
		p.turns.assistantLast, p.turns.hasAssistant = true, true
		p.appendToolCalls(m.toolCalls)
	case "developer":
		p.Text = p.appendTools(p.Text, m.tools)
		p.turns.developer, isSystem = true, true
	case "system":
		isSystem = true
	}
	if p.turns.leading = p.turns.leading && isSystem; p.turns.leading {
		p.turns.leadingEnd = len(p.Text)
	} else if isSystem {
		p.turns.movable = append(p.turns.movable, movable{start: m.start, text: m.contentStart, end: len(p.Text)})
	}
}

// beginUserMessage records that a user message begins at start in Text.
func (t *turns) beginUserMessage(start int) { t.previousUser, t.user = t.user, start }

// beginMessage appends what precedes the text of a message to dst.
func beginMessage(dst []byte, role string) []byte {
	return append(append(append(dst, markMessage), role...), markText)
}

// appendRoleAndContent appends a message up to the end of its content, which is in p.content.
func (p *Prompt) appendRoleAndContent(m *message) {
	s := &p.scan
	m.start = len(p.Text)
	p.Text = append(append(p.Text, markMessage), s.unquote(m.role)...)
	role := p.Text[m.start+1:]
	if s.firstByte(m.name) == '"' {
		p.Text = append(append(p.Text, markField), s.unquote(m.name)...)
	}
	if string(role) == "assistant" {
		v := m.reasoning
		if !s.notNull(v) {
			v = m.reasoningContent // the old name
		}
		if s.firstByte(v) == '"' {
			p.appendReasoning(s.unquote(v))
		} else if len(p.reasoning) > 0 { // of content blocks
			p.appendReasoning(p.reasoning)
		}
	}
	p.Text = append(p.Text, markText)
	m.contentStart = len(p.Text)
	p.Text = append(p.Text, p.content...)
}

// appendReasoning appends reasoning of the assistant and remembers where it is.
func (p *Prompt) appendReasoning(text []byte) {
	start := len(p.Text)
	p.Text = append(append(p.Text, markReasoning), text...)
	p.turns.movable = append(p.turns.movable, movable{start: start, end: len(p.Text)})
}
