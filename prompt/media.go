package prompt

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"github.com/zeebo/xxh3"
)

// HasMedia reports whether part of Text stands for an image, a sound or a video.
func (p *Prompt) HasMedia() bool { return p.media > 0 }

// MediaKind is the kind of a media item.
type MediaKind uint8

const (
	Image MediaKind = iota
	Audio
	Video

	NumMediaKinds = iota
)

// MediaBytes is the length of a media item in Text. It is fixed, so that the blocks after an
// item are the same however many tokens the item is thought to have.
const MediaBytes = 4000

// MediaPosition is where a media item of a prompt is.
type MediaPosition struct {
	Offset int // of its MediaBytes in Text
	Kind   MediaKind
	Counts MediaCounts // of the items up to this one
}

// MediaCounts is how many media items of each kind there are.
type MediaCounts [NumMediaKinds]uint16

// AppendMediaPositions appends the positions of the media items of Text to dst, in their order.
func (p *Prompt) AppendMediaPositions(dst []MediaPosition) []MediaPosition {
	if p.media == 0 || p.kind == Generate {
		return dst
	}
	var counts MediaCounts
	for i := 0; i < len(p.Text); i++ {
		if p.Text[i] < markVideo { // as is all text
			continue
		}
		kind := slices.Index(mediaMarks[:], p.Text[i])
		if kind < 0 {
			continue
		}
		counts[kind]++
		dst = append(dst, MediaPosition{Offset: i + 1, Kind: MediaKind(kind), Counts: counts})
		i += MediaBytes
	}
	return dst
}

// maxMedia bounds the media that are written out; no model takes more. Without it a body of
// empty parts would grow a hundredfold.
const maxMedia = 256

// mediaMarks are the marks of media items, by kind.
var mediaMarks = [NumMediaKinds]byte{Image: markImage, Audio: markAudio, Video: markVideo}

// isBase64OrDataURL reports whether s is probably base64 or a data URL: neither contains
// a space. Of base64, in both alphabets, only the first 512 bytes are examined; some clients
// escape the slash.
func isBase64OrDataURL(s []byte) bool {
	if !bytes.HasPrefix(s, []byte("data:")) {
		for _, c := range s[:min(len(s), 512)] {
			if !isDigit(c) && (c|0x20 < 'a' || c|0x20 > 'z') && strings.IndexByte(`+/=-_\`, c) < 0 {
				return false
			}
		}
	}
	return bytes.IndexByte(s, ' ') < 0
}

// appendMediaDigest appends the digest of a part that was read to p.content, repeated to
// MediaBytes.
func (p *Prompt) appendMediaDigest(part value) {
	m := p.scan.findMembers(part, "type", "uuid", "image_url", "source")
	partType := string(p.scan.unquote(m[0]))
	kind := mediaKindOf(partType)
	begin := len(p.content)
	var sum xxh3.Uint128
	if uuid := p.scan.stringOf(m[1]); p.kind == Chat && uuid != nil {
		// To vLLM two items of a kind with the same uuid are the same, whatever their data, which
		// the client may leave out once the replica has it. No URL begins with a mark.
		sum = xxh3.Hash128(append(append(p.content, mediaMarks[kind]), uuid...)[begin:])
	} else if p.appendImageURL(partType, m[2], m[3]) {
		sum = xxh3.Hash128(p.content[begin:])
	} else {
		sum = p.hashMembers(part)
	}
	p.content = p.content[:begin]
	if p.media++; p.media > maxMedia {
		p.ExtraBytes += MediaBytes
		p.content = fmt.Appendf(append(p.content, markMediaHash), "%016x", sum.Lo) // no byte of it is a mark
		return
	}
	p.content = append(p.content, mediaMarks[kind])
	digest := sum.Bytes()
	for range MediaBytes / len(digest) {
		p.content = append(p.content, digest[:]...)
	}
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

// appendImageURL appends the URL of the image in a part of a type to p.content, in Messages the
// one that vLLM makes of its source. It returns false if the part is something else.
func (p *Prompt) appendImageURL(partType string, url, source value) (ok bool) {
	s := &p.scan
	m := s.findMembers(source, "type", "url", "data", "media_type")
	switch {
	case partType == "image_url" || partType == "input_image":
		if s.firstByte(url) == '{' {
			url = s.member(url, "url")
		}
	case partType != "image":
		return false
	case string(s.unquote(m[0])) == "url":
		url = m[1]
	default:
		url = m[2]
		mediaType := []byte("image/jpeg") // what vLLM takes if there is none
		if s.firstByte(m[3]) == '"' {
			mediaType = s.unquote(m[3])
		}
		p.content = append(append(append(p.content, "data:"...), mediaType...), ";base64,"...)
	}
	p.content = append(p.content, s.stringOf(url)...)
	return s.firstByte(url) == '"'
}

// hashMembers returns a hash of an object that was read.
func (p *Prompt) hashMembers(object value) (sum xxh3.Uint128) {
	s := &p.scan
	begin := len(p.content)
	for key, v := range s.members(object) {
		if string(s.unquote(key)) == "cache_control" {
			continue // a hint for other vendors that moves between turns
		}
		p.content = s.appendMinified(s.appendMinified(p.content[:begin], key), v)
		digest := xxh3.Hash128(p.content[begin:])
		sum.Hi += digest.Hi // a sum, so that the order of members does not matter
		sum.Lo += digest.Lo
	}
	return sum
}
