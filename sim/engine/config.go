package engine

import (
	"cmp"
	"time"
)

// Config describes the simulated GPU and scheduler. A zero field takes
// its default, which together are an 8B-class model on one GPU.
type Config struct {
	BlockSize int // tokens; default 16
	KVTokens  int // size of the KV cache, rounded down to whole blocks; default 400,000

	StepTokens int // token budget of a step, decodes and prefill together; default 8,192
	MaxSeqs    int // requests running at once; default 256

	StepTime       time.Duration // what a step takes however empty it is; default 8 ms
	PrefillRate    float64       // prompt tokens per second; default 8,000
	DecodeTime     time.Duration // for each decoding request; default 40 µs
	ContextTime    time.Duration // for each token of context decoded over; default 24 ns
	QuadraticDepth float64       // share by which a prompt token costs more for each token before it; default 0, 1.9e-5 is realistic
	Speed          float64       // divides every duration; default 1

	NoPrefixCache bool // nothing is ever hit

	// HiddenEvictions is how many more blocks each new one evicts, as if another
	// tenant took them; default 0.
	HiddenEvictions float64
}

func (c Config) WithDefaults() Config {
	c.BlockSize = cmp.Or(c.BlockSize, 16)
	c.KVTokens = cmp.Or(c.KVTokens, 400_000)
	c.StepTokens = cmp.Or(c.StepTokens, 8192)
	c.MaxSeqs = cmp.Or(c.MaxSeqs, 256)
	c.StepTime = cmp.Or(c.StepTime, 8*time.Millisecond)
	c.PrefillRate = cmp.Or(c.PrefillRate, 8000)
	c.DecodeTime = cmp.Or(c.DecodeTime, 40*time.Microsecond)
	c.ContextTime = cmp.Or(c.ContextTime, 24*time.Nanosecond)
	c.Speed = cmp.Or(c.Speed, 1)
	return c
}
