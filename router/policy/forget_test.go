package policy

import (
	"math/rand/v2"
	"testing"
	"time"

	"warmroute/router/prompt"
)

// Of a slot that a policy forgot, its next owner is taken for one that was sent
// nothing; the others keep what they have.
func TestAForgottenSlotHoldsNothing(t *testing.T) {
	blocks := make([]prompt.Block, 20)
	for i := range blocks {
		blocks[i] = prompt.Block(i + 1)
	}
	candidates := []Candidate{{Slot: 0}, {Slot: 1}, {Slot: 70}}
	now := time.Unix(1000, 0)
	f := func(name string, leading func() []int, add func(slot int), forget func(slot int)) {
		t.Helper()
		forget(500) // a slot that nobody had
		for _, c := range candidates {
			add(c.Slot)
		}
		for gone, c := range candidates {
			forget(c.Slot)
			forget(c.Slot)
			for i, depth := range leading() {
				if want := 20; i == gone && depth != 0 || i != gone && depth != want {
					t.Errorf("%s, slot %d forgotten: candidate %d holds %d blocks", name, c.Slot, i, depth)
				}
			}
			add(c.Slot)
		}
	}
	l := newLedger(1000, losesTails)
	f("ledger", func() []int { return l.leading(blocks, candidates) }, func(slot int) { l.add(slot, blocks, now) }, l.Forget)
	if l.known != 3 {
		t.Errorf("%d backends are known, want 3", l.known)
	}
	tr := newTrie(1000, losesTails)
	f("trie", func() []int { return tr.leading(blocks, candidates) }, func(slot int) { tr.add(slot, blocks, now) }, tr.Forget)
}

// Where a policy did not forget, it would send to the slot's next owner what the
// first one held, each time.
func TestEveryPolicyThatRemembersForgets(t *testing.T) {
	r := &Request{Now: time.Unix(1000, 0), Blocks: []prompt.Block{1, 2, 3}, BlockTokens: 64, PromptTokens: 192, MeanAnswerTokens: 100}
	forgot := 0
	for _, name := range Names() {
		elsewhere := false
		for seed := range uint64(50) {
			p := mustNew(t, name, Settings{}, rand.New(rand.NewPCG(seed, 2)))
			remembers, ok := p.(Forgetter)
			if !ok {
				elsewhere = true
				break
			}
			candidates := []Candidate{{Slot: 0, NameHash: 1, Weight: 1, PrefillRate: 8000}, {Slot: 1, NameHash: 2, Weight: 1, PrefillRate: 8000}}
			for range 5 {
				p.Choose(r, candidates[:1])
			}
			remembers.Forget(0)
			elsewhere = elsewhere || p.Choose(r, candidates) == 1
			forgot++
		}
		if !elsewhere {
			t.Errorf("%s sends to the next owner of a slot what its first one held", name)
		}
	}
	if forgot != 10*50 {
		t.Errorf("%d policies remember slots, want 10", forgot/50)
	}
}
