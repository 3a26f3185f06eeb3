package sim

import (
	"context"
	"encoding/binary"
	"math"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"warmroute/kvevents/zmtp"
	"warmroute/lab/sim/engine"
)

// kvEventPublisher publishes the events of one rank as vLLM does: on a PUB socket, and from
// memory on a ROUTER socket unless the PUB socket connects. Calls of publish and restart must not
// overlap.
type kvEventPublisher struct {
	rank   int
	topic  []byte
	faults *faults

	live, replay kvEventSocket

	mu            sync.Mutex
	batches       *batchLog // of the running process
	subscriptions map[*subscription]struct{}
}

// kvEventSocket is one of the two sockets of a publisher.
type kvEventSocket struct {
	server   *zmtpServer
	listener net.Listener // nil: the socket connects, or there is none
	endpoint string       // as vLLM reports it
}

func newKVEventPublisher(rank int, topic string, faults *faults) *kvEventPublisher {
	p := &kvEventPublisher{
		rank: rank, topic: []byte(topic), faults: faults, batches: newBatchLog(), subscriptions: map[*subscription]struct{}{},
	}
	p.live.server = newZMTPServer(zmtp.Pub, p.serveSubscriber)
	p.replay.server = newZMTPServer(zmtp.Router, p.serveReplays)
	return p
}

// bind binds both sockets, or neither if the publisher connects. httpHost is the address of the HTTP server.
func (p *kvEventPublisher) bind(cfg KVEventsConfig, httpHost string) error {
	if cfg.Connect != "" {
		address, err := cfg.connectAddress(p.rank)
		p.live.endpoint = "tcp://" + address
		return err
	}
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

func (s *kvEventSocket) bind(host, httpHost string, port, rank int) (err error) {
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
	address = net.JoinHostPort(address, strconv.Itoa(port))
	if s.listener, err = net.Listen("tcp", address); err != nil {
		return &KVEventsBindError{address, err}
	}
	bound := s.listener.Addr().(*net.TCPAddr)
	switch {
	case port == 0 && !bound.IP.IsUnspecified():
		host = bound.IP.String()
	case host == "" || port == 0:
		host = "*"
	}
	s.endpoint = "tcp://" + net.JoinHostPort(host, strconv.Itoa(bound.Port))
	return nil
}

// closeListeners closes the listeners of a publisher that does not serve.
func (p *kvEventPublisher) closeListeners() {
	if p.live.listener != nil {
		p.live.listener.Close()
		p.replay.listener.Close()
	}
}

// serve serves both sockets until ctx is done, or publishes over the connection that it makes.
func (p *kvEventPublisher) serve(ctx context.Context) {
	if p.live.listener == nil {
		p.live.server.serveDialed(ctx, strings.TrimPrefix(p.live.endpoint, "tcp://"))
		return
	}
	var replays sync.WaitGroup
	defer replays.Wait()
	replays.Go(func() { p.replay.server.serve(ctx, p.replay.listener) })
	p.live.server.serve(ctx, p.live.listener)
}

// restart makes the publisher appear killed and restarted: connections are reset, nothing can
// be replayed, and the sequence begins at 0.
func (p *kvEventPublisher) restart() {
	p.setLog(newBatchLog())
	p.live.server.resetAll()
	p.replay.server.resetAll()
}

func (p *kvEventPublisher) setLog(batches *batchLog) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.batches = batches
}

func (p *kvEventPublisher) currentLog() *batchLog {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.batches
}

// publish publishes the events of a step, if there are any.
func (p *kvEventPublisher) publish(events []engine.KVEvent, blockSize int) {
	if len(events) == 0 {
		return
	}
	payload := appendBatch(nil, time.Now(), events, blockSize, p.rank)
	if _, garbled := p.faults.matchAndCount(true, EventsGarbled); garbled {
		payload = payload[:len(payload)/2]
	}
	f, _ := p.faults.matchAndCount(true, EventsLost)
	p.currentLog().add(payload, f.Every)
}

// newSubscription returns that of a new connection, and adds it to the publisher's until removeSubscription is called.
func (p *kvEventPublisher) newSubscription() *subscription {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := &subscription{batches: p.batches, topic: string(p.topic), prefixes: make(map[string]int), changed: make(chan struct{}, 1)}
	p.subscriptions[s] = struct{}{}
	return s
}

func (p *kvEventPublisher) removeSubscription(s *subscription) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.subscriptions, s)
}

// hasSubscriber reports whether a connection has subscribed to what the running process publishes.
func (p *kvEventPublisher) hasSubscriber() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for s := range p.subscriptions {
		if s.batches == p.batches && s.isSubscribed() {
			return true
		}
	}
	return false
}

// serveSubscriber sends a subscriber the batches that are published while it is subscribed.
func (p *kvEventPublisher) serveSubscriber(c *zmtp.Conn) {
	sub := p.newSubscription()
	defer p.removeSubscription(sub)
	ctx, cancel := context.WithCancel(context.Background())
	var sender sync.WaitGroup
	defer sender.Wait()
	defer c.Close() // ends a write of the sender
	defer cancel()
	sender.Go(func() {
		defer c.Close() // ends the read below
		sub.sendBatches(ctx, c)
	})
	for {
		message, err := c.ReadMessage()
		if err != nil || sub.apply(message) != nil {
			return
		}
	}
}

// serveReplays responds to the requests for batches from a sequence number on, one after the
// other. As in vLLM, a request of another form gets no response.
func (p *kvEventPublisher) serveReplays(c *zmtp.Conn) {
	batches := p.currentLog()
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
		end := batches.nextSeq()
		for seq := binary.BigEndian.Uint64(request[1]); seq < end; seq++ {
			b, ok := batches.batchFrom(seq)
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

// bindPublishers binds the sockets of all ranks. The HTTP server is bound already.
func (s *Server) bindPublishers() error {
	if !s.cfg.KVEvents.isEnabled() {
		return nil
	}
	host, _, err := net.SplitHostPort(s.address)
	for i := 0; i < len(s.ranks) && err == nil; i++ {
		if p := s.ranks[i].publisher; s.cfg.KVEvents.Connect != "" && s.cfg.KVEvents.Topic == "" {
			p.topic = []byte("kv@" + s.address + "@" + s.cfg.Model)
		}
		if err = s.ranks[i].publisher.bind(s.cfg.KVEvents, host); err != nil {
			for _, k := range s.ranks[:i] {
				k.publisher.closeListeners()
			}
		}
	}
	return err
}
