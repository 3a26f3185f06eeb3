package server

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/config"
	"warmroute/lab/freeport"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// rankServer is a proxy in front of one simulated server with data-parallel ranks.
type rankServer struct {
	t       *testing.T
	replica *sim.Server
	server  *Server
	client  *http.Client
	log     *syncBuffer
}

func startRankServer(t *testing.T, c sim.Config, change func(*config.Config)) *rankServer {
	t.Helper()
	c.Engine = engine.Config{KVTokens: 20_000, Speed: 20}
	g := &rankServer{t: t, replica: sim.NewServer(c), log: new(syncBuffer),
		client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 100}}}
	if err := g.replica.Bind("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	runUntilStopped(t, g.replica.Run)
	t.Cleanup(g.client.CloseIdleConnections)
	g.server, _ = startServer(t, g.log, func(c *config.Config) {
		c.Backends[0].Name = "gpu"
		c.Poll.Interval, c.Poll.FastInterval = 50*time.Millisecond, 50*time.Millisecond
		if change != nil {
			change(c)
		}
	}, g.replica.URL())
	return g
}

// names returns the names of the ready backends.
func (g *rankServer) names() (names []string) {
	for _, b := range g.server.registry.All() {
		if b.State() == backends.Ready && b.Load() != nil {
			names = append(names, b.Name)
		}
	}
	slices.Sort(names)
	return names
}

// awaitNames waits until these backends, and no others, are ready.
func (g *rankServer) awaitNames(want ...string) {
	g.t.Helper()
	for end := time.Now().Add(20 * time.Second); !slices.Equal(g.names(), want); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			g.t.Fatalf("backends %q, want %q\n%s", g.names(), want, g.log)
		}
	}
}

func rankNames(first, n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprint("gpu-rank", first+i))
	}
	return names
}

// chat sends a conversation's next turn, and returns the backend that responded and how much of the prompt it had.
func (g *rankServer) chat(messages ...string) (backend string, cached int, err error) {
	var list []map[string]string
	for i, m := range messages {
		list = append(list, map[string]string{"role": [2]string{"user", "assistant"}[i%2], "content": m})
	}
	body, _ := json.Marshal(map[string]any{"model": "sim", "messages": list, "max_tokens": 8, "ignore_eos": true})
	resp, err := g.client.Post(g.server.publicURL()+"/v1/chat/completions", "application/json", strings.NewReader(string(body)))
	if err != nil {
		return "", 0, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	var response struct {
		Usage struct {
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err == nil {
		err = json.Unmarshal(text, &response)
	}
	if err != nil || resp.StatusCode != http.StatusOK {
		return "", 0, fmt.Errorf("status %d, %s, %w", resp.StatusCode, text, err)
	}
	return resp.Header.Get("X-Warmroute-Backend"), response.Usage.Details.Cached, nil
}

var frontEnds = []struct {
	name string
	rank sim.RankConfig
}{
	{"Python, labels 0-3", sim.RankConfig{}},
	{"Rust, labels 0-3", sim.RankConfig{Rust: true}},
	{"Python, labels 2-5", sim.RankConfig{First: 2}},
	{"Rust, labels 2-5", sim.RankConfig{First: 2, Rust: true}},
	{"Python, labels 4-7", sim.RankConfig{First: 4}},
	{"Rust, labels 4-7", sim.RankConfig{First: 4, Rust: true}},
}

// Each conversation stays on one rank, and each rank gets conversations, whatever its number is to the front end.
func TestDataParallelRanks(t *testing.T) {
	for _, f := range frontEnds {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			g := startRankServer(t, sim.Config{Ranks: 4, Rank: f.rank}, nil)
			g.awaitNames(rankNames(f.rank.First, 4)...)
			var mu sync.Mutex
			conversations := map[string]int{} // by backend
			moved := 0                        // turns that had to be prefilled again, as their rank was busy
			var clients sync.WaitGroup
			for i := range 16 {
				clients.Go(func() {
					messages := []string{fmt.Sprintf("Conversation %d. %s", i, strings.Repeat("It has a long beginning of its own. ", 40+i))}
					first := ""
					for turn := range 5 {
						backend, cached, err := g.chat(messages...)
						switch {
						case err != nil:
							t.Error(err)
							return
						case turn == 0:
							first = backend
						case cached < 300:
							mu.Lock()
							moved++
							mu.Unlock()
						}
						messages = append(messages, "Yes.", strings.Repeat("More of it. ", 20))
					}
					mu.Lock()
					defer mu.Unlock()
					conversations[first]++
				})
			}
			clients.Wait()
			if moved > 12 { // more where the machine is busy, and with it the ranks
				t.Errorf("%d of 64 turns were not on the rank of the turn before", moved)
			}
			for _, name := range rankNames(f.rank.First, 4) {
				if conversations[name] < 2 {
					t.Errorf("%d of 16 conversations on %s", conversations[name], name)
				}
			}
			g.checkEachRankIsItsEngine(f.rank.First)
		})
	}
}

// checkEachRankIsItsEngine sends a request to each rank alone.
func (g *rankServer) checkEachRankIsItsEngine(first int) {
	all := g.server.registry.All()
	for _, rank := range all {
		for _, other := range all {
			if other != rank {
				other.Drain()
			}
		}
		label, _ := rank.Engine()
		before := g.replica.RankStats()
		if _, _, err := g.chat("To one rank."); err != nil {
			g.t.Error(err)
		}
		for i, after := range g.replica.RankStats() {
			if got := after.GenerationTokens > before[i].GenerationTokens; got != (first+i == label) {
				g.t.Errorf("a request to %s was processed by engine %d: %v", rank.Name, first+i, got)
			}
		}
		for _, other := range all {
			other.Undrain()
		}
	}
}

func TestServerWithoutAddressableRanks(t *testing.T) {
	for _, c := range []struct {
		name   string
		config sim.Config
		change func(*config.Config)
	}{
		{"one engine", sim.Config{}, nil},
		{"ranks: off", sim.Config{Ranks: 4}, func(c *config.Config) { c.Backends[0].Ranks = "off" }},
		{"labels 2-5, header ignored", sim.Config{Ranks: 4, Rank: sim.RankConfig{First: 2, Ignored: true}}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			g := startRankServer(t, c.config, c.change)
			g.awaitNames("gpu")
			for range 20 {
				if _, _, err := g.chat("Hello."); err != nil {
					t.Error(err)
				}
			}
			time.Sleep(200 * time.Millisecond) // a few polls
			g.awaitNames("gpu")
			if n := strings.Count(g.log.String(), "ranks not used"); n > 1 {
				t.Errorf("logged %d times", n)
			}
		})
	}
}

// The header has no effect, which nothing shows where the labels begin at 0: no request fails.
func TestRankHeaderIgnored(t *testing.T) {
	t.Parallel()
	g := startRankServer(t, sim.Config{Ranks: 2, Rank: sim.RankConfig{Ignored: true}}, nil)
	g.awaitNames(rankNames(0, 2)...)
	for i := range 20 {
		if _, _, err := g.chat(fmt.Sprint("Hello ", i)); err != nil {
			t.Error(err)
		}
	}
}

// A server's engines change under load. Their former numbers are refused until the next poll, which no client sees.
func TestRanksChangeUnderLoad(t *testing.T) {
	for _, f := range frontEnds[:4] {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			rank := f.rank
			rank.Spare = 4
			g := startRankServer(t, sim.Config{Ranks: 4, Rank: rank}, nil)
			g.awaitNames(rankNames(rank.First, 4)...)
			c := startCrowd(t, g.server.publicURL(), 12, &http.Transport{})
			for _, n := range []int{2, 8, 3, 1, 4} {
				c.more(50)
				if err := g.replica.ScaleRanks(n); err != nil {
					t.Fatal(err)
				}
				c.more(50)
				if n == 1 {
					g.awaitNames("gpu")
				} else {
					g.awaitNames(rankNames(rank.First, n)...)
				}
			}
			c.more(50)
			c.leave()
			if sum := metricSum(t, g.server.adminURL(), "warmroute_retries_total", "rank"); sum == 0 {
				t.Error("no rank was refused, so that nothing was tested")
			}
		})
	}
}

// A replica's front end counts its engines otherwise after a restart.
func TestRanksAfterRestart(t *testing.T) {
	t.Parallel()
	start := func(rust bool, address string) (*sim.Server, func()) {
		s := sim.NewServer(sim.Config{Ranks: 2, Rank: sim.RankConfig{First: 2, Rust: rust}, Engine: engine.Config{KVTokens: 20_000, Speed: 20}})
		if err := s.Bind(address); err != nil {
			t.Fatal(err)
		}
		return s, runUntilStopped(t, s.Run)
	}
	replica, kill := start(false, freeport.FindAddress(t))
	g := &rankServer{t: t, log: new(syncBuffer), client: &http.Client{Transport: &http.Transport{}}}
	t.Cleanup(g.client.CloseIdleConnections)
	g.server, _ = startServer(t, g.log, func(c *config.Config) {
		c.Backends[0].Name = "gpu"
		c.Poll.Interval, c.Poll.FastInterval = 50*time.Millisecond, 50*time.Millisecond
	}, replica.URL())
	for _, rust := range []bool{true, false} {
		g.awaitNames(rankNames(2, 2)...)
		for i := range 4 {
			if _, _, err := g.chat(fmt.Sprint("Hello ", i)); err != nil {
				t.Error(err)
			}
		}
		kill()
		g.awaitNames()
		replica, kill = start(rust, strings.TrimPrefix(replica.URL(), "http://"))
	}
	g.awaitNames(rankNames(2, 2)...)
	g.replica = replica
	g.checkEachRankIsItsEngine(2)
}

// Each rank follows the events of its own engine.
func TestKVEventsOfRanks(t *testing.T) {
	t.Parallel()
	g := startRankServer(t, sim.Config{Ranks: 3, Rank: sim.RankConfig{First: 2}, KVEvents: sim.KVEventsConfig{Endpoint: "0"}}, nil)
	g.awaitNames(rankNames(2, 3)...)
	confirmed := func() (blocks map[string]int) {
		parts, _ := g.server.router.IndexStats()
		blocks = map[string]int{}
		for _, p := range parts {
			if p.Backend != nil && p.KV != nil && p.KV.Complete {
				blocks[p.Backend.Name] = p.KV.Confirmed
			}
		}
		return blocks
	}
	await := func(what string, is func() bool) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("never: %s; %v\n%s", what, confirmed(), g.log)
			}
		}
	}
	await("the events of all ranks are read", func() bool { return len(confirmed()) == 3 })
	backend, _, err := g.chat(strings.Repeat("A prompt of many blocks. ", 100))
	if err != nil {
		t.Fatal(err)
	}
	await("the blocks of the prompt are confirmed", func() bool { return confirmed()[backend] > 5 })
	for name, blocks := range confirmed() {
		if name != backend && blocks > 0 {
			t.Errorf("%s holds %d blocks of a prompt that %s has processed", name, blocks, backend)
		}
	}
}

// Ranks are drained by the name of their server or their own, and removed with their server.
func TestDrainRanks(t *testing.T) {
	t.Parallel()
	g := startRankServer(t, sim.Config{Ranks: 2}, nil)
	g.awaitNames(rankNames(0, 2)...)
	for _, step := range []struct {
		path string
		want []string
	}{
		{"gpu-rank1/drain", rankNames(0, 1)},
		{"gpu/drain", nil},
		{"gpu/undrain", rankNames(0, 2)},
		{"gpu/reset", rankNames(0, 2)},
	} {
		resp, err := g.client.Post(g.server.adminURL()+"/api/backends/"+step.path, "application/json", nil)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Errorf("%s: status %d, %s", step.path, resp.StatusCode, text)
		}
		g.awaitNames(step.want...)
	}
}

// The drain of a server with ranks by another process, and its end here, are known to both.
func TestStoredDrainOfRanks(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "state.json")
	g := startRankServer(t, sim.Config{Ranks: 2}, func(c *config.Config) { c.StateFile = file })
	g.awaitNames(rankNames(0, 2)...)
	drained := fmt.Sprintf(`{"version": 1, "records": {"drain/gpu": {"changed": %q}}}`, time.Now().UTC().Format(time.RFC3339Nano))
	if err := os.WriteFile(file, []byte(drained), 0o600); err != nil {
		t.Fatal(err)
	}
	g.awaitNames()
	g.server.fleet.SetDrained(g.server.registry.Find("gpu"), false)
	g.awaitNames(rankNames(0, 2)...)
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if content, _ := os.ReadFile(file); strings.Contains(string(content), `"removed": true`) {
			return
		}
		if time.Now().After(end) {
			t.Fatal("the file still has the drain")
		}
	}
}
