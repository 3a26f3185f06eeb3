package upstream

import (
	"context"
	"sync"
	"time"

	"warmroute/proxy/fault"
	"warmroute/router"
)

// Context is the context with which an attempt is sent. Until the response is committed it ends with the client, a
// time limit, a stall or a cancel; context.Cause says which. Safe for concurrent use, but for Begin.
type Context struct {
	context.Context
	Cancel context.CancelCauseFunc

	ContextOptions

	mu         sync.Mutex // guards what follows
	committed  bool       // stalls and time limits end it no more
	prefilling bool       // the prefill request of a split request is open
	timer      *time.Timer
	idle       *time.Timer
}

// ContextOptions say what ends a Context.
type ContextOptions struct {
	FirstByteTimeout time.Duration // 0: no limit
	Streams          bool
	RetryStalled     bool // of the settings
	RetriesStall     bool // another attempt may follow if the backend stalls
	Relocated        bool // an earlier attempt has ended by a stall
}

// Begin makes c a context that ends with parent. It must be called once, before any other method.
func (c *Context) Begin(parent context.Context, o ContextOptions) {
	c.Context, c.Cancel = context.WithCancelCause(parent)
	c.ContextOptions = o
}

// StartFirstByteTimer ends the attempt with fault.ErrFirstByte after the limit.
func (c *Context) StartFirstByteTimer() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.startFirstByteTimerLocked()
}

// startFirstByteTimerLocked ends the attempt with fault.ErrFirstByte after the limit. c.mu is held.
func (c *Context) startFirstByteTimerLocked() {
	if c.FirstByteTimeout == 0 || c.timer != nil {
		return
	}
	var t *time.Timer
	t = time.AfterFunc(c.FirstByteTimeout, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if !c.committed && c.timer == t {
			c.Cancel(fault.ErrFirstByte)
		}
	})
	c.timer = t
}

// StartProgressTimer ends the attempt with fault.ErrResponse when the backend of d has made no progress for limit.
func (c *Context) StartProgressTimer(d *router.Reservation, limit time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var t *time.Timer
	t = time.AfterFunc(limit, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.committed || c.idle != t {
			return
		}
		if left := limit - d.SinceProgress(); left > 0 {
			t.Reset(left)
			return
		}
		c.Cancel(fault.ErrResponse)
	})
	c.idle = t
}

// stopTimersLocked ends the time limits. c.mu is held.
func (c *Context) stopTimersLocked() {
	for _, t := range []*time.Timer{c.timer, c.idle} {
		if t != nil {
			t.Stop()
		}
	}
	c.timer, c.idle = nil, nil // for those that run already
}

// BackendStalled implements router.StallListener. A stall moves a request once, unless the replica is unresponsive: the request may
// itself be what takes so long. Where it stays, a response that is not a stream has FirstByteTimeout from now on.
func (c *Context) BackendStalled(anotherAvailable, unresponsive bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.committed:
	case c.prefilling && c.RetryStalled, anotherAvailable && c.RetriesStall && (unresponsive || !c.Relocated):
		c.Cancel(fault.ErrStalled)
	case !c.Streams || c.prefilling: // a stream has its timer from the beginning
		c.startFirstByteTimerLocked()
	}
}

// Commit ends the time limits and stalls of the attempt, and returns what has ended it before, else nil.
func (c *Context) Commit() (cancelCause error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.committed = true
	c.stopTimersLocked()
	return context.Cause(c)
}

// End cancels the context and stops its timers.
func (c *Context) End() {
	_ = c.Commit()
	c.Cancel(context.Canceled)
}

// BeginPrefill begins the time limits of a prefill request on the backend of p, until EndPrefill. A stall ends it, since
// another backend can do the prefill.
func (c *Context) BeginPrefill(p *router.Reservation, limit time.Duration) {
	c.mu.Lock()
	c.prefilling = true
	c.mu.Unlock()
	if limit > 0 {
		c.StartProgressTimer(p, limit)
	}
}

// EndPrefill ends BeginPrefill. It returns what has ended the context before, else nil.
func (c *Context) EndPrefill() (cancelCause error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.prefilling = false
	c.stopTimersLocked()
	return context.Cause(c)
}
