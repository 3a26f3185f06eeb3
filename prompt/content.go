package prompt

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"github.com/zeebo/xxh3"
)

// bufferContent checks the content of a message at i, sets p.content to it, and returns
// the index after it. Of a list, texts are joined by newlines, as in vLLM for templates
// that take strings.
func (p *Prompt) bufferContent(i int) (end int, err error) {
	s := &p.scan
	p.content = p.content[:0]
	switch s.byteAt(i) {
	case '"':
		end, _, err := p.appendContentText(i, false)
		return end, err
	case '[':
		afterText := false // the previous part is a text
		i++
		for {
			at, ok, err := s.nextElement(i)
			if !ok {
				return at, err
			}
			switch s.byteAt(at) {
			case '{':
				i, afterText, err = p.appendContentPart(at, afterText)
			case '"': // accepted by older versions of vLLM
				i, afterText, err = p.appendContentText(at, afterText)
			default:
				var v value
				v, err = s.parseValue(at, 4)
				i = v.end
			}
			if err != nil {
				return 0, err
			}
		}
	}
	v, err := s.parseValue(i, 3)
	return v.end, err
}

// billingHeader starts a line that Claude Code puts at the head of its system prompt and
// that changes with every request. vLLM removes the line.
const billingHeader = "x-anthropic-billing-header"

// appendContentText checks the text whose quote is at i and appends it to p.content, after
// a newline if it follows a text. It returns the index after it and whether p.content now
// ends in a text.
func (p *Prompt) appendContentText(i int, afterText bool) (end int, endsInText bool, err error) {
	before := len(p.content)
	if afterText {
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
			return end, afterText, nil
		}
		p.content = slices.Delete(p.content, begin, len(p.content)-len(rest))
	}
	return end, true, nil
}

// appendContentPart is appendContentText for an object of a content list.
func (p *Prompt) appendContentPart(i int, afterText bool) (end int, endsInText bool, err error) {
	s := &p.scan
	before := len(p.content)
	var kind, other value // other: text with another key than "text"
	text, next := false, afterText
	for end = i + 1; ; {
		key, at, ok, err := s.nextMember(end)
		if err != nil {
			return 0, false, err
		}
		if !ok {
			end = at
			break
		}
		var ignored value
		v := &ignored
		switch string(p.unquote(key)) {
		case "text":
			p.content, next = p.content[:before], afterText
			if text = s.byteAt(at) == '"'; text {
				if end, next, err = p.appendContentText(at, afterText); err != nil {
					return 0, false, err
				}
				continue
			}
		case "type":
			v = &kind
		case "refusal", "thinking", "name":
			v = &other
		}
		if *v, err = s.parseValue(at, 5); err != nil {
			return 0, false, err
		}
		end = v.end
	}
	switch string(p.unquote(kind)) {
	case "text", "input_text", "output_text":
		return end, next, nil
	case "refusal", "thinking", "tool_reference":
		p.content = p.content[:before]
		if s.firstByte(other) == '"' {
			_, afterText, err = p.appendContentText(other.start, afterText)
		}
		return end, afterText, err
	}
	p.content = p.content[:before]
	return end, false, p.appendMediaDigest(i)
}

// maxMedia bounds the media that are written out; no model takes more. Without it a body of
// empty parts would grow a hundredfold.
const maxMedia = 256

// mediaMarks are the marks of media items, by kind.
var mediaMarks = [NumMediaKinds]byte{Image: markImage, Audio: markAudio, Video: markVideo}

// base64Others are the characters of base64, in both alphabets, beside letters and
// digits; some clients escape the slash.
const base64Others = `+/=-_\`

// isBase64OrDataURL reports whether s is probably base64 or a data URL: neither contains
// a space. Of base64 only the first 512 bytes are examined.
func isBase64OrDataURL(s []byte) bool {
	if !bytes.HasPrefix(s, []byte("data:")) {
		for _, c := range s[:min(len(s), 512)] {
			if !isDigit(c) && (c|0x20 < 'a' || c|0x20 > 'z') && strings.IndexByte(base64Others, c) < 0 {
				return false
			}
		}
	}
	return bytes.IndexByte(s, ' ') < 0
}

// appendMediaDigest appends the digest of the validated part at i to p.content, repeated to
// MediaBytes.
func (p *Prompt) appendMediaDigest(i int) error {
	var members [4]value
	if _, err := p.findMembers(i, []string{"type", "uuid", "image_url", "source"}, members[:]); err != nil {
		return err
	}
	name := string(p.unquote(members[0]))
	kind := mediaKindOf(name)
	begin := len(p.content)
	var sum xxh3.Uint128
	if p.appendMediaUUID(kind, members[1]) || p.appendImageURL(name, members[2], members[3]) {
		sum = xxh3.Hash128(p.content[begin:])
		p.content = p.content[:begin]
	} else {
		var err error
		if sum, err = p.hashMembers(i); err != nil {
			return err
		}
	}
	if p.media++; p.media > maxMedia {
		p.ExtraBytes += MediaBytes
		p.content = fmt.Appendf(append(p.content, markMediaHash), "%016x", sum.Lo) // no byte of it is a mark
		return nil
	}
	p.content = append(p.content, mediaMarks[kind])
	digest := sum.Bytes()
	for range MediaBytes / len(digest) {
		p.content = append(p.content, digest[:]...)
	}
	return nil
}

// mediaKindOf returns the kind of the media in parts of a type.
func mediaKindOf(partType string) MediaKind {
	switch {
	case strings.Contains(partType, "audio"):
		return Audio
	case strings.Contains(partType, "video"):
		return Video
	}
	return Image
}

// appendMediaUUID appends the uuid of a media item to p.content. To vLLM two items of a kind
// with the same uuid are the same, whatever their data, which the client may leave out once the
// replica has it. It returns false and does nothing if there is none; only chats have it.
func (p *Prompt) appendMediaUUID(kind MediaKind, uuid value) (ok bool) {
	if p.kind != Chat || p.scan.firstByte(uuid) != '"' {
		return false
	}
	p.content = append(append(p.content, mediaMarks[kind]), p.unquote(uuid)...) // no URL begins with a mark
	return true
}

// appendImageURL appends the URL of the image in a part of a type to p.content, in Messages the
// one that vLLM makes of its source. It returns false and does nothing if the part is something
// else.
func (p *Prompt) appendImageURL(partType string, url, source value) (ok bool) {
	s := &p.scan
	switch {
	case partType == "image_url" || partType == "input_image":
		if s.firstByte(url) == '{' {
			url = p.memberOf(url, "url")
		}
	case partType == "image" && string(p.unquote(p.memberOf(source, "type"))) == "url":
		url = p.memberOf(source, "url")
	case partType == "image":
		if url = p.memberOf(source, "data"); s.firstByte(url) != '"' {
			return false
		}
		media := []byte("image/jpeg") // what vLLM takes if there is none
		if v := p.memberOf(source, "media_type"); s.firstByte(v) == '"' {
			media = p.unquote(v)
		}
		p.content = append(append(append(p.content, "data:"...), media...), ";base64,"...)
	default:
		return false
	}
	if s.firstByte(url) != '"' {
		return false
	}
	p.content, _, _ = s.appendString(p.content, url.start) // it was checked
	return true
}

// hashMembers returns a hash of the object at i.
func (p *Prompt) hashMembers(i int) (sum xxh3.Uint128, err error) {
	s := &p.scan
	mark := len(p.content)
	for i++; ; {
		key, at, ok, err := s.nextMember(i)
		if !ok {
			return sum, err
		}
		v, err := s.parseValue(at, validated)
		if err != nil {
			return sum, err
		}
		i = v.end
		if string(p.unquote(key)) == "cache_control" {
			continue // a hint for other vendors that moves between turns
		}
		p.content = s.appendMinified(p.content, key)
		p.content = s.appendMinified(p.content, v)
		digest := xxh3.Hash128(p.content[mark:])
		sum.Hi += digest.Hi // a sum, so that the order of members does not matter
		sum.Lo += digest.Lo
		p.content = p.content[:mark]
	}
}
