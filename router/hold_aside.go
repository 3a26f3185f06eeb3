package router

import (
	"slices"

	"warmroute/backends"
)

// AddWaiting counts a request among those that wait, and reports whether it may
// wait: ErrQueueFull or nil. After nil RemoveWaiting must follow, with the same request.
func (r *Router) AddWaiting(req *Request) error {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	if r.holding.Requests > 0 && r.holdsAll(req) {
		return ErrQueueFull
	}
	r.aside[req.class()].add(1, int64(req.BodyBytes), 0)
	return nil
}

// RemoveWaiting ends what AddWaiting began.
func (r *Router) RemoveWaiting(req *Request) {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	r.aside[req.class()].add(-1, -int64(req.BodyBytes), 0)
}

// holdsAll reports whether a request may not wait beside those of its class that do.
func (r *Router) holdsAll(req *Request) bool {
	c := req.class()
	requests, bytes := r.holding.bounds(c)
	held := r.queue.classes[c]
	held.add(r.aside[c].count, r.aside[c].bytes, 0)
	return held.count >= requests || bytes > 0 && held.bytes+int64(req.BodyBytes) > bytes
}

// unreadyHaveTheirShare reports whether a request without a ready backend is not
// queued, because such requests take half of their class's queue already: the other half is
// for models that have one. Where none has, there is nothing to keep it for.
func (r *Router) unreadyHaveTheirShare(req *Request) bool {
	isReady := func(b *backends.Backend) bool { return b != nil && r.available(b, nil) }
	if slices.ContainsFunc(req.Backends, isReady) || !slices.ContainsFunc(r.fleet, isReady) {
		return false
	}
	c, unready := req.class(), waiting{}
	for _, g := range r.queue.groups {
		if !slices.ContainsFunc(g.backends, isReady) {
			unready.add(g.classes[c].count, g.classes[c].bytes, 0)
		}
	}
	requests, bytes := r.holding.bounds(c)
	return unready.count > 0 && (2*(unready.count+1) > requests || bytes > 0 && 2*(unready.bytes+int64(req.BodyBytes)) > bytes)
}

// WaitingRequests is how many wait, in the queue or aside.
func (r *Router) WaitingRequests() int {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	n := r.queue.count
	for c := range r.aside {
		n += r.aside[c].count
	}
	return n
}

// WaitingByClass returns how many wait, in the queue or aside, by the name of their
// priority class.
func (r *Router) WaitingByClass() map[string]int {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	held := make(map[string]int, classes)
	for c := range classes {
		held[c.String()] = r.queue.classes[c].count + r.aside[c].count
	}
	return held
}

// queued is how many wait in the queue.
func (r *Router) queued() int {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	return r.queue.count
}
