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
// that carry requests are bounded by their requests. Safe for concurrent use.
type connections struct {
	mu   sync.Mutex // guards what follows
	open map[net.Conn]*connection
	idle connection // root of a ring; next has been idle for longest
}

// connection is in the ring while it carries no request.
type connection struct {
	net.Conn
	prev, next *connection
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
		last := c.idle.prev
		known.prev, known.next = last, &c.idle
		last.next, c.idle.prev = known, known
	case http.StateClosed, http.StateHijacked:
		delete(c.open, conn)
	}
	if longest := c.idle.next; state == http.StateNew && len(c.open) > most && longest != known {
		longest.unlink()
		return longest.Conn
	}
	return nil
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

// BoundConnections is the ConnState of another server, which may have so many: it
// makes room as Track does.
func BoundConnections(most int) func(net.Conn, http.ConnState) {
	var c connections
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
