package router

import (
	"maps"
	"time"

	"warmroute/prompt"
	"warmroute/router/policy"
	"warmroute/router/queue"
)

const (
	// keptPrefills is for how long the tokens of a conversation are kept for its next turn, in
	// times of what their prefill takes: the cache is of no use to others for so long, and the
	// next turn saves the prefill.
	keptPrefills = 0.3
	maxKept      = 1024 // conversations
)

// keptTokens are tokens in the KV caches that the next turns of conversations are expected to
// use soon, by policy.ConversationKey. Where a cache is full, queued requests of others wait for
// the end of that time. Otherwise each turn would evict what the next turn of another
// conversation needs.
type keptTokens map[uint64]keptConversation

type keptConversation struct {
	slot   int
	tokens int
	until  time.Time
}

// add keeps the tokens of a conversation, unless maxKept others are kept at the time.
func (k keptTokens) add(key uint64, kept keptConversation, now time.Time) {
	k.removeWhere(func(c keptConversation) bool { return now.After(c.until) })
	if _, known := k[key]; known || len(k) < maxKept {
		k[key] = kept
	}
}

// removeWhere removes the conversations that are selected.
func (k keptTokens) removeWhere(selects func(keptConversation) bool) {
	maps.DeleteFunc(k, func(_ uint64, c keptConversation) bool { return selects(c) })
}

// countForOthers returns how many tokens of a backend's cache are kept at a time for other
// conversations than that of the key.
func (k keptTokens) countForOthers(slot int, key uint64, now time.Time) (tokens int) {
	for other, c := range k {
		if c.slot == slot && other != key && !now.After(c.until) {
			tokens += c.tokens
		}
	}
	return tokens
}

func (r *Request) conversationKey() uint64 {
	return policy.ConversationKey(r.Session, r.PromptKey, r.Turn)
}

// keepForNextTurn keeps the tokens of an answered request, if another turn may follow.
func (r *Router) keepForNextTurn(d *Decision, outputTokens int, now time.Time) {
	tracker, ok := r.policy.Policy.(policy.ConversationTracker)
	if !ok || d.request.conversation == 0 || !r.isQueueEnabled() {
		return
	}
	tokens := int(d.prediction.PromptTokens) + outputTokens
	seconds := keptPrefills * tracker.LaterTurnProbability() * float64(tokens) / r.estimates.PrefillRate(d.Backend.Slot)
	r.kept.add(d.request.conversation, keptConversation{
		d.Backend.Slot, tokens, now.Add(time.Duration(seconds * float64(time.Second))),
	}, now)
}

// conversationLead returns by how much a request is queued as if it had arrived earlier: for as
// long as its conversation is under way, because turns that evict each other's prefixes in turn
// are all computed from the beginning.
func (r *Router) conversationLead(req *Request, now time.Time) time.Duration {
	tracker, ok := r.policy.Policy.(policy.ConversationTracker)
	if !ok || req.Turn != prompt.TurnLater {
		return 0
	}
	return min(tracker.ConversationAge(req.conversationKey(), now), queue.MaxLead)
}
