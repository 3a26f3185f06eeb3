package router

import (
	"slices"

	"warmroute/backends"
	"warmroute/router/health"
)

// SlotWait is a request's turn among those that wait for a slot on backends that
// refused them because of a full queue.
type SlotWait struct {
	router  *Router
	full    []*backends.Backend
	granted chan struct{}
	backend *backends.Backend // that has the slot; set before granted is closed
}

// slotWaits are the requests that wait for a slot, first come, first served.
type slotWaits []*SlotWait

// StartSlotWait begins a wait, without blocking, for a request to end on one of the backends, which last
// refused one because of a full queue. Each slot that becomes free goes to one of those that wait, in their
// order. Release must follow. full does not change until then.
func (r *Router) StartSlotWait(full []*backends.Backend) *SlotWait {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	w := &SlotWait{router: r, full: full, granted: make(chan struct{})}
	r.slotWaits = append(r.slotWaits, w)
	for _, b := range full {
		if r.fleet.has(b) {
			r.slotWaits.grant(b, r.fleet.states[b.Slot].health)
		}
	}
	return w
}

// Granted returns a channel that is closed when there is a slot.
func (w *SlotWait) Granted() <-chan struct{} { return w.granted }

// Backend returns the backend that has the slot. It may be called once Granted is closed.
func (w *SlotWait) Backend() *backends.Backend { return w.backend }

// Release ends the wait. A granted slot that is not used goes to the next request.
func (w *SlotWait) Release(slotUsed bool) {
	r := w.router
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if at := slices.Index(r.slotWaits, w); at >= 0 {
		r.slotWaits = slices.Delete(r.slotWaits, at, at+1)
		return
	}
	if !slotUsed && r.fleet.has(w.backend) {
		h := r.fleet.states[w.backend.Slot].health
		h.ReturnFreeSlot()
		r.slotWaits.grant(w.backend, h)
	}
}

// grant gives the free slots of b to those that wait for them.
func (waits *slotWaits) grant(b *backends.Backend, h *health.Record) {
	*waits = slices.DeleteFunc(*waits, func(w *SlotWait) bool {
		if !slices.Contains(w.full, b) || !h.AcquireFreeSlot() {
			return false
		}
		w.backend = b
		close(w.granted)
		return true
	})
}
