package prompt

import "encoding/binary"

// The forms of a prompt, which seed its blocks: the bytes of text and of token
// ids may be the same.
const (
	formChat = 'c'
	formText = 't'
	formIDs  = 'i'
)

// completion completes the prompt when the body has been read.
func (p *Prompt) completion() error {
	if !p.scan.set(p.top[fieldPrompt]) && !p.scan.set(p.top[fieldPromptEmbeds]) {
		return &Error{Param: "prompt", Message: "prompt is missing"}
	}
	p.Sequences *= max(1, p.prompts)
	if len(p.Text) > 0 {
		p.open(p.Text)
	}
	p.seedWith(p.form)
	return nil
}

// readPrompt checks the prompt that begins at i and returns the index behind
// it: a text, token ids, or a list of either, of which the first is matched and
// the others count in the load. What mixes them is for the replica to refuse.
func (p *Prompt) readPrompt(i int) (end int, err error) {
	s := &p.scan
	p.form = formText
	switch s.at(i) {
	case '"':
		p.Text, end, err = s.appendString(p.Text, i)
		return end, err
	case '[':
	default:
		v, err := s.value(i, 1)
		if err == nil && s.set(v) {
			err = &Error{Param: "prompt", Message: "prompt must be a string or a list"}
		}
		return v.end, err
	}
	for i++; ; {
		at, ok, err := s.element(i)
		if !ok {
			return at, err
		}
		first, before := p.prompts == 0, len(p.Text)
		switch s.at(at) {
		case '"':
			p.prompts++
			p.Text, i, err = s.appendString(p.Text, at)
		case '[':
			if p.prompts++; first {
				p.form = formIDs
			}
			i, err = p.readIDs(at + 1)
		default:
			p.form = formIDs
			i, err = p.readID(at, 2)
		}
		if err != nil {
			return 0, err
		}
		if !first {
			p.ExtraBytes += len(p.Text) - before
			p.Text = p.Text[:before]
		}
	}
}

// readIDs writes the token ids of a list inside the list of prompts; its
// bracket is right before i.
func (p *Prompt) readIDs(i int) (int, error) {
	for {
		at, ok, err := p.scan.element(i)
		if !ok {
			return at, err
		}
		if i, err = p.readID(at, 3); err != nil {
			return 0, err
		}
	}
}

// readID writes the token id at i in four bytes, about the length of its text,
// and returns the index behind it. What is no id makes some four bytes too; the
// replica refuses it.
func (p *Prompt) readID(i, depth int) (int, error) {
	s := &p.scan
	id, end := uint32(0), i
	for digit(s.at(end)) {
		id = id*10 + uint32(s.b[end]-'0')
		end++
	}
	// Most often that was all; else it is for value to say what it is.
	c := s.at(end)
	if end == i || s.b[i] == '0' && end > i+1 || c != ',' && c != ']' {
		v, err := s.value(i, depth)
		if err != nil {
			return 0, err
		}
		end = v.end
	}
	p.Text = binary.LittleEndian.AppendUint32(p.Text, id)
	return end, nil
}
