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
func (p *Prompt) finishResponses() {
	s, top := &p.scan, &p.top
	p.PreviousResponse, p.PreviousResponseAt = p.parseID(fieldPreviousResponse, "previous_response_id")
	p.ResponseID, p.ResponseIDAt = p.parseID(fieldRequestID, "request_id")
	p.NoStore = s.notNull(top[fieldStore]) && !s.parseBool(top[fieldStore])
	p.endAssistantItem()
	if p.PreviousResponse != "" {
		p.Cacheable = false
		return
	}
	if s.notNull(top[fieldPreviousInput]) {
		p.Cacheable = false
	}
	p.system = p.system[:0]
	if instructions := s.stringOf(top[fieldInstructions]); len(instructions) > 0 {
		p.system = append(beginMessage(p.system, "system"), instructions...)
	}
	top[fieldReasoningEffort] = s.member(top[fieldReasoning], "effort")
	p.setSeedFromFields(formatChat)
}

// parseID returns the string of a field and its index in the body, after the quote; 0 if the field
// is absent or null.
func (p *Prompt) parseID(f field, name string) (id string, at int) {
	s, v := &p.scan, p.top[f]
	if !s.notNull(v) {
		return "", 0
	}
	if s.firstByte(v) != '"' {
		s.fail(name, name+" must be a string")
	}
	return string(s.unquote(v)), v.start + 1
}

// parseInput reads the input, a text or a list of items, and appends it to Text. Anything else
// is left for the replica to reject.
func (p *Prompt) parseInput() {
	s := &p.scan
	p.turns.leading = true
	if s.peek() == '"' {
		p.Text = beginMessage(p.Text, "user")
		begin := len(p.Text)
		p.Text = s.readString(p.Text)
		p.setFirstMessageHash(p.Text[begin:])
		return
	}
	if !s.enter('[') {
		s.readValue()
		return
	}
	for s.nextElement() {
		if s.enter('{') {
			p.parseItem()
		} else {
			s.readValue()
		}
	}
}

// inputItem holds the fields of one item, but for what was appended as it was read.
type inputItem struct {
	itemType, role, content, name, namespace, arguments, input, output, summary value

	appended bool    // the content or the output
	message  message // as far as it is appended
}

// parseItem reads the item that was entered and appends it to Text. Messages and the outputs of
// tools are copied as they are checked if, as usual, what they are stands before their content.
func (p *Prompt) parseItem() {
	s := &p.scan
	var item inputItem
	p.content = p.content[:0]
	for s.nextMember() {
		var v *value
		switch string(s.unquote(s.key)) {
		case "type":
			v = &item.itemType
		case "role":
			v = &item.role
		case "content":
			if !item.appended && item.role.exists() && !p.isAssistantRole(item.role) && p.isMessage(item.itemType) {
				p.parseItemContent(&item)
				continue
			}
			v = &item.content
		case "output":
			if !item.appended && p.isToolOutput(item.itemType) {
				item.appended = true
				p.appendToolOutput()
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
		default:
			s.readValue()
			continue
		}
		*v = s.readValue()
	}
	p.appendItem(&item)
}

// parseItemContent reads the content of a message.
func (p *Prompt) parseItemContent(item *inputItem) {
	item.appended = true
	p.endAssistantItem()
	item.message.role = item.role
	p.parseContent(&item.message)
}

func (p *Prompt) isAssistantRole(v value) bool { return string(p.scan.unquote(v)) == "assistant" }

// isMessage reports whether an item of that type is a message, as one without a type is.
func (p *Prompt) isMessage(itemType value) bool {
	return !itemType.exists() || string(p.scan.unquote(itemType)) == "message"
}

func (p *Prompt) isToolOutput(itemType value) bool {
	switch string(p.scan.unquote(itemType)) {
	case "function_call_output", "custom_tool_call_output":
		return true
	}
	return false
}

// appendItem appends an item whose members were read.
func (p *Prompt) appendItem(item *inputItem) {
	s := &p.scan
	switch {
	case p.isToolOutput(item.itemType):
		if !item.appended && item.output.exists() {
			s.reread(item.output, p.appendToolOutput)
		}
	case !p.isMessage(item.itemType):
		switch string(s.unquote(item.itemType)) {
		case "reasoning":
			p.appendReasoningItem(item)
		case "function_call":
			p.beginCall(item)
			p.Text = appendArguments(p.Text, s.unquote(item.arguments))
		case "custom_tool_call":
			p.beginCall(item)
			p.Text = append(append(p.Text, '{', markQuote), "input"...)
			p.Text = append(append(p.Text, markQuote, ':', markQuote), s.unquote(item.input)...)
			p.Text = append(p.Text, markQuote, '}')
		}
	case p.isAssistantRole(item.role):
		text := item.content
		if s.firstByte(text) == '[' {
			text = p.firstText(text)
		}
		p.beginAssistantText()
		p.Text = append(p.Text, s.stringOf(text)...)
	case item.role.exists(): // else the replica rejects it
		if !item.appended && item.content.exists() {
			s.reread(item.content, func() { p.parseItemContent(item) })
		} else if !item.appended {
			p.endAssistantItem()
			item.message.role = item.role
		}
		p.appendMessage(&item.message)
	}
}

// firstText returns the text of the first part of a list; absent if there is none.
func (p *Prompt) firstText(list value) value {
	for part := range p.scan.elements(list) {
		return p.scan.member(part, "text")
	}
	return value{}
}

// appendToolOutput reads the output of a tool and appends its tool message.
func (p *Prompt) appendToolOutput() {
	p.endAssistantItem()
	p.beginToolMessage()
	if p.scan.peek() == '"' {
		p.Text = p.scan.readString(p.Text)
		return
	}
	p.bufferContent()
	p.Text = append(p.Text, p.content...)
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
	p.setAssistantItem(itemReasoning)
	if p.scan.firstByte(text) == '"' {
		p.appendReasoning(p.scan.unquote(text))
	}
}

// beginAssistantText appends what precedes an assistant's text. A text that follows another,
// or a call, is a message of its own.
func (p *Prompt) beginAssistantText() {
	if p.turns.item == itemReasoning {
		p.endAssistantItem()
	} else {
		p.Text = beginMessage(p.Text, "assistant")
	}
	p.setAssistantItem(itemText)
}

// setAssistantItem records how much of a message of the assistant is written.
func (p *Prompt) setAssistantItem(state itemState) {
	p.turns.item, p.turns.leading, p.turns.assistantLast, p.turns.hasAssistant = state, false, true, true
}

// beginCall appends what precedes the arguments of a call, which continues the message of
// the assistant if there is one.
func (p *Prompt) beginCall(item *inputItem) {
	if p.turns.item != itemText {
		p.beginAssistantText()
	}
	p.Text = append(p.Text, markCall)
	if p.scan.notNull(item.namespace) {
		p.Text = append(append(p.Text, p.scan.unquote(item.namespace)...), "__"...)
	}
	p.Text = append(append(p.Text, p.scan.unquote(item.name)...), markArguments)
}

// endAssistantItem ends the message of the assistant: what follows does not continue it.
func (p *Prompt) endAssistantItem() {
	if p.turns.item == itemReasoning {
		p.Text = append(p.Text, markText)
	}
	p.turns.item = itemNone
}
