package queue

import (
	"slices"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
)

// chain returns n blocks of a prompt, which are those of another chain of the same name.
func chain(name uint64, n int) []prompt.Block {
	blocks := make([]prompt.Block, n)
	for i := range blocks {
		blocks[i] = prompt.Block(name<<32 | uint64(i) + 1)
	}
	return blocks
}

// addTurn adds a later turn of a conversation to the queue, whose prefill takes a second.
func addTurn(q *Queue[int], value int, id ConversationID, blocks []prompt.Block, now time.Time) *Item[int] {
	it := &Item[int]{Value: value, Backends: []*backends.Backend{{}}, Class: Normal, Tenant: id.Tenant, Tokens: 1, Conversation: id,
		Blocks: blocks}
	q.Add(it, 1, 1, false, now)
	return it
}

func TestLeadOfContinuedPrompt(t *testing.T) {
	own, others := ConversationID{Tenant: 1, Key: 7}, ConversationID{Tenant: 2, Key: 7}
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	for _, c := range []struct {
		name string
		sent [][]prompt.Block // one second after the other
		id   ConversationID
		next []prompt.Block
		at   int
		want time.Duration
	}{
		{"a prompt that goes on", [][]prompt.Block{chain(1, 10)}, own, chain(1, 12), 20, 20 * time.Second},
		{"the same prompt", [][]prompt.Block{chain(1, 10)}, own, chain(1, 10), 20, 20 * time.Second},
		{"at most a minute", [][]prompt.Block{chain(1, 10)}, own, chain(1, 12), 90, MaxLead},
		{"since its first turn", [][]prompt.Block{chain(1, 10), chain(1, 12), chain(1, 14)}, own, chain(1, 15), 20, 20 * time.Second},
		{"another end of an earlier turn", [][]prompt.Block{chain(1, 10), chain(1, 14)}, own, chain(1, 12), 20, 0},
		{"another tenant's", [][]prompt.Block{chain(1, 10)}, others, chain(1, 12), 20, 0},
		{"another conversation", [][]prompt.Block{chain(1, 10)}, ConversationID{Tenant: 1, Key: 8}, chain(1, 12), 20, 0},
		{"no conversation", [][]prompt.Block{chain(1, 10)}, ConversationID{Tenant: 1}, chain(1, 12), 20, 0},
		{"only the name is the same", [][]prompt.Block{chain(1, 10)}, own, chain(2, 12), 20, 0},
		{"it begins alike", [][]prompt.Block{chain(1, 10)}, own, append(chain(1, 9), chain(2, 3)...), 20, 0},
		{"no full block was sent", [][]prompt.Block{nil}, own, chain(1, 12), 20, 0},
		{"no full block", [][]prompt.Block{chain(1, 10)}, own, nil, 20, 0},
		{"a subagent's", [][]prompt.Block{chain(1, 10), chain(2, 5), chain(1, 12), chain(3, 4)}, own, chain(2, 6), 20, 19 * time.Second},
		{"after a long pause", [][]prompt.Block{chain(1, 10)}, own, chain(1, 12), 3601, 0},
	} {
		q := New[int](start)
		for i, blocks := range c.sent {
			q.RecordPrompt(own, blocks, at(i))
		}
		if it := addTurn(q, 1, c.id, c.next, at(c.at)); it.lead != c.want {
			t.Errorf("%s: lead %v, want %v", c.name, it.lead, c.want)
		}
	}
}

// TestOneLeadOfConversation has several turns of a conversation wait: one after the other has a lead.
func TestOneLeadOfConversation(t *testing.T) {
	q := New[int](start)
	id := ConversationID{Key: 7}
	q.RecordPrompt(id, chain(1, 10), start)
	now := start.Add(10 * time.Second)
	plain := &Item[int]{Value: 4, Backends: []*backends.Backend{{}}, Class: Normal, Tokens: 1}
	q.Add(plain, 1, 1, false, now)
	now = now.Add(time.Second)
	first := addTurn(q, 1, id, chain(1, 12), now)
	other := addTurn(q, 2, id, chain(2, 12), now)
	third := addTurn(q, 3, id, chain(1, 14), now)
	expect := func(when string, want ...*Item[int]) {
		t.Helper()
		for _, it := range []*Item[int]{first, other, third} {
			if has := it.lead > 0 && q.Contains(it); has != slices.Contains(want, it) {
				t.Errorf("%s: request %d has a lead: %v", when, it.Value, has)
			}
		}
	}
	expect("all wait", first)
	q.Remove(other, now)
	expect("one without a lead has left", first)
	q.StartRound()
	if it := q.GiveNextTurn(hasRoom(1)); it != first {
		t.Errorf("request %d is the first", it.Value)
	}
	q.Remove(first, now)
	expect("it has left", third)
	if it := q.GiveNextTurn(hasRoom(1)); it != third {
		t.Errorf("request %d is the next", it.Value)
	}
	q.Remove(third, now)
	expect("all have left")
	if v := q.conversations.find(id); v.leading != nil || len(v.queued) != 0 {
		t.Errorf("%v leads of %d", v.leading, len(v.queued))
	}

	waiting := addTurn(q, 5, id, chain(3, 12), now)
	q.RecordPrompt(id, chain(3, 11), now.Add(-time.Second))
	if waiting.lead != time.Second {
		t.Errorf("lead %v of a queued turn of a prompt that was sent meanwhile", waiting.lead)
	}
}

func TestQueuedTurnsAreBounded(t *testing.T) {
	q := New[int](start)
	id := ConversationID{Key: 7}
	q.RecordPrompt(id, chain(1, 10), start)
	var items []*Item[int]
	for i := range 2 * maxQueuedTurns {
		items = append(items, addTurn(q, i, id, chain(1, 12), start))
	}
	if n := len(q.conversations.find(id).queued); n != maxQueuedTurns {
		t.Errorf("%d turns of a conversation may have a lead, want %d", n, maxQueuedTurns)
	}
	for _, it := range items {
		q.Remove(it, start)
	}
	if n := len(q.conversations.find(id).queued); n != 0 {
		t.Errorf("%d turns are left", n)
	}
}

func TestHeadsOfConversation(t *testing.T) {
	var c conversations[int]
	id := ConversationID{Key: 7}
	for name := range uint64(maxHeads + 1) {
		c.recordPrompt(id, chain(name+1, 10), start)
	}
	c.recordPrompt(id, chain(2, 11), start) // it is used last, and takes no further place
	v := c.recordPrompt(id, chain(100, 10), start)
	for name, want := range map[uint64]bool{1: false, 2: true, 3: false, 4: true, maxHeads + 1: true, 100: true} {
		if known := v.findHead(chain(name, 12), start) >= 0; known != want {
			t.Errorf("a turn of subagent %d is known: %v", name, known)
		}
	}
	if n := len(v.heads); n != maxHeads {
		t.Errorf("%d heads, want %d", n, maxHeads)
	}
}

// TestLeadStaysInShare has a tenant whose later turns have leads beside one without: each is served its half.
func TestLeadStaysInShare(t *testing.T) {
	q := New[int](start)
	now := start
	const conversations = 30
	chains := map[uint64]int{}
	for key := range uint64(conversations) {
		q.RecordPrompt(ConversationID{1, key + 1}, chain(key+1, 1), start)
		chains[key+1] = 1
	}
	now = now.Add(MaxLead)
	next := func(key uint64) {
		chains[key]++
		addTurn(q, 1, ConversationID{1, key}, chain(key, chains[key]), now)
	}
	plain := func() { addTurn(q, 2, ConversationID{Tenant: 2}, nil, now) }
	for key := range uint64(conversations) {
		next(key + 1)
		plain()
	}
	served := map[int]int{}
	for range 200 { // each takes a second
		q.StartRound()
		it := q.GiveNextTurn(hasRoom(1))
		q.Remove(it, now)
		served[it.Value]++
		now = now.Add(time.Second)
		if it.Value == 1 {
			q.RecordPrompt(it.Conversation, it.Blocks, now)
			next(it.Conversation.Key)
		} else {
			plain()
		}
		if d := served[1] - served[2]; d < -2 || d > 2 {
			t.Fatalf("served %v", served)
		}
	}
}

// TestLoneTenantHasWholeLead has one tenant that has used its share, which matters to nobody.
func TestLoneTenantHasWholeLead(t *testing.T) {
	q := New[int](start)
	id := ConversationID{1, 7}
	q.RecordPrompt(id, chain(1, 10), start)
	now := start.Add(MaxLead)
	for range 20 {
		addTurn(q, 1, ConversationID{Tenant: 1}, nil, now)
	}
	now = now.Add(time.Second)
	turn := addTurn(q, 2, id, chain(1, 12), now)
	q.StartRound()
	if it := q.GiveNextTurn(hasRoom(1)); it != turn {
		t.Error("a later turn is not the first of its tenant's requests")
	}
}

// TestConversationsAreBounded has a tenant begin more conversations than are kept beside another one's.
func TestConversationsAreBounded(t *testing.T) {
	var c conversations[int]
	c.recordPrompt(ConversationID{1, 1}, chain(1, 1), start)
	for key := range uint64(maxConversations) {
		c.recordPrompt(ConversationID{2, key + 1}, chain(1, 1), start)
	}
	if n := c.byID.Len(); n != maxConversations || c.find(ConversationID{1, 1}) == nil || c.find(ConversationID{2, 1}) != nil {
		t.Errorf("%d conversations, or the other tenant's is displaced", n)
	}
}
