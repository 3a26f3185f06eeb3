package sim

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"warmroute/sim/engine"
	"warmroute/sim/zmtp"
)

const (
	// maxBatches is how many batches can be replayed. A subscriber that lags further behind
	// loses batches.
	maxBatches = 10_000
	// replayPortOffset is the distance between the ports for events and for their replay.
	replayPortOffset = 1000
	// maxTopics is the number of topics that one connection may subscribe to.
	maxTopics = 100
)

// KVEventsConfig describes the publisher of KV cache events, vLLM's --kv-events-config.
type KVEventsConfig struct {
	// Endpoint is a port on the address of the HTTP server, or tcp://HOST:PORT, where HOST
	// may be * for all addresses. Replays are served 1000 ports above. Rank r uses both ports
	// plus r; with port 0 all ports are free ones. Empty: no events.
	Endpoint string
	Topic    string
}

// parseEndpoint splits Endpoint. host is empty for that of the HTTP server.
func (c KVEventsConfig) parseEndpoint() (host string, port int, err error) {
	text := c.Endpoint
	if address, ok := strings.CutPrefix(text, "tcp://"); ok {
		if host, text, err = net.SplitHostPort(address); err != nil {
			return "", 0, fmt.Errorf("endpoint %q of KV events: %w", c.Endpoint, err)
		}
		if host == "" {
			return "", 0, fmt.Errorf("endpoint %q of KV events has no host; use * for all addresses", c.Endpoint)
		}
	}
	if port, err = strconv.Atoi(text); err != nil || port < 0 || port > math.MaxUint16 {
		return "", 0, fmt.Errorf("endpoint %q of KV events is neither a port nor tcp://HOST:PORT", c.Endpoint)
	}
	return host, port, nil
}

// validate returns an error unless all ranks can have ports.
func (c KVEventsConfig) validate(ranks int) error {
	if c.Endpoint == "" {
		return nil
	}
	_, port, err := c.parseEndpoint()
	if last := port + replayPortOffset + ranks - 1; err == nil && port > 0 && last > math.MaxUint16 {
		return fmt.Errorf("endpoint %q of KV events: port %d, for replays, exceeds %d", c.Endpoint, last, math.MaxUint16)
	}
	return err
}

// eventPublisher publishes the events of one rank as vLLM does: on a PUB socket, and from
// memory on a ROUTER socket. Publish and restart may be called from any goroutine.
type eventPublisher struct {
	rank   int
	topic  []byte
	faults *faults

	live, replay eventSocket

	mu      sync.Mutex
	batches *batchLog // of the running process
}

// eventSocket is one of the two sockets of a publisher.
type eventSocket struct {
	server   *zmtp.Server
	listener net.Listener
	endpoint string // as vLLM reports it
}

func newEventPublisher(rank int, topic string, faults *faults) *eventPublisher {
	p := &eventPublisher{rank: rank, topic: []byte(topic), faults: faults, batches: newBatchLog()}
	p.live.server = zmtp.NewServer("PUB", p.serveSubscriber)
	p.replay.server = zmtp.NewServer("ROUTER", p.serveReplays)
	return p
}

// bind binds both sockets. httpHost is the address of the HTTP server.
func (p *eventPublisher) bind(cfg KVEventsConfig, httpHost string) error {
	host, port, err := cfg.parseEndpoint()
	if err != nil {
		return err
	}
	if err := p.live.bind(host, httpHost, port, p.rank); err != nil {
		return err
	}
	if port > 0 {
		port += replayPortOffset
	}
	if err := p.replay.bind(host, httpHost, port, p.rank); err != nil {
		p.live.listener.Close()
		return err
	}
	return nil
}

func (s *eventSocket) bind(host, httpHost string, port, rank int) (err error) {
	address := host
	switch host {
	case "":
		address = httpHost
	case "*":
		address = ""
	}
	if port > 0 {
		port += rank
	}
	if s.listener, err = net.Listen("tcp", net.JoinHostPort(address, strconv.Itoa(port))); err != nil {
		return fmt.Errorf("simulated replica's KV events: %w", err)
	}
	bound, ok := s.listener.Addr().(*net.TCPAddr)
	switch {
	case !ok:
		return fmt.Errorf("simulated replica's KV events: %v is not a TCP address", s.listener.Addr())
	case port == 0 && !bound.IP.IsUnspecified():
		host = bound.IP.String()
	case host == "" || port == 0:
		host = "*"
	}
	s.endpoint = "tcp://" + net.JoinHostPort(host, strconv.Itoa(bound.Port))
	return nil
}

// close closes the sockets of a publisher that does not serve.
func (p *eventPublisher) close() {
	p.live.listener.Close()
	p.replay.listener.Close()
}

// serve serves both sockets until ctx is done.
func (p *eventPublisher) serve(ctx context.Context) {
	var replays sync.WaitGroup
	defer replays.Wait()
	replays.Go(func() { p.replay.server.Serve(ctx, p.replay.listener) })
	p.live.server.Serve(ctx, p.live.listener)
}

// restart makes the publisher appear killed and restarted: connections are reset, nothing can
// be replayed, and the sequence begins at 0.
func (p *eventPublisher) restart() {
	p.setLog(newBatchLog())
	p.live.server.ResetAll()
	p.replay.server.ResetAll()
}

func (p *eventPublisher) setLog(batches *batchLog) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.batches = batches
}

func (p *eventPublisher) log() *batchLog {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.batches
}

// publish publishes the events of a step, if there are any.
func (p *eventPublisher) publish(events []engine.KVEvent, blockSize int) {
	if len(events) == 0 {
		return
	}
	payload := appendBatch(nil, time.Now(), events, blockSize, p.rank)
	if _, garbled := p.faults.matchAndCount(true, EventsGarbled); garbled {
		payload = payload[:len(payload)/2]
	}
	f, _ := p.faults.matchAndCount(true, EventsLost)
	p.log().append(payload, f.Every)
}

// serveSubscriber sends a subscriber the batches that are published while it is subscribed.
func (p *eventPublisher) serveSubscriber(c *zmtp.Conn) {
	sub := &subscription{batches: p.log(), topic: string(p.topic), prefixes: make(map[string]int), changed: make(chan struct{}, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	var sender sync.WaitGroup
	defer sender.Wait()
	defer c.Close() // ends a write of the sender
	defer cancel()
	sender.Go(func() {
		defer c.Close() // ends the read below
		sub.send(ctx, c)
	})
	for {
		message, err := c.ReadMessage()
		if err != nil || sub.update(message) != nil {
			return
		}
	}
}

// serveReplays answers the requests for batches from a sequence number on, one after the
// other. As in vLLM, a request of another form gets no answer.
func (p *eventPublisher) serveReplays(c *zmtp.Conn) {
	batches := p.log()
	for {
		request, err := c.ReadMessage()
		if err != nil {
			return
		}
		if len(request) != 2 || len(request[1]) != 8 {
			continue
		}
		if _, silent := p.faults.matchAndCount(true, ReplaySilent); silent {
			continue
		}
		end := batches.next()
		for seq := binary.BigEndian.Uint64(request[1]); seq < end; seq++ {
			b, ok := batches.at(seq)
			if !ok || b.seq >= end {
				break
			}
			seq = b.seq // those before it have left the memory
			if c.WriteMessage(nil, p.topic, binary.BigEndian.AppendUint64(nil, seq), b.payload) != nil {
				return
			}
		}
		if c.WriteMessage(nil, nil, binary.BigEndian.AppendUint64(nil, math.MaxUint64), nil) != nil {
			return
		}
	}
}

// subscription is the state of a connection to the PUB socket.
type subscription struct {
	batches *batchLog
	topic   string
	changed chan struct{} // has an element when the connection was subscribed

	mu       sync.Mutex
	prefixes map[string]int // how often the peer has subscribed to them
	matches  int            // how many of these subscriptions are to topic
	seq      uint64         // the next batch to send, if matches is above 0
}

// update applies a message by which the peer subscribes or cancels that; it ignores others.
func (s *subscription) update(message [][]byte) error {
	if len(message) != 1 || len(message[0]) == 0 {
		return nil
	}
	prefix := string(message[0][1:])
	s.mu.Lock()
	defer s.mu.Unlock()
	switch message[0][0] {
	case zmtp.Subscribe:
		if len(s.prefixes) == maxTopics && s.prefixes[prefix] == 0 {
			return fmt.Errorf("a subscriber may have at most %d topics", maxTopics)
		}
		s.prefixes[prefix]++
		if !strings.HasPrefix(s.topic, prefix) {
			return nil
		}
		if s.matches++; s.matches == 1 {
			s.seq = s.batches.next()
			select {
			case s.changed <- struct{}{}:
			default:
			}
		}
	case zmtp.Cancel:
		if s.prefixes[prefix] == 0 {
			return nil
		}
		if s.prefixes[prefix]--; s.prefixes[prefix] == 0 {
			delete(s.prefixes, prefix)
		}
		if strings.HasPrefix(s.topic, prefix) {
			s.matches--
		}
	}
	return nil
}

// take returns the next batch to send, if there is one.
func (s *subscription) take() (b batch, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.matches == 0 {
		return batch{}, false
	}
	if b, ok = s.batches.at(s.seq); ok {
		s.seq = b.seq + 1
	}
	return b, ok
}

// send sends batches until a write fails or ctx is done.
func (s *subscription) send(ctx context.Context, c *zmtp.Conn) {
	for {
		appended := s.batches.waitForAppend()
		for b, ok := s.take(); ok; b, ok = s.take() {
			if b.lost {
				continue
			}
			if c.WriteMessage([]byte(s.topic), binary.BigEndian.AppendUint64(nil, b.seq), b.payload) != nil {
				return
			}
		}
		select {
		case <-appended:
		case <-s.changed:
		case <-ctx.Done():
			return
		}
	}
}

// batch is an encoded batch of events.
type batch struct {
	seq     uint64
	payload []byte
	lost    bool // subscribers do not get it; see EventsLost
}

// batchLog holds the last maxBatches batches of a process.
type batchLog struct {
	mu       sync.Mutex
	ring     []batch // batch seq is at seq % maxBatches
	count    uint64  // batches so far
	appended chan struct{}
}

func newBatchLog() *batchLog { return &batchLog{appended: make(chan struct{})} }

// append adds a batch, in place of the oldest one if there are maxBatches. With loseEvery above 0
// subscribers do not get each batch of that number.
func (l *batchLog) append(payload []byte, loseEvery int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := batch{seq: l.count, payload: payload, lost: loseEvery > 0 && (l.count+1)%uint64(loseEvery) == 0}
	if len(l.ring) < maxBatches {
		l.ring = append(l.ring, b)
	} else {
		l.ring[l.count%maxBatches] = b
	}
	l.count++
	close(l.appended)
	l.appended = make(chan struct{})
}

// next returns the sequence number of the next batch.
func (l *batchLog) next() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.count
}

// at returns batch seq, or the oldest one if that is newer; false if there is none yet.
func (l *batchLog) at(seq uint64) (b batch, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if seq >= l.count {
		return batch{}, false
	}
	if l.count > maxBatches {
		seq = max(seq, l.count-maxBatches)
	}
	return l.ring[seq%maxBatches], true
}

// waitForAppend returns a channel that is closed by the next append.
func (l *batchLog) waitForAppend() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.appended
}

// kvEventSources handles GET /kv_event_sources: the configuration of each rank's publisher.
func (s *Server) kvEventSources(w http.ResponseWriter, _ *http.Request) {
	b := []byte{'{'}
	for i, k := range s.ranks {
		if k.events == nil {
			break // no rank has one
		}
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `"`+strconv.Itoa(i)+`":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":`...)
		b = appendQuoted(b, k.events.live.endpoint)
		b = appendQuoted(append(b, `,"replay_endpoint":`...), k.events.replay.endpoint)
		n := strconv.Itoa(maxBatches)
		b = append(b, `,"buffer_steps":`+n+`,"hwm":`+n+`,"max_queue_size":`+n+`,"topic":`...)
		b = append(appendQuoted(b, string(k.events.topic)), '}')
	}
	writeJSON(w, http.StatusOK, append(b, '}'))
}

// bindEvents binds the sockets of all ranks. The HTTP server is bound already.
func (s *Server) bindEvents() error {
	if s.cfg.KVEvents.Endpoint == "" {
		return nil
	}
	host, _, err := net.SplitHostPort(s.address)
	for i := 0; i < len(s.ranks) && err == nil; i++ {
		if err = s.ranks[i].events.bind(s.cfg.KVEvents, host); err != nil {
			for _, k := range s.ranks[:i] {
				k.events.close()
			}
		}
	}
	return err
}
