package engine

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// describe returns an event in a few words, such as "store 1002 1003 after 1001".
func describe(event KVEvent) string {
	var b strings.Builder
	if event.Host {
		b.WriteString("host ")
	}
	b.WriteString([...]string{BlocksStored: "store", BlockRemoved: "remove", CacheCleared: "clear"}[event.Kind])
	for _, h := range event.Hashes {
		fmt.Fprintf(&b, " %d", h)
	}
	if event.Parent != 0 {
		fmt.Fprintf(&b, " after %d", event.Parent)
	}
	return b.String()
}

// recorder steps an engine and notes what it reports.
type recorder struct {
	*Engine
	now   time.Duration
	steps []string // the events of each step that has any
}

func (r *recorder) step() StepResult {
	done := r.Step(r.now)
	r.now = done.End
	var events []string
	for _, event := range done.KVEvents {
		events = append(events, describe(event))
	}
	if len(events) > 0 {
		r.steps = append(r.steps, strings.Join(events, ", "))
	}
	return done
}

// run adds a request and steps until it has ended.
func (r *recorder) run(t *testing.T, prompt, output int, hashes []BlockHash) {
	t.Helper()
	q := add(t, r.Engine, prompt, output, hashes, r.now)
	for range 10_000 {
		if slices.Contains(r.step().Finished, q) {
			return
		}
	}
	t.Fatal("the request did not end")
}

func TestKVEvents(t *testing.T) {
	for _, c := range []struct {
		name string
		cfg  Config
		play func(*testing.T, *recorder)
		want []string
	}{
		{"prompt, chunk by chunk", Config{StepTokens: 40}, func(t *testing.T, r *recorder) {
			r.run(t, 90, 1, blocks(1, 5))
		}, []string{"store 1001 1002", "store 1003 1004 1005 after 1002"}},

		{"transfer", transferConfig(), func(t *testing.T, r *recorder) {
			q := addDecodeRequest(t, r.Engine, 40, 1, blocks(1, 2), 0)
			r.step()
			r.EndTransfer(q, TransferDone)
			r.run(t, 60, 1, blocks(1, 3))
		}, []string{"store 1001 1002, store 1003 after 1002"}},

		{"blocks of the output", Config{}, func(t *testing.T, r *recorder) {
			r.run(t, 30, 36, blocks(1, 4)) // 65 tokens are computed
		}, []string{"store 1001", "store 1002 after 1001", "store 1003 after 1002", "store 1004 after 1003"}},

		{"hit", Config{}, func(t *testing.T, r *recorder) {
			r.run(t, 40, 1, blocks(1, 2))
			r.run(t, 60, 1, blocks(1, 3))
			r.run(t, 60, 1, blocks(1, 3))
		}, []string{"store 1001 1002", "store 1003 after 1002"}},

		{"in one step", Config{}, func(t *testing.T, r *recorder) {
			add(t, r.Engine, 40, 1, blocks(1, 2), 0)
			r.run(t, 40, 1, append(blocks(1, 1), blocks(2, 1)...))
		}, []string{"store 1001 1002, store 2001 after 1001"}},

		// The last token is always computed again, and its block stored beside the first one.
		{"equal blocks are removed one by one", Config{KVTokens: 96}, func(t *testing.T, r *recorder) {
			r.run(t, 32, 1, blocks(1, 2))
			r.run(t, 32, 1, blocks(1, 2))
			r.run(t, 95, 1, blocks(2, 6))
		}, []string{
			"store 1001 1002", "store 1002 after 1001",
			"remove 1002, remove 1002, remove 1001, store 2001 2002 2003 2004 2005",
		}},

		{"eviction from the tail", Config{KVTokens: 64}, func(t *testing.T, r *recorder) {
			r.run(t, 48, 1, blocks(1, 3))
			r.run(t, 48, 1, blocks(2, 3))
		}, []string{"store 1001 1002 1003", "remove 1003, remove 1002, store 2001 2002 2003"}},

		{"hidden eviction", Config{KVTokens: 64, HiddenEvictions: 1}, func(t *testing.T, r *recorder) {
			r.run(t, 16, 1, blocks(1, 1))
			r.run(t, 32, 1, blocks(2, 2))
		}, []string{"store 1001", "remove 1001, store 2001 2002"}},

		{"preemption", Config{KVTokens: 160}, func(t *testing.T, r *recorder) {
			second := &Request{Prompt: 60, Output: 40, Blocks: blocks(2, 6)}
			add(t, r.Engine, 60, 40, blocks(1, 6), 0)
			if err := r.Add(second, 0); err != nil {
				t.Fatal(err)
			}
			for second.Finished == 0 {
				r.step()
			}
		}, []string{
			"store 1001 1002 1003, store 2001 2002 2003",
			"store 1004 after 1003, store 2004 after 2003",
			// The first one needs a sixth block, the second one loses its last.
			"store 1005 after 1004, store 2005 after 2004, remove 2005",
			"store 1006 after 1005, remove 2004",
			// The first one has ended; its last blocks are reused.
			"remove 1006, remove 1005, store 2004 2005 after 2003",
			"store 2006 after 2005, remove 1004",
		}},

		{"clear", Config{KVTokens: 160}, func(t *testing.T, r *recorder) {
			r.run(t, 40, 1, blocks(1, 2))
			for range 3 {
				r.ResetPrefixCache()
			}
			r.run(t, 40, 1, blocks(1, 2))
		}, []string{"store 1001 1002", "clear, store 1001 1002"}},

		{"clear while requests run", Config{}, func(t *testing.T, r *recorder) {
			add(t, r.Engine, 40, 5, blocks(1, 2), 0)
			r.step()
			r.ResetPrefixCache() // has no effect
			r.step()
			r.DiscardCache(r.now)
			r.step()
		}, []string{"store 1001 1002", "clear, store 1001 1002"}},

		{"abort", Config{StepTokens: 40}, func(t *testing.T, r *recorder) {
			q := add(t, r.Engine, 30, 20, blocks(1, 3), 0)
			for q.Generated(r.Engine) < 3 { // 32 tokens are computed
				r.step()
			}
			r.Abort(q)
			r.run(t, 20, 1, blocks(2, 1))
		}, []string{"store 1001", "store 1002 after 1001, store 2001"}},

		{"host tier", Config{KVTokens: 64, HostKVTokens: 64}, func(t *testing.T, r *recorder) {
			r.run(t, 33, 1, blocks(1, 2))
			r.run(t, 63, 1, blocks(2, 3)) // evicts both, and the first one on the host
			r.run(t, 33, 1, blocks(1, 2))
		}, []string{
			"store 1001 1002, host store 1001, host store 1002",
			"remove 1002, remove 1001, store 2001 2002 2003, host store 2001, host store 2002, host remove 1001, host store 2003",
			"remove 2003, remove 2002, store 1001 1002, host remove 1002, host store 1001, host remove 2001, host store 1002",
		}},

		{"load from the host", Config{KVTokens: 64, HostKVTokens: 160}, func(t *testing.T, r *recorder) {
			r.run(t, 33, 1, blocks(1, 2))
			r.run(t, 63, 1, blocks(2, 3))
			r.run(t, 49, 1, blocks(1, 3))
			r.ResetPrefixCache()
			r.run(t, 10, 1, nil)
		}, []string{
			"store 1001 1002, host store 1001, host store 1002",
			"remove 1002, remove 1001, store 2001 2002 2003, host store 2001, host store 2002, host store 2003",
			"remove 2003, store 1001 1002",
			"remove 2002, remove 2001, store 1003 after 1002, host store 1003",
			"clear",
		}},

		{"without a prefix cache", Config{NoPrefixCache: true, KVTokens: 64, HostKVTokens: 64}, func(t *testing.T, r *recorder) {
			r.run(t, 40, 20, blocks(1, 3))
			r.run(t, 40, 20, blocks(2, 3))
		}, nil},

		{"fewer hashes than blocks", Config{}, func(t *testing.T, r *recorder) {
			r.run(t, 40, 30, blocks(1, 1))
		}, []string{"store 1001"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.cfg.KVEvents = true
			r := &recorder{Engine: newEngine(c.cfg)}
			c.play(t, r)
			if !slices.Equal(r.steps, c.want) {
				t.Errorf("got\n  %s\nwant\n  %s", strings.Join(r.steps, "\n  "), strings.Join(c.want, "\n  "))
			}

			c.cfg.KVEvents = false
			off := &recorder{Engine: newEngine(c.cfg)}
			c.play(t, off)
			if off.steps != nil || off.now != r.now {
				t.Errorf("without events: %v, and the end at %v, want none and %v", off.steps, off.now, r.now)
			}
		})
	}
}

func TestKVEventsOfSharedCache(t *testing.T) {
	both := NewWithSharedCache(withRoundTimes(Config{KVTokens: 160, KVEvents: true}), withRoundTimes(Config{KVTokens: 160}))
	first, second := &recorder{Engine: both[0]}, &recorder{Engine: both[1]}
	first.run(t, 40, 1, blocks(1, 2))
	both[0].ResetPrefixCache()
	second.run(t, 40, 1, blocks(2, 2))
	if want := []string{"store 1001 1002"}; !slices.Equal(first.steps, want) {
		t.Errorf("the first engine reports %q, want %q", first.steps, want)
	}
	if want := []string{"clear, store 2001 2002"}; !slices.Equal(second.steps, want) {
		t.Errorf("the second engine reports %q, want %q", second.steps, want)
	}
}

// content counts the blocks of a cache by their hashes.
type content map[BlockHash]int

// apply changes c by an event of its tier.
func (c content) apply(event KVEvent) error {
	for _, h := range event.Hashes {
		if event.Kind == BlocksStored {
			c[h]++
			continue
		}
		if c[h]--; c[h] < 0 {
			return fmt.Errorf("block %d was removed once more than stored", h)
		}
		if c[h] == 0 {
			delete(c, h)
		}
	}
	if event.Kind == CacheCleared {
		clear(c)
	}
	return nil
}

// contentOf returns what a pool has cached.
func contentOf(p *blockPool) content {
	c := content{}
	for _, h := range p.hash {
		if h != 0 {
			c[h]++
		}
	}
	return c
}

// TestKVEventsTellContent plays random requests, aborts and resets. Who applies the events knows
// what both tiers hold, and the parents of all blocks.
func TestKVEventsTellContent(t *testing.T) {
	for seed := range uint64(40) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 1))
			e := newEngine(Config{KVTokens: 480, HostKVTokens: 960 * int(seed%2), StepTokens: 50, MaxSeqs: 8,
				HiddenEvictions: float64(seed%3) / 4, HostLoadRate: 5000, KVEvents: true})
			gpu, host := content{}, content{}
			var open []*Request
			stores, removals, clears := 0, 0, 0
			for now := time.Duration(0); stores < 300; {
				if len(open) < 10 && random.IntN(3) == 0 {
					prompt := 1 + random.IntN(250)
					open = append(open, add(t, e, prompt, 1+random.IntN(100), blocks(random.IntN(6), 22), now))
				}
				switch random.IntN(200) {
				case 0:
					e.ResetPrefixCache()
				case 1:
					e.DiscardCache(now)
				case 2:
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
				open = slices.DeleteFunc(open, func(r *Request) bool { return slices.Contains(step.Finished, r) })
				for _, event := range step.KVEvents {
					tier := gpu
					if event.Host {
						tier = host
					}
					if event.Parent != 0 && gpu[event.Parent] == 0 {
						t.Fatalf("%s: the parent is not cached", describe(event))
					}
					if r := event.Request; r != nil && !slices.Equal(event.Hashes, r.Blocks[event.First:event.First+len(event.Hashes)]) {
						t.Fatalf("%s: not the blocks of its request from %d on", describe(event), event.First)
					}
					if err := tier.apply(event); err != nil {
						t.Fatal(err)
					}
					switch event.Kind {
					case BlocksStored:
						stores++
					case BlockRemoved:
						removals++
					case CacheCleared:
						clears++
					}
				}
				if want := contentOf(e.pool); !maps.Equal(gpu, want) {
					t.Fatalf("by its events the cache has %v, want %v", gpu, want)
				}
				if e.pool.host == nil {
					continue
				}
				if want := contentOf(e.pool.host); !maps.Equal(host, want) {
					t.Fatalf("by its events the host cache has %v, want %v", host, want)
				}
			}
			if removals == 0 || clears == 0 {
				t.Errorf("%d removals, %d clears: the test covers too little", removals, clears)
			}
		})
	}
}

func BenchmarkStep(b *testing.B) {
	for _, events := range []bool{false, true} {
		b.Run(fmt.Sprintf("events=%v", events), func(b *testing.B) {
			e := newEngine(Config{KVTokens: 64_000, KVEvents: events})
			var now time.Duration
			prefix := 0
			b.ReportAllocs()
			for b.Loop() {
				for len(e.decoding)+len(e.prefilling)+len(e.waiting) < 32 {
					prefix++
					if err := e.Add(&Request{Prompt: 1000, Output: 100, Blocks: blocks(prefix, 68)}, now); err != nil {
						b.Fatal(err)
					}
				}
				now = e.Step(now).End
			}
		})
	}
}
