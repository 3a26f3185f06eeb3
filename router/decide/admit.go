package decide

// Blocker is what keeps a request from starting soon on a backend.
type Blocker int

const (
	NotBlocked         Blocker = iota
	BlockedByPrefill           // its prefill queue is full
	BlockedBySequences         // it runs as many sequences as it can
	BlockedByQueue             // requests wait there for room in the KV cache
	BlockedByKV                // its KV cache has no room for the request
	BlockedByNextTurns         // its KV cache has no room beside what conversations will use soon
)

// String returns the reason as it is explained to operators.
func (b Blocker) String() string {
	return [...]string{"", "its prefill queue is full", "it runs as many sequences as it can", "requests wait there for room",
		"its KV cache has no room",
		"its KV cache has no room beside conversations whose next turn is expected"}[b]
}

// BlockedBy returns why the chosen candidate cannot start the request now, or nearly so; see lab/docs/design.md.
func (f *Fleet) BlockedBy(q *Query, choice Choice) Blocker {
	b := choice.Backend
	switch {
	case !f.QueueEnabled || q.NoEngine:
		return NotBlocked
	case f.IsTooLong(q.Request, b):
		return NotBlocked // it will be refused
	case b.ProbeDue:
		return NotBlocked // or it would wait for what no request tries
	case b.KnownInFlight == 0:
		return NotBlocked // nothing of ours could make room, and what others have there may last
	}
	switch {
	case !f.hasPrefillRoom(b):
		return BlockedByPrefill
	case !f.hasSequenceRoom(b):
		return BlockedBySequences
	case b.isWaitingForKV(), f.NeedsHeadroom(q.Request, q.Promoted) && b.HasWaiting:
		return BlockedByQueue
	}
	reserved := 0.0
	if !q.Promoted {
		holdsBack := func(tenant uint64) bool {
			return f.IsDueBefore == nil || f.IsDueBefore(q.Class(), tenant, q.Tenant, f.Now)
		}
		reserved = float64(f.Ledger.CountReservedForOthers(b.Slot, q.ConversationID(), q.Blocks, holdsBack, f.Now))
	}
	if b.fitsKV(q.promptTokens() + reserved) {
		return NotBlocked
	}
	// Exact, now that it matters.
	need := f.requiredKVTokens(q, b.Slot)
	if b.Capacity > 0 && need > float64(b.Capacity) {
		return NotBlocked // it never fits: the engine decides
	}
	switch {
	case b.fitsKV(need + reserved):
		return NotBlocked
	case b.fitsKV(need):
		return BlockedByNextTurns
	}
	return BlockedByKV
}

// Claim claims what the request takes of a backend for the rest of the round.
func (f *Fleet) Claim(q *Query, slot int) {
	b := &f.Backends[slot]
	if !b.HasRoom {
		return // nor has it for others
	}
	b.Claimed.KV += f.requiredKVTokens(q, slot)
	f.UpdateRoom(b)
}

// ClaimSequences claims, on the full backend with the most free ones, the slots of a
// request that counts for more than any backend may have beside what it has; else
// requests that count for one would take each slot that becomes free.
func (f *Fleet) ClaimSequences(q *Query, c *Candidates) {
	freest := f.freestFull(c)
	freest.Claimed.Sequences += q.CountedSequences()
	f.UpdateRoom(freest)
}
