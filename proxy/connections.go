package proxy

import (
	"crypto/tls"
	"net"
	"net/http"
	"sync"
)

// connections are those of clients. Beyond a bound, each new one closes the one
// that has carried no request for longest: clients leave idle connections behind,
// or send headers byte by byte, and descriptors that they take are missing for
// the replicas. New ones are never refused, or nobody could ask for /livez; those
// that carry requests are bounded by their requests, or, where all are bounded,
// closed when none is idle. Safe for concurrent use.
type connections struct {
	all bool // never changes

	mu   sync.Mutex // guards what follows
	open map[net.Conn]*connection
	idle connection // root of a ring; next has been idle for longest
	busy connection // likewise those that carry requests, where all are bounded
}

// connection is in a ring: while it carries no request, or where all are bounded.
type connection struct {
	net.Conn
	prev, next *connection
}

// link makes it the last of a ring.
func (c *connection) link(root *connection) {
	c.prev, c.next = root.prev, root
	c.prev.next, root.prev = c, c
}

func (c *connection) unlink() {
	if c.next != nil {
		c.prev.next, c.next.prev = c.next, c.prev
		c.prev, c.next = nil, nil
	}
}

// track notes a connection's state, and returns the one to be closed for it, if any.
func (c *connections) track(conn net.Conn, state http.ConnState, most int) net.Conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open == nil {
		c.open = map[net.Conn]*connection{}
		c.idle.prev, c.idle.next = &c.idle, &c.idle
		c.busy.prev, c.busy.next = &c.busy, &c.busy
	}
	known := c.open[conn]
	if state == http.StateNew {
		known = &connection{Conn: conn}
		c.open[conn] = known
	}
	if known == nil {
		return nil
	}
	known.unlink()
	switch state {
	case http.StateNew, http.StateIdle:
		known.link(&c.idle)
	case http.StateActive:
		if c.all {
			known.link(&c.busy)
		}
	case http.StateClosed, http.StateHijacked:
		delete(c.open, conn)
	}
	if state != http.StateNew || len(c.open) <= most {
		return nil
	}
	longest := c.idle.next
	if longest == known {
		longest = c.busy.next
	}
	if longest == &c.busy {
		return nil
	}
	longest.unlink()
	return longest.Conn
}

// mostUnsent is how much the kernel holds for a client beyond what is on its way.
const mostUnsent = 128 << 10

// Track bounds the connections of a server of this Proxy, and what the kernel holds
// for each, as its ConnState.
func (p *Proxy) Track(conn net.Conn, state http.ConnState) {
	if tcp, ok := plain(conn).(*net.TCPConn); ok && state == http.StateNew {
		boundUnsent(tcp)
	}
	longest := p.connections.track(conn, state, p.settings.Load().Connections)
	if longest == nil {
		return
	}
	p.metrics.ClosedForRoom()
	plain(longest).Close() // TLS's farewell could wait for a client that does not read
}

// BoundConnections is the ConnState of another server, which may have so many,
// those that carry requests among them: it makes room as Track does, and where none
// is idle it closes the one whose request has lasted for longest.
func BoundConnections(most int) func(net.Conn, http.ConnState) {
	c := connections{all: true}
	return func(conn net.Conn, state http.ConnState) {
		if longest := c.track(conn, state, most); longest != nil {
			plain(longest).Close()
		}
	}
}

// plain is the socket under what is laid over it.
func plain(conn net.Conn) net.Conn {
	if secure, ok := conn.(*tls.Conn); ok {
		conn = secure.NetConn()
	}
	if lazy, ok := conn.(*lazyConn); ok {
		conn = lazy.Conn
	}
	return conn
}
