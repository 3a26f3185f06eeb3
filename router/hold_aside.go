package router

// aside are the requests that wait elsewhere than in the hold queue, for what is
// no backend's room: their turn to be tried again, or a check. The queue's bounds
// are for both together.
type aside struct {
	count int
	bytes int64
}

// HoldAside counts a request among those that wait, and reports whether it may
// wait: ErrHoldFull or nil. After nil EndAside must follow, with the same bytes.
func (r *Router) HoldAside(bytes int) error {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	if r.holding.Requests > 0 && r.holdsAll(bytes) {
		return ErrHoldFull
	}
	r.aside.count++
	r.aside.bytes += int64(bytes)
	return nil
}

// EndAside ends what HoldAside began.
func (r *Router) EndAside(bytes int) {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	r.aside.count--
	r.aside.bytes -= int64(bytes)
}

// holdsAll reports whether no request of so many bytes may wait beside those that do.
func (r *Router) holdsAll(bytes int) bool {
	return r.queue.count+r.aside.count >= r.holding.Requests ||
		r.holding.Bytes > 0 && r.queue.bytes+r.aside.bytes+int64(bytes) > r.holding.Bytes
}

// HeldRequests is how many wait, in the queue or aside.
func (r *Router) HeldRequests() int {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	return r.queue.count + r.aside.count
}

// queued is how many wait in the queue.
func (r *Router) queued() int {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	return r.queue.count
}
