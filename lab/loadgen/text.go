package loadgen

import (
	"math/rand/v2"
	"strconv"
	"strings"

	"warmroute/lab/replay"
)

// words are common and short: a real tokenizer makes about one token of each
// with its space. Never modified.
var words = strings.Fields(`
	the and you that was for are with his they this have from one had word but
	not what all were when your can said there use each which she how their will
	other about out many then them these some her would make like him into time
	has look two more write see number way could people than first water been
	call who oil its now find long down day did get come made may part over new
	sound take only little work know place year live back give most very after
	thing our just name good sentence man think say great where help through much
	before line right too mean old any same tell boy follow came want show also
	around form three small set put end does another well large must big even
	such because turn here why ask went men read need land different home us move
	try kind hand picture again change off play spell air away animal house point
	page letter mother answer found study still learn should world high every near
	add food between own below country plant last school father keep tree never
	start city earth eye light thought head under story saw left few while along
	might close something seem next hard open example begin life always those both
`)

// appendSeededText appends exactly chars ASCII characters: name, id and words drawn from
// both, so that equal arguments give equal text and others differ early.
func appendSeededText(b []byte, name string, id uint64, chars int) []byte {
	end := len(b) + chars
	b = append(b, name...)
	b = strconv.AppendUint(b, id, 36)
	draw := rand.NewPCG(id, uint64(len(name)))
	for len(b) < end {
		// Each of the draw's eight bytes selects a word.
		for bits, i := draw.Uint64(), 0; i < 8; bits, i = bits>>8, i+1 {
			b = append(b, ' ')
			b = append(b, words[int(bits&0xff)%len(words)]...)
		}
	}
	return b[:end]
}

// seededText is appendSeededText as a string of a length given in tokens.
func seededText(name string, id uint64, tokens int) string {
	n := tokens * replay.CharsPerToken
	return string(appendSeededText(make([]byte, 0, n+96), name, id, n))
}

// traceMessages returns the prompt of r as text: for each block of blockTokens
// tokens characters that no other block has, fewer for a partial block.
func traceMessages(r replay.TraceRequest, blockTokens int) []Message {
	b := make([]byte, 0, r.PromptTokens*replay.CharsPerToken+96)
	for i, id := range r.Blocks {
		tokens := min(blockTokens, r.PromptTokens-i*blockTokens)
		b = appendSeededText(b, "", id, tokens*replay.CharsPerToken)
	}
	return []Message{{Role: "user", Content: string(b)}}
}
