package backends

import (
	"sync"
	"sync/atomic"
)

// Event is a broadcast that wakes all waiting goroutines, any number of times. The
// zero value is ready for use. Safe for concurrent use.
type Event struct {
	awaited atomic.Bool // next is not nil
	mu      sync.Mutex
	next    chan struct{}
}

// Next returns a channel that the next call of Notify closes. To miss no change,
// call it before reading the state that changes.
func (e *Event) Next() <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.next == nil {
		e.next = make(chan struct{})
		e.awaited.Store(true)
	}
	return e.next
}

// Notify wakes all waiting goroutines. It takes no lock while there are none.
func (e *Event) Notify() {
	if !e.awaited.Load() {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.next != nil {
		close(e.next)
		e.next = nil
		e.awaited.Store(false)
	}
}
