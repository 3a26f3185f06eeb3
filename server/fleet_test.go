package server

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/config"
	"warmroute/sim"
	"warmroute/sim/engine"
)

// changing is a proxy whose fleet is changed while it runs, as a reload does.
// Some of its replicas are in the configuration, by name.
type changing struct {
	*guarded
	config config.Config
}

func startChanging(t *testing.T, replicas int) *changing {
	t.Helper()
	g := startGuarded(t, replicas, sim.Config{Engine: engine.Config{KVTokens: 200_000, Speed: 20}}, func(c *config.Config) {
		for i := range c.Backends {
			c.Backends[i].Name = fmt.Sprintf("r%d", i)
		}
	})
	return &changing{guarded: g, config: *g.server.config}
}

// change makes the running proxy what f makes of its configuration. service.apply
// is for the goroutine that runs it.
func (c *changing) change(f func(*config.Config)) {
	c.t.Helper()
	next := c.config
	next.Backends = slices.Clone(c.config.Backends)
	f(&next)
	if err := c.server.fleet.update(&next); err != nil {
		c.t.Fatal(err)
	}
	if err := c.server.router.Configure(next.RouterSettings()); err != nil {
		c.t.Fatal(err)
	}
	c.server.proxy.Configure(next.ProxySettings())
	c.config = next
}

func (c *changing) setFleet(replicas ...int) {
	c.t.Helper()
	c.change(func(next *config.Config) {
		next.Backends = nil
		for _, i := range replicas {
			next.Backends = append(next.Backends, config.Backend{Name: fmt.Sprintf("r%d", i), URL: c.replicas[i].URL(), Weight: 1})
		}
	})
}

func (c *changing) backend(replica int) *backends.Backend {
	return c.server.fleet.registry.Find(fmt.Sprintf("r%d", replica))
}

func (c *changing) isReady(replica int) bool {
	b := c.backend(replica)
	return b != nil && b.State() == backends.Ready
}

func (c *changing) crowd(n int) *crowd {
	transport := &http.Transport{}
	return startCrowd(c.t, c.url, n, transport)
}

// made is how many tokens a replica has put out.
func (c *changing) made(replica int) int64 { return c.replicas[replica].Stats().GenerationTokens }

// settled waits until nothing is in flight or held.
func (c *changing) settled(all ...*backends.Backend) {
	c.t.Helper()
	c.until("nothing is in flight", func() bool {
		busy := slices.ContainsFunc(append(all, c.server.fleet.registry.All()...), func(b *backends.Backend) bool { return !b.Idle() })
		return !busy && c.server.router.WaitingRequests() == 0
	})
}

func TestFleetUpdatesUnderLoad(t *testing.T) {
	const replicas = 5
	c := startChanging(t, replicas)
	clients := c.crowd(16)
	rng := rand.New(rand.NewPCG(1, 2))
	policies := []string{"prefix", "least-load", "chwbl", "cache-threshold", "prefix", "preble"}
	there := []int{0, 1, 2, 3, 4}
	seen := map[*backends.Backend]bool{}
	for round := range 240 {
		for _, b := range c.server.fleet.registry.All() {
			seen[b] = true
		}
		some := there[rng.IntN(len(there))]
		switch round % 6 {
		case 0, 3: // another part of the replicas, two at least
			there = rng.Perm(replicas)[:2+rng.IntN(replicas-1)]
			c.setFleet(there...)
		case 1:
			c.until("one is ready", func() bool { return slices.ContainsFunc(there, c.isReady) })
			for _, i := range there[1:] {
				c.backend(i).Drain()
			}
			clients.more(5)
			for _, i := range there[1:] {
				c.backend(i).Undrain()
			}
		case 2:
			c.change(func(next *config.Config) { next.Routing.Policy = policies[rng.IntN(len(policies))] })
		case 4:
			c.change(func(next *config.Config) {
				b := &next.Backends[rng.IntN(len(next.Backends))]
				b.APIKey, b.Weight, b.MaxInFlight = fmt.Sprint("key", round), 1+rng.Float64(), rng.IntN(8)
				next.Routing.Queue.Requests = 16 + rng.IntN(100)
				next.Connections.MaxPerBackend = 100 + round
			})
		case 5:
			c.backend(some).Drain()
			c.change(func(next *config.Config) { next.Timeouts.Connect += time.Millisecond })
			c.backend(some).Undrain()
		}
		clients.more(10)
	}
	c.setFleet(0, 1)
	c.until("the others are gone", func() bool { return len(c.server.fleet.registry.All()) == 2 })
	before := c.made(2) + c.made(3) + c.made(4)
	clients.more(200)
	if after := c.made(2) + c.made(3) + c.made(4); after != before {
		t.Errorf("replicas that were removed put out %d tokens", after-before)
	}
	clients.leave()
	var all []*backends.Backend
	for b := range seen {
		all = append(all, b)
	}
	c.settled(all...)
}

func TestAddedBackendGetsRequests(t *testing.T) {
	c := startChanging(t, 2)
	c.setFleet(0)
	c.until("one is gone", func() bool { return len(c.server.fleet.registry.All()) == 1 })
	clients := c.crowd(8)
	clients.more(50)
	before := c.made(1)
	c.setFleet(0, 1)
	c.until("it is ready", func() bool { return c.isReady(1) })
	clients.more(200)
	clients.leave()
	if got := c.made(1) - before; got < 320 {
		t.Errorf("the added replica put out %d tokens of about 1,600", got)
	}
	c.settled()
}

func TestDrainedBackendStaysDrainedAfterReload(t *testing.T) {
	c := startChanging(t, 2)
	c.backend(0).Drain()
	c.change(func(next *config.Config) { next.Backends[0].Weight = 2 })
	if b := c.backend(0); b.State() != backends.Draining || b.Options().Weight != 2 {
		t.Errorf("state %v, weight %v", b.State(), b.Options().Weight)
	}
	for range 3 {
		if to := c.goesTo("sim", "hello"); to != 1 {
			t.Errorf("a request went to %d", to)
		}
	}
	c.backend(0).Undrain()
	c.until("it is ready", func() bool { return c.isReady(0) })
	c.settled()
}

// The backends that leave serve until those that join are ready, so this needs no
// admission queue.
func TestReplaceAllBackendsUnderLoad(t *testing.T) {
	for name, held := range map[string]int{"with the admission queue": 1000, "without": 0} {
		t.Run(name, func(t *testing.T) {
			c := startChanging(t, 4)
			c.change(func(next *config.Config) { next.Routing.Queue.Requests = held })
			c.setFleet(0, 1)
			clients := c.crowd(8)
			for range 5 {
				clients.more(20)
				c.setFleet(2, 3)
				clients.more(20)
				c.setFleet(0, 1)
			}
			clients.leave()
			c.settled()
		})
	}
}

func TestQueuedRequestGoesToAddedBackend(t *testing.T) {
	c := startChanging(t, 2)
	c.setFleet(0)
	c.until("one is gone", func() bool { return len(c.server.fleet.registry.All()) == 1 })
	c.backend(0).Drain()
	served := c.ask("hello")
	c.until("it is held", func() bool { return c.server.router.WaitingRequests() == 1 })
	before := c.made(1)
	c.setFleet(0, 1)
	if _, ok := <-served; !ok || c.made(1) == before {
		t.Error("the backend that joined did not answer it")
	}
	c.settled()
}

func TestBackendURLChange(t *testing.T) {
	c := startChanging(t, 3)
	c.setFleet(0, 1)
	clients := c.crowd(4)
	for to := range 6 {
		c.change(func(next *config.Config) { next.Backends[0].URL = c.replicas[2*(to%2)].URL() })
		clients.more(20)
	}
	clients.leave()
	c.until("the others are gone", func() bool { return len(c.server.fleet.registry.All()) == 2 })
	if b := c.backend(0); b.URL.Host != strings.TrimPrefix(c.replicas[2].URL(), "http://") {
		t.Errorf("%s is at %s", b.Name, b.URL)
	}
	c.settled()
}

// Of names that come and go nothing stays: no slot, no goroutine, no label, no
// memory to speak of.
func TestAddAndRemoveManyBackends(t *testing.T) {
	c := startChanging(t, 2)
	clients := c.crowd(4)
	cycle := func(i int) {
		name := fmt.Sprintf("guest%d", i)
		c.change(func(next *config.Config) {
			next.Backends = append(next.Backends[:1], config.Backend{Name: name, URL: c.replicas[1].URL(), Weight: 1})
		})
		c.until("the guest is ready", func() bool { b := c.server.fleet.registry.Find(name); return b != nil && b.State() == backends.Ready })
		clients.more(2)
		if b := c.server.fleet.registry.Find(name); b.Slot > 4 {
			t.Fatalf("guest %d has slot %d", i, b.Slot)
		}
	}
	measure := func() (goroutines int, heap uint64) {
		c.until("guests before are gone", func() bool { return len(c.server.fleet.registry.All()) == 2 })
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return runtime.NumGoroutine(), m.HeapAlloc
	}
	for i := range 50 {
		cycle(i)
	}
	goroutines, heap := measure()
	for i := range 300 {
		cycle(50 + i)
	}
	_, grown := measure()
	c.until("the goroutines of the guests' connections are gone", func() bool { return runtime.NumGoroutine() <= goroutines+20 })
	if grown > heap+8<<20 {
		t.Errorf("%d KB of heap, %d before", grown>>10, heap>>10)
	}
	clients.leave()
	c.settled()
	if n := metricSum(t, c.admin, "warmroute_requests_total", "guest0"); n != 0 {
		t.Errorf("the first guest's series are there")
	}
	if parts, _ := c.server.router.IndexStats(); len(parts) > 5 {
		t.Errorf("%d slots", len(parts))
	}
}
