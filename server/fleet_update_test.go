package server

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	cryptorand "crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"log/slog"
	"maps"
	"math/big"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/config"
	"warmroute/lab/policies"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
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

// change makes the running proxy what f makes of its configuration. Server.applyReload
// is for the goroutine that runs it.
func (c *changing) change(f func(*config.Config)) {
	c.t.Helper()
	next := c.config
	next.Backends = slices.Clone(c.config.Backends)
	f(&next)
	c.server.updateFleet(c.t, &next)
	apply, err := c.server.router.PrepareSettings(next.RouterSettings())
	if err != nil {
		c.t.Fatal(err)
	}
	apply()
	c.server.proxy.Configure(next.ProxySettings(0, 0))
	c.config = next
}

// updateFleet makes the fleet that of a configuration.
func (s *Server) updateFleet(t *testing.T, c *config.Config) {
	t.Helper()
	apply, err := s.fleet.PrepareConfig(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	apply()
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
	return c.server.registry.Find(fmt.Sprintf("r%d", replica))
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
		busy := slices.ContainsFunc(append(all, c.server.registry.All()...), func(b *backends.Backend) bool { return !b.Idle() })
		return !busy && c.server.router.CountWaiting() == 0
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
		for _, b := range c.server.registry.All() {
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
	c.until("the others are gone", func() bool { return len(c.server.registry.All()) == 2 })
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
	t.Parallel()
	c := startChanging(t, 2)
	c.setFleet(0)
	c.until("one is gone", func() bool { return len(c.server.registry.All()) == 1 })
	clients := c.crowd(8)
	clients.more(50)
	before := c.made(1)
	c.setFleet(0, 1)
	c.until("it is ready", func() bool { return c.isReady(1) })
	clients.more(200)
	clients.leave()
	if got := c.made(1) - before; got < 320 {
		t.Errorf("the added backend put out %d tokens of about 1,600", got)
	}
	c.settled()
}

func TestDrainedBackendStaysDrainedAfterReload(t *testing.T) {
	t.Parallel()
	c := startChanging(t, 2)
	c.backend(0).Drain()
	c.change(func(next *config.Config) {
		b := &next.Backends[0]
		b.Weight, b.EnginePriority, b.Device, b.Role = 2, true, "gpu0", "prefill"
	})
	if b := c.backend(0); b.State() != backends.Draining || b.Options().Weight != 2 || !b.Options().EnginePriority ||
		b.Options().Device != "gpu0" || b.Options().Role != backends.RolePrefill {
		t.Errorf("state %v, options %+v", b.State(), b.Options())
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
	t.Parallel()
	c := startChanging(t, 2)
	c.setFleet(0)
	c.until("one is gone", func() bool { return len(c.server.registry.All()) == 1 })
	c.backend(0).Drain()
	served := c.ask("hello")
	c.until("it is held", func() bool { return c.server.router.CountWaiting() == 1 })
	before := c.made(1)
	c.setFleet(0, 1)
	if _, ok := <-served; !ok || c.made(1) == before {
		t.Error("the backend that joined did not serve it")
	}
	c.settled()
}

func TestBackendURLChange(t *testing.T) {
	t.Parallel()
	c := startChanging(t, 3)
	c.setFleet(0, 1)
	clients := c.crowd(4)
	for to := range 6 {
		c.change(func(next *config.Config) { next.Backends[0].URL = c.replicas[2*(to%2)].URL() })
		clients.more(20)
	}
	clients.leave()
	c.until("the others are gone", func() bool { return len(c.server.registry.All()) == 2 })
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
		c.until("the guest is ready", func() bool { b := c.server.registry.Find(name); return b != nil && b.State() == backends.Ready })
		clients.more(2)
		if b := c.server.registry.Find(name); b.Slot > 4 {
			t.Fatalf("guest %d has slot %d", i, b.Slot)
		}
	}
	measure := func() (goroutines int, heap uint64) {
		c.until("guests before are gone", func() bool { return len(c.server.registry.All()) == 2 })
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

func TestRemovedBackendFinishesRequests(t *testing.T) {
	t.Parallel()
	c := startChanging(t, 2)
	s := c.long("a long story")
	b := c.backend(s.replica)
	c.setFleet(1 - s.replica)
	c.until("it drains", func() bool { return b.State() == backends.Draining })
	if n := metricSum(t, c.admin, "warmroute_backend_draining", b.Name); n != 1 {
		t.Errorf("backend_draining is %v", n)
	}
	if to := c.goesTo("sim", "a short one"); c.server.registry.All()[to] == b {
		t.Error("a request went to a backend that leaves")
	}
	s.leave() // the last one
	c.until("it is gone", func() bool { return c.server.registry.Find(b.Name) == nil })
	if n := metricSum(t, c.admin, "warmroute_requests_total", b.Name); n != 0 {
		t.Errorf("its series are still there: %v requests", n)
	}
	c.settled(b)
}

func TestRemovedBackendEndsRequestsAtTimeout(t *testing.T) {
	t.Parallel()
	c := startChanging(t, 2)
	s := c.long("a long story")
	b := c.backend(s.replica)
	c.change(func(next *config.Config) { next.Timeouts.Shutdown = 100 * time.Millisecond })
	c.setFleet(1 - s.replica)
	c.until("it is gone", func() bool { return c.server.registry.Find(b.Name) == nil })
	if rest, err := io.ReadAll(s.in); err != nil || !strings.Contains(string(rest), `"error"`) {
		t.Errorf("%v, and no error event in what followed", err)
	}
	c.settled(b)
}

func TestRemovalCancelled(t *testing.T) {
	t.Parallel()
	c := startChanging(t, 2)
	holder := c.goesTo("sim", known+"one")
	s := c.long(known + "two")
	if s.replica != holder {
		t.Fatalf("went to %d, and the prefix is on %d", s.replica, holder)
	}
	b := c.backend(holder)
	c.setFleet(1 - holder)
	c.until("it drains", func() bool { return b.State() == backends.Draining })
	c.setFleet(1-holder, holder)
	s.leave()
	c.until("it is ready", func() bool { return c.isReady(holder) })
	if c.backend(holder) != b {
		t.Error("another backend has its name")
	}
	blocks := 0
	parts, _ := c.server.router.IndexStats()
	for _, p := range parts {
		if p.Backend == b {
			blocks = p.Blocks
		}
	}
	if blocks == 0 {
		t.Error("what it holds was forgotten")
	}
	c.settled(b)
}

func TestTransportChangeKeepsRequestsInFlight(t *testing.T) {
	t.Parallel()
	c := startChanging(t, 1)
	s := c.long("a long story")
	old := c.backend(0).Options().Transport
	c.change(func(next *config.Config) { next.Timeouts.Connect *= 2 })
	if c.backend(0).Options().Transport == old {
		t.Fatal("the transport is the same")
	}
	c.goesTo("sim", "over the new one")
	if line, err := s.in.ReadString('\n'); err != nil || strings.Contains(line, "error") {
		t.Errorf("the stream: %q, %v", line, err)
	}
	s.leave()
	c.settled()
}

// Requests held by the rule before are sent under one that holds none.
func TestPolicyWithoutQueueSendsQueuedRequests(t *testing.T) {
	t.Parallel()
	c := startChanging(t, 1)
	c.change(func(next *config.Config) { next.Backends[0].MaxInFlight = 1 })
	s := c.long("a long story")
	served := c.ask("waits for a place")
	c.until("it is held", func() bool { return c.server.router.CountWaiting() == 1 })
	c.change(func(next *config.Config) {
		next.Routing.Policy = "least-load"
		next.Backends[0].MaxInFlight = 0
	})
	if _, ok := <-served; !ok {
		t.Error("it was not served")
	}
	s.leave()
	c.settled()
}

// The file that ca_file names may change while its name stays.
func TestCAFileContentChange(t *testing.T) {
	t.Parallel()
	url, right := standIn{}.startTLS(t)
	caFile := filepath.Join(t.TempDir(), "ca.pem")
	writeCertificate(t, caFile)
	f := startFronted(t, func(c *config.Config) { trust(t, &c.Backends[0], caFile) }, url)
	f.logs("certificate signed by unknown authority")
	copyFile(t, right, caFile)
	next := *f.server.config
	next.Backends = slices.Clone(next.Backends)
	trust(t, &next.Backends[0], caFile)
	f.server.updateFleet(t, &next)
	f.ready(1)
	carries := f.server.registry.All()[0].Options().Transport
	f.server.updateFleet(t, &next)
	if f.server.registry.All()[0].Options().Transport != carries {
		t.Error("the same authority got another transport")
	}
	f.checkServed()
}

// writeCertificate writes a certificate that nobody uses.
func writeCertificate(t *testing.T, file string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), cryptorand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	signed, err := x509.CreateCertificate(cryptorand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: signed}), 0o600); err != nil {
		t.Fatal(err)
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	data, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// set makes the fleet one of the replicas at so many places, by name.
func (c *changing) set(fleet map[string]string) {
	c.t.Helper()
	c.change(func(next *config.Config) {
		next.Backends = nil
		for _, name := range slices.Sorted(maps.Keys(fleet)) {
			next.Backends = append(next.Backends, config.Backend{Name: name, URL: fleet[name], Weight: 1})
		}
	})
}

// Whoever leaves serves until those that join are ready. A second change may come
// before.
func TestReuseNameOrURLOfRemovedBackend(t *testing.T) {
	t.Parallel()
	dead := unusedURL
	for name, second := range map[string]func(c *changing) map[string]string{
		"the name": func(c *changing) map[string]string {
			return map[string]string{"new": dead, "r0": c.replicas[2].URL(), "r1": c.replicas[1].URL()}
		},
		"the URL": func(c *changing) map[string]string {
			return map[string]string{"new": dead, "other": c.replicas[0].URL(), "r1": c.replicas[1].URL()}
		},
		"the URL, and no other is left": func(c *changing) map[string]string {
			return map[string]string{"other": c.replicas[0].URL()}
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := startChanging(t, 3)
			c.setFleet(0, 1)
			c.until("the third is gone", func() bool { return len(c.server.registry.All()) == 2 })
			c.set(map[string]string{"new": dead, "r1": c.replicas[1].URL()})
			fleet := second(c)
			c.set(fleet)
			for name, url := range fleet {
				if b := c.server.registry.Find(name); b == nil || b.URL.String() != url || b.Retiring() {
					t.Errorf("%s is not at %s", name, url)
				}
			}
			c.goesTo("sim", "hello")
			c.settled()
		})
	}
}

// Nothing is held here, so that each request needs a backend at once.
func TestRemovalWaitsForLaterAddedBackends(t *testing.T) {
	for name, changes := range map[string][2]map[string]string{
		"instead of the first":  {{"new": unusedURL}, {"new": unusedURL}},
		"which only takes away": {{"r0": "", "new": unusedURL}, {"new": ""}},
	} {
		t.Run(name, func(t *testing.T) {
			c := startChanging(t, 2)
			c.change(func(next *config.Config) { next.Routing.Queue.Requests = 0 })
			c.setFleet(0)
			c.until("the second is gone", func() bool { return len(c.server.registry.All()) == 1 })
			urls := map[string]string{"r0": c.replicas[0].URL()}
			clients := c.crowd(2)
			for _, fleet := range changes {
				for name, url := range fleet {
					if url != "" {
						urls[name] = url
					}
					fleet[name] = urls[name]
				}
				c.set(fleet)
			}
			clients.more(50)
			c.setFleet(0)
			clients.leave()
			c.settled()
		})
	}
}

// Where no replica of a test can come to listen: ports that the system never gives
// away.
const unusedURL, otherUnusedURL = "http://127.0.0.1:9", "http://127.0.0.1:13"

func TestRemovalCancelledWithNewTransports(t *testing.T) {
	t.Parallel()
	c := startChanging(t, 2)
	s := c.long("a long story")
	b := c.backend(s.replica)
	before := b.Options().Transport
	c.setFleet(1 - s.replica)
	c.until("it drains", func() bool { return b.State() == backends.Draining })
	c.change(func(next *config.Config) { next.Timeouts.Connect *= 2 })
	c.setFleet(1-s.replica, s.replica)
	if b.Retiring() || b.Options().Transport == before {
		t.Error("it has the transport of the settings before")
	}
	s.leave()
	c.settled()
}

// A signal that came during the start is heeded as soon as the service runs.
func TestFleetUpdateAfterStart(t *testing.T) {
	t.Parallel()
	c := loadConfig(t, "listen: 127.0.0.1:0\nadmin: \"\"", "http://127.0.0.1:1", "http://127.0.0.1:2")
	s, err := New(Options{Config: c, Policies: policies.All(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer s.listeners.closeAndWait()
	ctx, stop := context.WithCancel(t.Context())
	ends := s.fleet.Start(ctx)
	next := *c
	next.Backends = c.Backends[:1]
	s.updateFleet(t, &next)
	for len(s.registry.All()) > 1 {
		time.Sleep(10 * time.Millisecond)
	}
	stop()
	ends()
}

// startTLS serves the replica over https, and writes the certificate that it made
// for itself to a file. The certificate is for 127.0.0.1 and example.com.
func (s standIn) startTLS(t *testing.T) (url, caFile string) {
	t.Helper()
	server := httptest.NewUnstartedServer(s.handler())
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	t.Cleanup(server.Close)
	caFile = filepath.Join(t.TempDir(), "ca.pem")
	block := &pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}
	if err := os.WriteFile(caFile, pem.EncodeToMemory(block), 0o600); err != nil {
		t.Fatal(err)
	}
	return server.URL, caFile
}

// trust gives the backend a file of authorities, as loading does.
func trust(t *testing.T, b *config.Backend, caFile string) {
	t.Helper()
	pem, err := os.ReadFile(caFile)
	if err != nil {
		t.Fatal(err)
	}
	b.CAFile, b.CA = caFile, string(pem)
}

// Requests, readiness checks and polls all go by the backend's own authority.
func TestBackendCAFile(t *testing.T) {
	t.Parallel()
	url, caFile := standIn{}.startTLS(t)
	other, otherFile := standIn{}.startTLS(t)
	named := strings.Replace(other, "127.0.0.1", "localhost", 1)
	f := startFronted(t, func(c *config.Config) {
		trust(t, &c.Backends[0], caFile)
		trust(t, &c.Backends[1], otherFile)
		c.Backends[1].ServerName = "example.com"
	}, url, named)
	f.ready(2)
	for _, b := range f.server.registry.All() {
		f.until("polled", func() bool { return b.Load() != nil })
	}
	for range 4 {
		f.checkServed()
	}
}

func TestBackendConnectionAdvice(t *testing.T) {
	url, caFile := standIn{}.startTLS(t)
	plain := standIn{}.start(t)
	for name, f := range map[string]struct {
		url    string
		change func(*config.Backend)
		why    string
	}{
		"no authority given":  {url, func(*config.Backend) {}, "certificate signed by unknown authority; set the backend's ca_file"},
		"plain HTTP at https": {strings.Replace(plain, "http:", "https:", 1), func(*config.Backend) {}, "give the backend an http:// URL"},
		"HTTPS at http":       {strings.Replace(url, "https:", "http:", 1), func(*config.Backend) {}, "give the backend an https:// URL"},
		"not its name": {strings.Replace(url, "127.0.0.1", "localhost", 1), func(b *config.Backend) { trust(t, b, caFile) },
			"set the backend's server_name to one that it has"},
		"nor the one given": {url, func(b *config.Backend) { trust(t, b, caFile); b.ServerName = "other.org" }, "certificate is valid for"},
	} {
		t.Run(name, func(t *testing.T) {
			p := startFronted(t, func(c *config.Config) {
				f.change(&c.Backends[0])
				c.Health.Timeout = time.Minute // a check that times out first would be the reason in the log
			}, f.url)
			p.logs(f.why)
			p.ready(0)
		})
	}
}
