//go:build redis

package cluster

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	mathrand "math/rand/v2"
	"net"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/clock"
	"warmroute/lab/freeport"
	"warmroute/lab/redistest"
	"warmroute/prompt"
	"warmroute/proxy/apikey"
	"warmroute/router"
	"warmroute/router/responseindex"
	"warmroute/router/snapshot"
)

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	redistest.Eventually(t, what, is)
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

func newProxy(t *testing.T, s *redistest.Server, change ...func(*Options)) *testProxy {
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
		Now: time.Now, Rand: mathrand.NewPCG(1, 1), Reporter: outbox,
	})
	if err != nil {
		t.Fatal(err)
	}
	url := ""
	if s != nil {
		url = "unix://" + s.Address
	}
	o := Options{
		Settings:   Settings{URL: url, Mode: ModeSingle, Prefix: "test:", MaxBytes: 8 << 20},
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
func startProxy(t *testing.T, s *redistest.Server, change ...func(*Options)) *testProxy {
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
func startTwo(t *testing.T, s *redistest.Server, change ...func(*Options)) (a, b *testProxy) {
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
	a, b := startTwo(t, redistest.Start(t))
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
	a, b := startTwo(t, redistest.Start(t))
	d := a.send(1, 50)
	eventually(t, "the request is in flight for the other", func() bool { return b.Status().PeerRequests == 1 })
	a.stop()
	awaitProxies(t, 1, b)
	eventually(t, "nothing is in flight", func() bool { return b.Status().PeerRequests == 0 })
	complete(d)
}

func TestProxyThatVanishes(t *testing.T) {
	s := redistest.Start(t)
	b := startProxy(t, s)
	vanished := newProxy(t, s)
	defer vanished.redis.Close()
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
	s := redistest.Start(t)
	vanished := newProxy(t, s)
	defer vanished.redis.Close()
	vanished.send(1, 50)
	for e := vanished.Outbox.removeOldest(); e != nil; e = vanished.Outbox.removeOldest() {
		vanished.number++
		id := fmt.Sprintf("%d-%d", time.Now().Add(-30*time.Second).UnixMilli(), vanished.number)
		s.Do("XADD", vanished.stream, id, messageField, vanished.newMessage(e))
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
		stop, back func(*redistest.Server)
	}{
		{"killed", func(s *redistest.Server) { s.Kill() }, func(s *redistest.Server) { s.Restart() }},
		{"paused", func(s *redistest.Server) { s.Signal(syscall.SIGSTOP) }, func(s *redistest.Server) { s.Signal(syscall.SIGCONT) }},
		{"full", func(s *redistest.Server) {
			s.Do("CONFIG", "SET", "maxmemory", "1")
		}, func(s *redistest.Server) {
			s.Do("CONFIG", "SET", "maxmemory", "0")
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
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
	s := redistest.Start(t)
	a, b := startTwo(t, s)
	add := func(field string, value any) { s.Do("XADD", a.stream, "*", field, value) }
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
	s := redistest.Start(t)
	secret := func(secret string) func(*Options) {
		return func(o *Options) { o.Settings.Secret = secret }
	}
	a, b := startTwo(t, s, secret("the secret of the fleet"))
	ended := startProxy(t, s, secret("the secret of the fleet"))
	awaitProxies(t, 3, a, b, ended)
	ended.stop()
	awaitProxies(t, 2, a, b)
	recorded, _, err := a.redis.ReadStream(t.Context(), a.stream, "0", messageField, 1000, readBlock)
	if err != nil {
		t.Fatal(err)
	}
	ignored := b.Status().IgnoredMessages
	add := func(m []byte) { s.Do("XADD", a.stream, "*", messageField, m) }
	e := newEncoder(testAddress)
	e.addResponse(updateResponse, &storedResponse{"resp_of_another_key", "http://10.0.0.1:8000", "k"})
	head := messageHead{a.fingerprint, 99, 1, time.Now()}
	add(e.message(head, authenticator{prefix: "test:"}))
	add(e.message(head, authenticator{secret: "a guess of the secret", prefix: "test:"}))
	add(e.message(head, authenticator{secret: "the secret of the fleet", prefix: "other:"}))
	head.written = head.written.Add(-maxMessageAge - time.Minute)
	add(e.message(head, a.auth)) // copied from Redis long ago
	for _, entry := range recorded {
		add(entry.Value)
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
	s := redistest.Start(t)
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
	s := redistest.Start(t)
	a, b := startTwo(t, s)
	huge := strings.Repeat("x", 64<<20)
	s.Do("EVAL", "for i = 1, 3 do redis.call('XADD', KEYS[1], '*', ARGV[1], ARGV[2]) end return 1", 1, a.stream, messageField, huge)
	d := a.send(1, 50)
	eventually(t, "a placement behind them arrives", func() bool { return b.heldAnywhere(1, 50) == 50 })
	complete(d)
}

// TestManyFields has a client without the secret write entries of half a million fields, which took 1.2 GiB of a proxy.
func TestManyFields(t *testing.T) {
	const entries, fields, mostBytes = 16, 500_000, 64 << 20
	s := redistest.Start(t)
	a, b := startTwo(t, s, func(o *Options) { o.Settings.Secret = "the secret of the fleet" })
	add := fmt.Appendf(nil, "*%d\r\n$4\r\nXADD\r\n$%d\r\n%s\r\n$1\r\n*\r\n", 3+2*fields, len(a.stream), a.stream)
	add = append(add, strings.Repeat("$1\r\nf\r\n$1\r\nv\r\n", fields)...)
	conn, err := net.Dial("unix", s.Address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	replies := bufio.NewReader(conn)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	began := time.Now()
	for range entries {
		if _, err := conn.Write(add); err != nil {
			t.Fatal(err)
		}
		for range 2 { // the length of the ID, and the ID
			if line, err := replies.ReadString('\n'); err != nil || line[0] == '-' {
				t.Fatal(line, err)
			}
		}
	}
	d := a.send(1, 50)
	written := time.Now()
	eventually(t, "a placement behind them arrives", func() bool { return b.heldAnywhere(1, 50) == 50 })
	complete(d)
	t.Logf("written in %v, passed over in %v", written.Sub(began), time.Since(written))
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > mostBytes {
		t.Errorf("two proxies have allocated %d bytes, want at most %d", n, mostBytes)
	}
	if got := b.Status().IgnoredMessages; got != entries {
		t.Errorf("%d messages were ignored, want %d", got, entries)
	}
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

// TestSentinel runs proxies that share state over the master that sentinels name, and over its replacement after a failover.
func TestSentinel(t *testing.T) {
	w := redistest.StartWatched(t, "secret")
	settings := Settings{Mode: ModeSentinel, URL: w.URL(), Password: "secret", Prefix: "test:", MaxBytes: 8 << 20}
	a, b := startTwo(t, nil, func(o *Options) { o.Settings = settings })
	expectShared(t, a, b, 1)
	w.Master.Kill()
	w.AwaitMaster(w.Replica)
	awaitProxies(t, 2, a, b)
	d := a.send(2, 50)
	eventually(t, "a placement arrives over the new master", func() bool { return b.Status().PeerRequests == 1 })
	complete(d)
}

// TestCluster shares over three nodes, of which the URL names one.
func TestCluster(t *testing.T) {
	nodes := redistest.StartCluster(t, 3, nil, func(int) []string { return nil })
	settings := Settings{Mode: ModeCluster, URL: "redis://" + nodes[0].Address, Prefix: "test:", MaxBytes: 8 << 20}
	a, b := startTwo(t, nil, func(o *Options) { o.Settings = settings })
	expectShared(t, a, b, 1)
}

// TestDemotedServer shares over a server whose address moves to another one, while the old one becomes a replica.
func TestDemotedServer(t *testing.T) {
	addresses := freeport.FindAddresses(t, 2)
	old, successor := redistest.StartAt(t, addresses[0]), redistest.StartAt(t, addresses[1])
	address := redistest.NewAddress(t, old.Address)
	settings := Settings{Mode: ModeSingle, URL: "redis://" + address.String(), Prefix: "test:", MaxBytes: 8 << 20}
	a, b := startTwo(t, nil, func(o *Options) { o.Settings = settings })
	address.Move(successor.Address)
	host, port, _ := net.SplitHostPort(freeport.FindAddress(t))
	old.Do("REPLICAOF", host, port)
	began := time.Now()
	d := a.send(1, 50)
	eventually(t, "a placement arrives over the new server", func() bool { return b.Status().PeerRequests == 1 })
	awaitProxies(t, 2, a, b)
	complete(d)
	if passed := time.Since(began); passed > 10*time.Second {
		t.Errorf("the new server was used after %v", passed)
	}
	if successor.Do("XLEN", a.stream).(int64) == 0 {
		t.Error("the new server has no messages")
	}
	for _, p := range []*testProxy{a, b} {
		if p.log.count("redis refuses commands, connecting again") != 1 || p.log.count("READONLY")+p.log.count("UNBLOCKED") == 0 {
			t.Errorf("the log does not name the reason:\n%s", p.log.String())
		}
	}
}

// TestLargeSnapshot reads a snapshot of 200 MiB in each mode.
func TestLargeSnapshot(t *testing.T) {
	const size = 200 << 20
	data := make([]byte, size)
	mathrand.NewChaCha8([32]byte{1}).Read(data)
	for mode, start := range map[string]func() Settings{
		ModeSingle: func() Settings { return Settings{URL: "unix://" + redistest.Start(t).Address} },
		ModeSentinel: func() Settings {
			w := redistest.StartWatched(t, "")
			return Settings{URL: w.URL()}
		},
		ModeCluster: func() Settings {
			return Settings{URL: "redis://" + redistest.StartCluster(t, 3, nil, func(int) []string { return nil })[0].Address}
		},
	} {
		t.Run(mode, func(t *testing.T) {
			settings := start()
			settings.Mode, settings.Prefix, settings.MaxBytes, settings.Secret = mode, "test:", 8<<20, "the secret of the fleet"
			p := newProxy(t, nil, func(o *Options) { o.Settings = settings })
			defer p.redis.Close()
			h := &snapshotHead{Generation: "A", Bytes: size, Position: fmt.Sprintf("%d-0", time.Now().UnixMilli())}
			h.Sum = h.sum(p.auth, data)
			for i := range h.pieces() {
				p.writeValue(p.pieceKey(h, i), data[i*pieceBytes:min((i+1)*pieceBytes, size)])
			}
			text, err := json.Marshal(h)
			if err != nil {
				t.Fatal(err)
			}
			p.writeValue(p.headKey(), text)
			got, read, err := p.readSnapshot(t.Context())
			if err != nil || got == nil || !bytes.Equal(read, data) {
				t.Errorf("%d bytes, %v", len(read), err)
			}
			if err := p.deletePieces(t.Context(), h); err != nil {
				t.Error(err)
			}
		})
	}
}

// writeValue writes a value of a test, however long that takes.
func (p *testProxy) writeValue(key string, value []byte) {
	p.t.Helper()
	eventually(p.t, key+" is written", func() bool {
		isWritten, _ := p.redis.WriteValue(p.t.Context(), key, value, time.Hour, false)
		return isWritten
	})
}

func TestStreamOfAnotherType(t *testing.T) {
	s := redistest.Start(t)
	s.Do("SET", "test:stream", "text")
	a := startProxy(t, s)
	eventually(t, "it is noticed", func() bool { return strings.Contains(a.Status().Reason, "WRONGTYPE") })
	s.Do("DEL", "test:stream")
	awaitProxies(t, 1, a)
}

func TestStreamIsBounded(t *testing.T) {
	s := redistest.Start(t)
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
	if used := s.Do("MEMORY", "USAGE", a.stream, "SAMPLES", 0).(int64); used > 3*most {
		t.Errorf("the stream takes %d bytes, with the bound %d", used, most)
	}
	eventually(t, "all are known", func() bool { return b.heldAnywhere(3999, 200) == 200 })
}

func TestSnapshotOverRedis(t *testing.T) {
	s := redistest.Start(t)
	a := startProxy(t, s)
	awaitProxies(t, 1, a)
	load := func() *backends.Load {
		return &backends.Load{StartTime: 1000, TokensKnown: true, PromptTokens: 10, GenerationTokens: 10, CacheTokens: 400_000,
			PolledAt: time.Now()}
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
	s.Do("DEL", a.stream)
	b := newProxy(t, s)
	defer b.redis.Close()
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
	s := redistest.Start(t)
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
	s := redistest.Start(t)
	a := startProxy(t, s)
	awaitProxies(t, 1, a)
	d := a.send(1, 20)
	d.RecordFirstEvent()
	written := a.Status().WrittenMessages
	eventually(t, "a message is written", func() bool { return a.Status().WrittenMessages > written })
	d.Release(router.Outcome{End: router.Completed, OutputTokens: 1000}) // sent in a message of its own
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
	s := redistest.Start(t)
	for _, head := range []string{"", "{", "[]", `{"generation":"A","bytes":-1,"position":"1-1"}`,
		`{"generation":"A","bytes":1000000000000,"position":"1-1"}`,
		`{"generation":"*","bytes":1,"position":"1-1"}`, `{"generation":"A","bytes":1,"position":"$"}`,
		`{"generation":"A","bytes":1,"position":"1-1"}`} {
		s.Do("SET", "test:snapshot", head)
		p := newProxy(t, s)
		p.LoadSnapshot(t.Context())
		p.redis.Close()
		if p.position != "" {
			t.Errorf("head %q: reads from %q", head, p.position)
		}
	}
}

// TestForgedSnapshot expects that a proxy with a secret loads no snapshot that was written without
// it, was changed, or is old.
func TestForgedSnapshot(t *testing.T) {
	s := redistest.Start(t)
	write := func(secret string, change func(*snapshotHead)) {
		s.Do("FLUSHALL")
		p := newProxy(t, s, func(o *Options) { o.Settings.Secret = secret })
		defer p.redis.Close()
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
		s.Do("SET", p.headKey(), text)
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
			h.Sum = h.sum(signed, []byte(s.Do("GET", "test:snapshot:"+h.Generation+":0").(string)))
		}, false},
	} {
		write(c.secret, c.change)
		p := newProxy(t, s, func(o *Options) { o.Settings.Secret = signed.secret })
		p.LoadSnapshot(t.Context())
		p.redis.Close()
		if loaded := p.position != ""; loaded != c.loaded {
			t.Errorf("%s: loaded %v, want %v; the log:\n%s", c.name, loaded, c.loaded, p.log.String())
		}
	}
}

func TestKeysAreShared(t *testing.T) {
	a, b := startTwo(t, redistest.Start(t))
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
			s := redistest.Start(t)
			withSecret := func(o *Options) { o.Settings.Secret = secret }
			a, b := newProxy(t, s, withSecret), newProxy(t, s, withSecret)
			a.writeRecords(map[string][]byte{"replica/x": []byte("1"), "replica/y": []byte("2")})
			b.writeRecords(map[string][]byte{"replica/x": []byte("3")}, "replica/y")
			if got := a.readRecords(); len(got) != 1 || string(got["replica/x"]) != "3" {
				t.Errorf("it reads %s", got)
			}
			// Another client of Redis writes.
			for field, value := range map[string]string{"replica/evil": "4", "replica/long": strings.Repeat("x", 1<<20), "replica/empty": ""} {
				s.Do("HSET", "test:fleet", field, value)
			}
			old := appendSharedRecord(nil, "replica/old", []byte("5"), time.Now().Add(-2*maxSharedRecordAge), a.auth)
			abandoned := appendSharedRecord(nil, "replica/abandoned", []byte("6"), time.Now().Add(-2*abandonedRecordAge), a.auth)
			s.Do("HSET", "test:fleet", "replica/old", old, "replica/abandoned", abandoned)
			want := 3
			if secret != "" {
				want = 1
			}
			if got := a.readRecords(); len(got) != want || string(got["replica/x"]) != "3" {
				t.Errorf("it reads %s", got)
			}
			if left := s.Do("HEXISTS", "test:fleet", "replica/abandoned").(int64) == 1; left != (secret == "") {
				t.Errorf("the abandoned record is there: %v", left)
			}
			many := []any{"HSET", "test:fleet"}
			for i := range 2 * maxSharedRecords {
				many = append(many, fmt.Sprint(i), "")
			}
			s.Do(many...)
			if got, err := a.Records().ReadRecords(t.Context()); err == nil {
				t.Errorf("it reads %d records", len(got))
			}
		})
	}
}
