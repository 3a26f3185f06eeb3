package engine

import (
	"cmp"
	"math"
	"slices"
	"testing"
	"time"
)

// newEngine returns an engine with round times, for which a test computes its own, and without an API server, unless cfg
// has others.
func newEngine(cfg Config) *Engine { return New(withRoundTimes(cfg)) }

func withRoundTimes(cfg Config) Config {
	cfg.StepTime = cmp.Or(cfg.StepTime, 8*time.Millisecond)
	cfg.PrefillRate = cmp.Or(cfg.PrefillRate, 8000)
	cfg.DecodeTime = cmp.Or(cfg.DecodeTime, 40*time.Microsecond)
	cfg.ContextTime = cmp.Or(cfg.ContextTime, 24*time.Nanosecond)
	cfg.PromptTokenTime = cmp.Or(cfg.PromptTokenTime, NoAPIServer)
	return cfg
}

// blocks numbers n chained blocks of a prompt whose first differs by prefix.
func blocks(prefix, n int) []BlockHash {
	list := make([]BlockHash, n)
	for i := range list {
		list[i] = BlockHash(prefix*1000 + i + 1)
	}
	return list
}

// finish steps e until r has ended and returns the time.
func finish(t *testing.T, e *Engine, r *Request, now time.Duration) time.Duration {
	t.Helper()
	for range 100_000 {
		step := e.Step(now)
		now = step.End
		if slices.Contains(step.Finished, r) {
			return now
		}
	}
	t.Fatal("the request did not end")
	return 0
}

// add queues a request and fails the test when it is refused.
func add(t *testing.T, e *Engine, prompt, output int, hashes []BlockHash, now time.Duration) *Request {
	t.Helper()
	r := &Request{Prompt: prompt, Output: output, Blocks: hashes}
	if err := e.Add(r, now); err != nil {
		t.Fatal(err)
	}
	return r
}

func TestHits(t *testing.T) {
	for _, c := range []struct {
		name                string
		firstPrompt, output int
		firstBlocks         []BlockHash
		secondPrompt        int
		secondBlocks        []BlockHash
		want                int
	}{
		{"same prompt, last partial block not cached", 40, 1, blocks(1, 2), 40, blocks(1, 2), 32},
		{"last token recomputed: a whole block is lost", 32, 1, blocks(1, 2), 32, blocks(1, 2), 16},
		{"one token more and it is not", 33, 1, blocks(1, 2), 33, blocks(1, 2), 32},
		{"shorter than a block", 10, 1, nil, 10, nil, 0},
		{"prefix in common", 64, 1, blocks(1, 4), 64, append(blocks(1, 2), blocks(2, 2)...), 32},
		{"a hole ends the prefix", 64, 1, blocks(1, 4), 80, append([]BlockHash{1001, 99}, blocks(1, 5)[2:]...), 16},
		{"nothing in common", 64, 1, blocks(1, 4), 64, blocks(2, 4), 0},
		// 30 tokens of prompt and 20 of output, of which the last is never computed: 49, three blocks.
		{"generated blocks hit in the next turn", 30, 20, blocks(1, 3), 60, blocks(1, 3), 48},
		// The last token that is computed fills the third block.
		{"last computed token fills a block", 30, 19, blocks(1, 3), 60, blocks(1, 3), 48},
		// 48 tokens, the last of them not computed: 47, two blocks.
		{"last generated token not computed", 30, 18, blocks(1, 3), 60, blocks(1, 3), 32},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newEngine(Config{KVTokens: 1600})
			end := finish(t, e, add(t, e, c.firstPrompt, c.output, c.firstBlocks, 0), 0)
			second := add(t, e, c.secondPrompt, 1, c.secondBlocks, end)
			finish(t, e, second, end)
			if second.Cached != c.want {
				t.Errorf("%d tokens hit, want %d", second.Cached, c.want)
			}
			st := e.Stats()
			if want := int64(c.firstPrompt + c.secondPrompt); st.PrefixQueries != want || st.PrefixHits != int64(c.want) {
				t.Errorf("counted %d hits in %d queried, want %d in %d", st.PrefixHits, st.PrefixQueries, c.want, want)
			}
		})
	}
}

func TestRunningRequestSharesBlocks(t *testing.T) {
	e := newEngine(Config{KVTokens: 160}) // 10 blocks
	first := add(t, e, 64, 10, blocks(1, 4), 0)
	second := add(t, e, 64, 10, blocks(1, 4), 0)
	e.Step(0)
	if first.Cached != 0 || second.Cached != 48 {
		t.Errorf("hits %d and %d, want 0 and 48: the second shares what the first fills in the same step", first.Cached, second.Cached)
	}
	// Four blocks each, three of them in common.
	if got := e.Stats().KVUsage; got != 0.5 {
		t.Errorf("usage %v, want 0.5", got)
	}
	e.Abort(first)
	if got := e.Stats().KVUsage; got != 0.4 {
		t.Errorf("usage %v after one left, want 0.4", got)
	}
}

func TestEvictionFromTail(t *testing.T) {
	e := newEngine(Config{KVTokens: 128}) // 8 blocks
	// Five blocks, then four others: one of the first's five has to go.
	end := finish(t, e, add(t, e, 79, 1, blocks(1, 5), 0), 0)
	end = finish(t, e, add(t, e, 63, 1, blocks(2, 4), end), end)
	again := add(t, e, 80, 1, blocks(1, 5), end)
	finish(t, e, again, end)
	// 79 tokens fill four blocks. The fifth, partial, was freed first and reused
	// after the three that never were; no full one was lost.
	if again.Cached != 64 {
		t.Errorf("%d tokens hit, want 64", again.Cached)
	}

	e = newEngine(Config{KVTokens: 128})
	end = finish(t, e, add(t, e, 79, 1, blocks(1, 5), 0), 0)
	end = finish(t, e, add(t, e, 95, 1, blocks(2, 6), end), end) // three unused, the partial one, and two full ones
	again = add(t, e, 80, 1, blocks(1, 5), end)
	finish(t, e, again, end)
	if again.Cached != 32 {
		t.Errorf("%d tokens hit, want 32: the first two blocks of four", again.Cached)
	}
}

func TestHitPreventsEviction(t *testing.T) {
	e := newEngine(Config{KVTokens: 64}) // 4 blocks
	end := finish(t, e, add(t, e, 17, 1, blocks(1, 1), 0), 0)
	end = finish(t, e, add(t, e, 17, 1, blocks(2, 1), end), end)
	end = finish(t, e, add(t, e, 17, 1, blocks(1, 1), end), end) // 1 is the newest again
	end = finish(t, e, add(t, e, 40, 1, blocks(3, 2), end), end) // takes three, of which 2 is one
	kept := add(t, e, 17, 1, blocks(1, 1), end)
	old := add(t, e, 17, 1, blocks(2, 1), end)
	finish(t, e, old, end)
	if old.Cached != 0 || kept.Cached != 16 {
		t.Errorf("hits %d and %d, want 0 and 16", old.Cached, kept.Cached)
	}
}

func TestStepDurations(t *testing.T) {
	type step struct {
		end             time.Duration
		first, finished int
	}
	const ms, us, ns = time.Millisecond, time.Microsecond, time.Nanosecond
	for _, c := range []struct {
		name           string
		cfg            Config
		prompt, output int
		want           []step
	}{
		// 800 tokens at 8,000 per second are 100 ms. Then one request decodes over
		// 801 and 802 tokens.
		{"prefill, then decodes", Config{QuadraticDepth: LinearPrefill}, 800, 3, []step{
			{108 * ms, 1, 0},
			{108*ms + 8*ms + 40*us + 801*24*ns, 0, 0},
			{108*ms + 2*(8*ms+40*us) + (801+802)*24*ns, 0, 1},
		}},
		{"chunked prefill", Config{QuadraticDepth: LinearPrefill}, 20_000, 1, []step{
			{1032 * ms, 0, 0},               // 8,192 tokens: 1,024 ms
			{2064 * ms, 0, 0},               // as many
			{2064*ms + 8*ms + 452*ms, 1, 1}, // 3,616 tokens
		}},
		{"another budget and rate", Config{StepTokens: 500, PrefillRate: 1000, QuadraticDepth: LinearPrefill}, 600, 1, []step{
			{508 * ms, 0, 0}, {616 * ms, 1, 1},
		}},
		{"twice the speed", Config{Speed: 2, QuadraticDepth: LinearPrefill}, 800, 1, []step{{54 * ms, 1, 1}}},
		// 8,000 tokens at a mean depth of 4,000: 1 s times 1 + 0.1.
		{"quadratic term", Config{QuadraticDepth: 2.5e-5}, 8000, 1, []step{{1108 * ms, 1, 1}}},
		// 4,000 previous tokens on average.
		{"default", Config{}, 8000, 1, []step{{1120 * ms, 1, 1}}},
		// 1 s of prefill.
		{"API server", Config{PromptTokenTime: 10 * us, QuadraticDepth: LinearPrefill}, 8000, 1, []step{
			{8 * ms, 0, 0}, {16 * ms, 0, 0}, {24 * ms, 0, 0}, {32 * ms, 0, 0}, {40 * ms, 0, 0},
			{48 * ms, 0, 0}, {56 * ms, 0, 0}, {64 * ms, 0, 0}, {72 * ms, 0, 0}, {80 * ms, 0, 0}, {1088 * ms, 1, 1},
		}},
		// The second chunk has 4,000 tokens before it: a mean depth of 6,000.
		{"quadratic term in chunks", Config{QuadraticDepth: 2.5e-5, StepTokens: 4000}, 8000, 1, []step{{533 * ms, 0, 0}, {1116 * ms, 1, 1}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newEngine(c.cfg)
			add(t, e, c.prompt, c.output, nil, 0)
			var now time.Duration
			for i, want := range c.want {
				s := e.Step(now)
				now = s.End
				if got := (step{s.End, len(s.First), len(s.Finished)}); got != want {
					t.Errorf("step %d: %+v, want %+v", i, got, want)
				}
			}
			if !e.Idle() {
				t.Error("not idle in the end")
			}
		})
	}
}

func TestChunkAfterCachedTokens(t *testing.T) {
	e := newEngine(Config{CachedDepth: 1e-5, QuadraticDepth: 2e-5, StepTokens: 4000})
	end := finish(t, e, add(t, e, 8001, 1, blocks(1, 500), 0), 0)
	r := add(t, e, 16_000, 1, blocks(1, 500), end)
	// 4,000 tokens take 0.5 s, times 1 + 0.08 for those from the cache + 0.04 for themselves; then
	// + 0.08 for the chunk before.
	for _, want := range []time.Duration{568 * time.Millisecond, 608 * time.Millisecond} {
		step := e.Step(end)
		if took := step.End - end; took != want {
			t.Errorf("a chunk took %v, want %v", took, want)
		}
		end = step.End
	}
	if r.Cached != 8000 || r.FirstToken != end {
		t.Errorf("%d tokens cached, first token at %v, want 8,000 and %v", r.Cached, r.FirstToken, end)
	}
}

func TestDecodeInterference(t *testing.T) {
	e := newEngine(Config{DecodeInterference: 0.1, QuadraticDepth: LinearPrefill})
	add(t, e, 1, 100, nil, 0)
	add(t, e, 1, 100, nil, 0)
	now := e.Step(0).End
	add(t, e, 800, 1, nil, now)
	// 100 ms of prefill, longer by 0.2.
	want := 120*time.Millisecond + 8*time.Millisecond + 2*40*time.Microsecond + 4*24*time.Nanosecond
	if took := e.Step(now).End - now; took != want {
		t.Errorf("the step took %v, want %v", took, want)
	}
}

func TestJitter(t *testing.T) {
	durations := func(seed uint64) (list []time.Duration) {
		e := newEngine(Config{Jitter: 0.2, Seed: seed})
		add(t, e, 1, 1000, nil, 0)
		var now time.Duration
		for !e.Idle() {
			end := e.Step(now).End
			list = append(list, end-now)
			now = end
		}
		return list
	}
	list := durations(1)
	least, most := slices.Min(list), slices.Max(list)
	if least < 6400*time.Microsecond || least > 6500*time.Microsecond || most < 9500*time.Microsecond || most > 9700*time.Microsecond {
		t.Errorf("steps took %v to %v, want about 8 ms ± 20 %%", least, most)
	}
	if !slices.Equal(list, durations(1)) || slices.Equal(list, durations(2)) {
		t.Error("the seed does not determine the durations")
	}
}

func TestDecodesReducePrefillBudget(t *testing.T) {
	e := newEngine(Config{StepTokens: 100})
	add(t, e, 50, 100, nil, 0)
	now := e.Step(0).End
	long := add(t, e, 198, 1, nil, now)
	for _, last := range []bool{false, true} {
		step := e.Step(now)
		now = step.End
		if step.Decoded != 1 || step.Prefilled != 99 || slices.Contains(step.First, long) != last {
			t.Errorf("a step of 100 tokens beside one decode: %+v", step)
		}
	}
}

func TestWaitForBlocks(t *testing.T) {
	e := newEngine(Config{KVTokens: 160})        // 10 blocks
	first := add(t, e, 100, 10, blocks(1, 6), 0) // 7 blocks
	second := add(t, e, 50, 10, blocks(2, 3), 0) // 4 do not fit beside them
	third := add(t, e, 10, 5, nil, 0)            // would, but it is not its turn
	now := e.Step(0).End
	if st := e.Stats(); st.Running != 1 || st.Waiting != 2 {
		t.Fatalf("%d running, %d waiting, want 1 and 2", st.Running, st.Waiting)
	}
	now = finish(t, e, first, now)
	if second.Started != 0 || third.Started != 0 {
		t.Error("started before there was room")
	}
	e.Step(now)
	if second.Started != now || third.Started != now {
		t.Errorf("started at %v and %v, want both in the step after the first ended, at %v", second.Started, third.Started, now)
	}
}

func TestSharedPrefixCountsOnce(t *testing.T) {
	e := newEngine(Config{KVTokens: 160})
	add(t, e, 100, 12, blocks(1, 7), 0) // 7 blocks
	add(t, e, 100, 12, blocks(1, 6), 0) // 6 in common, 1 of its own
	e.Step(0)
	if got := e.Stats().Running; got != 2 {
		t.Errorf("%d running, want 2", got)
	}
}

func TestSequenceLimit(t *testing.T) {
	e := newEngine(Config{MaxSeqs: 2})
	for range 3 {
		add(t, e, 10, 5, nil, 0)
	}
	e.Step(0)
	if st := e.Stats(); st.Running != 2 || st.Waiting != 1 {
		t.Errorf("%d running, %d waiting, want 2 and 1", st.Running, st.Waiting)
	}
}

func TestAbortKeepsBlocksCached(t *testing.T) {
	e := newEngine(Config{KVTokens: 1600, StepTokens: 64})
	decoding := add(t, e, 33, 100, blocks(1, 8), 0)
	partial := add(t, e, 200, 10, blocks(2, 13), 0)
	waiting := add(t, e, 20, 10, blocks(3, 1), 0)
	e.Step(0)
	for _, r := range []*Request{waiting, partial, decoding, decoding} {
		e.Abort(r)
	}
	if st := e.Stats(); !e.Idle() || st.KVUsage != 0 {
		t.Fatalf("idle %v, usage %v after all were aborted", e.Idle(), st.KVUsage)
	}
	again := add(t, e, 33, 1, blocks(1, 2), 0)
	finish(t, e, again, 0)
	if again.Cached != 32 {
		t.Errorf("%d tokens hit, want 32", again.Cached)
	}
	// 31 tokens of the second prompt were computed in the first step: one block.
	partly := add(t, e, 200, 1, blocks(2, 12), 0)
	finish(t, e, partly, 0)
	if partly.Cached != 16 {
		t.Errorf("%d tokens hit, want 16", partly.Cached)
	}
}

func TestRequestTooLarge(t *testing.T) {
	e := newEngine(Config{KVTokens: 160})
	if err := e.Add(&Request{Prompt: 160, Output: 1}, 0); err == nil {
		t.Error("161 tokens were accepted for a cache of 160")
	}
	if err := e.Add(&Request{Prompt: 159, Output: 1}, 0); err != nil {
		t.Error(err)
	}
}

func TestResetPrefixCache(t *testing.T) {
	e := newEngine(Config{KVTokens: 1600})
	r := add(t, e, 33, 50, blocks(1, 5), 0)
	e.Step(0)
	if e.ResetPrefixCache() {
		t.Error("reset while a request ran")
	}
	end := finish(t, e, r, 0)
	if !e.ResetPrefixCache() {
		t.Error("no reset while idle")
	}
	again := add(t, e, 33, 1, blocks(1, 2), end)
	finish(t, e, again, end)
	if again.Cached != 0 {
		t.Errorf("%d tokens hit after a reset", again.Cached)
	}
}

func TestHiddenEvictions(t *testing.T) {
	for _, c := range []struct {
		hidden float64
		want   int // tokens of the first prompt still cached after others took 12 of 20 blocks
	}{{0, 80}, {0.5, 32}, {1, 0}, {math.Inf(1), 0}} {
		e := newEngine(Config{KVTokens: 320, HiddenEvictions: c.hidden})
		now := finish(t, e, add(t, e, 81, 1, blocks(1, 5), 0), 0)
		// Before its five full ones go its sixth and fourteen that are unused;
		// without hidden evictions twelve of them, with one for every second block
		// 9 + 9.
		for i := range 2 {
			now = finish(t, e, add(t, e, 81, 1, blocks(2+i, 5), now), now)
		}
		if got := e.CachedTokens(81, blocks(1, 5)); got != c.want {
			t.Errorf("%.1f hidden evictions a block: %d tokens of the first prompt are left, want %d", c.hidden, got, c.want)
		}
		if free := e.pool.free; free != 20 {
			t.Errorf("%d of 20 blocks are free in the end", free)
		}
	}
}

func TestPooledEngines(t *testing.T) {
	cfg := withRoundTimes(Config{KVTokens: 160})
	both := NewWithSharedCache(cfg, cfg)
	a, b := both[0], both[1]
	long := add(t, a, 200, 60, blocks(1, 12), 0) // more than one of them alone could hold
	a.Step(0)
	if got := b.CachedTokens(200, blocks(1, 12)); got != 192 {
		t.Errorf("%d of 200 tokens that one engine computed hit on the other, want 192", got)
	}
	// 13 of 20 blocks are in use: this one has to wait until the other's end.
	blocked := add(t, b, 120, 1, blocks(2, 7), 0)
	now := b.Step(0).End
	if b.Stats().Waiting != 1 || b.ResetPrefixCache() {
		t.Error("a request that does not fit beside another engine's was admitted, or the cache in use was reset")
	}
	finish(t, a, long, now)
	if step := b.Step(now); len(step.First) != 1 || step.Prefilled != 120 || blocked.Computed() != 120 {
		t.Errorf("after the other's end the step brought %+v", step)
	}
	if !b.ResetPrefixCache() || a.CachedTokens(200, blocks(1, 12)) != 0 {
		t.Error("a reset by one engine leaves the other something to hit")
	}
}

// TestStepTokens checks what vLLM counts in iteration_tokens_total: nothing for a step without
// output, and the whole uncached prompt with its first token.
func TestStepTokens(t *testing.T) {
	e := newEngine(Config{StepTokens: 100})
	now := finish(t, e, add(t, e, 250, 3, blocks(1, 15), 0), 0)
	finish(t, e, add(t, e, 250, 1, blocks(1, 15), now), now)
	st := e.Stats()
	want := [len(StepBuckets) + 1]int64{0: 2, 2: 1, 6: 1} // two decodes, 250-240+1 and 250+1 tokens
	if st.StepTokens != want || st.StepTokensSum != 2+11+251 {
		t.Errorf("buckets %v with a sum of %d, want %v with %d", st.StepTokens, st.StepTokensSum, want, 2+11+251)
	}
	if st.PromptTokens != 500 || st.CachedPromptTokens != 240 || st.GenerationTokens != 4 {
		t.Errorf("%d prompt tokens, %d of them cached, and %d generated; want 500, 240 and 4", st.PromptTokens, st.CachedPromptTokens,
			st.GenerationTokens)
	}
}

func TestPriorityScheduling(t *testing.T) {
	for _, c := range []struct {
		enabled bool
		want    []int // indices of the requests, in the order in which they start
	}{
		{false, []int{0, 1, 2, 3, 4}},
		{true, []int{1, 4, 0, 2, 3}},
	} {
		e := newEngine(Config{MaxSeqs: 1, PriorityScheduling: c.enabled})
		var requests []*Request
		for i, priority := range []int{0, -5, 0, 7, -5} {
			r := &Request{Prompt: 100 + i, Output: 1, Priority: priority}
			if err := e.Add(r, 0); err != nil {
				t.Fatal(err)
			}
			requests = append(requests, r)
		}
		var got []int
		for now := time.Duration(0); !e.Idle(); {
			step := e.Step(now)
			for _, r := range step.Finished {
				got = append(got, slices.Index(requests, r))
			}
			now = step.End
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("priority scheduling %v: the order is %v, want %v", c.enabled, got, c.want)
		}
	}
}

// TestPrioritySchedulingBeforeBlocked adds a request that fits in front of one that does not.
func TestPrioritySchedulingBeforeBlocked(t *testing.T) {
	e := newEngine(Config{KVTokens: 1600, PriorityScheduling: true})
	running := add(t, e, 800, 100, nil, 0)
	e.Step(0)
	blocked := add(t, e, 1500, 1, nil, 0)
	e.Step(0)
	urgent := &Request{Prompt: 100, Output: 1, Priority: -1}
	if err := e.Add(urgent, 0); err != nil {
		t.Fatal(err)
	}
	if step := e.Step(0); !slices.Contains(step.First, urgent) || running.state != decoding || blocked.state != waiting {
		t.Errorf("the urgent request has not started: %+v", step)
	}
}
