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

	"github.com/redis/go-redis/v9"

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
	client *redis.Client // of the test
}

func startRedis(t *testing.T, args ...string) *redisServer {
	t.Helper()
	s := &redisServer{t: t, socket: filepath.Join(t.TempDir(), "redis.sock")}
	s.client = redis.NewClient(&redis.Options{Network: "unix", Addr: s.socket})
	t.Cleanup(func() { s.client.Close() })
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
		err := s.client.Ping(s.t.Context()).Err()
		return err == nil || strings.Contains(err.Error(), "NOAUTH")
	})
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
	defer vanished.client.Close()
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
			if err := s.client.ConfigSet(s.t.Context(), "maxmemory", "1").Err(); err != nil {
				s.t.Fatal(err)
			}
		}, func(s *redisServer) {
			if err := s.client.ConfigSet(s.t.Context(), "maxmemory", "0").Err(); err != nil {
				s.t.Fatal(err)
			}
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
	ctx := t.Context()
	add := func(values ...any) {
		if err := s.client.XAdd(ctx, &redis.XAddArgs{Stream: a.stream, Values: values}).Err(); err != nil {
			t.Fatal(err)
		}
	}
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
	recorded, err := s.client.XRange(t.Context(), a.stream, "-", "+").Result()
	if err != nil {
		t.Fatal(err)
	}
	ignored := b.Status().IgnoredMessages
	add := func(m []byte) {
		if err := s.client.XAdd(t.Context(), &redis.XAddArgs{Stream: a.stream, Values: []any{messageField, m}}).Err(); err != nil {
			t.Fatal(err)
		}
	}
	e := newEncoder(testAddress)
	e.addResponse(recordResponse, &storedResponse{"resp_of_another_key", "http://10.0.0.1:8000", "k"})
	head := messageHead{a.fingerprint, 99, 1, time.Now()}
	add(e.message(head, authenticator{prefix: "test:"}))
	add(e.message(head, authenticator{secret: "a guess of the secret", prefix: "test:"}))
	add(e.message(head, authenticator{secret: "the secret of the fleet", prefix: "other:"}))
	head.written = head.written.Add(-maxMessageAge - time.Minute)
	add(e.message(head, a.auth)) // copied from Redis long ago
	for _, entry := range recorded {
		add([]byte(entry.Values[messageField].(string)))
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
	if _, err := s.client.Pipelined(t.Context(), func(p redis.Pipeliner) error {
		for range 3 {
			p.XAdd(t.Context(), &redis.XAddArgs{Stream: a.stream, Values: []any{messageField, huge}})
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a placement behind them arrives", func() bool {
		complete(a.send(1, 50))
		return b.heldAnywhere(1, 50) == 50
	})
}

// TestSentinelAndCluster shares over a server that a sentinel names, and over a cluster of one.
func TestSentinelAndCluster(t *testing.T) {
	ports := freePorts(t, 3)
	start := func(args ...string) {
		dir := t.TempDir()
		cmd := exec.Command("redis-server", append(args, "--save", "", "--dir", dir)...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	}
	do := func(port string, args ...any) error {
		client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:" + port})
		defer client.Close()
		return client.Do(t.Context(), args...).Err()
	}
	sentinel := filepath.Join(t.TempDir(), "sentinel.conf")
	if err := os.WriteFile(sentinel, fmt.Appendf(nil, "port %s\nsentinel monitor mymaster 127.0.0.1 %s 1\nsentinel auth-pass mymaster secret\n", ports[1], ports[0]), 0o600); err != nil {
		t.Fatal(err)
	}
	start("--port", ports[0], "--requirepass", "secret")
	start(sentinel, "--sentinel")
	start("--port", ports[2], "--cluster-enabled", "yes")
	eventually(t, "the cluster is made", func() bool { return do(ports[2], "CLUSTER", "ADDSLOTSRANGE", 0, 16383) == nil })
	for _, settings := range []Settings{
		{Mode: ModeSentinel, URL: "redis://127.0.0.1:" + ports[1] + "?master_name=mymaster", Password: "secret"},
		{Mode: ModeCluster, URL: "redis://127.0.0.1:" + ports[2]},
	} {
		settings.Prefix, settings.MaxBytes = "test:", 8<<20
		t.Run(settings.Mode, func(t *testing.T) {
			a, b := startTwo(t, &redisServer{t: t}, func(o *Options) { o.Settings = settings })
			complete(a.send(1, 50))
			eventually(t, "the placement arrives", func() bool { return b.heldAnywhere(1, 50) == 50 })
			if err := a.writeSnapshot(t.Context()); err != nil {
				t.Fatal(err)
			}
			if h, data, err := b.readSnapshot(t.Context()); err != nil || h == nil || len(data) == 0 {
				t.Errorf("snapshot %+v of %d bytes, %v", h, len(data), err)
			}
		})
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
	if err := s.client.Set(t.Context(), "test:stream", "text", 0).Err(); err != nil {
		t.Fatal(err)
	}
	a := startProxy(t, s)
	eventually(t, "it is noticed", func() bool { return strings.Contains(a.Status().Reason, "WRONGTYPE") })
	if err := s.client.Del(t.Context(), "test:stream").Err(); err != nil {
		t.Fatal(err)
	}
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
	used, err := s.client.MemoryUsage(t.Context(), a.stream).Result()
	if err != nil {
		t.Fatal(err)
	}
	if used > 3*most {
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
	if err := s.client.Del(t.Context(), a.stream).Err(); err != nil {
		t.Fatal(err)
	}
	b := newProxy(t, s)
	defer b.client.Close()
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

func TestDamagedSnapshot(t *testing.T) {
	s := startRedis(t)
	for _, head := range []string{"", "{", "[]", `{"generation":"A","bytes":-1,"position":"1-1"}`, `{"generation":"A","bytes":1000000000000,"position":"1-1"}`,
		`{"generation":"*","bytes":1,"position":"1-1"}`, `{"generation":"A","bytes":1,"position":"$"}`, `{"generation":"A","bytes":1,"position":"1-1"}`} {
		if err := s.client.Set(t.Context(), "test:snapshot", head, 0).Err(); err != nil {
			t.Fatal(err)
		}
		p := newProxy(t, s)
		p.LoadSnapshot(t.Context())
		p.client.Close()
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
		s.client.FlushAll(t.Context())
		p := newProxy(t, s, func(o *Options) { o.Settings.Secret = secret })
		defer p.client.Close()
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
		if err := s.client.Set(t.Context(), p.headKey(), text, 0).Err(); err != nil {
			t.Fatal(err)
		}
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
			data, err := s.client.Get(t.Context(), "test:snapshot:"+h.Generation+":0").Bytes()
			if err != nil {
				t.Fatal(err)
			}
			h.Position = old
			h.Sum = h.sum(signed, data)
		}, false},
	} {
		write(c.secret, c.change)
		p := newProxy(t, s, func(o *Options) { o.Settings.Secret = signed.secret })
		p.LoadSnapshot(t.Context())
		p.client.Close()
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
				if err := s.client.HSet(t.Context(), "test:fleet", field, value).Err(); err != nil {
					t.Fatal(err)
				}
			}
			old := appendSharedRecord(nil, "replica/old", []byte("5"), time.Now().Add(-2*maxSharedRecordAge), a.auth)
			abandoned := appendSharedRecord(nil, "replica/abandoned", []byte("6"), time.Now().Add(-2*abandonedRecordAge), a.auth)
			if err := s.client.HSet(t.Context(), "test:fleet", "replica/old", old, "replica/abandoned", abandoned).Err(); err != nil {
				t.Fatal(err)
			}
			want := 3
			if secret != "" {
				want = 1
			}
			if got := a.readRecords(); len(got) != want || string(got["replica/x"]) != "3" {
				t.Errorf("it reads %s", got)
			}
			if left := s.client.HExists(t.Context(), "test:fleet", "replica/abandoned").Val(); left != (secret == "") {
				t.Errorf("the abandoned record is there: %v", left)
			}
			many := make([]any, 0, 4*maxSharedRecords)
			for i := range 2 * maxSharedRecords {
				many = append(many, fmt.Sprint(i), "")
			}
			if err := s.client.HSet(t.Context(), "test:fleet", many...).Err(); err != nil {
				t.Fatal(err)
			}
			if got, err := a.Records().ReadRecords(t.Context()); err == nil {
				t.Errorf("it reads %d records", len(got))
			}
		})
	}
}
