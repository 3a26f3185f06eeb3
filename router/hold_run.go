package router

import (
	"context"
	"time"

	"warmroute/backends"
)

// BackendChanged tells that a backend's state has changed: requests may be waiting for it.
// One that has come back is as good as new.
func (r *Router) BackendChanged(b *backends.Backend) {
	r.deciding.Lock()
	defer r.unlock()
	now := r.now()
	if r.has(b) && b.State() == backends.Ready {
		p := r.progress[b.Slot]
		p.missed, p.hung = 0, false
		p.breaker.close(now)
		p.stops = time.Time{}
	}
	r.dispatch(now)
}

// Tick looks at what time alone changes: work that was done, loads that fade,
// requests held too long. Whoever drives a Router without Run calls it every
// TickInterval or so while WaitingRequests is not 0.
func (r *Router) Tick() {
	r.deciding.Lock()
	defer r.unlock()
	r.dispatch(r.now())
}

// Drain tells that the proxy is about to end: from now on requests are held for
// room, but not for a backend to become ready. Those that are get ErrNoneReady.
func (r *Router) Drain() {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	r.stopping = true
	r.dispatch(r.now())
}

// TickInterval is how often time is looked at while requests are held. Most are
// sent by what happens, not by this.
const TickInterval = 20 * time.Millisecond

// Run ticks while requests are held, until ctx is done.
func (r *Router) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.began:
			r.tickWhileHeld(ctx)
		}
	}
}

func (r *Router) tickWhileHeld(ctx context.Context) {
	ticker := time.NewTicker(TickInterval)
	defer ticker.Stop()
	for r.queued() > 0 {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			r.Tick()
		}
	}
}
