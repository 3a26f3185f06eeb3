package router

import (
	"runtime"

	"warmroute/backends"
	"warmroute/router/estimate"
	"warmroute/router/index"
)

// maxTransferBlocks is how many blocks are copied out or in while the lock is held:
// it takes some ten microseconds, as long as a decision.
const maxTransferBlocks = 512

// Backends returns the backends in the fleet, by slot.
func (r *Router) Backends() []*backends.Backend {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	return r.listBackendsLocked()
}

func (r *Router) listBackendsLocked() (list []*backends.Backend) {
	for i := range r.states {
		if b := r.states[i].backend; b != nil {
			list = append(list, b)
		}
	}
	return list
}

// withLock calls f under the lock.
func (r *Router) withLock(f func()) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	f()
}

// Export appends what was learned of b to estimates, in estimate.EncodedBytes bytes,
// and what the index holds of it to blocks, which is empty. Decisions go on
// meanwhile. Nothing is exported of a removed backend.
func (r *Router) Export(b *backends.Backend, estimates []byte, blocks []index.ExportedBlock) ([]byte, []index.ExportedBlock) {
	var e *index.Export
	r.withLock(func() {
		if r.has(b) {
			estimates, e = r.estimates.AppendBackend(estimates, b.Slot), r.index.Export(b.Slot)
		}
	})
	if e == nil {
		return append(estimates, make([]byte, estimate.EncodedBytes)...), blocks
	}
	for more := true; more; runtime.Gosched() {
		r.withLock(func() {
			if r.has(b) {
				blocks, more = e.AppendNext(blocks, maxTransferBlocks)
			} else {
				blocks, more = blocks[:0], false // its slot may be another's
			}
		})
	}
	return estimates, blocks
}

// Import restores what Export returned, and returns how many blocks it took. Estimates
// that are not plausible are ignored. Decisions continue meanwhile.
func (r *Router) Import(b *backends.Backend, estimates []byte, blocks []index.ImportedBlock) (takenBlocks int) {
	var i *index.Import
	r.withLock(func() {
		if !r.has(b) {
			return
		}
		if r.estimates.RestoreBackend(b.Slot, estimates) {
			r.resizeIndex(b.Slot)
		}
		i = r.index.Import(b.Slot, len(blocks))
	})
	for more := i != nil; more && len(blocks) > 0; runtime.Gosched() { // else this goroutine would have the lock again before those that wait for it
		part := blocks[:min(maxTransferBlocks, len(blocks))]
		blocks = blocks[len(part):]
		r.withLock(func() {
			var n int
			n, more = i.Add(part)
			takenBlocks += n
		})
	}
	return takenBlocks
}
