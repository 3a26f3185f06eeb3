package prompt

// Head identifies the full blocks of a prompt by their number and the last of them. The zero value is of a prompt without any.
type Head struct {
	blocks int
	last   Block
}

// HeadOf returns the head of a prompt with these full blocks.
func HeadOf(blocks []Block) Head {
	if len(blocks) == 0 {
		return Head{}
	}
	return Head{len(blocks), blocks[len(blocks)-1]}
}

// Len returns how many blocks the prompt has.
func (h Head) Len() int { return h.blocks }

// IsContinuedBy reports whether a prompt begins with all blocks of the head's. None continues a prompt without blocks.
func (h Head) IsContinuedBy(blocks []Block) bool {
	return h.blocks > 0 && h.blocks <= len(blocks) && blocks[h.blocks-1] == h.last
}
