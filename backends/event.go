package backends

import (
	"sync"
	"sync/atomic"
)

// Event wakes those who wait for something to happen, any number of times. The zero
// value is ready. Safe for concurrent use.
type Event struct {
	awaited atomic.Bool // next is not nil
	mu      sync.Mutex
	next    chan struct{}
}

// Next returns a channel that is closed by the next call of Notify. To miss none, call
// it before looking at what the event is about.
func (e *Event) Next() <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.next == nil {
		e.next = make(chan struct{})
		e.awaited.Store(true)
	}
	return e.next
}

// Notify wakes all who wait. It costs next to nothing while nobody does.
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
