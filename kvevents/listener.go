package kvevents

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"golang.org/x/time/rate"

	"warmroute/backends"
	"warmroute/clock"
	"warmroute/kvevents/wire"
	"warmroute/kvevents/zmtp"
	"warmroute/recovery"
)

const (
	// MaxConnections bounds the connections that publishers make. Above it, the oldest one that feeds no backend is closed.
	MaxConnections = 1024

	acceptRetryDelay = 50 * time.Millisecond // after a connection could not be accepted

	maxNotices     = 1024 // that are remembered
	noticeInterval = time.Hour
	noticeBurst    = 20 // of different notices, then one in noticeDelay
	noticeDelay    = 10 * time.Second
)

// Settings say where publishers of KV events can connect to the proxy.
type Settings struct {
	Listen string `mapstructure:"listen"`               // tcp://HOST:PORT; empty: nowhere
	Ports  int    `mapstructure:"ports" range:"1..256"` // from that of Listen on, one for each data-parallel rank
}

// Addresses returns the addresses to listen on, host:port; none if Listen is empty.
func (s Settings) Addresses() ([]string, error) {
	if s.Listen == "" {
		return nil, nil
	}
	return wire.ListenAddresses(s.Listen, s.Ports)
}

// Why the messages of a connection are ignored. The backends may change, so the connection stays open.
const (
	ignoredTopic      = "topic"      // it is not kv@ADDRESS@MODEL
	ignoredAddress    = "address"    // it is that of no backend, or of several
	ignoredModel      = "model"      // the backend does not list it
	ignoredUnexpected = "unexpected" // the backend is not ready, or its events are read from elsewhere, or not at all
)

// Why a connection is closed.
const (
	refusedHandshake = "handshake" // the peer is not a publisher, or too slow
	refusedInvalid   = "invalid"   // what it sent is not a message, or exceeds a bound
	refusedDuplicate = "duplicate" // another connection feeds the backend
	refusedRenamed   = "renamed"   // its topic has changed
	refusedLimit     = "limit"     // there are MaxConnections
)

var errDuplicate = errors.New("another connection already has the events of this replica: give each replica a topic with its own address")

// listener passes the connections that publishers make to the subscribers of the backends that their topics name.
// Safe for concurrent use.
type listener struct {
	reader  *Reader
	sockets []net.Listener // those of data-parallel ranks 0, 1 and so on
	notices *noticeLog

	mu          sync.Mutex
	closed      bool
	connections []*connection                    // oldest first
	feeding     map[*wire.Subscriber]*connection // those that feed a backend
}

// connection is a connection that a publisher has made.
type connection struct {
	net.Conn
	rank int // of the port

	// Of the goroutine that serves it.
	isNamed  bool
	topic    string            // of all its messages, if it is named
	ignored  *ignoredError     // why they are ignored; nil: they are not
	lookedUp time.Time         // when that was found
	changed  []<-chan struct{} // one is closed when that may have changed
	target   target            // that it feeds
}

// target is what a connection can feed.
type target struct {
	subscriber *wire.Subscriber
	stopped    <-chan struct{} // closed when the subscriber ends
}

// ignoredError is why the messages of a connection are ignored.
type ignoredError struct {
	reason  string // a label of the metric
	text    string
	pending bool // it may be different in a moment
}

func (e *ignoredError) Error() string { return e.text }

func newListener(r *Reader, sockets []net.Listener) *listener {
	return &listener{reader: r, sockets: sockets, notices: newNoticeLog(r.log), feeding: map[*wire.Subscriber]*connection{}}
}

// ports returns the ports to which publishers can connect.
func (l *listener) ports() wire.Ports {
	if len(l.sockets) == 0 {
		return wire.Ports{}
	}
	first, _ := l.sockets[0].Addr().(*net.TCPAddr)
	return wire.Ports{First: first.Port, Count: len(l.sockets)}
}

// serve accepts connections until ctx is done. Then it closes the sockets and all connections, and waits for what it started.
func (l *listener) serve(ctx context.Context) {
	var work sync.WaitGroup
	defer work.Wait()
	for rank, socket := range l.sockets {
		work.Go(func() {
			l.reader.panics.RunLoop(ctx, recovery.KVEvents, func(ctx context.Context) { l.accept(ctx, rank, socket, &work) })
		})
	}
	<-ctx.Done()
	l.close()
}

// accept accepts the connections to the port of a rank until its socket is closed.
func (l *listener) accept(ctx context.Context, rank int, socket net.Listener, work *sync.WaitGroup) {
	for ctx.Err() == nil {
		conn, err := socket.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // such as too many open files
			l.notices.warn("accept", "KV event connection not accepted", "err", err)
			clock.Sleep(ctx, acceptRetryDelay)
			continue
		}
		c := &connection{Conn: conn, rank: rank}
		if !l.add(c) {
			conn.Close()
			continue
		}
		work.Go(func() {
			defer l.remove(c)
			l.reader.panics.CallAndRecover(recovery.KVEvents, func() { l.serveConnection(ctx, c) })
		})
	}
}

// add registers a connection. If there are too many, it closes the oldest one that feeds no backend, and reports false if all do.
func (l *listener) add(c *connection) (added bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	if len(l.connections) >= MaxConnections {
		l.reader.refused.WithLabelValues(refusedLimit).Inc()
		l.notices.warn(refusedLimit, "KV event connection closed, too many connections", "limit", MaxConnections)
		oldest := slices.IndexFunc(l.connections, func(c *connection) bool { return l.feeding[c.target.subscriber] != c })
		if oldest < 0 {
			return false
		}
		l.connections[oldest].Close()
		l.connections = slices.Delete(l.connections, oldest, oldest+1)
	}
	l.connections = append(l.connections, c)
	return true
}

// remove frees the backend that a connection feeds, and then closes it: the publisher may connect again at once.
func (l *listener) remove(c *connection) {
	defer c.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.connections = slices.DeleteFunc(l.connections, func(other *connection) bool { return other == c })
	if l.feeding[c.target.subscriber] == c {
		delete(l.feeding, c.target.subscriber)
	}
}

// claim records that c feeds the target. It reports false, and records nothing, if another connection does.
func (l *listener) claim(c *connection, t target) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.feeding[t.subscriber] != nil {
		return false
	}
	l.feeding[t.subscriber], c.target = c, t
	return true
}

// close closes the sockets and all connections, and those that are accepted later.
func (l *listener) close() {
	for _, socket := range l.sockets {
		socket.Close()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for _, c := range l.connections {
		c.Close()
	}
}

// countConnections returns how many connections are open.
func (l *listener) countConnections() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.connections)
}

// serveConnection waits until a message names a backend that a publisher can feed, and passes the connection on. It returns when the
// connection or ctx ends.
func (l *listener) serveConnection(ctx context.Context, c *connection) {
	conn, err := zmtp.Handshake(c.Conn, zmtp.Sub)
	if err == nil {
		err = conn.WriteMessage([]byte{zmtp.Subscribe}) // to all topics
	}
	if err != nil {
		if ctx.Err() == nil {
			l.refuse(c, refusedHandshake, err)
		}
		return
	}
	first, err := conn.ReadMessageIf(wire.MaxTopicBytes, func(topic []byte) (bool, error) { return l.isWanted(ctx, c, string(topic)) })
	if err == nil && !c.isNamed {
		err = errors.New("a subscription of a publisher")
	}
	if err == nil {
		passed := &wire.Connection{Conn: conn, Topic: c.topic, First: first, Ended: make(chan error, 1)}
		select {
		case c.target.subscriber.Accepted <- passed:
			err = <-passed.Ended
			l.remove(c)
		case <-c.target.stopped:
		}
	}
	switch {
	case err == nil || ctx.Err() != nil || isDisconnect(err):
	case errors.Is(err, errDuplicate):
		l.refuse(c, refusedDuplicate, err)
	case errors.Is(err, wire.ErrOtherTopic):
		l.refuse(c, refusedRenamed, err)
	default:
		l.refuse(c, refusedInvalid, err)
	}
}

// isDisconnect reports whether err is the end of a connection, and not about what was sent.
func isDisconnect(err error) bool {
	var failed *net.OpError
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &failed)
}

// isWanted claims the backend that a topic names for a connection, and reports false if its messages are to be ignored. The error is
// why the connection is to be closed.
func (l *listener) isWanted(ctx context.Context, c *connection, topic string) (wanted bool, err error) {
	if c.isNamed && topic != c.topic {
		return false, wire.ErrOtherTopic
	}
	c.topic, c.isNamed = topic, true
	if c.ignored != nil && !c.hasChanged() {
		l.reader.ignored.WithLabelValues(c.ignored.reason).Inc()
		return false, nil
	}
	t, ignored := l.awaitTarget(ctx, c)
	if c.ignored = ignored; ignored != nil {
		l.reader.ignored.WithLabelValues(ignored.reason).Inc()
		l.notices.warn(ignored.reason+topic, "KV events ignored", "topic", topic, "peer", c.RemoteAddr().String(), "reason", ignored.text)
		return false, nil
	}
	if !l.claim(c, t) {
		return false, errDuplicate
	}
	return true, nil
}

// hasChanged reports whether the target of a connection may be another one since it was looked up.
func (c *connection) hasChanged() bool {
	if time.Since(c.lookedUp) > settingsInterval { // of which not all changes are events
		return true
	}
	for _, changed := range c.changed {
		select {
		case <-changed:
			return true
		default:
		}
	}
	return false
}

// awaitTarget returns what a connection can feed. If the backend has just become ready, it blocks until it is known whether its events
// are expected, for a few seconds at most: the publisher buffers them meanwhile.
func (l *listener) awaitTarget(ctx context.Context, c *connection) (target, *ignoredError) {
	timeout := time.NewTimer(2 * discoveryTimeout)
	defer timeout.Stop()
	for {
		c.lookedUp, c.changed = time.Now(), []<-chan struct{}{l.reader.registry.StateChanged(), l.reader.changed.Next()}
		t, ignored := l.findTarget(c.topic, c.rank)
		if ignored == nil || !ignored.pending {
			return t, ignored
		}
		select {
		case <-c.changed[0]:
		case <-c.changed[1]:
		case <-timeout.C:
			return t, ignored
		case <-ctx.Done():
			return t, ignored
		}
	}
}

// findTarget returns what a publisher can feed that sends a topic to the port of a rank.
func (l *listener) findTarget(text string, rank int) (target, *ignoredError) {
	topic, err := wire.ParseTopic(text)
	if err != nil {
		return target{}, &ignoredError{reason: ignoredTopic, text: err.Error()}
	}
	server, err := findServer(l.reader.registry.All(), topic)
	if err != nil {
		return target{}, &ignoredError{reason: ignoredAddress, text: err.Error()}
	}
	t, known := l.reader.findTarget(server, rank)
	switch isReady := server.State() == backends.Ready; {
	case t.subscriber == nil && !isReady:
		return target{}, &ignoredError{reason: ignoredUnexpected, text: "backend " + server.Name + " is not ready"}
	case t.subscriber == nil:
		return target{}, &ignoredError{reason: ignoredUnexpected, pending: !known, text: fmt.Sprintf(
			"no events of data-parallel rank %d of backend %s are expected here: see its kv_events, and its /kv_event_sources", rank, server.Name)}
	case !listsModel(server, topic.Model):
		return target{}, &ignoredError{reason: ignoredModel, text: fmt.Sprintf("backend %s does not list the model %q", server.Name, topic.Model)}
	}
	return t, nil
}

// findServer returns the server whose address a topic has. A host alone is enough if it is that of one server only.
func findServer(all []*backends.Backend, topic wire.Topic) (found *backends.Backend, err error) {
	for _, b := range all {
		server := b.Server()
		if server == found || !hasAddress(server, topic) {
			continue
		}
		if found != nil && !found.Retiring() && !server.Retiring() {
			return nil, fmt.Errorf("%s is the address of several backends, such as %s and %s: state the port", topic.Host, found.Name, server.Name)
		}
		if found == nil || found.Retiring() {
			found = server
		}
	}
	if found == nil {
		return nil, errors.New("the address is that of no backend")
	}
	return found, nil
}

// hasAddress reports whether the address of a topic is that of a server.
func hasAddress(server *backends.Backend, topic wire.Topic) bool {
	if wire.NormalizeHost(server.Host()) != topic.Host && wire.NormalizeHost(server.URL.Hostname()) != topic.Host {
		return false
	}
	return topic.Port == "" || topic.Port == server.Port()
}

// listsModel reports whether a server has a model of that name, or one that was loaded from there; also if its models are not known.
func listsModel(server *backends.Backend, name string) bool {
	models := server.Models()
	return len(models) == 0 || slices.ContainsFunc(models, func(m backends.Model) bool { return m.ID == name || m.Root == name })
}

// refuse records why a connection is closed.
func (l *listener) refuse(c *connection, reason string, err error) {
	l.reader.refused.WithLabelValues(reason).Inc()
	host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
	l.notices.warn(reason+host+c.topic, "KV event connection refused", "peer", c.RemoteAddr().String(), "topic", c.topic, "err", err)
}

// noticeLog logs each notice once in noticeInterval, and few of many different ones. Safe for concurrent use.
type noticeLog struct {
	log *slog.Logger

	mu         sync.Mutex
	logged     *simplelru.LRU[string, time.Time] // by key
	limit      *rate.Limiter
	suppressed int // of those that were new, since the last one that was logged
}

func newNoticeLog(log *slog.Logger) *noticeLog {
	logged, _ := simplelru.NewLRU[string, time.Time](maxNotices, nil) // fails without a size alone
	return &noticeLog{log: log, logged: logged, limit: rate.NewLimiter(rate.Every(noticeDelay), noticeBurst)}
}

func (n *noticeLog) warn(key, message string, args ...any) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	if at, ok := n.logged.Get(key); ok && now.Sub(at) < noticeInterval {
		return
	}
	if !n.limit.AllowN(now, 1) {
		n.suppressed++
		return
	}
	n.logged.Add(key, now)
	n.log.Warn(message, append(args, "suppressed", n.suppressed)...)
	n.suppressed = 0
}
