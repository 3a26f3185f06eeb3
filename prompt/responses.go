package prompt

// The canonical prompt of a Responses body is that of the chat into which vLLM converts it.
// Items of the assistant in a row are one message: its reasoning, its text and its calls.

// itemState says how much of an assistant message is written that further items may continue.
type itemState uint8

const (
	itemNone      itemState = iota // the last item is not the assistant's
	itemReasoning                  // the reasoning is written, the text is not
	itemText                       // the text is written, or there is none
)

// finishResponses ends the parsing of a Responses body. Of a prompt that continues a stored
// response only the new input is counted: the rest is in a replica's memory, and most likely
// in its cache, with the instructions and tools that clients repeat.
func (p *Prompt) finishResponses() error {
	s, top := &p.scan, &p.top
	if !top[fieldInput].exists() {
		return &Error{Param: "input", Message: "input is missing"}
	}
	if err := p.parseStoreFields(); err != nil {
		return err
	}
	p.endAssistantItem()
	if p.PreviousResponse != "" {
		p.Cacheable = false
		return nil
	}
	if s.notNull(top[fieldPreviousInput]) {
		p.Cacheable = false
	}
	p.system = p.system[:0]
	if v := top[fieldInstructions]; s.firstByte(v) == '"' && v.end-v.start > len(`""`) {
		p.beginSystem()
		p.system, _, _ = s.appendString(p.system, v.start) // it was checked
	}
	top[fieldReasoningEffort] = p.memberOf(top[fieldReasoning], "effort")
	p.setSeedFromFields(formatChat)
	return nil
}

// parseStoreFields reads the fields that concern stored responses.
func (p *Prompt) parseStoreFields() (err error) {
	if p.PreviousResponse, p.PreviousResponseAt, err = p.parseID(fieldPreviousResponse, "previous_response_id"); err != nil {
		return err
	}
	if p.ResponseID, p.ResponseIDAt, err = p.parseID(fieldRequestID, "request_id"); err != nil {
		return err
	}
	store := p.top[fieldStore]
	p.NoStore = p.scan.notNull(store) && !p.parseBool(store)
	return nil
}

// parseID returns the string of a field and its index in the body, after the quote; 0 if the field
// is absent or null.
func (p *Prompt) parseID(f field, name string) (id string, at int, err error) {
	s, v := &p.scan, p.top[f]
	switch {
	case !s.notNull(v):
		return "", 0, nil
	case s.firstByte(v) != '"':
		return "", 0, &Error{Param: name, Message: name + " must be a string"}
	}
	return string(p.unquote(v)), v.start + 1, nil
}

// parseInput checks the input at i, a text or a list of items, appends it to Text and returns
// the index after it. Anything else is left for the replica to reject.
func (p *Prompt) parseInput(i int) (end int, err error) {
	s := &p.scan
	p.turns.leading = true
	switch s.byteAt(i) {
	case '"':
		p.Text = append(append(append(p.Text, markMessage), "user"...), markText)
		begin := len(p.Text)
		if p.Text, end, err = s.appendString(p.Text, i); err == nil {
			p.setFirstMessageHash(p.Text[begin:])
		}
		return end, err
	case '[':
	default:
		return s.skipValue(i)
	}
	for i++; ; {
		at, ok, err := s.nextElement(i)
		if !ok {
			return at, err
		}
		if s.byteAt(at) == '{' {
			i, err = p.parseItem(at + 1)
		} else {
			i, err = s.skipValue(at)
		}
		if err != nil {
			return 0, err
		}
	}
}

// inputItem holds the fields of one item, but for what was appended as it was read.
type inputItem struct {
	kind, role, content, name, namespace, arguments, input, output, summary value
	written                                                                 bool // the content or the output
}

// parseItem appends the item whose brace is right before i and returns the index after it.
// Messages and the outputs of tools are copied as they are checked if, as usual, what they
// are stands before their content.
func (p *Prompt) parseItem(i int) (int, error) {
	s := &p.scan
	var item inputItem
	var m message
	p.content = p.content[:0]
	for {
		key, at, ok, err := s.nextMember(i)
		if err != nil {
			return 0, err
		}
		if !ok {
			return at, p.appendItem(&item, &m)
		}
		var ignored value
		v := &ignored
		switch string(p.unquote(key)) {
		case "type":
			v = &item.kind
		case "role":
			v = &item.role
		case "content":
			if !item.written && item.role.exists() && !p.isAssistantRole(item.role) && p.isMessage(item.kind) {
				item.written = true
				p.endAssistantItem()
				m.role = item.role
				if i, err = p.parseContent(&m, at); err != nil {
					return 0, err
				}
				continue
			}
			v = &item.content
		case "output":
			if !item.written && p.isToolOutput(item.kind) {
				item.written = true
				if i, err = p.appendToolOutput(at); err != nil {
					return 0, err
				}
				continue
			}
			v = &item.output
		case "name":
			v = &item.name
		case "namespace":
			v = &item.namespace
		case "arguments":
			v = &item.arguments
		case "input":
			v = &item.input
		case "summary":
			v = &item.summary
		}
		if *v, err = s.parseValue(at, 3); err != nil {
			return 0, err
		}
		i = v.end
	}
}

func (p *Prompt) isAssistantRole(v value) bool { return string(p.unquote(v)) == "assistant" }

// isMessage reports whether an item of that type is a message, as one without a type is.
func (p *Prompt) isMessage(kind value) bool {
	return !kind.exists() || string(p.unquote(kind)) == "message"
}

func (p *Prompt) isToolOutput(kind value) bool {
	switch string(p.unquote(kind)) {
	case "function_call_output", "custom_tool_call_output":
		return true
	}
	return false
}

// appendItem appends an item whose members were read. m is its message as far as it is
// written.
func (p *Prompt) appendItem(item *inputItem, m *message) (err error) {
	s := &p.scan
	switch {
	case p.isToolOutput(item.kind):
		if !item.written && item.output.exists() {
			_, err = p.appendToolOutput(item.output.start)
		}
		return err
	case !p.isMessage(item.kind):
		switch string(p.unquote(item.kind)) {
		case "reasoning":
			p.appendReasoningItem(item)
		case "function_call":
			p.beginCall(item)
			p.Text = appendArguments(p.Text, p.unquote(item.arguments))
		case "custom_tool_call":
			p.beginCall(item)
			p.Text = append(append(p.Text, '{', markQuote), "input"...)
			p.Text = append(append(p.Text, markQuote, ':', markQuote), p.unquote(item.input)...)
			p.Text = append(p.Text, markQuote, '}')
		}
		return nil
	case p.isAssistantRole(item.role):
		text := item.content
		if s.firstByte(text) == '[' {
			text = p.firstText(text)
		}
		p.beginAssistantText()
		if s.firstByte(text) == '"' {
			p.Text = append(p.Text, p.unquote(text)...)
		}
		return nil
	case !item.role.exists():
		return nil // the replica rejects it
	}
	if !item.written {
		p.endAssistantItem()
		m.role = item.role
		if item.content.exists() {
			if _, err := p.parseContent(m, item.content.start); err != nil {
				return err
			}
		}
	}
	return p.appendMessage(m)
}

// firstText returns the text of the first part of a validated list; absent if there is none.
func (p *Prompt) firstText(list value) value {
	if p.scan.firstByte(list) != '[' {
		return value{}
	}
	at, ok, _ := p.scan.nextElement(list.start + 1)
	if !ok || p.scan.byteAt(at) != '{' {
		return value{}
	}
	return p.memberOf(value{start: at, end: list.end}, "text")
}

// appendToolOutput appends the tool message whose content is at i and returns the index after
// the content.
func (p *Prompt) appendToolOutput(i int) (end int, err error) {
	p.endAssistantItem()
	p.beginToolMessage()
	if p.scan.byteAt(i) == '"' {
		p.Text, end, err = p.scan.appendString(p.Text, i)
		return end, err
	}
	end, err = p.bufferContent(i)
	p.Text = append(p.Text, p.content...)
	return end, err
}

// appendReasoningItem appends the reasoning of the assistant message that the next items
// continue: the item's content, else its summary.
func (p *Prompt) appendReasoningItem(item *inputItem) {
	text := p.firstText(item.content)
	if !text.exists() {
		text = p.firstText(item.summary)
	}
	p.endAssistantItem()
	p.Text = append(append(p.Text, markMessage), "assistant"...)
	p.turns.item, p.turns.leading, p.turns.assistantLast, p.turns.hasAssistant = itemReasoning, false, true, true
	if p.scan.firstByte(text) == '"' {
		p.appendReasoningText(p.unquote(text))
	}
}

// beginAssistantText appends what precedes an assistant's text. A text that follows another,
// or a call, is a message of its own.
func (p *Prompt) beginAssistantText() {
	if p.turns.item == itemReasoning {
		p.endAssistantItem()
	} else {
		p.Text = append(append(append(p.Text, markMessage), "assistant"...), markText)
	}
	p.turns.item, p.turns.leading, p.turns.assistantLast, p.turns.hasAssistant = itemText, false, true, true
}

// beginCall appends what precedes the arguments of a call, which continues the message of
// the assistant if there is one.
func (p *Prompt) beginCall(item *inputItem) {
	if p.turns.item != itemText {
		p.beginAssistantText()
	}
	p.Text = append(p.Text, markCall)
	if p.scan.notNull(item.namespace) {
		p.Text = append(append(p.Text, p.unquote(item.namespace)...), "__"...)
	}
	p.Text = append(append(p.Text, p.unquote(item.name)...), markArguments)
}

// endAssistantItem ends the message of the assistant: what follows does not continue it.
func (p *Prompt) endAssistantItem() {
	if p.turns.item == itemReasoning {
		p.Text = append(p.Text, markText)
	}
	p.turns.item = itemNone
}
