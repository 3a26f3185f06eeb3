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
func (r *Router) Backends() (list []*backends.Backend) {
	r.withLock(func() { list = r.fleet.all() })
	return list
}

// Export appends what was learned of b to estimates, in estimate.EncodedBytes bytes, and what the index holds
// of it to blocks, which is empty. Decisions go on meanwhile. Nothing is exported of a removed backend.
func (r *Router) Export(b *backends.Backend, estimates []byte, blocks []index.ExportedBlock) ([]byte, []index.ExportedBlock) {
	var e *index.Export
	r.withLock(func() {
		if r.fleet.has(b) {
			estimates, e = r.fleet.estimates.AppendBackend(estimates, b.Slot), r.fleet.index.Export(b.Slot)
		}
	})
	if e == nil {
		return append(estimates, make([]byte, estimate.EncodedBytes)...), blocks
	}
	for more := true; more; runtime.Gosched() {
		r.withLock(func() {
			if r.fleet.has(b) {
				blocks, more = e.AppendNext(blocks, maxTransferBlocks)
			} else {
				blocks, more = blocks[:0], false // its slot may be another's
			}
		})
	}
	return estimates, blocks
}

// Import restores what Export returned, and returns how many blocks it took. Estimates
// that are not plausible are ignored. Decisions continue meanwhile. Blocks count as restored until they are used.
func (r *Router) Import(b *backends.Backend, estimates []byte, blocks []index.ImportedBlock) (takenBlocks int) {
	var i *index.Import
	r.withLock(func() {
		if !r.fleet.has(b) {
			return
		}
		if r.fleet.estimates.RestoreBackend(b.Slot, estimates) {
			r.fleet.ledger.ResizeIndex(b.Slot)
		}
		i = r.fleet.index.Import(b.Slot, len(blocks))
		r.fleet.estimates.SetRestored(b.Slot, i.LastUse())
	})
	// else this goroutine would have the lock again before those that wait for it
	for more := i != nil; more && len(blocks) > 0; runtime.Gosched() {
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

// SetIndexRestored makes all blocks in the index count as restored until they are used: they are of requests before the start of
// this process.
func (r *Router) SetIndexRestored() {
	r.withLock(func() {
		for _, b := range r.fleet.all() {
			r.fleet.estimates.SetRestored(b.Slot, r.fleet.index.Uses(b.Slot))
		}
	})
}
