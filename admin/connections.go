package admin

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"sync"
)

const (
	// maxConnections bounds the file descriptors used by the admin listener.
	maxConnections = 64
	// maxStrangers bounds the connections from other machines without the admin token, and maxTrusted the
	// others: an operator's connection is a stranger's until its first request.
	maxStrangers = maxConnections / 2
	maxTrusted   = maxConnections * 3 / 4
)

// trust is the rank of a connection. None is closed for one of a lower rank.
type trust int

const (
	stranger      trust = iota // from another machine
	local                      // over loopback
	authenticated              // has sent the admin token
)

// connections limits the connections of a listener. Beyond a limit, each new one closes
// another of the lowest rank, at most its own: the one that has been idle the longest
// or, if none is idle, the one with the longest request. It is safe for concurrent use.
type connections struct {
	mu   sync.Mutex // guards what follows
	open map[net.Conn]*connection
	tick uint64 // counts changes of state
}

type connection struct {
	rank   trust
	local  bool
	active bool   // has a request
	since  uint64 // tick of its last change between active and idle
}

// trackState records a connection's state. It returns the connection to close for a new
// one, which may be the new one itself, or nil.
func (c *connections) trackState(conn net.Conn, state http.ConnState) (toClose net.Conn) {
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

// authenticate records that a connection has sent the admin token. It returns the
// connection to close for that, or nil.
func (c *connections) authenticate(conn net.Conn) (toClose net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.open[conn]
	if k == nil || k.rank == authenticated {
		return nil
	}
	k.rank = authenticated
	return c.makeRoom(conn)
}

// makeRoom removes and returns the connection to close for one that is new or has a new
// rank, or nil. c.mu is locked.
func (c *connections) makeRoom(conn net.Conn) (toClose net.Conn) {
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
	toClose = conn
	for other, k := range c.open {
		if other != conn && isCandidate(k.rank) && (toClose == conn || k.closesBefore(c.open[toClose])) {
			toClose = other
		}
	}
	delete(c.open, toClose)
	return toClose
}

func (k *connection) closesBefore(other *connection) bool {
	switch {
	case k.rank != other.rank:
		return k.rank < other.rank
	case k.active != other.active:
		return !k.active
	}
	return k.since < other.since
}

// resetRanks undoes authenticate for all connections, after a change of the token.
func (c *connections) resetRanks() {
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

type connectionKey struct{}

// ConnContext is the ConnContext function of the http.Server that h serves. With
// ConnState it limits the connections.
func (h *Handler) ConnContext(ctx context.Context, conn net.Conn) context.Context {
	return context.WithValue(ctx, connectionKey{}, conn)
}

// ConnState is the ConnState function of the http.Server that h serves. It limits the
// connections: one from another machine without the admin token closes only such ones.
func (h *Handler) ConnState(conn net.Conn, state http.ConnState) {
	closeSocket(h.connections.trackState(conn, state))
}

func (h *Handler) markAuthenticated(r *http.Request) {
	if conn, ok := r.Context().Value(connectionKey{}).(net.Conn); ok {
		closeSocket(h.connections.authenticate(conn))
	}
}

// closeSocket closes a connection unless it is nil. The Close of TLS could wait for a
// client that does not read.
func closeSocket(conn net.Conn) {
	if tlsConn, ok := conn.(*tls.Conn); ok {
		conn = tlsConn.NetConn()
	}
	if conn != nil {
		conn.Close()
	}
}
