package prompt

import (
	"bytes"
	"fmt"
	"slices"
)

// The canonical prompt of a chat is a row of fields, each begun by one of these
// marks. No UTF-8 text holds such a byte, so no text can pass for a mark, and a
// field needs no end: a chat's canonical prompt is a prefix of the same chat's
// with more turns.
const (
	markMessage   = 0xff // the role follows
	markField     = 0xfe // name, developer tools and seeds: what the field is, and its value
	markText      = 0xfd
	markMedia     = 0xfc // mediaBytes of digest follow
	markReasoning = 0xfb
	markCall      = 0xfa // the name of the function called
	markArguments = 0xf9
	markTool      = 0xf8
	markQuote     = 0xf7 // around strings in minified JSON
)

// turns is what has to be remembered from one message to the next.
type turns struct {
	lead      int    // the end of the leading system messages in Text; tools go there
	leading   bool   // only system messages so far
	answered  bool   // the last message is the assistant's
	reasoning []span // the reasoning in Text since the last user message
}

// span is a part of Text.
type span struct{ start, end int }

// chat completes the prompt when the body has been read: tools were met before
// the messages or after them.
func (p *Prompt) chat() error {
	if !p.top[fieldMessages].given() {
		return &Error{Param: "messages", Message: "messages is missing"}
	}
	p.form = formChat
	p.seedWith(p.form)
	if p.scan.first(p.top[fieldTools]) == '[' {
		p.Text = slices.Insert(p.Text, p.turns.lead, p.tools.text...)
	}
	return nil
}

// readMessages checks the list of messages that begins at i, writes it to Text
// and returns the index behind it.
func (p *Prompt) readMessages(i int) (int, error) {
	s := &p.scan
	if s.at(i) != '[' {
		if _, err := s.value(i, 1); err != nil {
			return 0, err
		}
		return 0, &Error{Param: "messages", Message: "messages must be a list"}
	}
	p.turns.leading = true
	i++
	for n := 0; ; n++ {
		at, ok, err := s.element(i)
		if !ok {
			return at, err
		}
		if s.at(at) != '{' {
			if _, err := s.value(at, 2); err != nil {
				return 0, err
			}
			return 0, &Error{Param: "messages", Message: fmt.Sprintf("messages[%d] must be an object", n)}
		}
		if i, err = p.readMessage(at + 1); err != nil {
			return 0, err
		}
	}
}

// message is where the fields of one message lie, but for its content: that is
// most of a body, and copied out as it is checked. Where only the role precedes
// it, as most often, it is copied to where it belongs in Text.
type message struct {
	role, name, reasoning, reasoningContent, toolCalls, tools value

	start, text int // of the message and of its content, in Text; 0: the content is in p.content
}

// readMessage writes the message whose brace is right before i, and returns the
// index behind it. Of equal keys the last counts, as it does for vLLM.
func (p *Prompt) readMessage(i int) (int, error) {
	s := &p.scan
	var m message
	p.content = p.content[:0]
	for {
		key, at, ok, err := s.member(i)
		if err != nil {
			return 0, err
		}
		if !ok {
			return at, p.appendMessage(&m)
		}
		var ignored value
		v := &ignored
		switch string(p.text(key)) {
		case "content":
			p.takeBack(&m)
			if i, err = p.writeContent(&m, at); err != nil {
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
		if *v, err = s.value(at, 3); err != nil {
			return 0, err
		}
		i = v.end
		if v != &ignored {
			p.takeBack(&m) // it may belong before the content
		}
	}
}

// writeContent checks the content at i, and returns the index behind it. A text
// is written to Text if nothing but the role is known to stand before it, and no
// reasoning is there that this message may drop.
func (p *Prompt) writeContent(m *message, i int) (end int, err error) {
	s := &p.scan
	onlyRole := m.role.given() && *m == message{role: m.role}
	if s.at(i) != '"' || !onlyRole || len(p.turns.reasoning) > 0 {
		return p.readContent(i)
	}
	m.start = len(p.Text)
	p.Text = append(append(p.Text, markMessage), p.text(m.role)...)
	p.Text = append(p.Text, markText)
	m.text = len(p.Text)
	if p.Text, end, err = s.appendString(p.Text, i); err == nil && bytes.HasPrefix(p.Text[m.text:], []byte(billingHeader)) {
		p.takeBack(m)
		return p.readContent(i)
	}
	return end, err
}

// takeBack moves content out of Text that was written there.
func (p *Prompt) takeBack(m *message) {
	if m.text > 0 {
		p.content = append(p.content[:0], p.Text[m.text:]...)
		p.Text = p.Text[:m.start]
		m.start, m.text = 0, 0
	}
}

// appendMessage writes a message whose content was read. What templates do not
// see is left out: the ids of tool calls, and the function_call of old, which
// vLLM drops.
func (p *Prompt) appendMessage(m *message) error {
	if m.text == 0 {
		p.appendBeginning(m)
	}
	var err error
	leading := false
	p.turns.answered = false
	switch role := p.text(m.role); string(role) {
	case "user":
		p.open(p.Text[m.text:])
	case "assistant":
		p.turns.answered = true
		err = p.appendCalls(m.toolCalls)
	case "developer":
		p.Text, err = p.appendTools(p.Text, m.tools)
		leading = true
	case "system":
		leading = true
	}
	if p.turns.leading = p.turns.leading && leading; p.turns.leading {
		p.turns.lead = len(p.Text)
	}
	return err
}

// appendBeginning writes a message up to the end of its content.
func (p *Prompt) appendBeginning(m *message) {
	role := p.text(m.role)
	if string(role) == "user" {
		p.dropReasoning()
	}
	start := len(p.Text)
	p.Text = append(append(p.Text, markMessage), role...)
	role = p.Text[start+1:]
	if p.scan.first(m.name) == '"' {
		p.Text = append(append(p.Text, markField), p.text(m.name)...)
	}
	if string(role) == "assistant" {
		p.appendReasoning(m)
	}
	p.Text = append(p.Text, markText)
	m.text = len(p.Text)
	p.Text = append(p.Text, p.content...)
}

// appendReasoning writes the reasoning of an assistant message, and remembers
// where: templates show it until the user speaks again.
func (p *Prompt) appendReasoning(m *message) {
	v := m.reasoning
	if !p.scan.set(v) {
		v = m.reasoningContent // the old name
	}
	if p.scan.first(v) != '"' {
		return
	}
	start := len(p.Text)
	p.Text = append(append(p.Text, markReasoning), p.text(v)...)
	p.turns.reasoning = append(p.turns.reasoning, span{start, len(p.Text)})
}

// dropReasoning takes the reasoning of the turns before a user message out of Text.
func (p *Prompt) dropReasoning() {
	parts := p.turns.reasoning
	if len(parts) == 0 {
		return
	}
	end := parts[0].start
	for k, part := range parts {
		next := len(p.Text)
		if k+1 < len(parts) {
			next = parts[k+1].start
		}
		end += copy(p.Text[end:], p.Text[part.end:next])
	}
	p.Text = p.Text[:end]
	p.turns.reasoning = parts[:0]
}
