package engine

import (
	"slices"
	"time"
)

// TransferOutcome is how the transfer of a request's remote tokens ended.
type TransferOutcome uint8

const (
	TransferDone    TransferOutcome = iota
	TransferCorrupt                 // what was read is not the KV of the prompt, as when its blocks were reused before
	TransferFailed                  // nothing was read: the request computes its prompt
)

// beginTransfer allocates blocks for the next tokens of r and begins to transfer them.
func (e *Engine) beginTransfer(r *Request, tokens int, now time.Duration) {
	e.extendBlocks(r, r.computed+tokens, now) // admit has seen that they are free
	seconds := float64(tokens) * float64(e.cfg.TransferTokenBytes) / e.cfg.TransferBandwidth / e.cfg.Speed
	e.copyEnd = max(now, e.copyEnd) + time.Duration(seconds*float64(time.Second))
	r.TransferEnd = max(r.loadedAt, e.copyEnd+time.Duration(float64(e.cfg.TransferTime)/e.cfg.Speed))
	r.Transferred = tokens
	r.state = transferring
	e.stats.RemoteHits += int64(tokens)
}

// EndTransfer ends the transfer of a request that was in StepResult.Transferring: the caller calls it at
// r.TransferEnd, or when the transfer failed. From the next step on r computes what it lacks. EndTransfer has no
// effect on any other request, such as one that was aborted.
func (e *Engine) EndTransfer(r *Request, outcome TransferOutcome) {
	if r.state != transferring {
		return
	}
	r.state = prefilling
	if outcome == TransferFailed {
		r.Transferred = 0
		return
	}
	r.Corrupt = r.Corrupt || outcome == TransferCorrupt
	tokens := r.computed + r.Transferred
	e.cacheFullBlocks(r, tokens)
	r.computed = min(tokens, r.Prompt-1)
}

// ReleasePinned frees the blocks that a prefill request has pinned, and reports whether it had.
func (e *Engine) ReleasePinned(r *Request) (released bool) {
	if r.state != pinned {
		return false
	}
	e.pinned = slices.DeleteFunc(e.pinned, func(p *Request) bool { return p == r })
	r.state = ended
	e.freeBlocks(r)
	return true
}

// RenewLease lets the lease of a prefill request's pinned blocks end no earlier than the time given, and reports whether
// they are pinned.
func (e *Engine) RenewLease(r *Request, end time.Duration) (renewed bool) {
	if r.state != pinned {
		return false
	}
	r.leaseEnd = max(r.leaseEnd, end)
	return true
}

// ExpireLeases releases the pinned blocks whose leases have ended. Step does it, too.
func (e *Engine) ExpireLeases(now time.Duration) {
	e.pinned = slices.DeleteFunc(e.pinned, func(r *Request) bool {
		if r.leaseEnd > now {
			return false
		}
		r.state = ended
		e.freeBlocks(r)
		e.stats.ExpiredLeases++
		return true
	})
}

// PinnedBlocks returns the numbers of the blocks that a prefill request has pinned, in order; none if it has not.
func (r *Request) PinnedBlocks() []int32 {
	if r.state != pinned {
		return nil
	}
	return slices.Clone(r.blocks)
}
