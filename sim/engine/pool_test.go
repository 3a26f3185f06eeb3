package engine

import (
	"math"
	"testing"
	"time"
)

func TestHiddenEvictionsTakeTheOldestBlocks(t *testing.T) {
	for _, c := range []struct {
		hidden float64
		want   int // tokens of the first prompt still cached after others took 12 of 20 blocks
	}{{0, 80}, {0.5, 32}, {1, 0}, {math.Inf(1), 0}} {
		e := New(Config{KVTokens: 320, HiddenEvictions: c.hidden})
		now := finish(t, e, add(t, e, 81, 1, blocks(1, 5), 0), 0)
		// Before its five full ones go its sixth and fourteen that nobody used yet;
		// without hidden evictions twelve of them, with one for every second block
		// 9 + 9.
		for i := range 2 {
			now = finish(t, e, add(t, e, 80, 1, blocks(2+i, 5), now), now)
		}
		if got := e.Hit(81, blocks(1, 5)); got != c.want {
			t.Errorf("%.1f hidden evictions a block: %d tokens of the first prompt are left, want %d", c.hidden, got, c.want)
		}
		if free := e.pool.free; free != 20 {
			t.Errorf("%d of 20 blocks are free in the end", free)
		}
	}
}

func TestPooledEnginesShareTheirCache(t *testing.T) {
	cfg := Config{KVTokens: 160}
	both := NewPooled(cfg, cfg)
	a, b := both[0], both[1]
	long := add(t, a, 200, 60, blocks(1, 12), 0) // more than one of them alone could hold
	a.Step(0)
	if got := b.Hit(200, blocks(1, 12)); got != 192 {
		t.Errorf("%d of 200 tokens that one engine computed hit on the other, want 192", got)
	}
	// 17 of 20 blocks are promised: this one has to wait until the other's end.
	blocked := add(t, b, 64, 1, blocks(2, 4), 0)
	now := b.Step(0).End
	if b.Stats().Waiting != 1 || b.ResetPrefixCache() {
		t.Error("a request that does not fit beside another engine's was admitted, or the cache in use was reset")
	}
	finish(t, a, long, now)
	if step := b.Step(now); len(step.First) != 1 || step.Prefilled != 64 || blocked.Computed() != 64 {
		t.Errorf("after the other's end the step brought %+v", step)
	}
	if !b.ResetPrefixCache() || a.Hit(200, blocks(1, 12)) != 0 {
		t.Error("a reset by one engine leaves the other something to hit")
	}
}

func TestLargestStep(t *testing.T) {
	f := func(prompt, want int) {
		t.Helper()
		e := New(Config{StepTokens: 20_000})
		if prompt > 0 {
			finish(t, e, add(t, e, prompt, 1, nil, 0), 0)
			finish(t, e, add(t, e, 1, 1, nil, time.Hour), time.Hour)
		}
		st := e.Stats()
		if got := st.LargestStep(); got != want {
			t.Errorf("after a step of %d tokens: %d, want %d", prompt, got, want)
		}
	}
	f(0, 0)
	f(2000, 2048)
	f(2048, 2048)
	f(2049, 4096)
	f(18_000, 16_384)
}
