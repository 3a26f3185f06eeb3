package policy

import (
	"time"

	"warmroute/router/prompt"
)

// trie is one table for all backends: a block is remembered, with all who were
// sent it, or it is not.
type trie struct {
	owners
	order order
	ages  *ages
}

func newTrie(most int, o order) *trie {
	t := &trie{order: o}
	t.ages = newAges(most, t.drop)
	return t
}

// Forget takes away all that a backend has. Blocks that nobody has any more stay
// until they are the oldest, as they do when one of their owners is away.
func (t *trie) Forget(slot int) {
	if slot/64 >= len(t.sets) {
		return
	}
	for b := range t.sets[slot/64] {
		t.forget(b, slot)
	}
}

// add records that a backend was sent blocks.
func (t *trie) add(slot int, blocks []prompt.Block, now time.Time) {
	used := now.UnixNano()
	for _, b := range t.order(blocks) {
		t.note(b, slot)
		t.ages.Add(b, used)
	}
}
