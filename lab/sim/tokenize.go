package sim

import (
	"bytes"
	"encoding/binary"
	"net/http"
	"strconv"
	"strings"

	"github.com/zeebo/xxh3"

	"warmroute/lab/sim/engine"
)

// The tokenizer: special tokens separate the text into segments, each of which is
// split into tokens of a few bytes. So an output that comes back in the next turn has
// the tokens it was generated with, and is found in the cache.
//
// A token's id is its bytes, little-endian. Special tokens have ids that no UTF-8 text
// has.
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

// tokenIDBytes is the size of a token's id, the maximum of Config.BytesPerToken.
const tokenIDBytes = 4

// tokenizer is the number of bytes in a token of text.
type tokenizer int

func (s *Server) tokenizer() tokenizer { return tokenizer(s.cfg.BytesPerToken) }

// tokenize appends the tokens of text to into.
func (t tokenizer) tokenize(text []byte, into []uint32) []uint32 {
	for len(text) > 0 {
		at := indexSpecial(text)
		into = t.split(text[:at], into)
		text = text[at:]
		for _, s := range specials {
			if bytes.HasPrefix(text, []byte(s.text)) {
				into = append(into, s.id)
				text = text[len(s.text):]
				if s.id == tokenTurn {
					// The role's line is a segment of its own, so that the content
					// starts on a token.
					line := bytes.IndexByte(text, '\n') + 1
					into = t.split(text[:line], into)
					text = text[line:]
				}
				break
			}
		}
	}
	return into
}

// indexSpecial returns the index of the first special token in text, or its length.
func indexSpecial(text []byte) int {
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

// split appends the tokens of a segment without special tokens.
func (t tokenizer) split(segment []byte, into []uint32) []uint32 {
	for len(segment) > 0 {
		n := min(int(t), len(segment))
		var id [tokenIDBytes]byte
		copy(id[:], segment[:n])
		into = append(into, binary.LittleEndian.Uint32(id[:]))
		segment = segment[n:]
	}
	return into
}

// tokenText returns the text of a token.
func tokenText(id uint32) string {
	for _, s := range specials {
		if s.id == id {
			return s.text
		}
	}
	var b [tokenIDBytes]byte
	binary.LittleEndian.PutUint32(b[:], id)
	return string(bytes.TrimRight(b[:], "\x00"))
}

// hashBlocks returns the hashes of the full blocks of tokens, each seeded by the previous
// one, the first by seed.
func hashBlocks(tokens []uint32, blockSize int, seed uint64) []engine.BlockHash {
	blocks := make([]engine.BlockHash, 0, len(tokens)/blockSize)
	raw := make([]byte, blockSize*tokenIDBytes)
	for len(tokens) >= blockSize {
		for i, t := range tokens[:blockSize] {
			binary.LittleEndian.PutUint32(raw[i*tokenIDBytes:], t)
		}
		seed = max(1, xxh3.HashSeed(raw, seed)) // 0 stands for no block
		blocks = append(blocks, engine.BlockHash(seed))
		tokens = tokens[blockSize:]
	}
	return blocks
}

// tokenize handles POST /tokenize, for a prompt or for messages.
func (s *Server) tokenize(w http.ResponseWriter, r *http.Request) {
	in, err := readBody(r)
	if err == nil {
		_, err = s.modelOrDefault(in["model"].Str)
	}
	if err == nil && s.faults.isActive(Drain) {
		err = errDraining
	}
	if err == nil && !in.has("prompt") && !in.has("messages") {
		err = validationError("body.prompt", "Field required")
	}
	var text []byte
	if err == nil && in.has("messages") {
		text, err = s.renderChat(in)
	} else if err == nil {
		text = []byte(in["prompt"].String())
	}
	if err != nil {
		writeError(w, err)
		return
	}
	tokens := s.tokenizer().tokenize(text, nil)
	b := strconv.AppendInt([]byte(`{"count":`), int64(len(tokens)), 10)
	b = append(b, `,"max_model_len":`+strconv.Itoa(s.cfg.MaxModelLen)+`,"tokens":[`...)
	for i, t := range tokens {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, uint64(t), 10)
	}
	b = append(b, `],"token_strs":`...)
	if !in["return_token_strs"].Bool() {
		writeJSON(w, http.StatusOK, append(b, "null}"...))
		return
	}
	for i, t := range tokens {
		b = appendQuoted(append(b, [...]byte{'[', ','}[min(i, 1)]), tokenText(t))
	}
	writeJSON(w, http.StatusOK, append(b, "]}"...))
}

// detokenize handles POST /detokenize.
func (s *Server) detokenize(w http.ResponseWriter, r *http.Request) {
	in, err := readBody(r)
	if err == nil {
		err = in.validateTypes("tokens")
	}
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, append(appendQuoted([]byte(`{"prompt":`), detokenize(tokenIDs(in["tokens"]))), '}'))
}

func detokenize(tokens []uint32) string {
	var b strings.Builder
	for _, t := range tokens {
		b.WriteString(tokenText(t))
	}
	return b.String()
}
