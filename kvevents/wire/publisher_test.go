package wire

import (
	"bufio"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// publisher publishes as vLLM does: a PUB socket with live events and a ROUTER socket that
// replays them. Its fields after mu can be changed while it runs.
type publisher struct {
	t       *testing.T
	live    net.Listener
	router  net.Listener
	serving sync.WaitGroup

	mu    sync.Mutex
	conns map[*peer]bool // of both sockets
	kept  []keptBatch    // for replay
	next  uint64

	id          []byte // of the publisher, behind the sequence
	topic       string
	sendTopic   bool             // in replays, as from vLLM 0.32
	drop        func(i int) bool // drops the i-th message of a replay; nil: none
	silent      bool             // replay requests get no response
	subscribers int              // subscriptions that arrived
	pong        string           // context of the last PONG
	changed     *sync.Cond
}

type keptBatch struct {
	sequence uint64
	payload  []byte
}

// peer is the server's end of a connection.
type peer struct {
	net.Conn
	reader *bufio.Reader
	topic  string
	live   bool // and subscribed
}

func newPeer(conn net.Conn) *peer { return &peer{Conn: conn, reader: bufio.NewReader(conn)} }

// startPublisher starts a publisher that keeps everything for replay.
func startPublisher(t *testing.T) *publisher {
	t.Helper()
	p := &publisher{t: t, conns: map[*peer]bool{}, topic: "kv-events", sendTopic: true}
	p.changed = sync.NewCond(&p.mu)
	p.live, p.router = listen(t, "127.0.0.1:0"), listen(t, "127.0.0.1:0")
	p.serve()
	t.Cleanup(p.stop)
	return p
}

func listen(t testing.TB, address string) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

func (p *publisher) serve() {
	p.accept(p.live, "PUB", p.servePub)
	p.accept(p.router, "ROUTER", p.serveRouter)
}

func (p *publisher) stop() {
	p.live.Close()
	p.router.Close()
	p.disconnect()
	p.serving.Wait()
}

// restart ends the publisher and starts another one at the same addresses, which has published
// n batches when it can be reached.
func (p *publisher) restart(n int) {
	p.t.Helper()
	p.stop()
	p.set(func() { p.kept, p.next = nil, 0 })
	p.publish(n)
	p.live, p.router = listen(p.t, p.live.Addr().String()), listen(p.t, p.router.Addr().String())
	p.serve()
}

// disconnect closes all connections.
func (p *publisher) disconnect() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.Close()
	}
}

func (p *publisher) source() Source {
	return Source{Endpoint: "tcp://" + p.live.Addr().String(), Replay: "tcp://" + p.router.Addr().String(), Topic: "kv"}
}

// set changes fields of the publisher.
func (p *publisher) set(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
}

// await waits until condition holds, which is checked after changes. The time is a failsafe only.
func (p *publisher) await(what string, condition func() bool) {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	timer := time.AfterFunc(failsafe, p.changed.Broadcast)
	defer timer.Stop()
	for end := time.Now().Add(failsafe); !condition(); p.changed.Wait() {
		if time.Now().After(end) {
			p.t.Fatalf("timed out: %s", what)
		}
	}
}

const failsafe = 60 * time.Second

// publish sends n batches, each of one block whose hash is the sequence number, and keeps them.
func (p *publisher) publish(n int) {
	for range n {
		p.send(batchOf(p.next), true)
	}
}

// lose keeps n batches for replay and sends them to nobody.
func (p *publisher) lose(n int) {
	for range n {
		p.send(batchOf(p.next), false)
	}
}

func batchOf(sequence uint64) []byte {
	return pack([]any{float64(time.Now().UnixNano()), []any{stored(nil, []any{sequence}, []any{1, 2}, 2)}, 0})
}

func (p *publisher) send(payload []byte, live bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := keptBatch{p.next, payload}
	p.next++
	if live {
		for c := range p.conns {
			if c.live && strings.HasPrefix(p.topic, c.topic) {
				c.Write(packMessage([]byte(p.topic), sequenceFrame(b.sequence, p.id), payload))
			}
		}
	}
	p.kept = append(p.kept, b)
}

// write sends bytes to all subscribers.
func (p *publisher) write(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		if c.live {
			c.Write(b)
		}
	}
}

func sequenceFrame(sequence uint64, id []byte) []byte {
	return append(binary.BigEndian.AppendUint64(nil, sequence), id...)
}

// packMessage encodes the frames of a message.
func packMessage(frames ...[]byte) []byte {
	var b []byte
	for i, frame := range frames {
		flags := byte(0)
		if i < len(frames)-1 {
			flags = 1
		}
		b = append(b, packFrame(flags, frame)...)
	}
	return b
}

func packFrame(flags byte, body []byte) []byte {
	if len(body) < 256 {
		return append([]byte{flags, byte(len(body))}, body...)
	}
	return append(binary.BigEndian.AppendUint64([]byte{flags | 2}, uint64(len(body))), body...)
}

// accept serves the connections of one socket.
func (p *publisher) accept(ln net.Listener, socket string, serve func(*peer)) {
	p.serving.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			c := newPeer(conn)
			p.set(func() { p.conns[c] = true })
			p.serving.Go(func() {
				defer c.Close()
				defer p.set(func() { delete(p.conns, c) })
				if c.greet(socket) == nil {
					serve(c)
				}
			})
		}
	})
}

// greet does the server's side of the handshake, as libzmq 4.3 does.
func (c *peer) greet(socket string) error {
	greeting := slices.Concat([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1, 'N', 'U', 'L', 'L'}, make([]byte, 48))
	if _, err := c.Write(greeting); err != nil {
		return err
	}
	if _, err := io.ReadFull(c.reader, make([]byte, len(greeting))); err != nil {
		return err
	}
	ready := "\x05READY\x0bSocket-Type\x00\x00\x00" + string(rune(len(socket))) + socket + "\x08Identity\x00\x00\x00\x00"
	if _, err := c.Write(packFrame(4, []byte(ready))); err != nil {
		return err
	}
	_, _, err := c.readFrame() // the client's READY
	return err
}

// readFrame reads a short frame; our client sends no other.
func (c *peer) readFrame() (flags byte, body []byte, err error) {
	var head [2]byte
	if _, err := io.ReadFull(c.reader, head[:]); err != nil {
		return 0, nil, err
	}
	body = make([]byte, head[1])
	_, err = io.ReadFull(c.reader, body)
	return head[0], body, err
}

func (p *publisher) servePub(c *peer) {
	for {
		flags, body, err := c.readFrame()
		if err != nil {
			return
		}
		pong, isPong := strings.CutPrefix(string(body), "\x04PONG")
		switch {
		case flags == 0 && len(body) > 0 && body[0] == 1:
			p.set(func() {
				c.live, c.topic = true, string(body[1:])
				p.subscribers++
				p.changed.Broadcast()
			})
		case flags == 4 && isPong:
			p.set(func() {
				p.pong = pong
				p.changed.Broadcast()
			})
		default:
			p.t.Errorf("a subscriber sent %q with flags %d", body, flags)
			return
		}
	}
}

func (p *publisher) serveRouter(c *peer) {
	for {
		_, delimiter, err := c.readFrame()
		if err != nil {
			return
		}
		_, start, err := c.readFrame()
		if err != nil {
			return
		}
		if len(delimiter) != 0 || len(start) != 8 {
			p.t.Errorf("a request for replay of %q and %q", delimiter, start)
			return
		}
		p.replay(c, binary.BigEndian.Uint64(start))
	}
}

// replay responds to a request.
func (p *publisher) replay(c *peer, start uint64) {
	p.mu.Lock()
	silent, drop, kept := p.silent, p.drop, slices.Clone(p.kept)
	topic, sendTopic, id := p.topic, p.sendTopic, p.id
	p.mu.Unlock()
	if silent {
		return
	}
	replies := bufio.NewWriter(c)
	defer replies.Flush()
	sent := 0
	reply := func(topic string, sequence, payload []byte) {
		if sent++; drop != nil && drop(sent) {
			return
		}
		if sendTopic {
			replies.Write(packMessage(nil, []byte(topic), sequence, payload))
		} else {
			replies.Write(packMessage(nil, sequence, payload))
		}
	}
	for _, b := range kept {
		if b.sequence >= start {
			reply(topic, sequenceFrame(b.sequence, id), b.payload)
		}
	}
	reply("", replayEnd, nil)
}

// recorder is a Handler that keeps what it is told, in order: the calls of Restart as these
// constants, and the hashes of all blocks.
type recorder struct {
	mu      sync.Mutex
	changed *sync.Cond
	calls   []int64
	batches int
	delay   time.Duration // of every hundredth batch
}

const (
	restartIncomplete = -1
	restartComplete   = -2
)

func newRecorder() *recorder {
	r := &recorder{}
	r.changed = sync.NewCond(&r.mu)
	return r
}

func (r *recorder) record(calls ...int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, calls...)
	r.changed.Broadcast()
}

func (r *recorder) Restart(_ int, complete bool) {
	if complete {
		r.record(restartComplete)
	} else {
		r.record(restartIncomplete)
	}
}

func (r *recorder) Apply(_ int, events []Event) {
	if r.batches++; r.batches%100 == 0 {
		time.Sleep(r.delay)
	}
	for _, e := range events {
		for _, hash := range e.Hashes {
			r.record(int64(hash))
		}
	}
}

// expect waits until the calls are those of want. The time is a failsafe only.
func (r *recorder) expect(t *testing.T, want ...[]int64) {
	t.Helper()
	all := slices.Concat(want...)
	r.mu.Lock()
	defer r.mu.Unlock()
	timer := time.AfterFunc(failsafe, r.changed.Broadcast)
	defer timer.Stop()
	for end := time.Now().Add(failsafe); len(r.calls) < len(all); r.changed.Wait() {
		if time.Now().After(end) {
			break
		}
	}
	if slices.Equal(r.calls, all) {
		return
	}
	same := 0
	for same < min(len(r.calls), len(all)) && r.calls[same] == all[same] {
		same++
	}
	excerpt := func(calls []int64) []int64 { return calls[max(0, same-5):min(len(calls), same+20)] }
	t.Fatalf("%d calls, want %d; from call %d on: %v, want %v", len(r.calls), len(all), max(0, same-5), excerpt(r.calls), excerpt(all))
}

// from returns the numbers from first to last.
func from(first, last int64) []int64 {
	var numbers []int64
	for i := first; i <= last; i++ {
		numbers = append(numbers, i)
	}
	return numbers
}

func restart(complete bool) []int64 {
	if complete {
		return []int64{restartComplete}
	}
	return []int64{restartIncomplete}
}

// follow runs a subscriber until the test ends.
func follow(t *testing.T, source Source, h Handler) *Subscriber {
	t.Helper()
	s := &Subscriber{Source: source, Handler: h, Logger: slog.New(slog.NewTextHandler(testWriter{t}, nil))}
	run(t, s)
	return s
}

// testWriter writes to the log of a test.
type testWriter struct{ t *testing.T }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(b)))
	return len(b), nil
}
