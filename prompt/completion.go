package prompt

import "encoding/binary"

// Formats of a prompt, which are part of the seed: text and token ids may have equal bytes.
const (
	formatChat = 'c'
	formatText = 't'
	formatIDs  = 'i'
)

// finishText completes a prompt that is a text or token ids.
func (p *Prompt) finishText() {
	if len(p.Text) > 0 {
		p.setFirstMessageHash(p.Text)
	}
	p.setSeedFromFields(p.format)
}

// parsePrompt reads a prompt. It is a text, token ids, or a list of either, whose first is
// matched and the others only add load. Mixed lists are left for the replica to reject.
func (p *Prompt) parsePrompt() {
	s := &p.scan
	p.format = formatText
	switch {
	case s.peek() == '"':
		p.Text = s.readString(p.Text)
		return
	case !s.enter('['):
		if v := s.readValue(); s.notNull(v) && p.kind == Generate {
			s.fail("token_ids", "token_ids must be a list")
		} else if s.notNull(v) {
			s.fail("prompt", "prompt must be a string or a list")
		}
		return
	}
	for s.nextElement() {
		first, before := p.prompts == 0, len(p.Text)
		switch {
		case s.peek() == '"':
			p.prompts++
			p.Text = s.readString(p.Text)
		case s.enter('['):
			if p.prompts++; first {
				p.format = formatIDs
			}
			p.Text = s.appendTokenIDs(p.Text)
		default:
			p.format = formatIDs
			p.Text = s.appendTokenID(p.Text)
		}
		if !first {
			p.ExtraBytes += len(p.Text) - before
			p.Text = p.Text[:before]
		}
	}
}

// appendTokenIDs appends the token ids of the list that was entered.
func (s *scanner) appendTokenIDs(dst []byte) []byte {
	for s.nextElement() {
		dst = s.appendTokenID(dst)
	}
	return dst
}

// appendTokenID appends the token id that is next in four bytes, about the length of its text.
// What is not an id becomes four arbitrary bytes; the replica rejects it.
func (s *scanner) appendTokenID(dst []byte) []byte {
	id, end, b := uint32(0), s.at, s.b
	for end < len(b) && isDigit(b[end]) {
		id = id*10 + uint32(b[end]-'0')
		end++
	}
	// Anything else than a plain number is for readValue.
	if c := s.byteAt(end); end == s.at || s.b[s.at] == '0' && end > s.at+1 || c != ',' && c != ']' {
		s.readValue()
	} else {
		s.at = end
	}
	return binary.LittleEndian.AppendUint32(dst, id)
}
