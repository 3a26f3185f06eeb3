package admin

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"sync"
)

const (
	// maxConnections bounds what the admin listener takes of the process's
	// descriptors, which requests need.
	maxConnections = 64
	// maxStrangers is how many of them may be from other machines without the admin
	// token, and maxTrusted how many may not: an operator's connection is a stranger's
	// until its first request.
	maxStrangers = maxConnections / 2
	maxTrusted   = maxConnections * 3 / 4
)

// trust ranks a connection: none is closed to make room for one of a lower rank.
type trust int

const (
	stranger      trust = iota // from another machine
	local                      // over loopback
	authenticated              // it has sent the admin token
)

// connections bounds the connections of a listener. Beyond a bound each new one
// closes another of the lowest rank that there is, its own at most: the one that has
// been idle for longest, or, where none is idle, the one whose request has lasted for
// longest. Safe for concurrent use.
type connections struct {
	mu   sync.Mutex // guards what follows
	open map[net.Conn]*connection
	tick uint64 // counts changes of state
}

type connection struct {
	rank   trust
	local  bool
	active bool   // it carries a request
	since  uint64 // tick of its last change between active and idle
}

// track notes a connection's state and returns the connection to be closed for a new
// one, which may be the new one itself; nil: none.
func (c *connections) track(conn net.Conn, state http.ConnState) (closing net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tick++
	switch known := c.open[conn]; {
	case state == http.StateNew:
		added := &connection{local: isLoopback(conn.LocalAddr()), since: c.tick}
		if added.local {
			added.rank = local
		}
		if c.open == nil {
			c.open = map[net.Conn]*connection{}
		}
		c.open[conn] = added
		return c.makeRoom(conn)
	case known == nil: // it was closed to make room
	case state == http.StateClosed || state == http.StateHijacked:
		delete(c.open, conn)
	default:
		known.active, known.since = state == http.StateActive, c.tick
	}
	return nil
}

// authenticate notes that a request with the admin token came over a connection. It
// returns the connection to be closed for that; nil: none.
func (c *connections) authenticate(conn net.Conn) (closing net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.open[conn]
	if k == nil || k.rank == authenticated {
		return nil
	}
	k.rank = authenticated
	return c.makeRoom(conn)
}

// makeRoom takes out what is to be closed for a connection that is new or has another
// rank; nil: nothing. c.mu is held.
func (c *connections) makeRoom(conn net.Conn) (closing net.Conn) {
	strangers := 0
	for _, k := range c.open {
		if k.rank == stranger {
			strangers++
		}
	}
	own := c.open[conn].rank
	isCandidate := func(rank trust) bool { return rank <= own }
	switch full := len(c.open) > maxConnections; {
	case own != stranger && len(c.open)-strangers > maxTrusted:
		isCandidate = func(rank trust) bool { return rank != stranger && rank <= own }
	case !full && (own != stranger || strangers <= maxStrangers):
		return nil
	}
	closing = conn
	for other, k := range c.open {
		if other != conn && isCandidate(k.rank) && (closing == conn || k.before(c.open[closing])) {
			closing = other
		}
	}
	delete(c.open, closing)
	return closing
}

// before reports whether k is closed rather than other.
func (k *connection) before(other *connection) bool {
	switch {
	case k.rank != other.rank:
		return k.rank < other.rank
	case k.active != other.active:
		return !k.active
	}
	return k.since < other.since
}

// clearAuthentication is for when the token is another.
func (c *connections) clearAuthentication() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range c.open {
		if k.rank = stranger; k.local {
			k.rank = local
		}
	}
}

func isLoopback(a net.Addr) bool {
	tcp, ok := a.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}

// connectionKey is a request's context key for its connection.
type connectionKey struct{}

// ConnContext is for the http.Server that h serves, as is ConnState: together they
// bound its connections.
func (h *Handler) ConnContext(ctx context.Context, conn net.Conn) context.Context {
	return context.WithValue(ctx, connectionKey{}, conn)
}

// ConnState bounds the connections of the http.Server that h serves. A connection from
// another machine that has not sent the admin token closes no other than such ones.
func (h *Handler) ConnState(conn net.Conn, state http.ConnState) {
	closeSocket(h.connections.track(conn, state))
}

// markAuthenticated notes that the request has the admin token.
func (h *Handler) markAuthenticated(r *http.Request) {
	if conn, ok := r.Context().Value(connectionKey{}).(net.Conn); ok {
		closeSocket(h.connections.authenticate(conn))
	}
}

// closeSocket closes a connection unless it is nil. TLS's own Close could wait for a
// client that does not read.
func closeSocket(conn net.Conn) {
	if secured, ok := conn.(*tls.Conn); ok {
		conn = secured.NetConn()
	}
	if conn != nil {
		conn.Close()
	}
}
