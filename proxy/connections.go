package proxy

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

// connectionTracker bounds the connections of clients. Beyond the limit, each new one closes the one that has carried no request
// for longest. New ones are never refused, or /livez could not be reached; those with requests are bounded by limits.in_flight.
// Safe for concurrent use.
type connectionTracker struct {
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

// setState records a connection's state.
func (c *connectionTracker) setState(conn net.Conn, state http.ConnState) {
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
func (c *connectionTracker) removeLongestIdle(maxOpen int, minIdle time.Duration, kept net.Conn) net.Conn {
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

func (c *connectionTracker) idleTime() (open int, idle time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.active > 0 {
		return len(c.open), 0
	}
	return len(c.open), time.Since(c.lastActiveAt)
}

// ConnectionActivity returns how many connections of clients are open, and for how long none has carried a request or been
// opened: 0 while one carries a request.
func (p *Proxy) ConnectionActivity() (open int, idle time.Duration) { return p.clients.idleTime() }

// maxUnsentBytes bounds what the kernel buffers for a client beyond what is in flight.
const maxUnsentBytes = 128 << 10

// TrackAndLimitConnections bounds the connections of a server of this Proxy, whose ConnState it is to be, and what the kernel
// buffers for each. Beyond the limit it closes the one that is idle longest.
func (p *Proxy) TrackAndLimitConnections(conn net.Conn, state http.ConnState) {
	SetConnActive(conn, state)
	s := p.settings.Load()
	if tcp, ok := unwrapToTCP(conn).(*net.TCPConn); ok && state == http.StateNew {
		setSendLimits(tcp, s.WriteIdle)
	}
	p.clients.setState(conn, state)
	if state != http.StateNew {
		return
	}
	p.evictIdle(s.Connections, 0, conn)
	for s.DescriptorConnections > 0 && p.evictIdle(s.DescriptorConnections, minEvictedIdle, nil) {
	}
}

// EvictIdleConnection closes the connection that has been idle longest, whose file descriptor is free when it returns. It reports
// whether any was idle for long enough.
func (p *Proxy) EvictIdleConnection() bool { return p.evictIdle(0, minEvictedIdle, nil) }

// evictIdle closes the connection that removeLongestIdle returns, and reports whether there is one.
func (p *Proxy) evictIdle(maxOpen int, minIdle time.Duration, kept net.Conn) bool {
	longestIdle := p.clients.removeLongestIdle(maxOpen, minIdle, kept)
	if longestIdle == nil {
		return false
	}
	p.metrics.CountEvictedConnection()
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
