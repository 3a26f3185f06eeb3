package server

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"warmroute/config"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// A replica's cache is reset by another client while requests come. Ten requests later the index holds what was sent since,
// by the cached tokens that responses report or, where they do not, by the replica's counters.
func TestCacheResetFound(t *testing.T) {
	const conversations, clients, requests = 60, 3, 10
	for name, c := range map[string]struct {
		sim   sim.Config
		pause time.Duration // between the requests of a client
	}{
		"usage":    {sim.Config{}, 5 * time.Millisecond},
		"counters": {sim.Config{NoTokenDetails: true}, 150 * time.Millisecond}, // polls see few requests each
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.sim.Engine = engine.Config{KVTokens: 1_000_000, Speed: 20}
			g := startGuarded(t, 1, c.sim, func(c *config.Config) { c.Poll.Interval = 50 * time.Millisecond })
			blocks := func() int {
				parts, _ := g.server.router.IndexStats()
				return parts[0].Blocks
			}
			ask := func(conversation int) {
				t.Helper()
				prompt := strings.Repeat("All of us know this. ", 400) + strings.Repeat(fmt.Sprintf("Conversation %d knows that. ", conversation), 400)
				resp, err := g.client.Post(g.url+"/v1/chat/completions", "application/json",
					strings.NewReader(fmt.Sprintf(`{"model":"sim","max_tokens":2,"messages":[{"role":"user","content":%q}]}`, prompt)))
				if err != nil {
					t.Error(err)
					return
				}
				defer resp.Body.Close()
				if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
					t.Errorf("status %d, %v", resp.StatusCode, err)
				}
			}
			ask(0)
			first := blocks()
			for i := range conversations {
				ask(i)
			}
			all := blocks()
			var reset atomic.Bool
			var since atomic.Int64 // requests that began after the reset
			var load sync.WaitGroup
			for i := range clients {
				load.Go(func() {
					for rng := rand.New(rand.NewPCG(uint64(i), 1)); ; time.Sleep(c.pause) {
						if reset.Load() && since.Add(1) > requests {
							return
						}
						ask(rng.IntN(conversations))
					}
				})
			}
			time.Sleep(2 * time.Second) // responses and polls show that the index is right
			if held := blocks(); held < all*9/10 {
				t.Errorf("%d of %d blocks are held before the reset", held, all)
			}
			g.replicas[0].ResetPrefixCache(true)
			reset.Store(true)
			load.Wait()
			g.until("the reset is found", func() bool { return strings.Contains(g.log.String(), "prefix cache reset") })
			// The beginning of all conversations, and the rest of those that were sent since or were on the way.
			if held, most := blocks(), first+(requests+2*clients)*(all-first)/(conversations-1); held > most {
				t.Errorf("%d of %d blocks are held after the reset, want at most %d", held, all, most)
			}
			if n := metricSum(t, g.admin, "warmroute_index_resets_total"); n != 1 {
				t.Errorf("%v resets are counted", n)
			}
		})
	}
}
