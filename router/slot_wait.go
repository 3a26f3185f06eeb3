package router

import (
	"slices"

	"warmroute/backends"
)

// SlotWait is a request's turn among those that wait for a slot on backends that
// refused them because of a full queue.
type SlotWait struct {
	router  *Router
	full    []*backends.Backend
	granted chan struct{}
	backend *backends.Backend // that has the slot; set before granted is closed
}

// StartSlotWait begins a wait, without blocking, for a request to end on one of the
// backends, which last refused one because of a full queue. Each slot that becomes free
// goes to one of those that wait, in their order. Release must follow. full does not
// change until then.
func (r *Router) StartSlotWait(full []*backends.Backend) *SlotWait {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	w := &SlotWait{router: r, full: full, granted: make(chan struct{})}
	r.slotWaits = append(r.slotWaits, w)
	for _, b := range full {
		r.grantFreeSlots(b)
	}
	return w
}

// Granted returns a channel that is closed when there is a slot.
func (w *SlotWait) Granted() <-chan struct{} { return w.granted }

// Backend returns the backend that has the slot. It may be called once Granted is
// closed.
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
	if !slotUsed && r.has(w.backend) {
		r.states[w.backend.Slot].health.freeSlots++
		r.grantFreeSlots(w.backend)
	}
}

// grantFreeSlots gives the free slots of b to those that wait for them.
func (r *Router) grantFreeSlots(b *backends.Backend) {
	if !r.has(b) {
		return
	}
	h := r.states[b.Slot].health
	r.slotWaits = slices.DeleteFunc(r.slotWaits, func(w *SlotWait) bool {
		if h.freeSlots == 0 || !slices.Contains(w.full, b) {
			return false
		}
		h.freeSlots--
		w.backend = b
		close(w.granted)
		return true
	})
}
