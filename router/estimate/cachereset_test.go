package estimate

import (
	"testing"

	"warmroute/router/index"
)

func TestCacheReset(t *testing.T) {
	type event struct {
		miss         bool
		lastUse, use uint64
	}
	hit := func(lastUse, use uint64) event { return event{false, lastUse, use} }
	miss := func(lastUse, use uint64) event { return event{true, lastUse, use} }
	for _, c := range []struct {
		name   string
		events []event
		before uint64 // 0: no reset is found
	}{
		{"misses whose times agree", []event{miss(50, 100), miss(60, 103), miss(40, 101)}, 100},
		{"too few", []event{miss(50, 100), miss(60, 103)}, 0},
		{"a hit on older blocks", []event{miss(50, 100), miss(60, 103), hit(45, 105), miss(40, 106)}, 0},
		{"a hit on blocks that were computed since", []event{miss(50, 100), miss(60, 103), hit(101, 105), miss(40, 106)}, 100},
		{"hits of requests sent before", []event{miss(50, 100), hit(20, 45), miss(60, 103), hit(55, 70), miss(40, 101)}, 100},
		{"a hit of a request sent just before narrows it", []event{miss(50, 100), hit(20, 90), miss(80, 103), miss(40, 101)}, 100},
		{"a hit refutes the part after it", []event{miss(50, 100), hit(70, 110), miss(60, 120), miss(65, 121)}, 70},
		{"the same prompt misses again", []event{miss(50, 100), miss(100, 110), miss(110, 120)}, 0},
		{"a later reset counts alone", []event{miss(50, 100), miss(60, 101), miss(150, 200), miss(160, 201), miss(170, 202)}, 200},
		{"a miss of a request sent before", []event{miss(50, 100), miss(10, 40), miss(60, 101), miss(70, 102)}, 100},
		{"misses are usual", []event{
			miss(1, 2), hit(0, 3), miss(3, 4), hit(2, 5), miss(5, 6), hit(3, 7), miss(7, 8), hit(7, 9), miss(9, 10), miss(8, 11), miss(7, 12),
			miss(6, 13),
		}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			var r cacheReset
			for i, e := range c.events {
				if before, found := r.take(); found {
					t.Errorf("a reset before %d is found before event %d", before, i)
				}
				if e.miss {
					r.addMisses(e.lastUse, e.use, 1)
				} else {
					r.addHit(e.lastUse, e.use)
				}
			}
			if before, found := r.take(); before != c.before || found != (c.before > 0) {
				t.Errorf("a reset before %d (%v), want %d", before, found, c.before)
			}
			if before, found := r.take(); found {
				t.Errorf("found a second time, before %d", before)
			}
		})
	}
}

// A response shows a hit of the deepest blocks that were hit, or a miss of the first that were not.
func TestRecordReuse(t *testing.T) {
	const perBlock = 64
	spans := func(list ...index.ReusedSpan) (out [index.MaxReusedSpans]index.ReusedSpan) {
		copy(out[:], list)
		return out
	}
	conversation, system := index.ReusedSpan{Blocks: 40, LastUse: 50, Distance: 10}, index.ReusedSpan{Blocks: 60, LastUse: 80, Distance: 5}
	far := conversation
	far.Distance = 1 << 20
	short := index.ReusedSpan{Blocks: 3, LastUse: 50}
	for _, c := range []struct {
		name   string
		reused [index.MaxReusedSpans]index.ReusedSpan
		blocks int // matched
		hit    int // blocks
		want   cacheReset
	}{
		{"all missed", spans(conversation, system), 100, 0, cacheReset{after: 80, before: 90, misses: 1}},
		{"the shared part was computed since", spans(conversation, system), 100, 60, cacheReset{after: 50, before: 90, misses: 1}},
		{"a part of the deepest was hit", spans(conversation, system), 100, 80, cacheReset{}},
		{"all were hit", spans(conversation, system), 100, 100, cacheReset{}},
		{"the missed ones may have been evicted", spans(far, system), 100, 60, cacheReset{}},
		{"the missed ones are few", spans(short, system), 63, 60, cacheReset{}},
		{"blocks of a request in flight", spans(), 100, 0, cacheReset{}},
		{"others are in flight", spans(conversation), 100, 60, cacheReset{after: 50, before: 90, misses: 1}},
	} {
		f := New(256, 1.2)
		f.Grow(1)
		p := &Prediction{Bytes: 120 * 256, MatchedBlocks: c.blocks, Use: 90, Reused: c.reused}
		f.recordReuse(0, p, float64(c.hit*perBlock), 120*perBlock, 100)
		got := f.backends[0].reset
		got.missShare = 0
		if got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}

// Several engines have a cache each, and without learning nothing is concluded.
func TestRecordReuseNotComparable(t *testing.T) {
	p := &Prediction{Bytes: 120 * 256, MatchedBlocks: 100, Use: 90, Reused: [index.MaxReusedSpans]index.ReusedSpan{{Blocks: 100, LastUse: 50}}}
	for name, change := range map[string]func(*Estimates){
		"several engines":   func(f *Estimates) { f.backends[0].engines = 2 },
		"learning disabled": func(f *Estimates) { f.SetLearningDisabled(true) },
	} {
		f := New(256, 1.2)
		f.Grow(1)
		change(f)
		f.recordReuse(0, p, 0, 120*64, 100)
		if f.backends[0].reset != (cacheReset{}) {
			t.Errorf("%s: %+v", name, f.backends[0].reset)
		}
	}
}
