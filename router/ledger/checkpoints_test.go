package ledger

import "testing"

func TestSlidingWindows(t *testing.T) {
	const pool = 1 << 20
	// cacheOf returns how many tokens of a pool requests of the longest length have of their own, if each needs more blocks of 16 tokens.
	cacheOf := func(longest, more int) int { return pool * longest / (longest + 16*more) }
	for _, c := range []struct {
		pool, cache int // tokens, as reported
		longest     int
		attention   int // tokens in a block of full attention
		of          int // in one of a window
		windows     int // tokens
	}{
		{pool: 131072, cache: 73183, longest: 16384, attention: 32, of: 32, windows: 5 * 512}, // Gemma 3's layers, 2,048 tokens a step: measured
		{pool: 98304, cache: 54887, longest: 16384, attention: 32, of: 32, windows: 5 * 512},  // another size of it
		{pool: 196608, cache: 76144, longest: 16384, attention: 64, of: 32, windows: 5 * 512}, // Gemma 4's layers: measured
		{pool: pool, cache: cacheOf(32768, 1+8+512), longest: 32768, attention: 16, of: 16, windows: 128},
		{pool: pool, cache: cacheOf(32768, 3*(1+64+512)), longest: 32768, attention: 16, of: 16, windows: 3 * 1024},
		{pool: pool, cache: cacheOf(32768, 1+64+64), longest: 32768, attention: 16, of: 16, windows: 1024}, // window and step are equal
		{pool: pool, cache: cacheOf(32768, 1+8+625), longest: 32768, attention: 16, of: 16, windows: 0},    // 10,000 tokens a step
		{pool: pool, cache: cacheOf(8192, 1+512), longest: 8192, attention: 16, of: 16, windows: 0},        // a step has all tokens
	} {
		extra := float64(c.longest) * (float64(c.pool)/float64(c.cache) - 1)
		if groups, size := slidingWindows(extra/float64(c.attention), c.longest, c.of); groups*size != c.windows {
			t.Errorf("pool %d, cache %d, longest %d: windows of %d tokens, want %d", c.pool, c.cache, c.longest, groups*size, c.windows)
		}
	}
}
