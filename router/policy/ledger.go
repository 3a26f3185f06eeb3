package policy

import (
	"iter"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"warmroute/router/prompt"
)

// mostEntries bounds what a rule remembers, in blocks times backends, however
// much more its peer would: about 300 MB. With blocks of 256 bytes and eight
// backends it is 64 MiB of text for each.
const mostEntries = 1 << 21

// ages lists blocks, the least recently used first, each with the time of that
// use in nanoseconds.
type ages = simplelru.LRU[prompt.Block, int64]

func newAges(most int, evicted func(prompt.Block)) *ages {
	a, err := simplelru.NewLRU(max(1, most), func(b prompt.Block, _ int64) { evicted(b) })
	if err != nil {
		panic(err) // it fails for sizes below 1 only
	}
	return a
}

// order is that in which the blocks of a prompt are used, and so which end of
// prefixes a table loses first.
type order func([]prompt.Block) iter.Seq2[int, prompt.Block]

// losesTails uses the first block last: what is oldest is always the tail of a
// prefix, as in a tree that is pruned of its leaves.
func losesTails(blocks []prompt.Block) iter.Seq2[int, prompt.Block] { return slices.Backward(blocks) }

// losesHeads uses the first block first: it is the first to go, and the rest of
// the prefix outlives it.
func losesHeads(blocks []prompt.Block) iter.Seq2[int, prompt.Block] { return slices.All(blocks) }

func expire(a *ages, before time.Time) {
	for {
		_, used, ok := a.GetOldest()
		if !ok || used >= before.UnixNano() {
			return
		}
		a.RemoveOldest()
	}
}

// ledger remembers for each backend which blocks it was sent, and when.
type ledger struct {
	owners
	most    int // entries in all
	order   order
	tenants []tenant // by slot
	known   int      // tenants that were sent something
}

// tenant is the part of one backend.
type tenant struct {
	ages  *ages // nil until it is sent something
	limit int   // blocks; 0: no limit of its own
}

func newLedger(most int, o order) *ledger { return &ledger{most: most, order: o} }

// add records that a backend was sent blocks.
func (l *ledger) add(slot int, blocks []prompt.Block, now time.Time) {
	t := l.tenant(slot)
	if t.ages == nil {
		l.known++
		t.ages = newAges(l.most, func(b prompt.Block) { l.forget(b, slot) })
		for i := range l.tenants {
			l.fit(&l.tenants[i])
		}
	}
	used := now.UnixNano()
	for _, b := range l.order(blocks) {
		l.note(b, slot)
		t.ages.Add(b, used)
	}
}

// limit says how many blocks a backend may have, from now on.
func (l *ledger) limit(slot, blocks int) {
	if t := l.tenant(slot); t.limit != blocks {
		t.limit = blocks
		l.fit(t)
	}
}

func (l *ledger) tenant(slot int) *tenant {
	for len(l.tenants) <= slot {
		l.tenants = append(l.tenants, tenant{})
	}
	return &l.tenants[slot]
}

// fit gives a tenant its room: its limit, within an equal share of the whole.
func (l *ledger) fit(t *tenant) {
	if t.ages == nil {
		return
	}
	room := max(1, l.most/l.known)
	if t.limit > 0 {
		room = min(room, t.limit)
	}
	t.ages.Resize(room)
}

func (l *ledger) len(slot int) int {
	if a := l.tenant(slot).ages; a != nil {
		return a.Len()
	}
	return 0
}

// expire forgets what was used last before a time.
func (l *ledger) expire(before time.Time) {
	for i := range l.tenants {
		if a := l.tenants[i].ages; a != nil {
			expire(a, before)
		}
	}
}

// shrink cuts the part of every backend back to so many blocks. Unlike a limit it
// does so once only.
func (l *ledger) shrink(blocks int) {
	for i := range l.tenants {
		a := l.tenants[i].ages
		for a != nil && a.Len() > blocks {
			a.RemoveOldest()
		}
	}
}

// Forget implements Forgetful, for whoever has only this to forget.
func (l *ledger) Forget(slot int) {
	if slot >= len(l.tenants) || l.tenants[slot].ages == nil {
		return
	}
	l.tenants[slot].ages.Purge()
	l.tenants[slot] = tenant{}
	l.known--
	for i := range l.tenants {
		l.fit(&l.tenants[i]) // to what there is for fewer
	}
}

// smallest is the candidate with the fewest blocks.
func (l *ledger) smallest(r *Request, candidates []Candidate, rng *rand.Rand) int {
	return r.lowest("blocks that it was sent before, of any prompt", len(candidates), rng, func(i int) float64 { return float64(l.len(candidates[i].Slot)) })
}
