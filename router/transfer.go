package router

import (
	"runtime"
	"slices"

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
	defer r.unlock()
	return r.listBackends()
}

func (r *Router) listBackends() (list []*backends.Backend) {
	for i := range r.states {
		if b := r.states[i].backend; b != nil {
			list = append(list, b)
		}
	}
	return list
}

// Export appends what was learned of b to estimates, in estimate.EncodedBytes bytes,
// and what the index holds of it to blocks, which is empty. Decisions go on
// meanwhile. Of a backend that is removed nothing is exported.
func (r *Router) Export(b *backends.Backend, estimates []byte, blocks []index.ExportedBlock) ([]byte, []index.ExportedBlock) {
	estimates, e := r.startExport(b, estimates)
	for more := e != nil; more; runtime.Gosched() {
		blocks, more = r.exportPart(b, e, blocks)
	}
	return estimates, blocks
}

func (r *Router) startExport(b *backends.Backend, estimates []byte) ([]byte, *index.Export) {
	r.mu.Lock()
	defer r.unlock()
	if !r.has(b) {
		return slices.Concat(estimates, make([]byte, estimate.EncodedBytes)), nil
	}
	return r.estimates.Append(estimates, b.Slot), r.index.Export(b.Slot)
}

func (r *Router) exportPart(b *backends.Backend, e *index.Export, blocks []index.ExportedBlock) (all []index.ExportedBlock, more bool) {
	r.mu.Lock()
	defer r.unlock()
	if !r.has(b) {
		return blocks[:0], false // its slot may be another's
	}
	return e.Next(blocks, maxTransferBlocks)
}

// Import restores what Export returned, and returns how many blocks it took. Estimates
// that are not plausible are ignored. Decisions go on meanwhile.
func (r *Router) Import(b *backends.Backend, estimates []byte, blocks []index.ImportedBlock) (taken int) {
	i := r.startImport(b, estimates, len(blocks))
	for i != nil && len(blocks) > 0 {
		part := blocks[:min(maxTransferBlocks, len(blocks))]
		n, more := r.importPart(i, part)
		taken += n
		if !more {
			break
		}
		blocks = blocks[len(part):]
		runtime.Gosched() // else this goroutine would have the lock again before those that wait for it
	}
	return taken
}

func (r *Router) startImport(b *backends.Backend, estimates []byte, n int) *index.Import {
	r.mu.Lock()
	defer r.unlock()
	if !r.has(b) {
		return nil
	}
	if r.estimates.Restore(b.Slot, estimates) {
		r.resizeIndex(b.Slot)
	}
	return r.index.Import(b.Slot, n)
}

func (r *Router) importPart(i *index.Import, blocks []index.ImportedBlock) (taken int, more bool) {
	r.mu.Lock()
	defer r.unlock()
	return i.Add(blocks)
}
