package ledger

import (
	"maps"
	"time"

	"warmroute/prompt"
	"warmroute/router/queue"
)

const (
	// reservedPrefills is for how long the tokens of a conversation are reserved for its next turn, in
	// times of what their prefill takes: the cache is of no use to others for so long, and the
	// next turn saves the prefill.
	reservedPrefills = 0.3
	maxReservations  = 1024 // conversations
)

// nextTurns are tokens in the KV caches that the next turns of conversations are expected to use soon. Where a cache is
// full, queued requests of others wait for the end of that time. Otherwise each turn would evict what the next turn of
// another conversation needs.
type nextTurns map[queue.ConversationID]reservedTokens

// reservedTokens are those of one conversation.
type reservedTokens struct {
	slot   int
	tokens int
	until  time.Time
	head   prompt.Head // of the prompt that ended, which the next turn continues
}

// reserve reserves the tokens of a conversation, unless those of maxReservations others are
// reserved at the time.
func (n nextTurns) reserve(id queue.ConversationID, t reservedTokens, now time.Time) {
	n.removeWhere(func(t reservedTokens) bool { return now.After(t.until) })
	if _, known := n[id]; known || len(n) < maxReservations {
		n[id] = t
	}
}

// removeWhere removes the reservations that are selected.
func (n nextTurns) removeWhere(selects func(reservedTokens) bool) {
	maps.DeleteFunc(n, func(_ queue.ConversationID, t reservedTokens) bool { return selects(t) })
}

// removeContinued removes the reservation for a prompt that is sent.
func (n nextTurns) removeContinued(id queue.ConversationID, blocks []prompt.Block) {
	if t, known := n[id]; known && t.head.IsContinuedBy(blocks) {
		delete(n, id)
	}
}

// countForOthers returns how many tokens of a backend's cache are reserved at a time for other prompts than that of a
// conversation. Those of tenants that holdsBack refuses are left out.
func (n nextTurns) countForOthers(slot int, id queue.ConversationID, blocks []prompt.Block, holdsBack func(tenant uint64) bool,
	now time.Time) (tokens int) {
	for other, t := range n {
		switch {
		case t.slot != slot || now.After(t.until), other == id && t.head.IsContinuedBy(blocks):
		case other.Tenant == id.Tenant, holdsBack(other.Tenant):
			tokens += t.tokens
		}
	}
	return tokens
}
