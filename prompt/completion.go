package prompt

import "encoding/binary"

// Formats of a prompt, which are part of the seed: text and token ids may have equal
// bytes.
const (
	formatChat = 'c'
	formatText = 't'
	formatIDs  = 'i'
)

// finishCompletion completes the prompt after the body was parsed.
func (p *Prompt) finishCompletion() error {
	if !p.scan.notNull(p.top[fieldPrompt]) && !p.scan.notNull(p.top[fieldPromptEmbeds]) {
		return &Error{Param: "prompt", Message: "prompt is missing"}
	}
	p.Sequences *= max(1, p.prompts)
	if len(p.Text) > 0 {
		p.setFirstMessageHash(p.Text)
	}
	p.setSeedFromFields(p.format)
	return nil
}

// parsePrompt checks the prompt at i and returns the index after it. It is a text, token
// ids, or a list of either, whose first is matched and the others only add load. Mixed
// lists are left for the replica to reject.
func (p *Prompt) parsePrompt(i int) (end int, err error) {
	s := &p.scan
	p.format = formatText
	switch s.byteAt(i) {
	case '"':
		p.Text, end, err = s.appendString(p.Text, i)
		return end, err
	case '[':
	default:
		v, err := s.parseValue(i, 1)
		if err == nil && s.notNull(v) {
			err = newPromptTypeError(p.kind)
		}
		return v.end, err
	}
	for i++; ; {
		at, ok, err := s.nextElement(i)
		if !ok {
			return at, err
		}
		first, before := p.prompts == 0, len(p.Text)
		switch s.byteAt(at) {
		case '"':
			p.prompts++
			p.Text, i, err = s.appendString(p.Text, at)
		case '[':
			if p.prompts++; first {
				p.format = formatIDs
			}
			p.Text, i, err = s.appendTokenIDs(p.Text, at+1, 3)
		default:
			p.format = formatIDs
			p.Text, i, err = s.appendTokenID(p.Text, at, 2)
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

// newPromptTypeError returns the error for a prompt that is neither a text nor a list.
func newPromptTypeError(kind Kind) error {
	if kind == Generate {
		return &Error{Param: "token_ids", Message: "token_ids must be a list"}
	}
	return &Error{Param: "prompt", Message: "prompt must be a string or a list"}
}

// appendTokenIDs appends the token ids of a list whose bracket is right before i, inside
// depth open containers, and returns the index after the list.
func (s *scanner) appendTokenIDs(dst []byte, i, depth int) (extended []byte, end int, err error) {
	for {
		at, ok, err := s.nextElement(i)
		if !ok {
			return dst, at, err
		}
		if dst, i, err = s.appendTokenID(dst, at, depth); err != nil {
			return dst, 0, err
		}
	}
}

// appendTokenID appends the token id at i in four bytes, about the length of its text, and
// returns the index after it. What is not an id becomes four arbitrary bytes; the
// replica rejects it.
func (s *scanner) appendTokenID(dst []byte, i, depth int) (extended []byte, end int, err error) {
	id, end := uint32(0), i
	for isDigit(s.byteAt(end)) {
		id = id*10 + uint32(s.b[end]-'0')
		end++
	}
	// Anything else than a plain number is for parseValue.
	c := s.byteAt(end)
	if end == i || s.b[i] == '0' && end > i+1 || c != ',' && c != ']' {
		v, err := s.parseValue(i, depth)
		if err != nil {
			return dst, 0, err
		}
		end = v.end
	}
	return binary.LittleEndian.AppendUint32(dst, id), end, nil
}
