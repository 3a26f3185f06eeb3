package prompt

import (
	"bytes"
	"slices"
)

// billingHeader starts a line that Claude Code puts at the head of its system prompt and
// that changes with every request. vLLM removes the line.
const billingHeader = "x-anthropic-billing-header"

// bufferContent reads the content of a message into p.content. Of a list, texts are joined by
// newlines, as in vLLM for templates that take strings.
func (p *Prompt) bufferContent() {
	s := &p.scan
	p.content = p.content[:0]
	switch {
	case s.peek() == '"':
		p.readContentText(false)
	case s.enter('['):
		for afterText := false; s.nextElement(); {
			switch s.peek() {
			case '{':
				afterText = p.readContentPart(afterText)
			case '"': // accepted by older versions of vLLM
				afterText = p.readContentText(afterText)
			default:
				s.readValue()
			}
		}
	default:
		s.readValue()
	}
}

// readContentText reads the string that is next and appends it to p.content, after a newline if
// it follows a text. It reports whether p.content now ends in a text.
func (p *Prompt) readContentText(afterText bool) (endsInText bool) {
	before := len(p.content)
	if afterText {
		p.content = append(p.content, '\n')
	}
	begin := len(p.content)
	p.content = p.scan.readString(p.content)
	if bytes.HasPrefix(p.content[begin:], []byte(billingHeader)) {
		_, rest, _ := bytes.Cut(p.content[begin:], []byte("\n"))
		if len(rest) == 0 {
			p.content = p.content[:before]
			return afterText
		}
		p.content = slices.Delete(p.content, begin, len(p.content)-len(rest))
	}
	return true
}

// readContentPart is readContentText for an object of a content list.
func (p *Prompt) readContentPart(afterText bool) (endsInText bool) {
	s := &p.scan
	part, before := value{start: s.at}, len(p.content)
	var partType, other value // other: text with another key than "text"
	next := afterText
	for s.enter('{'); s.nextMember(); {
		switch string(s.unquote(s.key)) {
		case "text":
			if p.content, next = p.content[:before], afterText; s.peek() == '"' {
				next = p.readContentText(afterText)
			} else {
				s.readValue()
			}
		case "type":
			partType = s.readValue()
		case "refusal", "thinking", "name":
			other = s.readValue()
		default:
			s.readValue()
		}
	}
	part.end = s.at
	switch string(s.unquote(partType)) {
	case "text", "input_text", "output_text":
		return next
	case "refusal", "thinking", "tool_reference":
		p.content = p.content[:before]
		if s.firstByte(other) == '"' {
			s.reread(other, func() { afterText = p.readContentText(afterText) })
		}
		return afterText
	}
	p.content = p.content[:before]
	p.appendMediaDigest(part)
	return false
}
