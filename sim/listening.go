package sim

import (
	"context"
	"net"
	"sync"
)

// listening holds the listener, which goes away while connections are refused.
type listening struct {
	mu      sync.Mutex
	current net.Listener
	refuse  bool
	changed chan struct{} // closed and replaced when current is set
	closed  bool
}

func (l *listening) set(n net.Listener) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.current, l.refuse = n, false
	l.tell()
}

// tell wakes those in wait. It wants mu held.
func (l *listening) tell() {
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}

// wait returns the listener, waiting while there is none; nil when ctx is done
// or close was called.
func (l *listening) wait(ctx context.Context) net.Listener {
	for {
		l.mu.Lock()
		if l.closed {
			l.mu.Unlock()
			return nil
		}
		if l.current != nil {
			defer l.mu.Unlock()
			return l.current
		}
		if l.changed == nil {
			l.changed = make(chan struct{})
		}
		changed := l.changed
		l.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// stop closes the listener until resume: the kernel refuses new connections.
func (l *listening) stop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refuse = true
	if l.current != nil {
		l.current.Close()
		l.current = nil
	}
}

// resume binds address again, if stop was called.
func (l *listening) resume(address string) error {
	l.mu.Lock()
	stopped := l.refuse && !l.closed
	l.mu.Unlock()
	if !stopped {
		return nil
	}
	n, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	l.set(n)
	return nil
}

func (l *listening) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.tell()
	if l.current != nil {
		l.current.Close()
	}
}
