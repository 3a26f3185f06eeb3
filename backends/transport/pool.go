package transport

import (
	"errors"
	"net"
	"sync"
	"time"
)

// errMaxConns is the error of a request for which Options.MaxConns allows no connection.
var errMaxConns = errors.New("the limit of open connections is reached")

var errClosed = errors.New("transport is closed")

// pool has the connections of a Transport. It is safe for concurrent use.
type pool struct {
	maxConns    int // 0: no limit
	idleTimeout time.Duration

	mu     sync.Mutex         // guards what follows
	conns  map[*conn]struct{} // all, so that those in use can be closed too
	idle   []*conn            // of conns, in the order in which they became idle
	expiry *time.Timer        // calls closeExpired; nil: it is not due, since none was idle
	closed bool
}

// add counts a connection that is about to be made. It fails at the limit, and once the pool is closed.
func (p *pool) add(c *conn) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.closed:
		return errClosed
	case p.maxConns > 0 && len(p.conns) >= p.maxConns:
		return errMaxConns
	}
	p.conns[c] = struct{}{}
	return nil
}

// setSocket sets the socket of a connection that was added. It fails once the pool is closed.
func (p *pool) setSocket(c *conn, socket net.Conn) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	c.raw = socket
	if p.closed {
		return errClosed
	}
	return nil
}

// remove forgets a connection that is not idle.
func (p *pool) remove(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}

// takeIdle removes and returns the idle connection that was used last, which is the least likely to be closed by the
// replica; nil if none is idle.
func (p *pool) takeIdle() *conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.idle) - 1
	if n < 0 {
		return nil
	}
	c := p.idle[n]
	p.idle[n] = nil
	p.idle = p.idle[:n]
	return c
}

// putIdle keeps a connection for another request, until it has been idle for idleTimeout. It reports false, and does
// nothing, once the pool is closed.
func (p *pool) putIdle(c *conn) (kept bool) {
	c.idleSince = time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.idle = append(p.idle, c)
	if p.expiry == nil {
		p.expiry = time.AfterFunc(p.idleTimeout, p.closeExpired)
	}
	return true
}

// closeExpired closes the connections that have been idle for idleTimeout.
func (p *pool) closeExpired() {
	for _, c := range p.takeExpired(time.Now()) {
		c.Close()
	}
}

// takeExpired removes and returns those connections, and sets the timer for the next one.
func (p *pool) takeExpired(now time.Time) (expired []*conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for n < len(p.idle) && now.Sub(p.idle[n].idleSince) >= p.idleTimeout {
		n++
	}
	expired = append(expired, p.idle[:n]...)
	p.idle = append(p.idle[:0], p.idle[n:]...)
	if len(p.idle) == 0 {
		p.expiry = nil
	} else {
		p.expiry.Reset(p.idleTimeout - now.Sub(p.idle[0].idleSince))
	}
	return expired
}

// closeIdle closes the idle connections.
func (p *pool) closeIdle() {
	for c := p.takeIdle(); c != nil; c = p.takeIdle() {
		c.Close()
	}
}

// close closes the sockets and lets no connection be added. Who uses a connection removes it.
func (p *pool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for c := range p.conns {
		if c.raw != nil {
			c.raw.Close()
		}
	}
}

// len returns the number of connections, with those that are idle or being made.
func (p *pool) len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.conns)
}
