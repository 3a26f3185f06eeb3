//go:build redis

package cluster

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"net"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gomodule/redigo/redis"

	"warmroute/backends"
	"warmroute/clock"
	"warmroute/prompt"
	"warmroute/proxy/apikey"
	"warmroute/router"
	"warmroute/router/responseindex"
	"warmroute/router/snapshot"
)

// redisServer is a redis-server on a Unix socket. It keeps nothing on disk.
type redisServer struct {
	t      *testing.T
	socket string
	cmd    *exec.Cmd
}

func startRedis(t *testing.T, args ...string) *redisServer {
	t.Helper()
	s := &redisServer{t: t, socket: filepath.Join(t.TempDir(), "redis.sock")}
	s.start(args...)
	t.Cleanup(s.kill)
	return s
}

func (s *redisServer) start(args ...string) {
	s.t.Helper()
	s.cmd = exec.Command("redis-server", append([]string{"--port", "0", "--unixsocket", s.socket, "--save", "", "--dir", filepath.Dir(s.socket)}, args...)...)
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	eventually(s.t, "redis-server responds", func() bool {
		_, err := doAt("unix", s.socket, "PING")
		return err == nil || strings.Contains(err.Error(), "NOAUTH")
	})
}

// doAt sends a command to a server over a connection of its own.
func doAt(network, address, command string, args ...any) (any, error) {
	conn, err := redis.Dial(network, address)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return conn.Do(command, args...)
}

// do sends a command to the server, not as a proxy does.
func (s *redisServer) do(command string, args ...any) any {
	s.t.Helper()
	reply, err := doAt("unix", s.socket, command, args...)
	if err != nil {
		s.t.Fatal(err)
	}
	return reply
}

func (s *redisServer) kill() {
	s.cmd.Process.Kill()
	s.cmd.Wait()
}

func (s *redisServer) signal(signal syscall.Signal) {
	s.t.Helper()
	if err := s.cmd.Process.Signal(signal); err != nil {
		s.t.Fatal(err)
	}
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

// lockedBuffer is a log that several goroutines write.
type lockedBuffer struct {
	mu sync.Mutex
	bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.Write(p)
}

func (b *lockedBuffer) count(text string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.Count(b.String(), text)
}

// testProxy is what of a proxy a Cluster needs, in front of three replicas that are not asked.
type testProxy struct {
	*Cluster
	t        *testing.T
	backends []*backends.Backend
	log      *lockedBuffer
	stop     func() // as a proxy that ends
}

func newProxy(t *testing.T, s *redisServer, change ...func(*Options)) *testProxy {
	t.Helper()
	p := &testProxy{t: t, log: &lockedBuffer{}}
	for i := range 3 {
		b := newBackend(t, fmt.Sprintf("http://10.0.0.%d:8000", i+1))
		b.Name = fmt.Sprintf("b%d", i)
		p.backends = append(p.backends, b)
	}
	registry, err := backends.NewRegistry(p.backends)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range p.backends {
		b.SetState(backends.Ready)
	}
	outbox := NewOutbox()
	r, err := router.New(router.Options{
		Settings: router.Settings{Policy: "prefix", PollInterval: time.Second}, Backends: p.backends, BlockBytes: 256, IndexMaxBytes: 1 << 26,
		Now: time.Now, Rand: rand.NewPCG(1, 1), Reporter: outbox,
	})
	if err != nil {
		t.Fatal(err)
	}
	o := Options{
		Settings:   Settings{URL: "unix://" + s.socket, Mode: ModeSingle, Prefix: "test:", MaxBytes: 8 << 20},
		BlockBytes: 256, Outbox: outbox, Router: r, Registry: registry,
		Responses: responseindex.New(responseindex.Settings{MaxEntries: 100, TTL: time.Hour}, time.Now, outbox),
		Keys:      apikey.New([]apikey.Key{{Name: "k", RequestsPerMinute: 600, TokensPerMinute: 6000, Concurrency: 4}}),
		Log:       slog.New(slog.NewTextHandler(p.log, nil)),
	}
	o.Snapshot = snapshot.NewStore(r, snapshot.Options{BlockBytes: 256, MaxBytes: 1 << 26, Responses: o.Responses, Now: time.Now, Log: o.Log})
	for _, f := range change {
		f(&o)
	}
	if p.Cluster, err = New(o); err != nil {
		t.Fatal(err)
	}
	return p
}

// startProxy returns a proxy that exchanges with the others.
func startProxy(t *testing.T, s *redisServer, change ...func(*Options)) *testProxy {
	t.Helper()
	p := newProxy(t, s, change...)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { p.Run(ctx) })
	p.stop = func() {
		cancel()
		running.Wait()
	}
	t.Cleanup(p.stop)
	return p
}

// startTwo returns two proxies that know each other.
func startTwo(t *testing.T, s *redisServer, change ...func(*Options)) (a, b *testProxy) {
	t.Helper()
	a, b = startProxy(t, s, change...), startProxy(t, s, change...)
	awaitProxies(t, 2, a, b)
	return a, b
}

func awaitProxies(t *testing.T, n int, proxies ...*testProxy) {
	t.Helper()
	for _, p := range proxies {
		eventually(t, fmt.Sprintf("a proxy counts %d", n), func() bool { s := p.Status(); return s.Connected && s.Proxies == n })
	}
}

// send sends a prompt that key names to a backend, and returns the reservation.
func (p *testProxy) send(key, blocks int) *router.Reservation {
	p.t.Helper()
	d, err := p.Router.Pick(p.t.Context(), p.request(key, blocks))
	if err != nil {
		p.t.Fatal(err)
	}
	return d
}

func (p *testProxy) request(key, n int) *router.Request {
	blocks := make([]prompt.Block, n)
	for i := range blocks {
		blocks[i] = prompt.Block(uint64(key)<<32 | uint64(i) + 1)
	}
	return &router.Request{Backends: p.backends, Model: "m", Blocks: blocks, Bytes: 256 * n, Sequences: 1, Streams: true}
}

func complete(d *router.Reservation) {
	d.RecordFirstEvent()
	d.Release(router.Outcome{End: router.Completed, OutputTokens: 100})
}

// heldAnywhere returns how many blocks of a prompt the backends are thought to hold at most.
func (p *testProxy) heldAnywhere(key, blocks int) (most int) {
	for _, s := range p.Router.Explain(*p.request(key, blocks)).Backends {
		most = max(most, s.MatchedBlocks)
	}
	return most
}

func TestPlacementsAreShared(t *testing.T) {
	a, b := startTwo(t, startRedis(t))
	d := a.send(1, 50)
	eventually(t, "the request is in flight for the other", func() bool { return b.backends[d.Backend.Slot].PeerInFlight.Load() == 1 })
	complete(d)
	eventually(t, "it has ended for the other", func() bool { return b.backends[d.Backend.Slot].PeerInFlight.Load() == 0 })
	if got := b.heldAnywhere(1, 50); got != 50 {
		t.Errorf("the other knows %d blocks, want 50", got)
	}
	b.Responses.Add("resp_2", responseindex.Entry{Backend: "http://10.9.9.9:8000"}) // that the other does not have
	b.Responses.Add("resp_3", responseindex.Entry{Backend: "http://10.0.0.1:8000", Owner: "another"})
	b.Responses.Add("resp_1", responseindex.Entry{Backend: "http://10.0.0.1:8000", Owner: "k"})
	eventually(t, "the response is known to the other", func() bool { _, ok := a.Responses.Find("resp_1"); return ok })
	if n := a.Responses.Len(); n != 1 {
		t.Errorf("the other knows %d responses, want the one of a known backend and key", n)
	}
	b.Responses.Remove("resp_1")
	eventually(t, "the response is lost for the other", func() bool { _, ok := a.Responses.Find("resp_1"); return !ok })
}

func TestProxyThatEnds(t *testing.T) {
	a, b := startTwo(t, startRedis(t))
	d := a.send(1, 50)
	eventually(t, "the request is in flight for the other", func() bool { return b.Status().PeerRequests == 1 })
	a.stop()
	awaitProxies(t, 1, b)
	eventually(t, "nothing is in flight", func() bool { return b.Status().PeerRequests == 0 })
	complete(d)
}

func TestProxyThatVanishes(t *testing.T) {
	s := startRedis(t)
	b := startProxy(t, s)
	vanished := newProxy(t, s)
	defer vanished.client.close()
	vanished.send(1, 50)
	for e := vanished.Outbox.removeOldest(); e != nil; e = vanished.Outbox.removeOldest() {
		vanished.number++
		if err := vanished.addMessage(t.Context(), vanished.newMessage(e)); err != nil {
			t.Fatal(err)
		}
	}
	awaitProxies(t, 2, b)
	eventually(t, "its request is in flight", func() bool { return b.Status().PeerRequests == 1 })
	awaitProxies(t, 1, b)
	eventually(t, "nothing is in flight", func() bool { return b.Status().PeerRequests == 0 })
}

// A proxy that was killed before another one starts does not count for that, although it reads its last messages.
func TestProxyThatVanishedBeforeTheStart(t *testing.T) {
	s := startRedis(t)
	vanished := newProxy(t, s)
	defer vanished.client.close()
	vanished.send(1, 50)
	for e := vanished.Outbox.removeOldest(); e != nil; e = vanished.Outbox.removeOldest() {
		vanished.number++
		s.do("XADD", vanished.stream, fmt.Sprintf("%d-%d", time.Now().Add(-30*time.Second).UnixMilli(), vanished.number), messageField, vanished.newMessage(e))
	}
	b := startProxy(t, s)
	eventually(t, "it has read its own messages", func() bool { return b.Status().ReadMessages >= int64(vanished.number)+2 })
	if status := b.Status(); status.Proxies != 1 || status.PeerRequests != 0 {
		t.Errorf("%d proxies count, with %d requests", status.Proxies, status.PeerRequests)
	}
}

// TestRedisOutages stops Redis in several ways while requests are sent, and expects that the other
// proxy knows of all of them afterwards.
func TestRedisOutages(t *testing.T) {
	for _, c := range []struct {
		name       string
		stop, back func(*redisServer)
	}{
		{"killed", func(s *redisServer) { s.kill() }, func(s *redisServer) { s.start() }},
		{"paused", func(s *redisServer) { s.signal(syscall.SIGSTOP) }, func(s *redisServer) { s.signal(syscall.SIGCONT) }},
		{"full", func(s *redisServer) {
			s.do("CONFIG", "SET", "maxmemory", "1")
		}, func(s *redisServer) {
			s.do("CONFIG", "SET", "maxmemory", "0")
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := startRedis(t)
			a, b := startTwo(t, s)
			before := a.send(999, 20)
			eventually(t, "the request is in flight for the other", func() bool { return b.Status().PeerRequests == 1 })
			c.stop(s)
			for key := range 100 {
				complete(a.send(key, 20))
			}
			eventually(t, "the outage is noticed", func() bool { s := a.Status(); return !s.Connected && s.Reason != "" && s.Errors > 0 })
			d := a.send(1000, 20)
			eventually(t, "the other does not know any more what is in flight", func() bool { return b.Status().PeerRequests == 0 })
			if n := b.Status().Proxies; n != 2 {
				t.Errorf("%d proxies count without Redis, want the last known number", n)
			}
			c.back(s)
			awaitProxies(t, 2, a, b)
			eventually(t, "the other knows all prompts", func() bool {
				for key := range 100 {
					if b.heldAnywhere(key, 20) != 20 {
						return false
					}
				}
				return b.Status().PeerRequests == 2
			})
			complete(d)
			complete(before)
			eventually(t, "nothing is in flight", func() bool { return b.Status().PeerRequests == 0 })
			if n := a.log.count("level=WARN"); n != 1 {
				t.Errorf("%d warnings of one outage:\n%s", n, a.log.String())
			}
		})
	}
}

func TestHostileStream(t *testing.T) {
	s := startRedis(t)
	a, b := startTwo(t, s)
	add := func(field string, value any) { s.do("XADD", a.stream, "*", field, value) }
	events := sampleEvents(b.backends[0])
	e := newEncoder(testAddress)
	e.addEvent(&events[0])
	good := e.message(messageHead{a.fingerprint, 99, 1, time.Now()}, a.auth)
	add("other", "field")
	add(messageField, "")
	add(messageField, strings.Repeat("x", maxMessageBytes+1))
	for i := range good {
		changed := bytes.Clone(good)
		changed[i] ^= 0x55
		add(messageField, changed)
	}
	add(messageField, e.message(messageHead{a.fingerprint + 1, 98, 1, time.Now()}, a.auth)) // of another configuration
	d := a.send(1, 50)
	eventually(t, "a placement behind them arrives", func() bool { return b.Status().PeerRequests == 1 })
	complete(d)
	status := b.Status()
	if want := int64(len(good) + 4); status.IgnoredMessages != want || status.Proxies != 2 {
		t.Errorf("%d messages were ignored and %d proxies count, want %d and 2", status.IgnoredMessages, status.Proxies, want)
	}
	if n := b.log.count("message of another proxy ignored"); n != 1 {
		t.Errorf("%d lines about them", n)
	}
}

// TestForgedMessages writes to Redis without the secret, and expects that this has no effect.
func TestForgedMessages(t *testing.T) {
	s := startRedis(t)
	secret := func(secret string) func(*Options) {
		return func(o *Options) { o.Settings.Secret = secret }
	}
	a, b := startTwo(t, s, secret("the secret of the fleet"))
	ended := startProxy(t, s, secret("the secret of the fleet"))
	awaitProxies(t, 3, a, b, ended)
	ended.stop()
	awaitProxies(t, 2, a, b)
	recorded, err := parseStreamReply(s.do("XREAD", "STREAMS", a.stream, "0"))
	if err != nil {
		t.Fatal(err)
	}
	ignored := b.Status().IgnoredMessages
	add := func(m []byte) { s.do("XADD", a.stream, "*", messageField, m) }
	e := newEncoder(testAddress)
	e.addResponse(recordResponse, &storedResponse{"resp_of_another_key", "http://10.0.0.1:8000", "k"})
	head := messageHead{a.fingerprint, 99, 1, time.Now()}
	add(e.message(head, authenticator{prefix: "test:"}))
	add(e.message(head, authenticator{secret: "a guess of the secret", prefix: "test:"}))
	add(e.message(head, authenticator{secret: "the secret of the fleet", prefix: "other:"}))
	head.written = head.written.Add(-maxMessageAge - time.Minute)
	add(e.message(head, a.auth)) // copied from Redis long ago
	for _, entry := range recorded {
		add(entry.message)
	}
	d := a.send(1, 50)
	eventually(t, "a placement behind them arrives", func() bool { return b.Status().PeerRequests == 1 })
	complete(d)
	if _, ok := b.Responses.Find("resp_of_another_key"); ok {
		t.Error("a forged response is known")
	}
	if s := b.Status(); s.IgnoredMessages != ignored+4 || s.Proxies != 2 {
		t.Errorf("%d messages were ignored and %d proxies count, want 4 and 2", s.IgnoredMessages-ignored, s.Proxies)
	}
}

// TestManyEvents expects that a proxy with always something to write lists what it has in flight,
// and reports what it charges.
func TestManyEvents(t *testing.T) {
	s := startRedis(t)
	a, b := startTwo(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	var sending sync.WaitGroup
	sending.Go(func() {
		for key := 0; ctx.Err() == nil; key++ {
			complete(a.send(key, 10))
			clock.Sleep(ctx, time.Millisecond)
		}
	})
	defer sending.Wait()
	defer cancel()
	for range 100 {
		lease, err := a.Keys.FindName("k").TryAcquire()
		if err != nil {
			t.Fatal(err)
		}
		lease.Release(0, 0)
	}
	eventually(t, "the other has charged the requests", func() bool {
		requests, _ := b.Keys.FindName("k").Rates()
		return requests.Remaining < 600-80
	})
	// As if a message had been missed.
	b.Router.ApplyPlacements(a.id, []router.PlacementEvent{{
		Kind: router.PlacementSent, Placement: router.Placement{ID: 1 << 50, Backend: b.backends[0], Sequences: 1000},
	}}, 0)
	eventually(t, "what is not in flight is removed", func() bool { return b.backends[0].PeerInFlight.Load() < 500 })
}

// TestHugeValue expects that values beyond what a proxy writes are not read into memory.
func TestHugeValue(t *testing.T) {
	s := startRedis(t)
	a, b := startTwo(t, s)
	huge := strings.Repeat("x", maxReplyBytes/2+1<<20)
	s.do("EVAL", "for i = 1, 3 do redis.call('XADD', KEYS[1], '*', ARGV[1], ARGV[2]) end", 1, a.stream, messageField, huge)
	eventually(t, "a placement behind them arrives", func() bool {
		complete(a.send(1, 50))
		return b.heldAnywhere(1, 50) == 50
	})
}

// startRedisServer starts a redis-server that is killed at the end of the test.
func startRedisServer(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("redis-server", append(args, "--save", "", "--dir", t.TempDir())...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return cmd
}

// eventuallyAt sends a command to a server until it succeeds.
func eventuallyAt(t *testing.T, port, command string, args ...any) {
	t.Helper()
	eventually(t, command+" succeeds", func() bool {
		_, err := doAt("tcp", "127.0.0.1:"+port, command, args...)
		return err == nil
	})
}

// expectShared expects that two proxies share placements and a snapshot. key differs from call to call.
func expectShared(t *testing.T, a, b *testProxy, key int) {
	t.Helper()
	complete(a.send(key, 50))
	eventually(t, "the placement arrives", func() bool { return b.heldAnywhere(key, 50) == 50 })
	if err := a.writeSnapshot(t.Context()); err != nil {
		t.Fatal(err)
	}
	if h, data, err := b.readSnapshot(t.Context()); err != nil || h == nil || len(data) == 0 {
		t.Errorf("snapshot %+v of %d bytes, %v", h, len(data), err)
	}
	a.writeRecords(map[string][]byte{"replica/x": []byte("1")})
	if got := b.readRecords(); string(got["replica/x"]) != "1" {
		t.Errorf("the other reads the records %s", got)
	}
}

// TestSentinel shares over the server that a sentinel names, and over the one that replaces it.
func TestSentinel(t *testing.T) {
	ports := freePorts(t, 3)
	sentinel := filepath.Join(t.TempDir(), "sentinel.conf")
	lines := "port %s\nsentinel monitor mymaster 127.0.0.1 %s 1\nsentinel auth-pass mymaster secret\nsentinel down-after-milliseconds mymaster 500\n"
	if err := os.WriteFile(sentinel, fmt.Appendf(nil, lines, ports[1], ports[0]), 0o600); err != nil {
		t.Fatal(err)
	}
	master := startRedisServer(t, "--port", ports[0], "--requirepass", "secret", "--masterauth", "secret")
	startRedisServer(t, "--port", ports[2], "--requirepass", "secret", "--masterauth", "secret", "--replicaof", "127.0.0.1", ports[0])
	startRedisServer(t, sentinel, "--sentinel")
	settings := Settings{Mode: ModeSentinel, URL: "redis://127.0.0.1:" + ports[1] + "?master_name=mymaster", Password: "secret", Prefix: "test:", MaxBytes: 8 << 20}
	a, b := startTwo(t, &redisServer{t: t}, func(o *Options) { o.Settings = settings })
	expectShared(t, a, b, 1)
	eventually(t, "the sentinel knows the replica", func() bool {
		replicas, err := redis.Values(doAt("tcp", "127.0.0.1:"+ports[1], "SENTINEL", "replicas", "mymaster"))
		return err == nil && len(replicas) == 1
	})
	master.Process.Kill()
	eventually(t, "the sentinel names the replica", func() bool {
		address, err := a.client.options.askSentinel(t.Context(), "127.0.0.1:"+ports[1])
		return err == nil && address == "127.0.0.1:"+ports[2]
	})
	awaitProxies(t, 2, a, b)
	d := a.send(2, 50)
	eventually(t, "a placement arrives over the new master", func() bool { return b.Status().PeerRequests == 1 })
	complete(d)
}

// TestCluster shares over three nodes, of which the URL names one.
func TestCluster(t *testing.T) {
	const nodes, slots = 3, 1 << 14
	ports := freePorts(t, 2*nodes) // the second half is for the cluster's own connections
	for i := range nodes {
		startRedisServer(t, "--port", ports[i], "--cluster-enabled", "yes", "--cluster-port", ports[nodes+i])
		eventuallyAt(t, ports[i], "CLUSTER", "ADDSLOTSRANGE", i*slots/nodes, (i+1)*slots/nodes-1)
	}
	for i := 1; i < nodes; i++ {
		eventuallyAt(t, ports[0], "CLUSTER", "MEET", "127.0.0.1", ports[i], ports[nodes+i])
	}
	for i := range nodes {
		eventually(t, "the nodes have all slots", func() bool {
			info, err := redis.String(doAt("tcp", "127.0.0.1:"+ports[i], "CLUSTER", "INFO"))
			return err == nil && strings.Contains(info, "cluster_state:ok") && strings.Contains(info, "cluster_known_nodes:3")
		})
	}
	settings := Settings{Mode: ModeCluster, URL: "redis://127.0.0.1:" + ports[0], Prefix: "test:", MaxBytes: 8 << 20}
	a, b := startTwo(t, &redisServer{t: t}, func(o *Options) { o.Settings = settings })
	expectShared(t, a, b, 1)
	asked := map[string]bool{}
	for range 8 { // keys of pieces are new each time
		if _, err := a.client.do(t.Context(), newCommand("SET", fmt.Sprint("test:", rand.Uint64()), "x")); err != nil {
			t.Fatal(err)
		}
	}
	a.client.mu.Lock()
	defer a.client.mu.Unlock()
	for node := range a.client.pools {
		asked[node] = true
	}
	if len(asked) < 2 {
		t.Errorf("the nodes %v have all keys", asked)
	}
}

// freePorts returns ports that nothing listens on.
func freePorts(t *testing.T, n int) (ports []string) {
	t.Helper()
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		_, port, _ := net.SplitHostPort(l.Addr().String())
		ports = append(ports, port)
	}
	return ports
}

// TestTLSAndPassword connects to a server that wants both.
func TestTLSAndPassword(t *testing.T) {
	port, dir := freePorts(t, 1)[0], t.TempDir()
	server := httptest.NewUnstartedServer(nil)
	server.StartTLS()
	defer server.Close()
	key, err := x509.MarshalPKCS8PrivateKey(server.TLS.Certificates[0].PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	for name, content := range map[string][]byte{"cert": ca, "key": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s := startRedis(t, "--tls-port", port, "--tls-cert-file", filepath.Join(dir, "cert"), "--tls-key-file", filepath.Join(dir, "key"),
		"--tls-auth-clients", "no", "--requirepass", "secret")
	settings := Settings{Mode: ModeSingle, URL: "rediss://127.0.0.1:" + port, Password: "secret", CA: string(ca), Prefix: "test:", MaxBytes: 8 << 20}
	startTwo(t, s, func(o *Options) { o.Settings = settings })
	settings.Password = "wrong"
	wrong := startProxy(t, s, func(o *Options) { o.Settings = settings })
	eventually(t, "the wrong password is refused", func() bool { return strings.Contains(wrong.Status().Reason, "WRONGPASS") })
	if wrong.log.count("secret")+wrong.log.count("wrong") > 0 {
		t.Errorf("the password is logged:\n%s", wrong.log.String())
	}
}

func TestStreamOfAnotherType(t *testing.T) {
	s := startRedis(t)
	s.do("SET", "test:stream", "text")
	a := startProxy(t, s)
	eventually(t, "it is noticed", func() bool { return strings.Contains(a.Status().Reason, "WRONGTYPE") })
	s.do("DEL", "test:stream")
	awaitProxies(t, 1, a)
}

func TestStreamIsBounded(t *testing.T) {
	s := startRedis(t)
	const most = 1 << 20
	a, b := startTwo(t, s, func(o *Options) { o.Settings.MaxBytes = most })
	for key := range 4000 {
		complete(a.send(key, 200))
		if key%20 == 0 {
			eventually(t, "it is written", func() bool { return a.Status().WaitingBytes == 0 })
		}
	}
	if written := a.Status().WrittenBytes; written < 4*most {
		t.Fatalf("%d bytes were written: too few to say anything", written)
	}
	if used := s.do("MEMORY", "USAGE", a.stream, "SAMPLES", 0).(int64); used > 3*most {
		t.Errorf("the stream takes %d bytes, with the bound %d", used, most)
	}
	eventually(t, "all are known", func() bool { return b.heldAnywhere(3999, 200) == 200 })
}

func TestSnapshotOverRedis(t *testing.T) {
	s := startRedis(t)
	a := startProxy(t, s)
	awaitProxies(t, 1, a)
	load := func() *backends.Load {
		return &backends.Load{StartTime: 1000, TokensKnown: true, PromptTokens: 10, GenerationTokens: 10, CacheTokens: 400_000, PolledAt: time.Now()}
	}
	for _, b := range a.backends {
		a.Snapshot.ObserveLoad(b, load())
	}
	for key := range 150 {
		complete(a.send(key, 100))
	}
	eventually(t, "it is written", func() bool { return a.Status().WaitingBytes == 0 && a.readPosition() != "" })
	if err := a.writeSnapshot(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.do("DEL", a.stream)
	b := newProxy(t, s)
	defer b.client.close()
	b.LoadSnapshot(t.Context())
	for _, at := range b.backends {
		b.Snapshot.ObserveLoad(at, load())
	}
	for key := range 150 {
		if got := b.heldAnywhere(key, 100); got != 100 {
			t.Fatalf("prompt %d: %d blocks are known, want 100; the log:\n%s", key, got, b.log.String())
		}
	}
	// Another one in the same interval is not written.
	before, err := b.readHead(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := a.writeSnapshot(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after, err := b.readHead(t.Context()); err != nil || !reflect.DeepEqual(after, before) {
		t.Errorf("the head is %+v, want %+v (%v)", after, before, err)
	}
}

// What a proxy that starts reads of requests before its start is a guess, as a restored snapshot is: the replicas may have lost
// their caches since. Hits of these requests confirm nothing.
func TestCachesLostBeforeStart(t *testing.T) {
	const prompts, blocks, tokens = 8, 20, 20 * 64
	usage := func(cached int) router.Outcome {
		return router.Outcome{End: router.Completed, OutputTokens: 10, PromptTokens: tokens, CachedTokens: cached, CachedKnown: true}
	}
	s := startRedis(t)
	a := startProxy(t, s)
	awaitProxies(t, 1, a)
	for range 2 {
		for key := range prompts {
			d := a.send(key, blocks)
			d.Release(usage(d.MatchedTokens))
		}
	}
	a.stop()
	b := startProxy(t, s)
	eventually(t, "the requests before the start are known", func() bool {
		return b.readPosition() != "" && b.heldAnywhere(prompts-1, blocks) == blocks
	})
	missed := b.send(0, blocks)
	missed.Release(usage(0))
	for key := 1; key < prompts; key++ {
		for _, x := range b.Router.Explain(*b.request(key, blocks)).Backends {
			want := float64(tokens)
			if x.Name == missed.Backend.Name {
				want /= 4
			}
			if x.MatchedBlocks == blocks && math.Abs(x.MatchedTokens-want) > 1 {
				t.Errorf("prompt %d: %.0f tokens are thought to be cached on %s, want %.0f", key, x.MatchedTokens, x.Name, want)
			}
		}
	}
}

// How long requests before its start took is not learned by a proxy that reads of them all at once.
func TestTimesBeforeStart(t *testing.T) {
	s := startRedis(t)
	a := startProxy(t, s)
	awaitProxies(t, 1, a)
	d := a.send(1, 20)
	d.RecordFirstEvent()
	written := a.Status().WrittenMessages
	eventually(t, "a message is written", func() bool { return a.Status().WrittenMessages > written })
	d.Release(router.Outcome{End: router.Completed, OutputTokens: 1000}) // which comes in another message
	a.stop()
	b := startProxy(t, s)
	eventually(t, "the request before the start is known", func() bool {
		return b.heldAnywhere(1, 20) == 20 && b.backends[d.Backend.Slot].PeerInFlight.Load() == 0
	})
	req := b.request(1, 20)
	req.Backends = req.Backends[d.Backend.Slot:][:1]
	own, err := b.Router.Pick(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	own.RecordFirstEvent()
	const most = 1000 // in a few seconds, at the usual rate
	if tokens := own.EstimateOutputTokens(1, time.Now().Add(-time.Second)); tokens > most {
		t.Errorf("%d tokens are thought to be generated in a second", tokens)
	}
	complete(own)
}

func TestDamagedSnapshot(t *testing.T) {
	s := startRedis(t)
	for _, head := range []string{"", "{", "[]", `{"generation":"A","bytes":-1,"position":"1-1"}`, `{"generation":"A","bytes":1000000000000,"position":"1-1"}`,
		`{"generation":"*","bytes":1,"position":"1-1"}`, `{"generation":"A","bytes":1,"position":"$"}`, `{"generation":"A","bytes":1,"position":"1-1"}`} {
		s.do("SET", "test:snapshot", head)
		p := newProxy(t, s)
		p.LoadSnapshot(t.Context())
		p.client.close()
		if p.position != "" {
			t.Errorf("head %q: reads from %q", head, p.position)
		}
	}
}

// TestForgedSnapshot expects that a proxy with a secret loads no snapshot that was written without
// it, was changed, or is old.
func TestForgedSnapshot(t *testing.T) {
	s := startRedis(t)
	write := func(secret string, change func(*snapshotHead)) {
		s.do("FLUSHALL")
		p := newProxy(t, s, func(o *Options) { o.Settings.Secret = secret })
		defer p.client.close()
		p.position = fmt.Sprintf("%d-0", time.Now().UnixMilli())
		p.setReadPosition(p.position)
		if err := p.writeSnapshot(t.Context()); err != nil {
			t.Fatal(err)
		}
		h, err := p.readHead(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		change(h)
		text, err := json.Marshal(h)
		if err != nil {
			t.Fatal(err)
		}
		s.do("SET", p.headKey(), text)
	}
	old := fmt.Sprintf("%d-0", time.Now().Add(-maxMessageAge-time.Minute).UnixMilli())
	signed := authenticator{secret: "the secret of the fleet", prefix: "test:"}
	for _, c := range []struct {
		name, secret string
		change       func(*snapshotHead)
		loaded       bool
	}{
		{"same secret", signed.secret, func(*snapshotHead) {}, true},
		{"no secret", "", func(*snapshotHead) {}, false},
		{"other secret", "a guess of the secret", func(*snapshotHead) {}, false},
		{"changed position", signed.secret, func(h *snapshotHead) { h.Position = "1-1" }, false},
		{"no sum", signed.secret, func(h *snapshotHead) { h.Sum = nil }, false},
		{"old", signed.secret, func(h *snapshotHead) {
			h.Position = old
			h.Sum = h.sum(signed, s.do("GET", "test:snapshot:"+h.Generation+":0").([]byte))
		}, false},
	} {
		write(c.secret, c.change)
		p := newProxy(t, s, func(o *Options) { o.Settings.Secret = signed.secret })
		p.LoadSnapshot(t.Context())
		p.client.close()
		if loaded := p.position != ""; loaded != c.loaded {
			t.Errorf("%s: loaded %v, want %v; the log:\n%s", c.name, loaded, c.loaded, p.log.String())
		}
	}
}

func TestKeysAreShared(t *testing.T) {
	a, b := startTwo(t, startRedis(t))
	acquire := func(p *testProxy) (leases []apikey.Lease, err *apikey.LimitError) {
		for {
			lease, err := p.Keys.FindName("k").TryAcquire()
			if err != nil {
				return leases, err
			}
			leases = append(leases, lease)
		}
	}
	leases, err := acquire(a)
	if len(leases) != 2 || err.Limit != apikey.LimitConcurrency {
		t.Errorf("%d requests at once until %v, want half of 4", len(leases), err)
	}
	for i := range leases {
		leases[i].Release(1000, 500)
	}
	eventually(t, "the other has charged the tokens", func() bool {
		_, tokens := b.Keys.FindName("k").Rates()
		return tokens.Remaining <= 6000-3000+100
	})
	for range 500 {
		lease, err := a.Keys.FindName("k").TryAcquire()
		if err != nil {
			t.Fatal(err)
		}
		lease.Release(0, 0)
	}
	eventually(t, "the other has charged the requests", func() bool {
		requests, _ := b.Keys.FindName("k").Rates()
		return requests.Remaining < 600-450
	})
}

// readRecords returns the records that a proxy sees.
func (p *testProxy) readRecords() map[string][]byte {
	p.t.Helper()
	records, err := p.Records().ReadRecords(p.t.Context())
	if err != nil {
		p.t.Fatal(err)
	}
	return records
}

func (p *testProxy) writeRecords(changed map[string][]byte, removed ...string) {
	p.t.Helper()
	if err := p.Records().WriteRecords(p.t.Context(), changed, removed); err != nil {
		p.t.Fatal(err)
	}
}

func TestSharedRecords(t *testing.T) {
	for name, secret := range map[string]string{"signed": "a secret of the proxies", "not signed": ""} {
		t.Run(name, func(t *testing.T) {
			s := startRedis(t)
			withSecret := func(o *Options) { o.Settings.Secret = secret }
			a, b := newProxy(t, s, withSecret), newProxy(t, s, withSecret)
			a.writeRecords(map[string][]byte{"replica/x": []byte("1"), "replica/y": []byte("2")})
			b.writeRecords(map[string][]byte{"replica/x": []byte("3")}, "replica/y")
			if got := a.readRecords(); len(got) != 1 || string(got["replica/x"]) != "3" {
				t.Errorf("it reads %s", got)
			}
			// Another client of Redis writes.
			for field, value := range map[string]string{"replica/evil": "4", "replica/long": strings.Repeat("x", 1<<20), "replica/empty": ""} {
				s.do("HSET", "test:fleet", field, value)
			}
			old := appendSharedRecord(nil, "replica/old", []byte("5"), time.Now().Add(-2*maxSharedRecordAge), a.auth)
			abandoned := appendSharedRecord(nil, "replica/abandoned", []byte("6"), time.Now().Add(-2*abandonedRecordAge), a.auth)
			s.do("HSET", "test:fleet", "replica/old", old, "replica/abandoned", abandoned)
			want := 3
			if secret != "" {
				want = 1
			}
			if got := a.readRecords(); len(got) != want || string(got["replica/x"]) != "3" {
				t.Errorf("it reads %s", got)
			}
			if left := s.do("HEXISTS", "test:fleet", "replica/abandoned").(int64) == 1; left != (secret == "") {
				t.Errorf("the abandoned record is there: %v", left)
			}
			many := []any{"test:fleet"}
			for i := range 2 * maxSharedRecords {
				many = append(many, fmt.Sprint(i), "")
			}
			s.do("HSET", many...)
			if got, err := a.Records().ReadRecords(t.Context()); err == nil {
				t.Errorf("it reads %d records", len(got))
			}
		})
	}
}
