package policies

import (
	"cmp"
	"math/rand/v2"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"warmroute/router/policy"
)

// maxStickyConversations bounds the conversations that a stickyLeastLoaded remembers.
const maxStickyConversations = 1 << 16

// stickyLeastLoaded is sticky_least_loaded of vllm-router, and what manual with
// min_group does in SMG and sglang-router: a new conversation goes to the backend with the
// fewest conversations and stays there, whatever the load. A request without a conversation goes by
// the beginning of its first message or of its prompt.
type stickyLeastLoaded struct {
	rng           *rand.Rand
	slots         *simplelru.LRU[uint64, int] // by conversation
	conversations []int                       // by slot
}

func newStickyLeastLoaded(o policy.Options) policy.Policy {
	p := &stickyLeastLoaded{rng: o.Rand}
	slots, err := simplelru.NewLRU(maxStickyConversations, func(_ uint64, slot int) { p.conversations[slot]-- })
	if err != nil {
		panic(err) // it fails for sizes below 1 only
	}
	p.slots = slots
	return p
}

func stickyKey(r *policy.Request) uint64 { return cmp.Or(r.Conversation, promptStartHash(r)) }

func (p *stickyLeastLoaded) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	if slot, ok := p.slots.Peek(stickyKey(r)); ok {
		for i := range candidates {
			if candidates[i].Slot == slot {
				traceCriterion(r, "backend of the conversation's earlier requests")
				return i
			}
		}
	}
	return pickLowest(r, "conversations", len(candidates), p.rng, func(i int) float64 { return float64(p.count(candidates[i].Slot)) })
}

// count returns the number of conversations of a slot.
func (p *stickyLeastLoaded) count(slot int) int {
	if slot >= len(p.conversations) {
		return 0
	}
	return p.conversations[slot]
}

// RecordSent implements Recorder.
func (p *stickyLeastLoaded) RecordSent(r *policy.Request, c *policy.Candidate) {
	key := stickyKey(r)
	if key == 0 {
		return
	}
	if slot, ok := p.slots.Get(key); ok {
		if slot == c.Slot {
			return
		}
		p.slots.Remove(key)
	}
	for len(p.conversations) <= c.Slot {
		p.conversations = append(p.conversations, 0)
	}
	p.conversations[c.Slot]++
	p.slots.Add(key, c.Slot)
}

// ForgetBackend implements Forgetter.
func (p *stickyLeastLoaded) ForgetBackend(slot int) {
	for _, key := range p.slots.Keys() {
		if s, _ := p.slots.Peek(key); s == slot {
			p.slots.Remove(key)
		}
	}
}
