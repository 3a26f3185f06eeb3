package server

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"warmroute/admin"
	"warmroute/config"
	"warmroute/sim"
)

// state is what the admin listener shows.
func (g *guarded) state() (s admin.State) {
	g.t.Helper()
	resp, err := g.client.Get(g.admin + "/api/state")
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&s); err != nil || resp.StatusCode != http.StatusOK {
		g.t.Fatalf("status %d: %v", resp.StatusCode, err)
	}
	return s
}

func TestStateOfStalledBackend(t *testing.T) {
	g := startGuarded(t, 2, sim.Config{}, nil)
	began := time.Now()
	stalled := g.long("a long answer").replica
	g.fault(stalled, sim.Fault{Kind: sim.Freeze})
	g.until("the backend is shown as stalled", func() bool { return g.state().Backends[stalled].State == "stalled" })
	s := g.state()
	b, other := s.Backends[stalled], s.Backends[1-stalled]
	if b.Reason == "" || b.Since == nil || b.Since.Before(began) || b.Since.After(time.Now()) || b.LastReadyFor != nil {
		t.Errorf("the stalled one: %+v", b)
	}
	if other.State != "ready" || other.Reason != "" || len(other.LastReadyFor) != 1 || other.LastReadyFor[0] != "sim" {
		t.Errorf("the other one: %+v", other)
	}
	if m := s.Models; m.All != 1 || m.Unready != 0 || len(m.Listed) != 1 || m.Listed[0].ID != "sim" || m.Listed[0].Ready != 1 || m.Listed[0].Backends != 2 || m.Listed[0].Reason != "" {
		t.Errorf("models: %+v", m)
	}
	if r := s.Requests.Oldest; len(r) != 1 || !r[0].Stalled || r[0].Phase != "answering" {
		t.Errorf("requests: %+v", r)
	}
	g.fault(stalled, sim.Fault{Kind: sim.Clear})
	g.until("it is ready again", func() bool { return g.state().Backends[stalled].State == "ready" })
	g.until("its stream goes on", func() bool { r := g.state().Requests.Oldest; return len(r) == 1 && !r[0].Stalled })
}

func TestStateOfDownBackend(t *testing.T) {
	g := startGuarded(t, 1, sim.Config{}, func(c *config.Config) { c.Health.Interval = 100 * time.Millisecond })
	began := time.Now()
	g.fault(0, sim.Fault{Kind: sim.Status, Status: 503, Everything: true})
	g.until("the backend is shown as down", func() bool { return g.state().Backends[0].State == "down" })
	s := g.state()
	if b := s.Backends[0]; b.Reason != "/health answered 503" || b.Since == nil || b.Since.Before(began) || b.LastReadyFor != nil {
		t.Errorf("got %+v", b)
	}
	m := s.Models
	if m.All != 1 || m.Unready != 1 || m.Listed[0].Ready != 0 || m.Listed[0].Backends != 1 || m.Listed[0].Since == nil || !strings.Contains(m.Listed[0].Reason, g.server.fleet.registry.All()[0].Name+" is down") {
		t.Errorf("models: %+v", m)
	}
	g.fault(0, sim.Fault{Kind: sim.Clear})
	g.until("it is ready again", func() bool { return g.state().Backends[0].State == "ready" })
	if m := g.state().Models; m.Unready != 0 || m.Listed[0].Ready != 1 {
		t.Errorf("models: %+v", m)
	}
}

func TestStateOfDrainedBackend(t *testing.T) {
	g := startGuarded(t, 2, sim.Config{}, nil)
	s := g.long("a long answer")
	name := g.server.fleet.registry.All()[s.replica].Name
	post := func(verb string) {
		t.Helper()
		resp, err := g.client.Post(g.admin+"/api/backends/"+name+"/"+verb, "application/json", nil)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	post("drain")
	if b := g.state().Backends[s.replica]; b.State != "draining" || !b.Drained || b.Reason != "drained by an operator" || b.Since == nil {
		t.Errorf("with a request in flight: %+v", b)
	}
	s.leave()
	g.until("it is shown as drained", func() bool { return g.state().Backends[s.replica].State == "drained" })
	post("undrain")
	g.until("it is shown as ready", func() bool { b := g.state().Backends[s.replica]; return b.State == "ready" && b.Reason == "" })
}
