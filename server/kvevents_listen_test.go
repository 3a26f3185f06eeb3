package server

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"testing"

	"warmroute/kvevents"
	"warmroute/lab/policies"
	"warmroute/lab/sim"
	"warmroute/router"
)

// kvListener is a port to which replicas connect, before the proxy that listens there.
func kvListener(t *testing.T) net.Listener {
	t.Helper()
	socket, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return socket
}

// connecting returns replicas that publish to a socket.
func connecting(c sim.Config, socket net.Listener) sim.Config {
	c.KVEvents = sim.KVEventsConfig{Connect: "tcp://" + socket.Addr().String()}
	return c
}

// listenFor starts a proxy for the replicas, to which replicas can connect.
func (g *guarded) listenFor(sockets ...net.Listener) {
	g.t.Helper()
	c := loadConfig(g.t, "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\n", g.replicaURLs()...)
	c.KVEvents = kvevents.Settings{Listen: "tcp://" + sockets[0].Addr().String(), Ports: len(sockets)}
	s, err := New(Options{Config: c, Policies: policies.All(), Log: slog.New(slog.NewTextHandler(&g.log, nil)),
		process: process{inherited: &inherited{kvEvents: sockets}}})
	if err != nil {
		g.t.Fatal(err)
	}
	runUntilStopped(g.t, s.Run)
	g.use(s)
	g.until("events are expected", func() bool {
		parts, _ := g.server.router.IndexStats()
		for _, b := range g.server.registry.All() {
			if parts[b.Slot].KV == nil {
				return false
			}
		}
		return true
	})
}

// startConnecting starts a fleet whose replicas connect to publish their KV events.
func startConnecting(t *testing.T, n int, c sim.Config) *guarded {
	t.Helper()
	g, socket := &guarded{t: t}, kvListener(t)
	for range n {
		s, _ := g.startReplica(connecting(c, socket))
		g.replicas = append(g.replicas, s)
	}
	g.listenFor(socket)
	g.awaitPublishers(n, g.replicas...)
	return g
}

// awaitPublishers blocks until so many publishers are connected, and those of the replicas have our subscription: what they
// publish before is lost.
func (g *guarded) awaitPublishers(n int, replicas ...*sim.Server) {
	g.t.Helper()
	g.until(fmt.Sprintf("%d replicas have connected", n), func() bool {
		return metricSum(g.t, g.admin, "warmroute_kv_event_connections") == float64(n) &&
			!slices.ContainsFunc(replicas, func(s *sim.Server) bool { return !s.HasKVEventSubscribers() })
	})
}

func (g *guarded) feeding() float64 {
	return metricSum(g.t, g.admin, "warmroute_kv_event_connected_engines")
}

func TestKVEventsOfConnectingReplicas(t *testing.T) {
	t.Parallel()
	g := startConnecting(t, 2, publishing)
	holder := g.checkOtherClient()
	if n := g.feeding(); n != 2 {
		t.Errorf("the events of %v engines are read, want 2", n)
	}

	resp, err := g.client.Get(g.admin + "/api/state")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var state struct {
		Backends []struct {
			KVEvents *struct {
				Blocks    int `json:"kv_blocks"`
				Confirmed int `json:"confirmed_blocks"`
				Complete  bool
			} `json:"kv_events"`
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&state); err != nil {
		t.Fatal(err)
	}
	for i, b := range state.Backends {
		if b.KVEvents == nil || !b.KVEvents.Complete || b.KVEvents.Blocks == 0 || (b.KVEvents.Confirmed > 0) != (i == holder) {
			t.Errorf("replica %d: state %+v", i, b.KVEvents)
		}
	}
}

// A replica that restarts connects again, and its sequence begins again.
func TestRestartOfConnectingReplica(t *testing.T) {
	t.Parallel()
	g := startConnecting(t, 1, publishing)
	long := strings.Repeat("You answer in short sentences. ", 200)
	g.chat(g.url, long)
	g.until("the request is settled", func() bool { return g.confirmed(0) > 20 && g.kvStatus(0).Complete })
	held := g.kvStatus(0).KVBlocks
	g.fault(0, sim.Fault{Kind: sim.Restart})
	g.until("its connection has ended", func() bool { return g.feeding() == 0 })
	g.awaitPublishers(1, g.replicas...)
	g.chat(g.replicas[0].URL(), "A short prompt of another client, which is long enough to fill one or two blocks of the KV cache.")
	g.until("nothing else is held", func() bool { s := g.kvStatus(0); return s.Complete && s.KVBlocks > 0 && s.KVBlocks < held/2 })
	g.chat(g.url, long).checkPrediction(t, "after a restart")
	g.until("the request is settled", func() bool { return g.confirmed(0) > 20 })
	g.chat(g.url, long+"more").checkPrediction(t, "computed again")
}

// Lost events are a gap, which nothing replays: the proxy's own account counts.
func TestLostEventsOfConnectingReplica(t *testing.T) {
	t.Parallel()
	g := startConnecting(t, 1, publishing)
	long := strings.Repeat("You answer in short sentences. ", 200)
	g.chat(g.url, "0"+long)
	g.until("the request is settled", func() bool { return g.confirmed(0) > 20 && g.kvStatus(0).Complete })
	g.fault(0, sim.Fault{Kind: sim.EventsLost, Every: 3})
	for i := 0; g.kvStatus(0).Complete; i++ {
		g.chat(g.url, fmt.Sprint(i, " another prompt that stores a block or two with its output of forty tokens"))
	}
	if r := g.chat(g.url, "0"+long); r.cached < 1000 || r.predicted < r.cached-64 {
		t.Errorf("%d tokens expected to be cached by the proxy's own account, %d were", r.predicted, r.cached)
	}
	if n := metricSum(t, g.admin, "warmroute_kv_event_missed_batches_total"); n == 0 {
		t.Error("no missed batches are counted")
	}
}

// Two replicas that state the same address: the first one counts until it ends.
func TestTwoReplicasOfOneTopic(t *testing.T) {
	t.Parallel()
	g, socket := &guarded{t: t}, kvListener(t)
	c := connecting(publishing, socket)
	c.KVEvents.Topic = "kv@127.0.0.1@sim" // of the only backend here
	ours, _ := g.startReplica(c)
	g.replicas = append(g.replicas, ours)
	other, stopOther := g.startReplica(c)
	g.listenFor(socket)
	g.awaitPublishers(2, ours, other)

	g.chat(other.URL(), strings.Repeat("What the other replica holds. ", 100))
	g.until("the first one counts", func() bool { return g.kvStatus(0).KVBlocks > 20 })
	before := g.kvStatus(0).KVBlocks
	g.chat(ours.URL(), strings.Repeat("What our replica holds. ", 100))
	g.until("the second one is refused", func() bool {
		return metricSum(t, g.admin, "warmroute_kv_event_refused_connections_total") == 1
	})
	if n := g.kvStatus(0).KVBlocks; n < before || n > before+10 { // the last ones of the first replica's output may have come since
		t.Errorf("%d KV blocks after events of a second replica, %d before", n, before)
	}
	if log := g.log.String(); !strings.Contains(log, "KV event connection refused") || !strings.Contains(log, "topic=kv@127.0.0.1@sim") {
		t.Errorf("log: %s", log)
	}
	stopOther()
	g.until("the first one has ended", func() bool { return g.feeding() == 0 })
	g.awaitPublishers(1, ours)
	g.chat(ours.URL(), strings.Repeat("What our replica holds now. ", 100))
	g.until("the second one counts", func() bool { return g.feeding() == 1 })
}

// Bytes that mean nothing, and replicas that are no backends, have no effect on others.
func TestStrangersAtKVListener(t *testing.T) {
	t.Parallel()
	g := startConnecting(t, 1, publishing)
	address := g.server.listeners.kvEvents[0].Addr().String()
	c := publishing
	c.KVEvents = sim.KVEventsConfig{Connect: "tcp://" + address}
	stranger, stopStranger := g.startReplica(c)
	g.awaitPublishers(2, stranger)
	g.chat(stranger.URL(), strings.Repeat("What no backend holds. ", 100))
	g.until("its messages are ignored", func() bool {
		return metricSum(t, g.admin, "warmroute_kv_event_ignored_messages_total") > 0
	})
	for _, sent := range []string{"GET / HTTP/1.1\r\n\r\n", strings.Repeat("\x00", 1000), "\xff" + strings.Repeat("\x7f", 200)} {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(conn, sent)
		io.Copy(io.Discard, conn)
		conn.Close()
	}
	long := strings.Repeat("You answer in short sentences. ", 200)
	g.chat(g.url, long)
	g.until("the request is settled", func() bool { return g.confirmed(0) > 20 && g.kvStatus(0).Complete })
	g.chat(g.url, long+"more").checkPrediction(t, "beside strangers")
	stopStranger()
	g.awaitPublishers(1)
}

// A reload leaves the connections alone. Another address needs a restart.
func TestReloadWithKVListener(t *testing.T) {
	t.Parallel()
	g := startConnecting(t, 1, publishing)
	g.chat(g.url, strings.Repeat("You answer in short sentences. ", 200))
	g.until("the request is settled", func() bool { return g.confirmed(0) > 20 && g.kvStatus(0).Complete })
	held := g.kvStatus(0).KVBlocks
	changed := loadConfig(t, "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nlog: {level: warn}\nkv_events: {listen: \"tcp://127.0.0.1:1\"}\n",
		g.replicaURLs()...)
	if !g.server.applyReload(changed, nil) {
		t.Fatalf("the reload failed: %s", g.log.String())
	}
	if s := g.kvStatus(0); g.feeding() != 1 || !s.Complete || s.KVBlocks != held {
		t.Errorf("%v engines are read, state %+v", g.feeding(), s)
	}
	if !strings.Contains(g.log.String(), `msg="setting change requires a restart" setting=kv_events.listen`) {
		t.Errorf("log: %s", g.log.String())
	}
}

// A rank connects to the port above by its number. Each is a backend.
func TestConnectingRanks(t *testing.T) {
	t.Parallel()
	var sockets []net.Listener
	for len(sockets) < 3 { // consecutive ports
		closeSockets(sockets)
		sockets = []net.Listener{kvListener(t)}
		for i := 1; i < 3; i++ {
			next, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", sockets[0].Addr().(*net.TCPAddr).Port+i))
			if err != nil {
				break
			}
			sockets = append(sockets, next)
		}
	}
	c := publishing
	c.Ranks, c.Rank.First = 2, 1
	c = connecting(c, sockets[0])
	g := &guarded{t: t}
	s, _ := g.startReplica(c)
	g.replicas = append(g.replicas, s)
	g.listenFor(sockets...)
	g.until("there are two backends, whose events are expected", func() bool {
		parts, _ := g.server.router.IndexStats()
		all := g.server.registry.All()
		return len(all) == 2 && parts[all[0].Slot].KV != nil && parts[all[1].Slot].KV != nil
	})
	g.awaitPublishers(2, s)
	ranks := func() (known []*router.KVStatus) {
		parts, _ := g.server.router.IndexStats()
		for _, b := range g.server.registry.All() {
			known = append(known, parts[b.Slot].KV)
		}
		return known
	}
	for i := 0; slices.ContainsFunc(ranks(), func(kv *router.KVStatus) bool { return !kv.Complete }); i++ {
		g.chat(g.url, strings.Repeat(fmt.Sprint("prompt", i), 400))
	}
	g.until("the prompts are settled", func() bool {
		return !slices.ContainsFunc(ranks(), func(kv *router.KVStatus) bool { return kv.Confirmed < 10 })
	})
	if n := g.feeding(); n != 2 {
		t.Errorf("events of %v engines are received, want 2", n)
	}
}

// A port that is taken ends the start, and leaves no listener open.
func TestKVListenerInUse(t *testing.T) {
	t.Parallel()
	taken := kvListener(t)
	defer taken.Close()
	c := loadConfig(t, "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\n", "http://127.0.0.1:1")
	c.KVEvents = kvevents.Settings{Listen: "tcp://" + taken.Addr().String(), Ports: 1}
	_, err := New(Options{Config: c, Policies: policies.All(), Log: slog.New(slog.DiscardHandler)})
	if err == nil || !strings.Contains(err.Error(), "set another address with kv_events.listen") {
		t.Errorf("error %v", err)
	}
}
