package prompt

import "github.com/zeebo/xxh3"

// Block is the chained hash of a span of the canonical prompt: it stands for
// the span and for everything before it.
type Block uint64

// Blocks appends to dst the blocks of the canonical prompt, blockBytes each.
// The chain starts from engineModel, the model as the engine will see it, and
// from what else changes a prompt without being part of its text. A last block
// that is not full is left out, as vLLM leaves it out of its cache. A prompt
// that is not Cacheable has no blocks. A Reply goes on where they end.
func (p *Prompt) Blocks(dst []Block, engineModel string, blockBytes int) []Block {
	if !p.Cacheable {
		return dst
	}
	hash := xxh3.HashStringSeed(engineModel, p.seed)
	text := p.Text
	for ; len(text) >= blockBytes; text = text[blockBytes:] {
		hash = xxh3.HashSeed(text[:blockBytes], hash)
		dst = append(dst, Block(hash))
	}
	p.chain = chainEnd{hash, blockBytes, len(text)}
	return dst
}

// chainEnd is where the blocks of a text end.
type chainEnd struct {
	hash       uint64 // of the last block, or what the first is seeded with
	blockBytes int
	rest       int // bytes of text behind it
}
