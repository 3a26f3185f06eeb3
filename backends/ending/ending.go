// Package ending has a context that costs next to nothing until it ends. Package
// context takes two for what requests need, one that is cancelled and one that calls
// back, each with a map, a channel and closures of its own.
package ending

import (
	"context"
	"slices"
	"sync"
)

// Context ends when End is called. What its parent's end is to do to it, whoever
// holds it sees to: Err and Cause tell of both, Done and AfterFunc of End alone. Safe
// for concurrent use, but for Begin.
type Context struct {
	context.Context // the parent

	mu    sync.Mutex // guards what follows
	cause error      // nil: it has not ended
	done  chan struct{}
	calls []call // to be made at the end
	room  [1]call
	count int // of calls ever asked for
}

// call is what somebody wants to have called, by its number.
type call struct {
	number int
	f      func()
}

// Begin comes before everything else, once: what is late in ending a Context must
// not end another.
func (c *Context) Begin(parent context.Context) {
	c.Context, c.calls = parent, c.room[:0]
}

// Begun reports whether Begin was called.
func (c *Context) Begun() bool { return c.Context != nil }

// End ends the context, if nothing has before.
func (c *Context) End(cause error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cause != nil {
		return
	}
	c.cause = cause
	if c.done != nil {
		close(c.done)
	}
	for _, call := range c.calls {
		go call.f() // it may take locks that are held here, the router's for one
	}
	c.calls = nil
}

// Done implements context.Context.
func (c *Context) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done == nil {
		c.done = make(chan struct{})
		if c.cause != nil {
			close(c.done)
		}
	}
	return c.done
}

// Err implements context.Context. The parent's end is seen here at once, Done
// follows.
func (c *Context) Err() error {
	if err := c.Context.Err(); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cause != nil {
		return context.Canceled
	}
	return nil
}

// Cause says why the context has ended; nil: it has not.
func (c *Context) Cause() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cause != nil {
		return c.cause
	}
	return Cause(c.Context)
}

// AfterFunc is context.AfterFunc of c: package context looks for it too.
func (c *Context) AfterFunc(f func()) (stop func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cause != nil {
		go f()
		return func() bool { return false }
	}
	c.count++
	number := c.count
	c.calls = append(c.calls, call{number, f})
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		before := len(c.calls)
		c.calls = slices.DeleteFunc(c.calls, func(c call) bool { return c.number == number })
		return len(c.calls) < before
	}
}

// caller is a context that calls back by itself when it ends. With one, a request
// needs nothing of package context.
type caller interface {
	AfterFunc(f func()) (stop func() bool)
	Cause() error
}

// AfterFunc is context.AfterFunc, and cheap where ctx is a Context or holds one.
func AfterFunc(ctx context.Context, f func()) (stop func() bool) {
	if c, ok := ctx.(caller); ok {
		return c.AfterFunc(f)
	}
	return context.AfterFunc(ctx, f)
}

// Cause is context.Cause, and asks a Context itself.
func Cause(ctx context.Context) error {
	if c, ok := ctx.(caller); ok {
		return c.Cause()
	}
	return context.Cause(ctx)
}
