package server

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"warmroute/backends"
	"warmroute/config"
	"warmroute/fleet"
	"warmroute/lab/loadgen"
	"warmroute/lab/replay"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// nameServer is a DNS server on the loopback interface whose responses can be changed.
type nameServer struct {
	address string
	handle  atomic.Pointer[dns.HandlerFunc]
	queries atomic.Int64 // for IPv4 addresses
}

func startNameServer(t *testing.T, handle dns.HandlerFunc) *nameServer {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	packets, err := net.ListenPacket("udp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	n := &nameServer{address: listener.Addr().String()}
	n.respond(handle)
	for _, s := range []*dns.Server{{Listener: listener}, {PacketConn: packets}} {
		s.Handler = dns.HandlerFunc(func(w dns.ResponseWriter, query *dns.Msg) {
			(*n.handle.Load())(w, query)
			if query.Question[0].Qtype == dns.TypeA {
				n.queries.Add(1)
			}
		})
		started, stopped := make(chan struct{}), make(chan error, 1)
		s.NotifyStartedFunc = func() { close(started) }
		go func() { stopped <- s.ActivateAndServe() }()
		<-started
		t.Cleanup(func() {
			if err := errors.Join(s.Shutdown(), <-stopped); err != nil {
				t.Error(err)
			}
		})
	}
	return n
}

// respond makes handle respond to queries from now on.
func (n *nameServer) respond(handle dns.HandlerFunc) { n.handle.Store(&handle) }

// withAddresses responds to a query for IPv4 addresses with these, over TCP if they are many.
func withAddresses(addresses ...string) dns.HandlerFunc {
	return func(w dns.ResponseWriter, query *dns.Msg) {
		response := new(dns.Msg).SetReply(query)
		response.RecursionAvailable = true
		for _, a := range addresses {
			if query.Question[0].Qtype == dns.TypeA {
				header := dns.RR_Header{Name: query.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 600}
				response.Answer = append(response.Answer, &dns.A{Hdr: header, A: net.ParseIP(a)})
			}
		}
		if w.LocalAddr().Network() == "udp" {
			response.Truncate(dns.MinMsgSize)
		}
		_ = w.WriteMsg(response)
	}
}

// withCodes responds with one of the codes after the other.
func withCodes(codes ...int) dns.HandlerFunc {
	var n atomic.Int64
	return func(w dns.ResponseWriter, query *dns.Msg) {
		response := new(dns.Msg).SetRcode(query, codes[int(n.Add(1))%len(codes)])
		response.RecursionAvailable = true
		_ = w.WriteMsg(response)
	}
}

const discoveredName = "replicas.test"

// discovered is a proxy whose replicas are the addresses of a name. They have the same port.
type discovered struct {
	*fronted
	dns      *nameServer
	replicas map[string]*sim.Server // by address
	stop     map[string]func()
	port     string
}

// startDiscovered starts replicas at 127.0.1.1 and the addresses after it, of which the name has some at first.
func startDiscovered(t *testing.T, replicas int, initial []string, change func(*config.Config)) *discovered {
	t.Helper()
	d := &discovered{dns: startNameServer(t, withAddresses(initial...)), replicas: map[string]*sim.Server{}, stop: map[string]func(){},
		port: "0"}
	for _, address := range loopback(1, replicas) {
		s := sim.NewServer(sim.Config{Engine: engine.Config{KVTokens: 200_000, Speed: 20}})
		if err := s.Bind(address + ":" + d.port); err != nil {
			t.Fatal(err)
		}
		d.replicas[address], d.stop[address] = s, runUntilStopped(t, s.Run)
		_, d.port, _ = net.SplitHostPort(strings.TrimPrefix(s.URL(), "http://"))
	}
	d.fronted = startFronted(t, func(c *config.Config) {
		c.DNS = config.DNS{Server: d.dns.address, Interval: 10 * time.Millisecond, MaxAddresses: c.DNS.MaxAddresses}
		c.Timeouts.KeepaliveIdle = 500 * time.Millisecond
		if change != nil {
			change(c)
		}
	}, "http://"+discoveredName+":"+d.port)
	d.ready(len(initial))
	return d
}

// loopback returns addresses from 127.0.1.FIRST to 127.0.1.LAST.
func loopback(first, last int) (addresses []string) {
	for i := first; i <= last; i++ {
		addresses = append(addresses, fmt.Sprintf("127.0.1.%d", i))
	}
	return addresses
}

// awaitLookups waits until n more lookups were answered.
func (d *discovered) awaitLookups(n int64) {
	d.t.Helper()
	from := d.dns.queries.Load()
	d.until(fmt.Sprint(n, " lookups"), func() bool { return d.dns.queries.Load() >= from+n })
}

// awaitBackends waits until there are as many backends, and all are ready.
func (d *discovered) awaitBackends(n int) {
	d.t.Helper()
	d.until(fmt.Sprint(n, " backends, all ready"), func() bool {
		all := d.server.registry.All()
		return len(all) == n && !slices.ContainsFunc(all, func(b *backends.Backend) bool { return b.State() != backends.Ready })
	})
}

// backend returns the backend at one of several addresses, or nil.
func (d *discovered) backend(address string) *backends.Backend {
	return d.server.registry.Find(discoveredName + ":" + d.port + "@" + address)
}

// generated returns how many tokens the replica at an address has put out.
func (d *discovered) generated(address string) int64 {
	return d.replicas[address].Stats().GenerationTokens
}

// load is clients that chat with a proxy until stop.
type load struct {
	t       *testing.T
	began   time.Time
	tally   replay.Tally
	done    atomic.Int64
	ends    chan struct{}
	clients sync.WaitGroup
}

// startLoad starts clients that send about 24 requests a second each, if the machine can serve them.
func (d *discovered) startLoad(clients int) *load {
	l := &load{t: d.t, began: time.Now(), ends: make(chan struct{})}
	client := &loadgen.Client{
		URL: d.url, Model: "sim", HTTP: loadgen.NewHTTPClient(), Speed: 20, Timeout: time.Minute, Stop: l.ends,
		OnResult: func(r replay.Result) { l.tally.Add(r); l.done.Add(1) },
	}
	chats := &loadgen.Chats{
		Concurrency: clients, SystemPrompts: 8, SystemTokens: 200, Turns: loadgen.Range{Min: 2, Max: 6},
		UserTokens: loadgen.Range{Min: 10, Max: 40}, OutputTokens: loadgen.Range{Min: 2, Max: 6}, Think: time.Second,
	}
	l.clients.Go(func() {
		defer client.HTTP.CloseIdleConnections()
		client.RunChats(d.t.Context(), chats)
	})
	return l
}

// awaitRequests waits until n more requests have ended.
func (l *load) awaitRequests(d *discovered, n int64) {
	d.t.Helper()
	from := l.done.Load()
	d.until(fmt.Sprint(n, " requests"), func() bool { return l.done.Load() >= from+n })
}

// stop ends the load and checks that no request was lost.
func (l *load) stop() {
	l.t.Helper()
	close(l.ends)
	l.clients.Wait()
	elapsed := time.Since(l.began)
	s := l.tally.Summary("prefix", elapsed)
	l.t.Logf("%d requests in %v, %.0f a second", s.Requests, elapsed.Round(time.Millisecond), float64(s.Requests)/elapsed.Seconds())
	if s.Lost > 0 || s.Requests == 0 {
		l.t.Errorf("%d requests lost: %v", s.Lost, s.Errors)
	}
}

// checkGone fails the test unless nothing is left of the backends at addresses. all are backends that were there.
func (d *discovered) checkGone(addresses []string, all []*backends.Backend) {
	d.t.Helper()
	for _, b := range all {
		if gone := d.server.registry.Find(b.Name) == nil; gone && !b.Idle() {
			d.t.Errorf("%s: %d requests are in flight", b.Name, b.InFlight.Load())
		}
	}
	parts, _ := d.server.router.IndexStats()
	for slot, p := range parts {
		if p.Backend == nil && p.Blocks > 0 || p.Backend != nil && d.server.registry.Find(p.Backend.Name) != p.Backend {
			d.t.Errorf("slot %d has %d blocks of a backend that is gone", slot, p.Blocks)
		}
	}
	response, err := http.Get(d.admin + "/metrics")
	if err != nil {
		d.t.Fatal(err)
	}
	defer http.DefaultClient.CloseIdleConnections()
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		d.t.Fatal(err)
	}
	for _, address := range addresses {
		if strings.Contains(string(text), "@"+address+`"`) {
			d.t.Errorf("a metric has a series of %s", address)
		}
	}
}

func TestDiscoveryUnderLoad(t *testing.T) {
	all, last := loopback(1, 8), []string{"127.0.1.2", "127.0.1.5", "127.0.1.8"}
	removed := slices.DeleteFunc(slices.Clone(all), func(a string) bool { return slices.Contains(last, a) })
	d := startDiscovered(t, len(all), loopback(1, 1), nil)
	goroutines := runtime.NumGoroutine()
	load := d.startLoad(48) // 1,000 requests a second
	load.awaitRequests(d, 200)
	d.dns.respond(withAddresses(loopback(1, 2)...))
	d.awaitBackends(2)
	load.awaitRequests(d, 500)

	d.dns.respond(withAddresses(all...))
	answered := time.Now()
	d.ready(len(all))
	t.Logf("8 replicas are ready %v after the answer", time.Since(answered).Round(time.Millisecond))
	for _, address := range all {
		d.until("requests at "+address, func() bool { return d.generated(address) > 0 })
	}
	t.Logf("each has requests %v after the answer", time.Since(answered).Round(time.Millisecond))
	load.awaitRequests(d, 500)
	backendsBefore := d.server.registry.All()

	d.dns.respond(withAddresses(last...))
	answered = time.Now()
	d.awaitBackends(len(last))
	t.Logf("5 replicas are gone %v after the answer", time.Since(answered).Round(time.Millisecond))
	var before int64
	for _, address := range removed {
		before += d.generated(address)
	}
	load.awaitRequests(d, 500)
	load.stop()
	for _, address := range removed {
		before -= d.generated(address)
	}
	if before != 0 {
		t.Errorf("replicas whose addresses are gone put out %d tokens", -before)
	}
	d.checkGone(removed, backendsBefore)
	d.until("the goroutines of those that are gone have ended", func() bool { return runtime.NumGoroutine() <= goroutines+10 })
}

// TestDiscoveryWithFailingNameServer has as many lookups fail as the default interval makes in five minutes.
func TestDiscoveryWithFailingNameServer(t *testing.T) {
	addresses := loopback(1, 3)
	d := startDiscovered(t, 8, addresses, nil)
	load := d.startLoad(16)
	known := slices.Clone(d.server.registry.All())
	unchanged := func(what string, lookups int64, handle dns.HandlerFunc) {
		t.Helper()
		d.dns.respond(handle)
		d.awaitLookups(lookups)
		if got := d.server.registry.All(); !slices.Equal(got, known) {
			t.Errorf("%s: %d backends, others than before", what, len(got))
		}
	}
	unchanged("failures", 80, withCodes(dns.RcodeServerFailure, dns.RcodeRefused))
	unchanged("no such name", 20, withCodes(dns.RcodeNameError))
	unchanged("no address", 20, withAddresses())
	unchanged("null address", 20, withAddresses("0.0.0.0"))
	unchanged("all in turns", 20, withCodes(dns.RcodeServerFailure, dns.RcodeNameError, dns.RcodeSuccess, dns.RcodeRefused))
	var n atomic.Int64
	some, fail, all := withAddresses(addresses[:2]...), withCodes(dns.RcodeServerFailure), withAddresses(addresses...)
	unchanged("no third answer in a row without an address", 20, func(w dns.ResponseWriter, query *dns.Msg) {
		[]dns.HandlerFunc{some, fail, some, fail, all}[n.Add(1)%5](w, query)
	})

	d.dns.respond(withAddresses(loopback(1, 4)...))
	d.ready(4)
	load.stop()
	d.logs("DNS lookup failed")
	if n := strings.Count(d.log.String(), "DNS lookup failed"); n != 1 {
		t.Errorf("%d lines about failed lookups within a minute", n)
	}
}

// TestDiscoveryWithManyAddresses has a name with more addresses than are used, and one whose server returns others
// each time.
func TestDiscoveryWithManyAddresses(t *testing.T) {
	replicas := loopback(1, 8)
	d := startDiscovered(t, len(replicas), replicas, nil)
	load := d.startLoad(16)
	known := slices.Clone(d.server.registry.All())

	var n atomic.Int64
	d.dns.respond(func(w dns.ResponseWriter, query *dns.Msg) {
		var subset []string
		if query.Question[0].Qtype == dns.TypeA {
			at := int(n.Add(3))
			for i := range 3 {
				subset = append(subset, replicas[(at+i)%len(replicas)])
			}
		}
		withAddresses(subset...)(w, query)
	})
	d.awaitLookups(50)
	if got := d.server.registry.All(); !slices.Equal(got, known) {
		t.Errorf("subsets in rotation: %d backends, others than before", len(got))
	}

	many := slices.Clone(replicas)
	for i := range 492 {
		many = append(many, fmt.Sprintf("127.0.%d.%d", 2+i/250, 1+i%250))
	}
	d.dns.respond(withAddresses(many...))
	d.until("as many backends as may be", func() bool { return len(d.server.registry.All()) == 256 })
	d.logs("more addresses than dns.max_addresses")
	d.awaitLookups(10)
	if got := d.server.registry.All(); len(got) != 256 || !slices.Equal(got[:len(known)], known) {
		t.Errorf("%d backends", len(got))
	}
	load.awaitRequests(d, 200)
	d.dns.respond(withAddresses(replicas...))
	d.awaitBackends(len(replicas))
	load.stop()
	d.checkGone(many[len(replicas):], nil)
}

// TestDiscoveryWithInvalidResponses has the DNS server send garbage, and nothing.
func TestDiscoveryWithInvalidResponses(t *testing.T) {
	for name, handle := range map[string]dns.HandlerFunc{
		"garbage": func(w dns.ResponseWriter, _ *dns.Msg) { _, _ = w.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n")) },
		"nothing": func(dns.ResponseWriter, *dns.Msg) {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := startDiscovered(t, 3, loopback(1, 2), nil)
			clients := startCrowd(t, d.url, 4, &http.Transport{})
			known := slices.Clone(d.server.registry.All())
			d.dns.respond(handle)
			d.awaitLookups(1)
			clients.more(200)
			if got := d.server.registry.All(); !slices.Equal(got, known) {
				t.Errorf("%d backends, others than before", len(got))
			}
			d.dns.respond(withAddresses(loopback(1, 3)...))
			d.ready(3) // when the lookup that waits for a response has timed out
			clients.leave()
		})
	}
}

// TestDiscoveryOfRestartedReplica starts a replica again at another address, as containers are, and then has a
// second one beside it.
func TestDiscoveryOfRestartedReplica(t *testing.T) {
	t.Parallel()
	d := startDiscovered(t, 3, loopback(1, 1), nil)
	name := discoveredName + ":" + d.port
	b := d.server.registry.Find(name)
	request := func(address string) {
		t.Helper()
		before := d.generated(address)
		if err := askStream(d.client, d.url, "hello", 8, nil); err != nil {
			t.Error(err)
		}
		if d.generated(address) == before {
			t.Errorf("a request did not go to %s", address)
		}
	}
	request("127.0.1.1")
	d.stop["127.0.1.1"]()
	d.dns.respond(withAddresses("127.0.1.2"))
	d.ready(1)
	request("127.0.1.2")
	if d.server.registry.Find(name) != b || len(d.server.registry.All()) != 1 {
		t.Error("it is another backend")
	}
	d.dns.respond(withAddresses(loopback(2, 3)...))
	d.awaitBackends(2)
	if d.backend("127.0.1.2") == nil || d.backend("127.0.1.3") == nil {
		t.Error("they are not the backends of their addresses")
	}
	if err := askStream(d.client, d.url, "hello", 8, nil); err != nil {
		t.Error(err)
	}
	// Each remains a backend of its own.
	d.dns.respond(withAddresses("127.0.1.3"))
	d.awaitBackends(1)
	if d.backend("127.0.1.3") == nil {
		t.Error("it is not the backend of its address")
	}
	request("127.0.1.3")
}

// TestDiscoveryOfMovedName changes the only address of a name while the replica at the address before still runs, and
// clients keep the connections to it in use.
func TestDiscoveryOfMovedName(t *testing.T) {
	t.Parallel()
	d := startDiscovered(t, 2, loopback(1, 1), nil)
	b := d.server.registry.All()[0]
	clients := startCrowd(t, d.url, 8, &http.Transport{})
	clients.more(50)
	d.dns.respond(withAddresses("127.0.1.2"))
	d.until("requests at the new address", func() bool { return d.generated("127.0.1.2") > 0 })
	d.until("none at the one before", func() bool {
		before := d.generated("127.0.1.1")
		clients.more(50)
		return d.generated("127.0.1.1") == before
	})
	clients.leave()
	if all := d.server.registry.All(); len(all) != 1 || all[0] != b {
		t.Error("it is another backend")
	}
}

// TestDiscoveryOfDrainedReplica drains the backend of a name with one address before the name has a second one.
func TestDiscoveryOfDrainedReplica(t *testing.T) {
	t.Parallel()
	for _, change := range []func(*backends.Backend){
		(*backends.Backend).Drain,
		func(b *backends.Backend) { b.SetSuspension(backends.Paused) },
	} {
		d := startDiscovered(t, 2, loopback(1, 1), nil)
		change(d.server.registry.All()[0])
		d.dns.respond(withAddresses(loopback(1, 2)...))
		d.until("two backends", func() bool {
			second := d.backend("127.0.1.2")
			return len(d.server.registry.All()) == 2 && second != nil && second.State() == backends.Ready
		})
		for range 10 {
			if err := askStream(d.client, d.url, "hello", 8, nil); err != nil {
				t.Error(err)
			}
		}
		if n := d.generated("127.0.1.1"); n > 0 {
			t.Errorf("the replica has put out %d tokens", n)
		}
	}
}

// TestDrainOfNewAddresses drains the backends of a name while the one before them still has a request.
func TestDrainOfNewAddresses(t *testing.T) {
	t.Parallel()
	d := startDiscovered(t, 2, loopback(1, 1), nil)
	name, begun, ended := discoveredName+":"+d.port, make(chan struct{}), make(chan error)
	go func() { ended <- askStream(d.client, d.url, "hello", 10_000, func() { close(begun) }) }()
	<-begun
	d.dns.respond(withAddresses(loopback(1, 2)...))
	d.until("one backend is being removed, two are new", func() bool {
		b := d.server.registry.Find(name)
		return b == nil || b.Retiring() && len(d.server.registry.All()) == 3
	})
	if d.server.registry.Find(name) == nil {
		t.Fatal("the request has ended too early")
	}
	resp, err := d.client.Post(d.admin+"/api/backends/"+name+"/drain", "application/json", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	for _, address := range loopback(1, 2) {
		if b := d.backend(address); b == nil || !b.Drained() {
			t.Errorf("%s is not drained", address)
		}
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestReloadWhileNameIsAdded adds a name over the API while a reload that has it too looks it up. When both have removed
// it, it is not looked up any more.
func TestReloadWhileNameIsAdded(t *testing.T) {
	t.Parallel()
	d := startDiscovered(t, 1, loopback(1, 1), nil)
	var lookups atomic.Int64
	d.dns.respond(func(w dns.ResponseWriter, query *dns.Msg) {
		if strings.HasPrefix(query.Question[0].Name, "other.") {
			lookups.Add(1)
		}
		withAddresses("127.0.1.1")(w, query)
	})
	initial, next := d.server.config, *d.server.config
	other := config.Backend{Name: "other", URL: "dns://other.test:" + d.port, DNS: "auto", Weight: 1, KVEvents: "off", Ranks: "off"}
	next.Backends = append(slices.Clone(next.Backends), other)
	apply, err := d.server.fleet.PrepareConfig(t.Context(), &next)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := d.server.fleet.Add(t.Context(), fleet.Registration{Backend: other}); err != nil {
		t.Fatal(err)
	}
	apply()
	d.server.updateFleet(t, initial)
	if _, err := d.server.fleet.Remove("other", true); err != nil {
		t.Fatal(err)
	}
	d.awaitLookups(3) // one may be in progress
	before := lookups.Load()
	d.awaitLookups(10)
	if after := lookups.Load(); after > before {
		t.Errorf("it was looked up %d times", after-before)
	}
}

// TestRegistrationOfDiscoveredReplica registers a replica that is an address of a name already, and then removes the
// address from the name.
func TestRegistrationOfDiscoveredReplica(t *testing.T) {
	t.Parallel()
	d := startDiscovered(t, 2, loopback(1, 2), func(c *config.Config) {
		allowLoopback(c)
		c.Registration.AllowURLs = []string{"http://127.0.1.1:*"}
	})
	p, replica := registrable{d.fronted}, "http://127.0.1.1:"+d.port
	p.expect(http.StatusOK, "POST", "/workers", fmt.Sprintf(`{"url":%q}`, replica))
	isListed := func() bool {
		list := p.workers()
		return list.Total == 2 && list.Workers[0].URL == replica && list.Workers[0].IsHealthy
	}
	if !isListed() || len(d.server.registry.All()) != 2 || d.backend("127.0.1.1") == nil {
		t.Errorf("listed as %+v", p.workers())
	}
	d.dns.respond(withAddresses("127.0.1.2"))
	d.until("it is a backend of its own", func() bool { return d.backend("127.0.1.1") == nil && isListed() })
}

// TestDiscoveryReload changes how many addresses are used, and whether the name is looked up at all.
func TestDiscoveryReload(t *testing.T) {
	t.Parallel()
	addresses := loopback(1, 3)
	d := startDiscovered(t, len(addresses), addresses, nil)
	clients := startCrowd(t, d.url, 4, &http.Transport{})
	reload := func(dns string, maxAddresses int) {
		t.Helper()
		next := *d.server.config
		next.Backends = slices.Clone(next.Backends)
		next.Backends[0].DNS, next.DNS.MaxAddresses = dns, maxAddresses
		d.server.updateFleet(t, &next)
	}
	reload("auto", 2)
	d.awaitBackends(2)
	if d.backend("127.0.1.1") == nil || d.backend("127.0.1.2") == nil {
		t.Error("others than the lowest addresses are used")
	}
	clients.more(20)

	reload("off", 2)
	d.awaitBackends(1)
	if d.server.registry.Find(discoveredName+":"+d.port) == nil {
		t.Error("there is no backend by the name")
	}
	clients.more(20)

	reload("auto", 256)
	d.awaitBackends(3)
	clients.more(20)
	clients.leave()
}

// TestDiscoveryOfSRVTargets starts without a replica. A request waits until the name has targets.
func TestDiscoveryOfSRVTargets(t *testing.T) {
	t.Parallel()
	server := startNameServer(t, withCodes(dns.RcodeNameError))
	replicas := startSimFleet(t, 2, 200_000)
	f := startFronted(t, func(c *config.Config) {
		c.DNS.Server, c.DNS.Interval = server.address, 10*time.Millisecond
	}, "dns://_http._tcp."+discoveredName)
	served := make(chan error, 1)
	go func() { served <- askStream(f.client, f.url, "hello", 8, nil) }()
	f.until("the request waits", func() bool { return f.server.router.CountWaiting() == 1 })
	host := withAddresses("127.0.0.1")
	var targets []dns.RR
	for _, url := range replicas.urls {
		_, port, _ := net.SplitHostPort(strings.TrimPrefix(url, "http://"))
		target, err := dns.NewRR("_http._tcp." + discoveredName + ". 600 IN SRV 0 0 " + port + " host.test.")
		if err != nil {
			t.Fatal(err)
		}
		targets = append(targets, target)
	}
	server.respond(func(w dns.ResponseWriter, query *dns.Msg) {
		if query.Question[0].Qtype != dns.TypeSRV {
			host(w, query)
			return
		}
		response := new(dns.Msg).SetReply(query)
		response.Answer = targets
		_ = w.WriteMsg(response)
	})
	if err := <-served; err != nil {
		t.Error(err)
	}
	f.ready(2)
	for _, url := range replicas.urls {
		if name := "_http._tcp." + discoveredName + "@" + strings.TrimPrefix(url, "http://"); f.server.registry.Find(name) == nil {
			t.Errorf("no backend is named %s", name)
		}
	}
}

// TestDiscoveryWithTLS has a certificate that is valid for example.com at one of two addresses.
func TestDiscoveryWithTLS(t *testing.T) {
	t.Parallel()
	server := startNameServer(t, withAddresses("127.0.0.1", "127.0.1.9"))
	url, caFile := standIn{}.startTLS(t)
	start := func(host string) *fronted {
		t.Helper()
		return startFronted(t, func(c *config.Config) {
			c.DNS.Server = server.address
			trust(t, &c.Backends[0], caFile)
		}, strings.Replace(url, "127.0.0.1", host, 1))
	}
	f := start("example.com")
	f.ready(1)
	f.checkServed()
	start("other.test").logs("certificate is valid for")
}

// TestAddressesOfOneReplica checks that a replica which listens at several addresses of a name is one backend, and
// that the addresses are backends again when the replica is another process at each.
func TestAddressesOfOneReplica(t *testing.T) {
	t.Parallel()
	start := func(address string) (s *sim.Server, stop func()) {
		s = sim.NewServer(sim.Config{Engine: engine.Config{KVTokens: 200_000, Speed: 20}})
		if err := s.Bind(address); err != nil {
			t.Fatal(err)
		}
		return s, runUntilStopped(t, s.Run)
	}
	everywhere, stop := start("0.0.0.0:0")
	_, port, _ := net.SplitHostPort(strings.TrimPrefix(everywhere.URL(), "http://"))
	names := startNameServer(t, withAddresses("127.0.1.1", "127.0.1.2", "127.0.1.3"))
	d := &discovered{dns: names, port: port}
	d.fronted = startFronted(t, func(c *config.Config) {
		c.DNS = config.DNS{Server: names.address, Interval: 10 * time.Millisecond, MaxAddresses: c.DNS.MaxAddresses}
		c.Health.DownInterval = 20 * time.Millisecond
	}, "http://"+discoveredName+":"+port)
	hasBackends := func(want ...string) func() bool {
		return func() bool {
			var got []string
			for _, b := range d.server.registry.All() {
				if b.State() == backends.Ready {
					got = append(got, b.Addr)
				}
			}
			slices.Sort(got)
			return slices.Equal(got, want)
		}
	}
	clients := startCrowd(t, d.url, 4, &http.Transport{})
	d.until("the replica is one backend", hasBackends("127.0.1.1:"+port))
	clients.more(20)
	clients.leave()
	stop()
	for _, address := range []string{"127.0.1.1:", "127.0.1.2:", "127.0.1.3:"} {
		start(address + port)
	}
	d.until("three replicas are three backends", hasBackends("127.0.1.1:"+port, "127.0.1.2:"+port, "127.0.1.3:"+port))
}

// TestDrainName checks that a drain of a name is one of all its addresses.
func TestDrainName(t *testing.T) {
	t.Parallel()
	d := startDiscovered(t, 2, loopback(1, 2), nil)
	for action, want := range map[string]backends.State{"drain": backends.Draining, "undrain": backends.Ready} {
		resp, err := d.client.Post(d.admin+"/api/backends/"+discoveredName+":"+d.port+"/"+action, "application/json", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: status %d", action, resp.StatusCode)
		}
		for _, address := range loopback(1, 2) {
			d.until(action, func() bool { return d.backend(address).State() == want })
		}
	}
}
