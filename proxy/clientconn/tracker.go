package clientconn

import (
	"crypto/tls"
	"net"
	"net/http"
	"sync"
	"time"
)

// minEvictedIdle is how long a connection has been idle before it is closed for lack of file descriptors: one that has just
// connected or received a response may have sent a request.
const minEvictedIdle = time.Second

// Tracker bounds the connections of clients. Beyond the limit, each new one closes the one that has carried no request
// for longest. New ones are never refused, or /livez could not be reached; those with requests are bounded by limits.in_flight.
// Safe for concurrent use.
type Tracker struct {
	mu           sync.Mutex // guards what follows
	open         map[net.Conn]*connection
	idleRing     connection // root of a ring; next has been idle longest
	active       int        // how many carry a request
	lastActiveAt time.Time  // when one last carried a request, or was opened
}

// connection is in the ring while it carries no request.
type connection struct {
	net.Conn
	prev, next *connection
	active     bool      // it carries a request
	idleSince  time.Time // while it is in the ring
}

func (c *connection) unlink() {
	if c.next != nil {
		c.prev.next, c.next.prev = c.next, c.prev
		c.prev, c.next = nil, nil
	}
}

// record records a connection's state.
func (c *Tracker) record(conn net.Conn, state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open == nil {
		c.open = map[net.Conn]*connection{}
		c.idleRing.prev, c.idleRing.next = &c.idleRing, &c.idleRing
	}
	known := c.open[conn]
	if state == http.StateNew {
		known = &connection{Conn: conn}
		c.open[conn] = known
	}
	if known == nil {
		return
	}
	if known.active {
		c.active--
	}
	if known.active || state == http.StateActive || state == http.StateNew {
		c.lastActiveAt = time.Now()
	}
	known.active = state == http.StateActive
	known.unlink()
	switch state {
	case http.StateActive:
		c.active++
	case http.StateNew, http.StateIdle:
		known.idleSince = time.Now()
		known.prev, known.next = c.idleRing.prev, &c.idleRing
		known.prev.next, c.idleRing.prev = known, known
	case http.StateClosed, http.StateHijacked:
		delete(c.open, conn)
	}
}

// removeLongestIdle removes the connection that has been idle longest and returns it, or nil if at most maxOpen are open, or it
// has not been idle for minIdle, or it is kept.
func (c *Tracker) removeLongestIdle(maxOpen int, minIdle time.Duration, kept net.Conn) net.Conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.open) <= maxOpen {
		return nil
	}
	longestIdle := c.idleRing.next
	if longestIdle == &c.idleRing || longestIdle.Conn == kept || time.Since(longestIdle.idleSince) < minIdle {
		return nil
	}
	longestIdle.unlink()
	delete(c.open, longestIdle.Conn) // its next state is ignored
	return longestIdle.Conn
}

// Activity returns how many connections are open, how many of them carry a request, and for how long none has carried one or been
// opened: 0 while one carries a request.
func (c *Tracker) Activity() (open, active int, idle time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.active > 0 {
		return len(c.open), c.active, 0
	}
	return len(c.open), 0, time.Since(c.lastActiveAt)
}

// maxUnsentBytes bounds what the kernel buffers for a client beyond what is in flight.
const maxUnsentBytes = 128 << 10

// Limits bound connections.
type Limits struct {
	Connections           int           // open ones
	DescriptorConnections int           // likewise, but for those used or opened in the last second; 0: no limit
	AckTimeout            time.Duration // of what was sent to a client that acknowledges nothing; 0: the kernel's default
}

// SetState records a connection's state, and bounds what the kernel buffers for a new one. Beyond the limits, a new one has those
// closed that are idle longest: it returns how many.
func (c *Tracker) SetState(conn net.Conn, state http.ConnState, limits Limits) (evicted int) {
	SetActive(conn, state)
	if tcp, ok := unwrapToTCP(conn).(*net.TCPConn); ok && state == http.StateNew {
		setSendLimits(tcp, limits.AckTimeout)
	}
	c.record(conn, state)
	if state != http.StateNew {
		return 0
	}
	if c.evictIdle(limits.Connections, 0, conn) {
		evicted++
	}
	for limits.DescriptorConnections > 0 && c.evictIdle(limits.DescriptorConnections, minEvictedIdle, nil) {
		evicted++
	}
	return evicted
}

// EvictIdle closes the connection that has been idle longest, whose file descriptor is free when it returns. It reports
// whether any was idle for long enough.
func (c *Tracker) EvictIdle() (evicted bool) { return c.evictIdle(0, minEvictedIdle, nil) }

// evictIdle closes the connection that removeLongestIdle returns, and reports whether there is one.
func (c *Tracker) evictIdle(maxOpen int, minIdle time.Duration, kept net.Conn) (evicted bool) {
	longestIdle := c.removeLongestIdle(maxOpen, minIdle, kept)
	if longestIdle == nil {
		return false
	}
	unwrapToTCP(longestIdle).Close() // not its TLS, whose close_notify could wait for a client that does not read
	return true
}

// unwrapToTCP returns the TCP connection below TLS and clientConn.
func unwrapToTCP(conn net.Conn) net.Conn {
	conn = unwrapTLS(conn)
	if client, ok := conn.(*clientConn); ok {
		conn = client.Conn
	}
	return conn
}

func unwrapTLS(conn net.Conn) net.Conn {
	if secure, ok := conn.(*tls.Conn); ok {
		return secure.NetConn()
	}
	return conn
}
