package kvevents

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/tinylib/msgp/msgp"

	"warmroute/backends"
	"warmroute/kvevents/wire"
	"warmroute/kvevents/zmtp"
	"warmroute/router"
)

// failsafe bounds waits for what always comes.
const failsafe = 30 * time.Second

// lockedBuffer is a log that can be read while it is written.
type lockedBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// listening is a Reader to which publishers connect.
type listening struct {
	t *testing.T
	*Reader
	log     lockedBuffer
	servers []*backends.Backend
	stop    func() // ends Serve and waits for it
}

// startListening listens on so many ports. There is a backend at each URL, which is ready, has the model m and expects its
// replica to connect.
func startListening(t *testing.T, ports int, urls ...string) *listening {
	t.Helper()
	l := &listening{t: t}
	for _, text := range urls {
		u, err := backends.ParseURL(text)
		if err != nil {
			t.Fatal(err)
		}
		b := backends.New("", u, "", nil)
		o := *b.Options()
		o.KVEvents = backends.KVEventsListen
		b.SetOptions(o)
		b.SetModels([]backends.Model{{ID: "m", Root: "/models/m"}})
		b.SetState(backends.Ready)
		l.servers = append(l.servers, b)
	}
	registry, err := backends.NewRegistry(l.servers)
	if err != nil {
		t.Fatal(err)
	}
	r, err := router.New(router.Options{
		Settings: router.Settings{Policy: "prefix"}, Backends: registry.All(), BlockBytes: 256, IndexMaxBytes: 1 << 20, Now: time.Now,
	})
	if err != nil {
		t.Fatal(err)
	}
	var sockets []net.Listener
	for range ports {
		socket, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		sockets = append(sockets, socket)
	}
	l.Reader = NewReader(registry, r, slog.New(slog.NewTextHandler(&l.log, nil)), nil, sockets)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { l.Serve(ctx) })
	for _, b := range l.servers {
		running.Go(func() { l.Watch(ctx, b) })
	}
	l.stop = func() {
		cancel()
		running.Wait()
	}
	t.Cleanup(l.stop)
	return l
}

// until waits for a condition.
func (l *listening) until(what string, reached func() bool) {
	l.t.Helper()
	for deadline := time.Now().Add(failsafe); !reached(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			l.t.Fatalf("not within %v: %s; log:\n%s", failsafe, what, l.log.String())
		}
	}
}

// expect waits until a backend's replica is known to hold so many KV blocks.
func (l *listening) expect(backend, kvBlocks int, complete bool) {
	l.t.Helper()
	l.until(fmt.Sprintf("backend %d has %d blocks, complete: %v", backend, kvBlocks, complete), func() bool {
		parts, _ := l.fleet.router.IndexStats()
		kv := parts[backend].KV
		return kv != nil && kv.KVBlocks == kvBlocks && kv.Complete == complete
	})
}

func (l *listening) count(counter *prometheus.CounterVec, reason string) int {
	var m dto.Metric
	if err := counter.WithLabelValues(reason).Write(&m); err != nil {
		l.t.Fatal(err)
	}
	return int(m.GetCounter().GetValue())
}

func (l *listening) expectCount(counter *prometheus.CounterVec, reason string, want int) {
	l.t.Helper()
	l.until(fmt.Sprintf("%d are counted for %s", want, reason), func() bool { return l.count(counter, reason) == want })
}

// publisher is a PUB socket that connects.
type publisher struct {
	*zmtp.Conn
	t     *testing.T
	topic string
}

// connect connects to the port of a rank, and returns when it is subscribed.
func (l *listening) connect(rank int, topic string) *publisher {
	l.t.Helper()
	conn, err := net.Dial("tcp", l.listener.sockets[rank].Addr().String())
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(failsafe)); err != nil {
		l.t.Fatal(err)
	}
	c, err := zmtp.Handshake(conn, zmtp.Pub)
	if err != nil {
		l.t.Fatal(err)
	}
	if frames, err := c.ReadMessage(); err != nil || len(frames) != 1 || string(frames[0]) != string([]byte{zmtp.Subscribe}) {
		l.t.Fatalf("subscription %q, %v", frames, err)
	}
	return &publisher{c, l.t, topic}
}

// publish sends the batches of these sequence numbers. Each stores a block of its own.
func (p *publisher) publish(sequences ...uint64) {
	p.t.Helper()
	for _, n := range sequences {
		if err := p.WriteMessage([]byte(p.topic), binary.BigEndian.AppendUint64(nil, n), storedBatch(n)); err != nil {
			p.t.Fatal(err)
		}
	}
}

// expectEnd waits until the other side has closed the connection.
func (p *publisher) expectEnd() {
	p.t.Helper()
	if err := p.SetReadDeadline(time.Now().Add(failsafe)); err != nil {
		p.t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, p.Conn.Conn); errors.Is(err, os.ErrDeadlineExceeded) {
		p.t.Fatal("the connection stays open")
	}
}

// storedBatch is a batch in which a block is stored that no other number has.
func storedBatch(n uint64) []byte {
	b := msgp.AppendArrayHeader(nil, 2)
	b = msgp.AppendFloat64(b, float64(n))
	b = msgp.AppendArrayHeader(b, 1)
	b = msgp.AppendMapHeader(b, 5)
	b = msgp.AppendString(msgp.AppendString(b, "type"), "BlockStored")
	b = msgp.AppendUint64(msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), 1), n+1)
	b = msgp.AppendNil(msgp.AppendString(b, "parent_block_hash"))
	b = msgp.AppendUint64(msgp.AppendArrayHeader(msgp.AppendString(b, "token_ids"), 1), n+1)
	return msgp.AppendUint64(msgp.AppendString(b, "block_size"), 1)
}

func TestPublisherThatConnects(t *testing.T) {
	l := startListening(t, 1, "http://10.0.0.5:8000", "http://10.0.0.6:8000")
	p := l.connect(0, "kv@10.0.0.5:8000@m")
	p.publish(0, 1, 2)
	l.expect(0, 3, true)
	p.publish(4) // nothing replays the one before
	l.expect(0, 1, false)
	p.publish(0) // it has restarted
	l.expect(0, 1, true)
	p.Close()

	p = l.connect(0, "kv@10.0.0.5:8000@m")
	p.publish(1) // nothing was missed meanwhile
	l.expect(0, 2, true)
	p.Close()
	p = l.connect(0, "kv@10.0.0.5:8000@m")
	p.publish(5)
	l.expect(0, 1, false)
	p.Close()
	p = l.connect(0, "kv@10.0.0.5:8000@m")
	p.publish(0) // a new process
	l.expect(0, 1, true)

	other := l.connect(0, "kv@10.0.0.6@/models/m") // the host alone, and what the replica has loaded
	other.publish(7)
	l.expect(1, 1, false)
	l.expect(0, 1, true)
	l.stop()
	p.expectEnd()
	other.expectEnd()
}

// The PUB socket of another implementation is understood.
func TestPublisherOfAnotherLibrary(t *testing.T) {
	l := startListening(t, 1, "http://10.0.0.5:8000")
	pub := zmq4.NewPub(t.Context())
	defer pub.Close()
	if err := pub.Dial("tcp://" + l.listener.sockets[0].Addr().String()); err != nil {
		t.Fatal(err)
	}
	sent := uint64(0)
	l.until("messages arrive", func() bool { // those before the subscription are dropped
		sequence := binary.BigEndian.AppendUint64(nil, sent)
		if err := pub.SendMulti(zmq4.NewMsgFrom([]byte("kv@10.0.0.5:8000@m"), sequence, storedBatch(sent))); err != nil {
			t.Fatal(err)
		}
		sent++
		parts, _ := l.fleet.router.IndexStats()
		return parts[0].KV != nil && parts[0].KV.KVBlocks >= 2
	})
}

// A replica has the events of one connection.
func TestSecondPublisherOfReplica(t *testing.T) {
	l := startListening(t, 1, "http://10.0.0.5:8000")
	first := l.connect(0, "kv@10.0.0.5:8000@m")
	first.publish(0)
	l.expect(0, 1, true)
	for i := range 3 {
		second := l.connect(0, "kv@10.0.0.5@m")
		second.publish(0, 1)
		second.expectEnd()
		l.expectCount(l.refused, refusedDuplicate, i+1)
	}
	l.expect(0, 1, true)
	first.publish(1)
	l.expect(0, 2, true)
	first.Close()
	l.until("the first one has ended", func() bool { return l.listener.countConnections() == 0 })
	second := l.connect(0, "kv@10.0.0.5@m")
	second.publish(0)
	l.expect(0, 1, true)
	if n := strings.Count(l.log.String(), "another connection already has the events of this replica"); n != 1 {
		t.Errorf("%d lines about three connections of one topic, want 1: %s", n, l.log.String())
	}
}

func TestPublisherThatIsRenamed(t *testing.T) {
	l := startListening(t, 1, "http://10.0.0.5:8000", "http://10.0.0.6:8000")
	for i, before := range []string{"kv@10.0.0.5:8000@m", "kv@10.0.0.7:8000@m"} { // read, and ignored
		p := l.connect(0, before)
		p.publish(0)
		p.topic = "kv@10.0.0.6:8000@m"
		p.publish(1)
		p.expectEnd()
		l.expectCount(l.refused, refusedRenamed, i+1)
	}
	l.expect(1, 0, false)
}

func TestIgnoredPublishers(t *testing.T) {
	l := startListening(t, 1, "http://10.0.0.5:8000", "http://10.0.0.5:8001", "http://10.0.0.6:8000")
	off := *l.servers[2].Options()
	off.KVEvents = backends.KVEventsOff
	l.servers[2].SetOptions(off)
	for _, c := range []struct{ topic, reason, text string }{
		{"kv-events", ignoredTopic, "not of the form kv@ADDRESS@MODEL"},
		{"", ignoredTopic, "not of the form kv@ADDRESS@MODEL"},
		{"kv@10.0.0.7:8000@m", ignoredAddress, "that of no backend"},
		{"kv@10.0.0.5:9000@m", ignoredAddress, "that of no backend"},
		{"kv@10.0.0.5@m", ignoredAddress, "10.0.0.5 is the address of several backends"},
		{"kv@10.0.0.5:8000@other", ignoredModel, `does not list the model \"other\"`},
	} {
		before := l.count(l.ignored, c.reason)
		p := l.connect(0, c.topic)
		p.publish(0, 1, 2)
		l.expectCount(l.ignored, c.reason, before+3)
		if n := strings.Count(l.log.String(), fmt.Sprintf(" topic=%s ", logged(c.topic))); n != 1 {
			t.Errorf("%d lines about topic %q, want 1", n, c.topic)
		}
		if !strings.Contains(l.log.String(), c.text) {
			t.Errorf("no %q in the log: %s", c.text, l.log.String())
		}
	}
	if n := l.listener.countConnections(); n != 6 {
		t.Errorf("%d connections are open, want 6: the backends may change", n)
	}
}

// logged returns a topic as the log has it.
func logged(topic string) string {
	if topic == "" {
		return `""`
	}
	return topic
}

// A publisher is ignored until its replica is a backend that is ready.
func TestPublisherBeforeItsBackend(t *testing.T) {
	l := startListening(t, 1, "http://10.0.0.5:8000")
	u, _ := backends.ParseURL("http://10.0.0.6:8000")
	added := backends.New("", u, "", nil)
	added.SetOptions(*l.servers[0].Options())
	added.SetModels([]backends.Model{{ID: "m"}})
	p := l.connect(0, "kv@10.0.0.6:8000@m")
	p.publish(0)
	l.expectCount(l.ignored, ignoredAddress, 1)
	l.registry.Add(added)
	l.fleet.router.AddBackend(added)
	ctx, cancel := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() { l.Watch(ctx, added) })
	defer watching.Wait()
	defer cancel()
	added.SetState(backends.Ready)
	p.publish(1, 2)
	l.expect(1, 2, false)
}

// vLLM connects each data-parallel rank to a port of its own.
func TestPublishersOfRanks(t *testing.T) {
	l := startListening(t, 3, "http://10.0.0.5:8000")
	server := l.servers[0]
	parts := []*backends.Backend{backends.NewRank(server, 1, 0), backends.NewRank(server, 2, 1)}
	l.registry.Remove(server)
	l.fleet.router.RemoveBackend(server)
	for _, part := range parts {
		l.registry.Add(part)
		l.fleet.router.AddBackend(part)
	}
	server.SetParts(parts)
	l.until("both parts are followed", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.readings) == 2 && !slices.ContainsFunc(server.Parts(), func(b *backends.Backend) bool { return l.readings[b] == nil })
	})
	slot := func(i int) int { return server.Parts()[i].Slot }
	one, two := l.connect(1, "kv@10.0.0.5:8000@m"), l.connect(2, "kv@10.0.0.5:8000@m")
	one.publish(0)
	two.publish(0, 1)
	l.expect(slot(0), 1, true)
	l.expect(slot(1), 2, true)
	l.connect(0, "kv@10.0.0.5:8000@m").publish(0)
	l.expectCount(l.ignored, ignoredUnexpected, 1)
}

// Peers that are no publishers, too many, or send what is not a message, are closed.
func TestPeersThatAreNoPublishers(t *testing.T) {
	l := startListening(t, 1, "http://10.0.0.5:8000")
	address := l.listener.sockets[0].Addr().String()
	for _, sent := range []string{"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\nUser-Agent: some client\r\n\r\n", ""} {
		before := l.count(l.refused, refusedHandshake)
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(conn, sent)
		if sent == "" {
			conn.Close()
		}
		l.expectCount(l.refused, refusedHandshake, before+1)
		conn.Close()
	}
	for i, frames := range [][][]byte{
		{[]byte("kv@" + strings.Repeat("x", wire.MaxTopicBytes)), make([]byte, 8), nil},
		slices.Repeat([][]byte{[]byte("kv-events")}, 9),
		{[]byte("kv@10.0.0.5:8000@m")},
		{[]byte("kv@10.0.0.5:8000@m"), make([]byte, 7), nil},
	} {
		p := l.connect(0, "")
		if err := p.WriteMessage(frames...); err != nil {
			t.Fatal(err)
		}
		p.expectEnd()
		l.expectCount(l.refused, refusedInvalid, i+1)
	}
	p := l.connect(0, "")
	if _, err := p.Write([]byte("\x04\x0A\x09SUBSCRIBE")); err != nil {
		t.Fatal(err)
	}
	p.expectEnd()
	l.expectCount(l.refused, refusedInvalid, 5)
}

func TestConnectionLimit(t *testing.T) {
	l := startListening(t, 1, "http://10.0.0.5:8000")
	feeding := l.connect(0, "kv@10.0.0.5:8000@m")
	feeding.publish(0)
	l.expect(0, 1, true)
	add := func() (*connection, net.Conn) {
		conn, peer := net.Pipe()
		t.Cleanup(func() { peer.Close() })
		c := &connection{Conn: conn}
		if !l.listener.add(c) {
			t.Fatal("a connection was not accepted")
		}
		return c, peer
	}
	oldest, oldestPeer := add()
	for l.listener.countConnections() < MaxConnections {
		add()
	}
	last, lastPeer := add()
	if _, err := oldestPeer.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the oldest connection that feeds no backend: %v, want the end", err)
	}
	l.listener.remove(oldest)
	if n := l.listener.countConnections(); n != MaxConnections {
		t.Errorf("%d connections", n)
	}
	l.listener.remove(last)
	if _, err := lastPeer.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
	feeding.publish(1)
	l.expect(0, 2, true)
	l.expectCount(l.refused, refusedLimit, 1)
}

func TestNoticeLog(t *testing.T) {
	var log lockedBuffer
	n := newNoticeLog(slog.New(slog.NewTextHandler(&log, nil)))
	for i := range 10 * maxNotices {
		n.warn(fmt.Sprint(i), "a notice", "n", i)
		n.warn("0", "again")
	}
	if lines := strings.Count(log.String(), "\n"); lines != noticeBurst {
		t.Errorf("%d lines, want %d", lines, noticeBurst)
	}
}

// FuzzPublisher sends any bytes to a Reader over a connection, after a handshake or without one, while another one has the events of
// the first backend.
func FuzzPublisher(f *testing.F) {
	f.Add(true, []byte("\x01\x12kv@10.0.0.6:8000@m\x01\x08\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01x"))
	f.Add(true, []byte("\x01\x12kv@10.0.0.5:8000@m\x01\x08\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01x"))
	f.Add(true, []byte("\x01\x01x\x00\x01y\x04\x05\x04PING\x00\x0a\x09SUBSCRIBE"))
	f.Add(false, []byte("\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01NULL"))
	f.Fuzz(func(t *testing.T, greets bool, sent []byte) {
		l := startListening(t, 1, "http://10.0.0.5:8000", "http://10.0.0.6:8000")
		honest := l.connect(0, "kv@10.0.0.5:8000@m")
		honest.publish(0)
		l.expect(0, 1, true)
		var conn net.Conn
		if greets {
			conn = l.connect(0, "").Conn.Conn
		} else {
			var err error
			if conn, err = net.Dial("tcp", l.listener.sockets[0].Addr().String()); err != nil {
				t.Fatal(err)
			}
		}
		conn.Write(sent)
		conn.Close()
		l.until("the connection has ended", func() bool { return l.listener.countConnections() == 1 })
		honest.publish(1)
		l.expect(0, 2, true)
	})
}
