package server

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"io"
	"log/slog"
	"maps"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/config"
)

func TestRemovedBackendFinishesRequests(t *testing.T) {
	c := startChanging(t, 2)
	s := c.long("a long story")
	b := c.backend(s.replica)
	c.setFleet(1 - s.replica)
	c.until("it drains", func() bool { return b.State() == backends.Draining })
	if n := metricSum(t, c.admin, "warmroute_backend_draining", b.Name); n != 1 {
		t.Errorf("backend_draining is %v", n)
	}
	if to := c.goesTo("sim", "a short one"); c.server.fleet.registry.All()[to] == b {
		t.Error("a request went to a backend that leaves")
	}
	s.leave() // the last one
	c.until("it is gone", func() bool { return c.server.fleet.registry.Find(b.Name) == nil })
	if n := metricSum(t, c.admin, "warmroute_requests_total", b.Name); n != 0 {
		t.Errorf("its series are still there: %v requests", n)
	}
	c.settled(b)
}

func TestRemovedBackendAbortsRequestsAtTimeout(t *testing.T) {
	c := startChanging(t, 2)
	s := c.long("a long story")
	b := c.backend(s.replica)
	c.change(func(next *config.Config) { next.Timeouts.Shutdown = 100 * time.Millisecond })
	c.setFleet(1 - s.replica)
	c.until("it is gone", func() bool { return c.server.fleet.registry.Find(b.Name) == nil })
	if rest, err := io.ReadAll(s.in); err != nil || !strings.Contains(string(rest), `"error"`) {
		t.Errorf("%v, and no error event in what followed", err)
	}
	c.settled(b)
}

func TestRemovalCancelled(t *testing.T) {
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
	c := startChanging(t, 1)
	c.change(func(next *config.Config) { next.Backends[0].MaxInFlight = 1 })
	s := c.long("a long story")
	served := c.ask("waits for a place")
	c.until("it is held", func() bool { return c.server.router.WaitingRequests() == 1 })
	c.change(func(next *config.Config) {
		next.Routing.Policy = "least-load"
		next.Backends[0].MaxInFlight = 0
	})
	if _, ok := <-served; !ok {
		t.Error("it was not answered")
	}
	s.leave()
	c.settled()
}

// The file that ca_file names may change while its name stays.
func TestCAFileContentChange(t *testing.T) {
	url, right := standIn{}.startTLS(t)
	caFile := filepath.Join(t.TempDir(), "ca.pem")
	writeCertificate(t, caFile)
	f := startFronted(t, func(c *config.Config) { trust(t, &c.Backends[0], caFile) }, url)
	f.logs("certificate signed by unknown authority")
	copyFile(t, right, caFile)
	next := *f.server.config
	next.Backends = slices.Clone(next.Backends)
	trust(t, &next.Backends[0], caFile)
	if err := f.server.fleet.update(&next); err != nil {
		t.Fatal(err)
	}
	f.ready(1)
	carries := f.server.fleet.registry.All()[0].Options().Transport
	if err := f.server.fleet.update(&next); err != nil {
		t.Fatal(err)
	}
	if f.server.fleet.registry.All()[0].Options().Transport != carries {
		t.Error("the same authority got another transport")
	}
	f.answered()
}

// writeCertificate writes a certificate that nobody uses.
func writeCertificate(t *testing.T, file string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	signed, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
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
			c.until("the third is gone", func() bool { return len(c.server.fleet.registry.All()) == 2 })
			c.set(map[string]string{"new": dead, "r1": c.replicas[1].URL()})
			fleet := second(c)
			c.set(fleet)
			for name, url := range fleet {
				if b := c.server.fleet.registry.Find(name); b == nil || b.URL.String() != url || b.Retiring() {
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
			c.until("the second is gone", func() bool { return len(c.server.fleet.registry.All()) == 1 })
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
	c := loadConfig(t, "listen: 127.0.0.1:0\nadmin: \"\"", "http://127.0.0.1:1", "http://127.0.0.1:2")
	s, err := New(Options{Config: c, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer s.listeners.close()
	ctx, stop := context.WithCancel(t.Context())
	ends := s.fleet.start(ctx)
	next := *c
	next.Backends = c.Backends[:1]
	if err := s.fleet.update(&next); err != nil {
		t.Fatal(err)
	}
	for len(s.fleet.registry.All()) > 1 {
		time.Sleep(pollInterval)
	}
	stop()
	ends()
}
