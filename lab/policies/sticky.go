package policies

import (
	"cmp"
	"math/rand/v2"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"warmroute/router/policy"
)

// maxStickySessions bounds the sessions that a stickyLeastLoaded remembers.
const maxStickySessions = 1 << 16

// stickyLeastLoaded is sticky_least_loaded of vllm-router, and what manual with
// min_group does in SMG and sglang-router: a new session goes to the backend with the
// fewest sessions and stays there, whatever the load. A request without a session goes by
// the beginning of its first message or of its prompt.
type stickyLeastLoaded struct {
	rng      *rand.Rand
	slots    *simplelru.LRU[uint64, int] // by session
	sessions []int                       // by slot
}

func newStickyLeastLoaded(o policy.Options) policy.Policy {
	p := &stickyLeastLoaded{rng: o.Rand}
	slots, err := simplelru.NewLRU(maxStickySessions, func(_ uint64, slot int) { p.sessions[slot]-- })
	if err != nil {
		panic(err) // it fails for sizes below 1 only
	}
	p.slots = slots
	return p
}

func stickyKey(r *policy.Request) uint64 { return cmp.Or(r.Session, promptStartHash(r)) }

func (p *stickyLeastLoaded) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	if slot, ok := p.slots.Peek(stickyKey(r)); ok {
		for i := range candidates {
			if candidates[i].Slot == slot {
				traceCriterion(r, "backend of the session's earlier requests")
				return i
			}
		}
	}
	return pickLowest(r, "sessions", len(candidates), p.rng, func(i int) float64 { return float64(p.count(candidates[i].Slot)) })
}

// count returns the number of sessions of a slot.
func (p *stickyLeastLoaded) count(slot int) int {
	if slot >= len(p.sessions) {
		return 0
	}
	return p.sessions[slot]
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
	for len(p.sessions) <= c.Slot {
		p.sessions = append(p.sessions, 0)
	}
	p.sessions[c.Slot]++
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
