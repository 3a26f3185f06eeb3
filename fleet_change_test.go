package main

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
)

func TestABackendThatLeavesFinishesWhatItHas(t *testing.T) {
	c := startChanging(t, 2)
	s := c.long("a long story")
	b := c.backend(s.replica)
	c.setFleet(1 - s.replica)
	c.until("it drains", func() bool { return b.State() == backends.Draining })
	if n := metricSum(t, c.admin, "warmroute_backend_draining", b.Name); n != 1 {
		t.Errorf("backend_draining is %v", n)
	}
	if to := c.goesTo("sim", "a short one"); c.service.registry.All()[to] == b {
		t.Error("a request went to a backend that leaves")
	}
	s.leave() // the last one
	c.until("it is gone", func() bool { return c.service.registry.Find(b.Name) == nil })
	if n := metricSum(t, c.admin, "warmroute_requests_total", b.Name); n != 0 {
		t.Errorf("its series are still there: %v requests", n)
	}
	c.settled(b)
}

func TestWhatABackendStillHasAtTheLimitIsCutOff(t *testing.T) {
	c := startChanging(t, 2)
	s := c.long("a long story")
	b := c.backend(s.replica)
	c.change(func(next *Config) { next.Timeouts.Shutdown = 100 * time.Millisecond })
	c.setFleet(1 - s.replica)
	c.until("it is gone", func() bool { return c.service.registry.Find(b.Name) == nil })
	if rest, err := io.ReadAll(s.in); err != nil || !strings.Contains(string(rest), `"error"`) {
		t.Errorf("%v, and no error event in what followed", err)
	}
	c.settled(b)
}

func TestABackendThatComesBackInTimeKeepsWhatIsKnownOfIt(t *testing.T) {
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
	parts, _ := c.service.router.Index()
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

func TestOtherTransportsLeaveRequestsUnderWayAlone(t *testing.T) {
	c := startChanging(t, 1)
	s := c.long("a long story")
	old := c.backend(0).Terms().Transport
	c.change(func(next *Config) { next.Timeouts.Connect *= 2 })
	if c.backend(0).Terms().Transport == old {
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
func TestAPolicyThatHoldsNothingSendsWhatIsHeld(t *testing.T) {
	c := startChanging(t, 1)
	c.change(func(next *Config) { next.Backends[0].MaxInFlight = 1 })
	s := c.long("a long story")
	served := c.ask("waits for a place")
	c.until("it is held", func() bool { return c.service.router.HeldRequests() == 1 })
	c.change(func(next *Config) {
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
func TestAReloadTakesAReplicasNewAuthority(t *testing.T) {
	url, right := standIn{}.startTLS(t)
	caFile := filepath.Join(t.TempDir(), "ca.pem")
	copyFile(t, newPEMPair(t).cert, caFile)
	f := startFronted(t, func(c *Config) { c.Backends[0].trust(t, caFile) }, url)
	f.logs("certificate signed by unknown authority")
	copyFile(t, right, caFile)
	next := *f.service.config
	next.Backends = slices.Clone(next.Backends)
	next.Backends[0].trust(t, caFile)
	if err := f.service.fleet.apply(&next); err != nil {
		t.Fatal(err)
	}
	f.ready(1)
	carries := f.service.registry.All()[0].Terms().Transport
	if err := f.service.fleet.apply(&next); err != nil {
		t.Fatal(err)
	}
	if f.service.registry.All()[0].Terms().Transport != carries {
		t.Error("the same authority got another transport")
	}
	f.answered()
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
