package prompt

// Block is the chained hash of a span of the canonical prompt: it stands for
// the span and for everything before it.
type Block uint64
