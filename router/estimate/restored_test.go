package estimate

import (
	"testing"

	"warmroute/backends"
	"warmroute/router/index"
)

// restoredTest is one backend with blocks of 64 tokens, restored up to use 1,000.
type restoredTest struct{ *Estimates }

const restoredUntil = 1000

func newRestoredTest(engines int) restoredTest {
	f := New(256, 1.2)
	f.Grow(1)
	f.backends[0].engines = engines
	f.SetRestored(0, restoredUntil)
	return restoredTest{f}
}

// request returns the prediction for a prompt of 120 blocks, of which the backend has 100 by the index: the first ones used
// since the restore, and others restored and last used at lastUse.
func (restoredTest) request(restored, distance int, lastUse uint64) *Prediction {
	return &Prediction{
		Bytes: 120 * 256, PromptTokens: 120 * 64, MatchedBlocks: 100, Distance: distance, Use: 2000, IsText: true, Sequences: 1,
		Reused: [index.MaxReusedSpans]index.ReusedSpan{
			{Blocks: restored, LastUse: lastUse, Distance: distance}, {Blocks: 100 - restored, LastUse: 1500, Distance: 1},
		},
	}
}

func (f restoredTest) respond(p *Prediction, cachedBlocks int) (lost bool) {
	f.LearnFromCompletion(0, p, Usage{PromptTokens: 120 * 64, CachedTokens: cachedBlocks * 64, CachedKnown: true}, CacheInfo{Alignment: 16})
	_, lost = f.TakeCacheReset(0)
	return lost
}

const near, far = 10, 7000 // distances, of a cache of 7,500 blocks

func TestRestoredShare(t *testing.T) {
	miss := func(distance int) func(restoredTest) bool {
		return func(f restoredTest) bool { return f.respond(f.request(60, distance, 500), 40) }
	}
	hit := func(f restoredTest) bool { return f.respond(f.request(60, near, 500), 100) }
	for _, c := range []struct {
		name    string
		engines int
		events  []func(restoredTest) bool
		share   float64
		until   uint64 // with a share below 1
		lost    bool
	}{
		{"nothing known", 1, nil, 1, 0, false},
		{"a miss", 1, []func(restoredTest) bool{miss(near)}, 0.25, restoredUntil, false},
		{"two misses", 1, []func(restoredTest) bool{miss(near), miss(near)}, 0.0625, restoredUntil, false},
		{"three misses of blocks that cannot have been evicted", 1, []func(restoredTest) bool{miss(near), miss(near), miss(near)}, 1, 0, true},
		{"three misses of blocks that may have been evicted", 1, []func(restoredTest) bool{miss(far), miss(far), miss(far)}, 0.125, restoredUntil,
			false},
		{"a hit", 1, []func(restoredTest) bool{hit}, 1, 0, false},
		{"a hit after misses", 1, []func(restoredTest) bool{miss(far), miss(near), hit}, 1, 0, false},
		{"later misses of blocks that a hit has confirmed", 1, []func(restoredTest) bool{hit, miss(far), miss(far), miss(far)}, 1, 0, false},
		{"a part of the blocks of one use was evicted", 1, []func(restoredTest) bool{func(f restoredTest) bool {
			return f.respond(f.request(60, far, 500), 80)
		}}, 1, 0, false},
		{"older blocks were evicted", 1, []func(restoredTest) bool{func(f restoredTest) bool {
			p := f.request(60, far, 500)
			p.Reused[1].LastUse = 700 // restored, too
			return f.respond(p, 40)
		}}, 0.5, 699, false},
		{"older blocks than those that were hit", 1, []func(restoredTest) bool{hit, func(f restoredTest) bool {
			return f.respond(f.request(60, far, 400), 40)
		}}, 0.5, 499, false},
		{"few blocks", 1, []func(restoredTest) bool{func(f restoredTest) bool { return f.respond(f.request(3, near, 500), 97) }}, 1, 0, false},
		{"no restored blocks", 1, []func(restoredTest) bool{func(f restoredTest) bool {
			return f.respond(f.request(60, near, 1400), 40)
		}}, 1, 0, false},
		{"several engines", 2, []func(restoredTest) bool{miss(near), miss(near), miss(near)}, 0.015625, restoredUntil, false},
		{"all of several engines", 2, []func(restoredTest) bool{miss(near), miss(near), miss(near), miss(near), miss(near), miss(near)}, 1, 0,
			true},
		{"learning disabled", 1, []func(restoredTest) bool{func(f restoredTest) bool {
			f.SetLearningDisabled(true)
			return false
		}, miss(near), miss(near), miss(near)}, 1, 0, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newRestoredTest(c.engines)
			lost := false
			for _, event := range c.events {
				lost = event(f) || lost
			}
			if share, until := f.RestoredShare(0); share != c.share || until != c.until || lost != c.lost {
				t.Errorf("%g of the blocks up to %d count, lost is %v; want %g, %d, %v", share, until, lost, c.share, c.until, c.lost)
			}
		})
	}
}

// The replica's counters show a miss, and that only: the hits may be another request's. Its response does not count again.
func TestRestoredByCounters(t *testing.T) {
	for _, c := range []struct {
		name       string
		hitsBefore float64
		hits       float64 // at the poll after it has started
		share      float64
	}{
		{"no hits", 5000, 5000, 0.25},
		{"the hits of what was computed since", 5000, 5000 + 40*64, 0.25},
		{"hits", 5000, 5000 + 100*64, 1},
		{"a counter decreased", 5000, 100, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newRestoredTest(1)
			p := f.request(60, near, 500)
			p.RecordSent(&backends.Load{PrefixKnown: true, PrefixHits: c.hitsBefore})
			for range 2 {
				f.RecordStarted(0, p, &backends.Load{PrefixKnown: true, PrefixHits: c.hits}, CacheInfo{Alignment: 16})
			}
			if share, _ := f.RestoredShare(0); share != c.share {
				t.Errorf("a share of %g counts after the poll, want %g", share, c.share)
			}
			if f.respond(p, 40); c.share < 1 {
				if share, _ := f.RestoredShare(0); share != c.share {
					t.Errorf("a share of %g counts after the response, want %g", share, c.share)
				}
			}
		})
	}
	unknown := newRestoredTest(1)
	p := unknown.request(60, near, 500)
	p.RecordSent(nil)
	unknown.RecordStarted(0, p, &backends.Load{PrefixKnown: true}, CacheInfo{Alignment: 16})
	if share, _ := unknown.RestoredShare(0); share != 1 {
		t.Errorf("a share of %g counts, where the hits before are not known", share)
	}
}

// What was in flight when the cache was found to be lost shows nothing new, and neither it nor what misses of restored blocks show
// counts as missing hits or as evictions.
func TestRestoredMissesAreNoEvictions(t *testing.T) {
	f := newRestoredTest(1)
	capacity := f.IndexCapacity(0)
	check := func(when string) {
		t.Helper()
		if missing, got := f.MissingHits(0), f.IndexCapacity(0); missing != 0 || got != capacity {
			t.Errorf("%s: %g of the hits are missing, and the index has room for %d blocks, want %d", when, missing, got, capacity)
		}
	}
	for range 100 {
		f.respond(f.request(60, far, 500), 40)
	}
	check("misses of blocks that may have been evicted")
	inFlight := f.request(60, near, 500)
	for range 3 {
		if f.respond(f.request(60, near, 500), 40) {
			f.ForgetReplicaProcess(0)
		}
	}
	for range 100 {
		f.respond(inFlight, 40)
	}
	check("a request from before the loss was found")
	if before, found := f.TakeCacheReset(0); found {
		t.Errorf("another loss before use %d was found", before)
	}
	for range 3 {
		f.respond(f.request(60, near, 1400), 40)
	}
	if f.MissingHits(0) == 0 {
		t.Error("no hits are missing of blocks that were used since")
	}
}

// A process that was restarted has nothing that was restored.
func TestRestoredIsForgotten(t *testing.T) {
	f := newRestoredTest(1)
	f.respond(f.request(60, near, 500), 40)
	f.ForgetReplicaProcess(0)
	if share, until := f.RestoredShare(0); share != 1 || until != 0 {
		t.Errorf("%g of the blocks up to %d count", share, until)
	}
	if p := f.request(60, near, 500); f.reusesRestored(0, p) {
		t.Error("blocks count as restored")
	}
}
