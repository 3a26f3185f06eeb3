package engine

import (
	"encoding/binary"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// Models whose hits were measured with vLLM 0.32, with a step's budget of 2,048 tokens and KV caches of 64 MiB.
var (
	gemma3 = Config{BlockSize: 32, KVTokens: 4096 * 32, StepTokens: 2048, Groups: Groups{Windows: 5, Window: 512}}
	qwen35 = Config{BlockSize: 544, KVTokens: 481 * 544, StepTokens: 2048, Groups: Groups{States: 3}}
)

// client sends prompts of random tokens, one after the other.
type client struct {
	*testing.T
	engine *Engine
	random *rand.Rand
	now    time.Duration
}

func newClient(t *testing.T, cfg Config) *client {
	return &client{T: t, engine: newEngine(cfg), random: rand.New(rand.NewPCG(1, 2))}
}

func (c *client) text(tokens int) []uint32 {
	text := make([]uint32, tokens)
	for i := range text {
		text[i] = c.random.Uint32()
	}
	return text
}

// ask sends a prompt, and returns it with the output, and how many of its tokens were cached.
func (c *client) ask(prompt []uint32, output int) (sequence []uint32, cached int) {
	c.Helper()
	sequence = append(slices.Clone(prompt), c.text(output)...)
	r := add(c.T, c.engine, len(prompt), output, hashBlocks(sequence, c.engine.cfg.BlockSize), c.now)
	c.now = finish(c.T, c.engine, r, c.now)
	return sequence, r.Cached
}

// hashBlocks returns the chained hashes of the full blocks of a sequence.
func hashBlocks(sequence []uint32, blockSize int) (hashes []BlockHash) {
	chained := fnv.New64a()
	for block := range slices.Chunk(sequence, blockSize) {
		if len(block) == blockSize {
			for _, token := range block {
				chained.Write(binary.BigEndian.AppendUint32(nil, token))
			}
			hashes = append(hashes, BlockHash(chained.Sum64()))
		}
	}
	return hashes
}

// TestHitsLikeVLLM sends what was sent to vLLM 0.32 with hybrid models, and compares cached_tokens.
func TestHitsLikeVLLM(t *testing.T) {
	const (
		again = iota
		turn2
		turn3
		turn4
		user2 // of the same system prompt
		user3
		user4
		user5
		editedTurn
		insideTurn3
		half1
		half2
		half3
		branch3
		branch5
		short1
		short2
		evictedTurn4
		evictedFirst
		evictedSystem1
		evictedSystem2
		figures
	)
	for _, m := range []struct {
		name string
		cfg  Config
		user int // tokens
		want [figures]int
	}{
		{"Gemma 3", gemma3, 150, [...]int{
			2528, 2528, 2720, 2880, 0, 2400, 2400, 2400, 2560, 2816, 0, 1184, 1184, 1120, 1984, 192, 192, 0, 0, 0, 2400,
		}},
		{"Qwen 3.5", qwen35, 900, [...]int{
			3264, 3264, 3808, 4896, 0, 2176, 2176, 2176, 3264, 3808, 0, 1088, 1088, 1088, 1632, 0, 0, 5984, 3264, 2176, 2176,
		}},
	} {
		t.Run(m.name, func(t *testing.T) {
			c := newClient(t, m.cfg)
			const output = 24
			var got [figures]int
			system := c.text(2400)
			first := append(slices.Clone(system), c.text(m.user)...)
			after1, _ := c.ask(first, output)
			_, got[again] = c.ask(first, output)
			second := append(after1, c.text(m.user)...)
			after2, cached := c.ask(second, output)
			got[turn2] = cached
			third := append(after2, c.text(m.user)...)
			after3, cached := c.ask(third, output)
			got[turn3] = cached
			fourth := append(after3, c.text(m.user)...)
			_, got[turn4] = c.ask(fourth, output)
			for i := range 4 {
				_, got[user2+i] = c.ask(append(slices.Clone(system), c.text(m.user)...), output)
			}
			_, got[editedTurn] = c.ask(append(slices.Clone(after1), c.text(m.user)...), output)
			c.ask(append(slices.Clone(after1), c.text(m.user)...), output)
			_, got[insideTurn3] = c.ask(append(slices.Clone(third[:len(after2)+70]), c.text(200)...), output)
			for i := range 3 {
				_, got[half1+i] = c.ask(append(slices.Clone(system[:1200]), c.text(400)...), output)
			}
			var prompts [][]uint32
			long := c.text(300)
			for range 6 {
				prompts = append(prompts, long)
				sequence, _ := c.ask(long, output)
				long = append(sequence, c.text(400)...)
			}
			_, got[branch3] = c.ask(append(slices.Clone(prompts[2]), c.text(300)...), output)
			_, got[branch5] = c.ask(append(slices.Clone(prompts[4]), c.text(300)...), output)
			short := c.text(200)
			c.ask(short, output)
			_, got[short1] = c.ask(short, output)
			_, got[short2] = c.ask(append(slices.Clone(short), c.text(300)...), output)
			for range 40 {
				c.ask(c.text(1500), 16)
			}
			_, got[evictedTurn4] = c.ask(fourth, output)
			_, got[evictedFirst] = c.ask(first, output)
			for i := range 2 {
				_, got[evictedSystem1+i] = c.ask(append(slices.Clone(system), c.text(m.user)...), output)
			}
			if got != m.want {
				t.Errorf("cached %v, vLLM has %v", got, m.want)
			}
		})
	}
}

// TestHitsOfModels sends a system prompt of 2,400 tokens and 900 of a user to models of vLLM 0.32.
func TestHitsOfModels(t *testing.T) {
	withGroups := func(cfg Config, groups Groups) Config {
		cfg.Groups = groups
		return cfg
	}
	for _, m := range []struct {
		name        string
		cfg         Config
		again, next int
		users       [3]int // that have the system prompt in common with the first one
	}{
		{"Qwen 3.5, Granite 4, Qwen3-Next", qwen35, 3264, 3264, [...]int{0, 2176, 2176}},
		{"Nemotron-H, Falcon-H1", withGroups(qwen35, Groups{States: 2}), 3264, 3264, [...]int{0, 2176, 2176}},
		{"LFM2", withGroups(gemma3, Groups{States: 2}), 3296, 3296, [...]int{0, 2400, 2400}},
		{"gpt-oss", withGroups(gemma3, Groups{Windows: 1, Window: 128}), 3296, 3296, [...]int{0, 2400, 2400}},
		{"Qwen 2", withGroups(gemma3, Groups{}), 3296, 3296, [...]int{2400, 2400, 2400}},
		{"Qwen 3.5, retention interval", withGroups(qwen35, Groups{States: 3, RetentionInterval: 544}), 3264, 3264, [...]int{1632, 2176, 2176}},
	} {
		t.Run(m.name, func(t *testing.T) {
			c := newClient(t, m.cfg)
			system := c.text(2400)
			first := append(slices.Clone(system), c.text(900)...)
			c.ask(first, 24)
			sequence, again := c.ask(first, 24)
			_, next := c.ask(append(sequence, c.text(900)...), 24)
			var users [3]int
			for i := range users {
				_, users[i] = c.ask(append(slices.Clone(system), c.text(900)...), 24)
			}
			if again != m.again || next != m.next || users != m.users {
				t.Errorf("cached %d of the same prompt, %d of the next turn, %v of other users; vLLM has %d, %d, %v",
					again, next, users, m.again, m.next, m.users)
			}
			if s := c.engine.Stats(); s.PrefixHits != int64(again+next+users[0]+users[1]+users[2]) {
				t.Errorf("%d hits counted", s.PrefixHits)
			}
			if n := len(c.engine.pool.refs); c.engine.pool.free != n {
				t.Errorf("%d of %d blocks are free at the end", c.engine.pool.free, n)
			}
		})
	}
}

// TestEvictionOfGroups fills the cache: what other groups keep is evicted before the blocks of the request that full attention
// has, and then nothing is hit.
func TestEvictionOfGroups(t *testing.T) {
	for _, groups := range []Groups{{States: 3}, {Windows: 2, Window: 33}} {
		e := newEngine(Config{KVTokens: 24 * 16, Groups: groups, KVEvents: true})
		prompt := blocks(1, 6)
		now := finish(t, e, add(t, e, 100, 1, prompt, 0), 0)
		if n := e.CachedTokens(100, prompt); n != 96 {
			t.Fatalf("%+v: %d tokens are cached, want 96", groups, n)
		}
		var removed []*Group // of the blocks of the prompt
		for i := 2; i < 10; i++ {
			r := add(t, e, 40, 1, blocks(i, 2), now)
			for r.Finished == 0 {
				step := e.Step(now)
				now = step.End
				for _, event := range step.KVEvents {
					if event.Kind == BlockRemoved && event.Hashes[0] < 2000 {
						removed = append(removed, event.Group)
					}
				}
			}
			if n := e.CachedTokens(100, prompt); len(removed) > 0 && n != 0 {
				t.Errorf("%+v: %d tokens are hit after evictions", groups, n)
			}
		}
		others := 0
		for i, g := range removed {
			if g.Kind != FullAttention {
				if others++; others != i+1 {
					t.Errorf("%+v: eviction %d is one of group %d, after one of full attention", groups, i+1, g.Index)
				}
			}
		}
		if others == 0 || len(removed) != others+6 {
			t.Errorf("%+v: %d evictions, of which %d in other groups", groups, len(removed), others)
		}
	}
}

// TestPrefillOfStates has chunks end where states are kept: not beyond the budget, where the hit could have been, and at the
// prompt's last full block.
func TestPrefillOfStates(t *testing.T) {
	cfg := qwen35
	cfg.KVEvents = true
	c := newClient(t, cfg)
	chunks := func(prompt []uint32) (tokens []int) {
		r := add(t, c.engine, len(prompt), 1, hashBlocks(prompt, cfg.BlockSize), c.now)
		for r.Finished == 0 {
			step := c.engine.Step(c.now)
			c.now = step.End
			if step.Prefilled > 0 {
				tokens = append(tokens, step.Prefilled)
			}
		}
		return tokens
	}
	system := c.text(1700)
	if got := chunks(append(slices.Clone(system), c.text(1600)...)); !slices.Equal(got, []int{1632, 1632, 36}) {
		t.Errorf("first prompt in chunks of %v", got)
	}
	if got := chunks(append(slices.Clone(system), c.text(1600)...)); !slices.Equal(got, []int{1632, 1632, 36}) {
		t.Errorf("second prompt in chunks of %v", got)
	}
	if got := chunks(append(slices.Clone(system[:1200]), c.text(1000)...)); !slices.Equal(got, []int{1088, 1088, 24}) {
		t.Errorf("prompt that branches off in chunks of %v", got)
	}
	if got := chunks(append(slices.Clone(system), c.text(1600)...)); !slices.Equal(got, []int{1632, 36}) {
		t.Errorf("third prompt in chunks of %v", got)
	}
}

// TestReportedKVTokens compares kv_cache_size_tokens with that of vLLM, for requests of at most 16,384 tokens.
func TestReportedKVTokens(t *testing.T) {
	for _, c := range []struct {
		cfg    Config
		blocks int
		want   int
	}{
		{gemma3, 3072, 54_887}, {qwen35, 361, 159_854}, {Config{BlockSize: 32}, 512, 16_384},
	} {
		c.cfg.KVTokens = c.blocks * c.cfg.BlockSize
		if got := c.cfg.ReportedKVTokens(16_384); got != c.want {
			t.Errorf("%+v: %d tokens, vLLM reports %d", c.cfg.Groups, got, c.want)
		}
	}
}

func TestValidateGroups(t *testing.T) {
	for _, c := range []struct {
		cfg  Config
		want string // part of the error; empty: none
	}{
		{gemma3, ""}, {qwen35, ""},
		{Config{Groups: Groups{States: -1}}, "negative"},
		{Config{Groups: Groups{Windows: 1}}, "window"},
		{Config{BlockSize: 544, StepTokens: 512, Groups: Groups{States: 1}}, "budget"},
		{Config{KVTokens: 96, Groups: Groups{States: 3}}, "fewer"},
		{Config{HostKVTokens: 1600, Groups: Groups{States: 3}}, "host"},
	} {
		err := c.cfg.WithDefaults().ValidateGroups()
		if (err != nil) != (c.want != "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: error %v, want %q", c.cfg.Groups, err, c.want)
		}
	}
}

// TestKVEventsTellContentOfGroups plays random requests, aborts and resets. Who applies the events knows what each group holds.
func TestKVEventsTellContentOfGroups(t *testing.T) {
	for _, groups := range []Groups{{States: 2}, {Windows: 2, Window: 40}, {States: 1, Windows: 1, Window: 20, RetentionInterval: 16}} {
		random := rand.New(rand.NewPCG(1, uint64(groups.States)))
		e := newEngine(Config{KVTokens: 640, StepTokens: 50, MaxSeqs: 8, Groups: groups, KVEvents: true})
		full := int(e.pool.groups.fullAttention())
		held := make([]content, full+1)
		for g := range held {
			held[g] = content{}
		}
		var open []*Request
		hits, partial := 0, 0
		for now := time.Duration(0); hits < 100; {
			if len(open) < 10 && random.IntN(3) == 0 {
				prompt := append(blocks(random.IntN(4), random.IntN(12)), blocks(10+random.IntN(40), 10)...)
				open = append(open, add(t, e, 1+random.IntN(200), 1+random.IntN(100), prompt, now))
			}
			switch random.IntN(400) {
			case 0:
				e.DiscardCache(now)
			case 1:
				if len(open) > 0 {
					e.Abort(open[0])
					open = open[1:]
				}
			}
			if e.Idle() {
				continue
			}
			step := e.Step(now)
			now = step.End
			for _, r := range step.Finished {
				open = slices.DeleteFunc(open, func(o *Request) bool { return o == r })
				if r.Cached > 0 {
					hits++
				}
				if r.Created > 0 && r.Cached > 0 {
					partial++
				}
			}
			for _, event := range step.KVEvents {
				of := held
				if event.Kind != CacheCleared {
					of = held[event.Group.Index:][:1]
				}
				for _, c := range of {
					if err := c.apply(event); err != nil {
						t.Fatal(err)
					}
				}
			}
			for g := range held {
				want := content{}
				for b, h := range e.pool.hash {
					if h != 0 && int(e.pool.groups.of[b]) == g {
						want[h]++
					}
				}
				if !maps.Equal(held[g], want) {
					t.Fatalf("%+v: by its events group %d has %v, want %v", groups, g, held[g], want)
				}
			}
		}
		for _, r := range open {
			e.Abort(r)
		}
		if n := len(e.pool.refs); e.pool.free != n || partial == 0 || e.Stats().Preemptions == 0 {
			t.Errorf("%+v: %d of %d blocks are free at the end; %d partial hits, %d preemptions",
				groups, e.pool.free, n, partial, e.Stats().Preemptions)
		}
	}
}
