package prompt

import (
	"bytes"
	"slices"
	"strings"

	"github.com/zeebo/xxh3"
)

// readContent checks the content of a message, which begins at i, and leaves it
// in p.content: one text, or the parts of a list. A list of one text is that
// text, and several are joined by newlines, as vLLM does for templates that
// take strings. It returns the index behind the content.
func (p *Prompt) readContent(i int) (int, error) {
	s := &p.scan
	p.content = p.content[:0]
	switch s.at(i) {
	case '"':
		end, _, err := p.readText(i, false)
		return end, err
	case '[':
		joined := false // a text came right before
		i++
		for {
			at, ok, err := s.element(i)
			if !ok {
				return at, err
			}
			switch s.at(at) {
			case '{':
				i, joined, err = p.readPart(at, joined)
			case '"': // older versions of vLLM take bare strings
				i, joined, err = p.readText(at, joined)
			default:
				var v value
				v, err = s.value(at, 4)
				i = v.end
			}
			if err != nil {
				return 0, err
			}
		}
	}
	v, err := s.value(i, 3)
	return v.end, err
}

// billingHeader begins a line that Claude Code puts at the head of its system
// prompt and changes with every request. vLLM takes the line out.
const billingHeader = "x-anthropic-billing-header"

// readText checks and appends the text whose quote is at i, behind a newline
// when it is joined to another. It returns the index behind it, and whether the
// next text is joined in its turn.
func (p *Prompt) readText(i int, joined bool) (end int, _ bool, err error) {
	before := len(p.content)
	if joined {
		p.content = append(p.content, '\n')
	}
	begin := len(p.content)
	if p.content, end, err = p.scan.appendString(p.content, i); err != nil {
		return 0, false, err
	}
	if bytes.HasPrefix(p.content[begin:], []byte(billingHeader)) {
		_, rest, _ := bytes.Cut(p.content[begin:], []byte("\n"))
		if len(rest) == 0 {
			p.content = p.content[:before]
			return end, joined, nil
		}
		p.content = slices.Delete(p.content, begin, len(p.content)-len(rest))
	}
	return end, true, nil
}

// readPart reads one object of a content list, as readText does a text.
func (p *Prompt) readPart(i int, joined bool) (end int, _ bool, err error) {
	s := &p.scan
	before := len(p.content)
	var kind, other value // other: the text under another name than "text"
	text, next := false, joined
	for end = i + 1; ; {
		key, at, ok, err := s.member(end)
		if err != nil {
			return 0, false, err
		}
		if !ok {
			end = at
			break
		}
		var ignored value
		v := &ignored
		switch string(p.text(key)) {
		case "text":
			p.content, next = p.content[:before], joined
			if text = s.at(at) == '"'; text {
				// Most often this is the text and it stays.
				if end, next, err = p.readText(at, joined); err != nil {
					return 0, false, err
				}
				continue
			}
		case "type":
			v = &kind
		case "refusal", "thinking", "name":
			v = &other
		}
		if *v, err = s.value(at, 5); err != nil {
			return 0, false, err
		}
		end = v.end
	}
	switch string(p.text(kind)) {
	case "text", "input_text", "output_text":
		return end, next, nil
	case "refusal", "thinking", "tool_reference":
		p.content = p.content[:before]
		if s.first(other) == '"' {
			_, joined, err = p.readText(other.start, joined)
		}
		return end, joined, err
	}
	p.content = p.content[:before]
	return end, false, p.appendMedia(i)
}

const (
	// mediaBytes is the nominal length of an image, a sound or a video: about
	// 1,000 tokens, what an image costs most models.
	mediaBytes = 4000
	// maxMedia bounds the media of a request that are written out, or a body of empty parts
	// would grow a hundredfold. No model takes that many.
	maxMedia = 256
)

// base64Others are what base64 has beside letters and digits, in its two
// alphabets; some clients write / with a backslash.
const base64Others = `+/=-_\`

// isMedia tells an image, a sound or a document in a string from text: it is
// base64, alone or in a data URL, and has no space in all its length.
func isMedia(s []byte) bool {
	if !bytes.HasPrefix(s, []byte("data:")) {
		for _, c := range s[:min(len(s), 512)] {
			if !digit(c) && (c|0x20 < 'a' || c|0x20 > 'z') && strings.IndexByte(base64Others, c) < 0 {
				return false
			}
		}
	}
	return bytes.IndexByte(s, ' ') < 0
}

// appendMedia writes the digest of the part that begins at i, repeated to the
// part's nominal length, so that media held in a cache count as what they save.
func (p *Prompt) appendMedia(i int) error {
	s := &p.scan
	p.content = append(p.content, markMedia)
	mark := len(p.content)
	var sum xxh3.Uint128 // the order of members does not matter, hence a sum
	for i++; ; {
		key, at, ok, err := s.member(i)
		if err != nil {
			return err
		}
		if !ok {
			break
		}
		v, err := s.value(at, checked)
		if err != nil {
			return err
		}
		i = v.end
		if string(p.text(key)) == "cache_control" {
			continue // a hint to other vendors' caches that moves from turn to turn
		}
		p.content = s.appendMinified(p.content, key)
		p.content = s.appendMinified(p.content, v)
		digest := xxh3.Hash128(p.content[mark:])
		sum.Hi += digest.Hi
		sum.Lo += digest.Lo
		p.content = p.content[:mark]
	}
	digest, length := sum.Bytes(), mediaBytes
	if p.media++; p.media > maxMedia {
		p.ExtraBytes += mediaBytes
		length = len(digest)
	}
	for ; length > 0; length -= len(digest) {
		p.content = append(p.content, digest[:min(length, len(digest))]...)
	}
	return nil
}
