package transport

import (
	"errors"
	"sync"
)

var errClosed = errors.New("the transport is closed")

// open are the connections of a Transport, so that those in use can be closed as
// well: the pool knows the idle ones only.
type open struct {
	mu     sync.Mutex
	conns  map[*conn]struct{}
	closed bool
}

func (o *open) add(c *conn) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return errClosed
	}
	if o.conns == nil {
		o.conns = map[*conn]struct{}{}
	}
	o.conns[c] = struct{}{}
	return nil
}

func (o *open) remove(c *conn) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.conns, c)
}

// close closes the sockets alone: each conn is removed by whoever has it.
func (o *open) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	for c := range o.conns {
		c.raw.Close()
	}
}

func (o *open) len() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.conns)
}
