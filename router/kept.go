package router

import (
	"time"

	"warmroute/router/policy"
	"warmroute/router/prompt"
)

const (
	// keptPrefills is for how long the tokens of a conversation are kept for its next turn, in
	// times of what their prefill takes: the cache is of no use to others for so long, and the
	// next turn saves the prefill.
	keptPrefills = 0.3
	maxKept      = 1024 // conversations
	// maxConversationLead is by how much a later turn is queued as if it had arrived earlier.
	maxConversationLead = time.Minute
)

// keptTokens are tokens in the KV caches that the next turns of conversations are expected to
// use soon. Where a cache is full, queued requests of others wait for the end of that time.
// Otherwise each turn would evict what the next turn of another conversation needs.
type keptTokens struct {
	conversations map[uint64]keptConversation // by policy.ConversationKey
	bySlot        []float64                   // their sum
}

type keptConversation struct {
	slot   int
	tokens float64
	until  time.Time
}

func (k *keptTokens) add(key uint64, kept keptConversation) {
	k.remove(key)
	if len(k.conversations) == maxKept {
		return
	}
	if k.conversations == nil {
		k.conversations = map[uint64]keptConversation{}
	}
	for len(k.bySlot) <= kept.slot {
		k.bySlot = append(k.bySlot, 0)
	}
	k.conversations[key] = kept
	k.bySlot[kept.slot] += kept.tokens
}

func (k *keptTokens) remove(key uint64) {
	if kept, ok := k.conversations[key]; ok {
		delete(k.conversations, key)
		k.bySlot[kept.slot] -= kept.tokens
	}
	if len(k.conversations) == 0 {
		clear(k.bySlot) // no rounding error is left
	}
}

// removeWhere removes the conversations that are selected.
func (k *keptTokens) removeWhere(selects func(keptConversation) bool) {
	for key, kept := range k.conversations {
		if selects(kept) {
			k.remove(key)
		}
	}
}

// forOthers returns how many tokens of a backend's cache are kept at a time for other
// conversations than that of the key.
func (k *keptTokens) forOthers(slot int, key uint64, now time.Time) float64 {
	k.removeWhere(func(c keptConversation) bool { return now.After(c.until) })
	if slot >= len(k.bySlot) {
		return 0
	}
	tokens := k.bySlot[slot]
	if own, ok := k.conversations[key]; ok && own.slot == slot {
		tokens -= own.tokens
	}
	return max(0, tokens)
}

func (r *Request) conversationKey() uint64 {
	return policy.ConversationKey(r.Session, r.PromptKey, r.Turn)
}

// keepForNextTurn keeps the tokens of an answered request, if another turn may follow.
func (r *Router) keepForNextTurn(d *Decision, answerTokens int, now time.Time) {
	tracker, ok := r.policy.Policy.(policy.ConversationTracker)
	if !ok || d.request.conversation == 0 || !r.isQueueEnabled() {
		return
	}
	tokens := d.prediction.PromptTokens + float64(answerTokens)
	seconds := keptPrefills * tracker.FollowedShare() * tokens / r.estimates.PrefillRate(d.Backend.Slot)
	r.kept.add(d.request.conversation, keptConversation{
		d.Backend.Slot, tokens, now.Add(time.Duration(seconds * float64(time.Second))),
	})
}

// conversationLead returns by how much a request is queued as if it had arrived earlier: for as
// long as its conversation is under way, because turns that evict each other's prefixes in turn
// are all computed from the beginning.
func (r *Router) conversationLead(req *Request, now time.Time) time.Duration {
	tracker, ok := r.policy.Policy.(policy.ConversationTracker)
	if !ok || req.Turn != prompt.TurnLater {
		return 0
	}
	return min(tracker.ConversationAge(req.conversationKey(), now), maxConversationLead)
}
