package engine

import (
	"testing"
	"time"
)

// hostConfig is an engine with ten blocks of KV cache, and loads of 1,600 tokens a second.
func hostConfig(hostBlocks int) Config {
	return Config{KVTokens: 160, HostKVTokens: 16 * hostBlocks, HostLoadRate: 1600, QuadraticDepth: LinearPrefill}
}

func TestHostTier(t *testing.T) {
	for _, c := range []struct {
		name       string
		hostBlocks int
		cfg        func(*Config)
		want       int // tokens of the first prompt that are loaded
	}{
		{"no host tier", 0, func(*Config) {}, 0},
		{"room for both prompts", 20, func(*Config) {}, 64},
		{"room for all blocks but one, the first", 12, func(*Config) {}, 0},
		{"without a prefix cache", 20, func(c *Config) { c.NoPrefixCache = true }, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := hostConfig(c.hostBlocks)
			c.cfg(&cfg)
			e := newEngine(cfg)
			now := finish(t, e, add(t, e, 65, 1, blocks(1, 4), 0), 0)
			// The second prompt takes the whole cache, and the host's blocks in the order in
			// which they were stored.
			now = finish(t, e, add(t, e, 145, 1, blocks(2, 9), now), now)
			again := add(t, e, 65, 1, blocks(1, 4), now)
			end := finish(t, e, again, now)
			if st := e.Stats(); again.Cached != c.want || st.HostHits != int64(c.want) || st.PrefixHits != 0 ||
				st.CachedPromptTokens != int64(c.want) || st.LoadedPromptTokens != int64(c.want) {
				t.Errorf("%d tokens cached, %+v, want %d loaded from the host", again.Cached, st, c.want)
			}
			// 16 tokens take 10 ms to load, 8 ms is a step, and 1 token is computed in 0.125 ms.
			want := time.Duration(c.want)*time.Millisecond*10/16 + 8*time.Millisecond + time.Duration(65-c.want)*125*time.Microsecond
			if took := end - now; took != want {
				t.Errorf("took %v, want %v", took, want)
			}
		})
	}
}

// TestHostEvictionFromTail evicts blocks of a prompt that was looked up since it was stored.
func TestHostEvictionFromTail(t *testing.T) {
	e := newEngine(hostConfig(12))
	now := time.Duration(0)
	for range 2 {
		now = finish(t, e, add(t, e, 65, 1, blocks(1, 4), now), now)
	}
	finish(t, e, add(t, e, 145, 1, blocks(2, 9), now), now)
	if got := e.CachedTokens(65, blocks(1, 4)); got != 48 {
		t.Errorf("%d tokens are cached, want 48: all blocks but the last", got)
	}
}

func TestHostLoadBesideDecodes(t *testing.T) {
	e := newEngine(hostConfig(100))
	now := finish(t, e, add(t, e, 65, 1, blocks(1, 4), 0), 0)
	now = finish(t, e, add(t, e, 145, 1, blocks(2, 9), now), now) // evicts it
	busy := add(t, e, 17, 50, blocks(3, 1), now)
	now = e.Step(now).End
	first := add(t, e, 65, 1, blocks(1, 4), now)
	second := add(t, e, 65, 1, blocks(1, 4), now) // hits what the first loads
	begun := now
	for first.Finished == 0 || second.Finished == 0 {
		step := e.Step(now)
		if step.Decoded != 1 {
			t.Fatalf("at %v %d requests decode, want 1", now-begun, step.Decoded)
		}
		if now-begun < 40*time.Millisecond { // 64 tokens
			if st := e.Stats(); st.Loading != 2 || st.Waiting != 2 || st.Running != 1 || step.Prefilled != 0 {
				t.Fatalf("at %v: %+v, %d tokens computed, want two requests loading", now-begun, st, step.Prefilled)
			}
		}
		now = step.End
	}
	if st := e.Stats(); st.HostHits != 64 || st.PrefixHits != 64 || first.Cached != 64 || second.Cached != 64 || st.Loading != 0 {
		t.Errorf("%+v, want 64 tokens loaded and 64 hit", st)
	}
	e.Abort(busy)
	if st := e.Stats(); st.KVUsage != 0 {
		t.Errorf("a usage of %v when all have ended", st.KVUsage)
	}
}

func TestAbortWhileLoading(t *testing.T) {
	e := newEngine(hostConfig(100))
	now := finish(t, e, add(t, e, 65, 1, blocks(1, 4), 0), 0)
	now = finish(t, e, add(t, e, 145, 1, blocks(2, 9), now), now)
	aborted := add(t, e, 65, 1, blocks(1, 4), now)
	e.Step(now)
	e.Abort(aborted)
	if st := e.Stats(); !e.Idle() || st.KVUsage != 0 {
		t.Errorf("idle %v, %+v", e.Idle(), st)
	}
	// Its blocks are in the KV cache, but not before they are loaded.
	next := add(t, e, 65, 1, blocks(1, 4), now)
	if end := finish(t, e, next, now); end-now < 48*time.Millisecond || next.Cached != 64 || e.Stats().HostHits != 64 {
		t.Errorf("took %v with %d tokens cached, of which %d were loaded again", end-now, next.Cached, e.Stats().HostHits-64)
	}
}

// TestLoadedPromptsShareStep has two partly loaded prompts to compute at once.
func TestLoadedPromptsShareStep(t *testing.T) {
	cfg := hostConfig(100)
	cfg.StepTokens = 32
	e := newEngine(cfg)
	now := time.Duration(0)
	for prefix := range 3 { // the third evicts the first two
		now = finish(t, e, add(t, e, 33+112*(prefix/2), 1, blocks(prefix+1, 2+7*(prefix/2)), now), now)
	}
	first := add(t, e, 64, 1, blocks(1, 2), now)
	second := add(t, e, 64, 1, blocks(2, 2), now)
	now = e.Step(now).End
	if st := e.Stats(); st.Loading != 2 {
		t.Fatalf("%+v, want two requests loading", st)
	}
	now += time.Second // both are loaded
	for _, r := range []*Request{first, second} {
		step := e.Step(now)
		now = step.End
		if step.Prefilled != 32 || len(step.First) != 1 || step.First[0] != r {
			t.Errorf("%+v: want 32 tokens of one prompt, in the order of admission", step)
		}
	}
}
