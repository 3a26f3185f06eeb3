package queue

import (
	"slices"
	"time"

	"warmroute/prompt"
	"warmroute/router/tenantlru"
)

const (
	maxConversations = 1 << 16
	// maxHeads is how many ends of prompts are known of a conversation. Subagents take turns in one.
	maxHeads = 8
	// maxQueuedTurns is how many queued requests of a conversation may have a lead, one after the other.
	maxQueuedTurns = 64
	// maxConversationPause is for how long after its last turn a conversation is under way.
	maxConversationPause = time.Hour
)

// ConversationID identifies a conversation of a tenant. Those of different tenants have nothing in common.
type ConversationID struct {
	Tenant uint64
	Key    uint64 // that its requests have in common; 0: it is not known to be one
}

// conversations are those under way, by the ends of the prompts that were sent. They tell a turn that continues an earlier one
// from a prompt that only names the same conversation, or begins with the same message. No tenant displaces those of others once it
// has a sixteenth.
type conversations[T any] struct {
	byID *tenantlru.LRU[*conversation[T]] // nil: none yet
}

// conversation is one of conversations. It may outlive its place there.
type conversation[T any] struct {
	heads   []promptHead  // the one used last at the end
	first   [1]promptHead // the memory of heads while there is one, as most conversations have
	queued  []*Item[T]    // its later turns, by arrival
	leading *Item[T]      // the one of these that has a lead
}

// promptHead is the end of a prompt that was sent.
type promptHead struct {
	prompt.Head
	began time.Time // when the first of the prompts was sent that each continue the one before
	at    time.Time // when this one was sent
}

// recordPrompt records a prompt of a conversation that is sent, and returns the conversation; nil where it is none, or the
// prompt has no full block.
func (c *conversations[T]) recordPrompt(id ConversationID, blocks []prompt.Block, now time.Time) *conversation[T] {
	if id.Key == 0 || len(blocks) == 0 {
		return nil
	}
	v := c.findOrAdd(id)
	head := promptHead{Head: prompt.HeadOf(blocks), began: now, at: now}
	if at := v.findHead(blocks, now); at >= 0 {
		head.began = v.heads[at].began
		v.heads = slices.Delete(v.heads, at, at+1)
	} else if len(v.heads) == maxHeads {
		v.heads = slices.Delete(v.heads, 0, 1)
	}
	v.heads = append(v.heads, head)
	return v
}

// findHead returns the index of the longest prompt under way that a prompt continues; -1: none.
func (v *conversation[T]) findHead(blocks []prompt.Block, now time.Time) int {
	found := -1
	for i, h := range v.heads {
		if h.IsContinuedBy(blocks) && now.Sub(h.at) <= maxConversationPause && (found < 0 || h.Len() > v.heads[found].Len()) {
			found = i
		}
	}
	return found
}

// giveLead gives the first queued turn that continues an earlier one a lead, if no turn has one: for as long as the
// conversation was under way when it arrived. It returns that turn, or nil.
func (v *conversation[T]) giveLead(now time.Time) *Item[T] {
	if v.leading != nil {
		return nil
	}
	for _, it := range v.queued {
		if at := v.findHead(it.Blocks, now); at >= 0 {
			it.lead = min(max(0, it.Arrived.Sub(v.heads[at].began)), MaxLead)
			v.leading = it
			return it
		}
	}
	return nil
}

// removeQueued removes a turn that leaves the queue.
func (v *conversation[T]) removeQueued(it *Item[T]) {
	at := slices.Index(v.queued, it)
	v.queued = slices.Delete(v.queued, at, at+1)
	if v.leading == it {
		v.leading = nil
	}
}

// find returns a conversation; nil if it is not known.
func (c *conversations[T]) find(id ConversationID) *conversation[T] {
	if c.byID == nil {
		return nil
	}
	v, _ := c.byID.Find(tenantlru.Key(id))
	return v
}

// findOrAdd returns a conversation, which is the one used last from now on.
func (c *conversations[T]) findOrAdd(id ConversationID) *conversation[T] {
	v := c.find(id)
	switch {
	case c.byID == nil:
		c.byID = tenantlru.New[*conversation[T]](maxConversations, nil)
		fallthrough
	case v == nil:
		v = &conversation[T]{}
		v.heads = v.first[:0]
	}
	c.byID.Add(tenantlru.Key(id), v)
	return v
}
