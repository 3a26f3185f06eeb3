package ledger

import (
	"maps"
	"time"
)

const (
	// reservedPrefills is for how long the tokens of a conversation are reserved for its next turn, in
	// times of what their prefill takes: the cache is of no use to others for so long, and the
	// next turn saves the prefill.
	reservedPrefills = 0.3
	maxReservations  = 1024 // conversations
)

// nextTurns are tokens in the KV caches that the next turns of conversations are expected to use soon, by
// policy.ConversationKey. Where a cache is full, queued requests of others wait for the end of that time.
// Otherwise each turn would evict what the next turn of another conversation needs.
type nextTurns map[uint64]reservedTokens

// reservedTokens are those of one conversation.
type reservedTokens struct {
	slot   int
	tokens int
	until  time.Time
}

// reserve reserves the tokens of a conversation, unless those of maxReservations others are
// reserved at the time.
func (n nextTurns) reserve(key uint64, t reservedTokens, now time.Time) {
	n.removeWhere(func(t reservedTokens) bool { return now.After(t.until) })
	if _, known := n[key]; known || len(n) < maxReservations {
		n[key] = t
	}
}

// removeWhere removes the reservations that are selected.
func (n nextTurns) removeWhere(selects func(reservedTokens) bool) {
	maps.DeleteFunc(n, func(_ uint64, t reservedTokens) bool { return selects(t) })
}

// countForOthers returns how many tokens of a backend's cache are reserved at a time for other
// conversations than that of the key.
func (n nextTurns) countForOthers(slot int, key uint64, now time.Time) (tokens int) {
	for other, t := range n {
		if t.slot == slot && other != key && !now.After(t.until) {
			tokens += t.tokens
		}
	}
	return tokens
}
