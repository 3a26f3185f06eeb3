package sim

import (
	"bytes"
	"encoding/binary"

	"github.com/zeebo/xxh3"

	"warmroute/sim/engine"
)

// The tokenizer: special tokens stand for themselves and cut the text into
// segments, and a segment is cut into tokens of four bytes from its start. So a
// reply that comes back in the next turn falls on the tokens it was generated
// as, which is what lets it be found in the cache.
//
// A token's id is its bytes, little-endian. The special ones have ids that no
// UTF-8 text can form.
const (
	tokenEnd uint32 = 0xFFFFFF00 + iota
	tokenTurn
	tokenTurnEnd
)

var specials = [...]struct {
	text string
	id   uint32
}{
	{"<|endoftext|>", tokenEnd},
	{"<|im_start|>", tokenTurn},
	{"<|im_end|>", tokenTurnEnd},
}

const bytesPerToken = 4

// tokenize appends the tokens of text to into.
func tokenize(text []byte, into []uint32) []uint32 {
	for len(text) > 0 {
		at := nextSpecial(text)
		into = cut(text[:at], into)
		text = text[at:]
		for _, s := range specials {
			if bytes.HasPrefix(text, []byte(s.text)) {
				into = append(into, s.id)
				text = text[len(s.text):]
				if s.id == tokenTurn {
					// The role's line is a segment of its own, so that what
					// follows it starts on a token.
					line := bytes.IndexByte(text, '\n') + 1
					into = cut(text[:line], into)
					text = text[line:]
				}
				break
			}
		}
	}
	return into
}

// nextSpecial is where the first special token in text begins, or its end.
func nextSpecial(text []byte) int {
	for at := 0; ; {
		i := bytes.Index(text[at:], []byte("<|"))
		if i < 0 {
			return len(text)
		}
		at += i
		for _, s := range specials {
			if bytes.HasPrefix(text[at:], []byte(s.text)) {
				return at
			}
		}
		at += 2
	}
}

// cut appends the tokens of a segment without special tokens.
func cut(segment []byte, into []uint32) []uint32 {
	for len(segment) >= bytesPerToken {
		into = append(into, binary.LittleEndian.Uint32(segment))
		segment = segment[bytesPerToken:]
	}
	if len(segment) > 0 {
		var last [bytesPerToken]byte
		copy(last[:], segment)
		into = append(into, binary.LittleEndian.Uint32(last[:]))
	}
	return into
}

// tokenText is the inverse of a token's id.
func tokenText(id uint32) string {
	for _, s := range specials {
		if s.id == id {
			return s.text
		}
	}
	var b [bytesPerToken]byte
	binary.LittleEndian.PutUint32(b[:], id)
	return string(bytes.TrimRight(b[:], "\x00"))
}

// chain hashes the full blocks of tokens, each seeded by the one before, the
// first by seed.
func chain(tokens []uint32, blockSize int, seed uint64) []engine.BlockHash {
	blocks := make([]engine.BlockHash, 0, len(tokens)/blockSize)
	raw := make([]byte, blockSize*bytesPerToken)
	for len(tokens) >= blockSize {
		for i, t := range tokens[:blockSize] {
			binary.LittleEndian.PutUint32(raw[i*bytesPerToken:], t)
		}
		seed = max(1, xxh3.HashSeed(raw, seed)) // 0 stands for no block
		blocks = append(blocks, engine.BlockHash(seed))
		tokens = tokens[blockSize:]
	}
	return blocks
}
