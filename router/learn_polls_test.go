package router

import (
	"math"
	"testing"
	"time"

	"warmroute/backends"
)

// polls plays prompts whose answers carry no usage, from the one used last to
// the one used longest ago, of which the older half is gone, and after each of
// them a poll that counter has had its way with.
func polls(t *testing.T, counter func(l *backends.Load)) BackendEstimates {
	t.Helper()
	r, fleet, c := newFleet(t, 1, "prefix")
	size := backends.Load{CacheTokens: 1000 * 64 * 10 / 12, HitAlignment: 16, BlockSize: 16, PrefixKnown: true}
	poll := func(queries, hits float64) {
		c.advance(time.Second)
		l := size
		l.PrefixQueries, l.PrefixHits, l.ScrapedAt = queries, hits, c.now
		counter(&l)
		fleet[0].SetLoad(&l)
		r.ObserveLoad(fleet[0], &l)
	}
	play := func(key int) {
		d := mustPick(t, r, ask(fleet, key, 10))
		c.advance(time.Second)
		d.RecordFirstEvent()
		d.Release(Outcome{End: Completed})
	}
	poll(0, 0)
	for key := range 100 {
		play(key)
	}
	queries, hits := 64_000.0, 0.0
	poll(queries, hits)
	for key := 99; key >= 0; key-- {
		play(key)
		queries += 640
		if key >= 50 {
			hits += 624
		}
		poll(queries, hits)
	}
	return r.Estimates()[0]
}

func TestCountersTeachWhereAnswersDoNot(t *testing.T) {
	l := polls(t, func(*backends.Load) {})
	if l.CapacityFactor < 0.45 || l.CapacityFactor > 0.7 {
		t.Errorf("the factor is %.2f where half of the cache is there", l.CapacityFactor)
	}
	if l.ObservedTokens != 50*624 || l.PredictedTokens < 55*624 {
		t.Errorf("%.0f tokens predicted and %.0f found", l.PredictedTokens, l.ObservedTokens)
	}
}

func TestCountersThatTeachNothing(t *testing.T) {
	turn := 0
	for name, counter := range map[string]func(l *backends.Load){
		"absent":                 func(l *backends.Load) { l.PrefixKnown = false },
		"another client's too":   func(l *backends.Load) { l.PrefixQueries *= 2 },
		"more hits than queries": func(l *backends.Load) { l.PrefixHits = 2*l.PrefixQueries + 1 },
		"running backwards":      func(l *backends.Load) { l.PrefixQueries, l.PrefixHits = 1e9-l.PrefixQueries, 1e9-l.PrefixHits },
		"absurd": func(l *backends.Load) {
			turn++
			l.PrefixQueries = math.MaxFloat64 / float64(2+turn%3)
		},
		"standing still": func(l *backends.Load) { l.PrefixQueries, l.PrefixHits = 5, 5 },
	} {
		if l := polls(t, counter); l.CapacityFactor != 1 || math.Abs(l.BytesPerToken-4) > 1e-9 {
			t.Errorf("%s: learned %+v", name, l)
		}
	}
}

// A restart between two polls: the counters are smaller, or have grown beyond
// what they were.
func TestCountersOfARestartedReplicaTeachNothing(t *testing.T) {
	for _, after := range []float64{10, 1e6} {
		r, fleet, c := newFleet(t, 1, "prefix")
		poll := func(queries, hits float64) {
			c.advance(time.Second)
			l := &backends.Load{PrefixKnown: true, PrefixQueries: queries, PrefixHits: hits, ScrapedAt: c.now}
			fleet[0].SetLoad(l)
			r.ObserveLoad(fleet[0], l)
		}
		poll(0, 0)
		d := mustPick(t, r, ask(fleet, 1, 10))
		d.RecordFirstEvent()
		d.Release(Outcome{End: Completed})
		r.ForgetCache(fleet[0])
		poll(after, after/2)
		if l := r.Estimates()[0]; l.PredictedTokens != 0 || l.ObservedTokens != 0 || l.CapacityFactor != 1 {
			t.Errorf("counters at %g: learned %+v", after, l)
		}
	}
}

func TestUsageIsTheBetterSource(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	queries := 0.0
	for key := range 30 {
		d := mustPick(t, r, ask(fleet, key, 10))
		d.RecordFirstEvent()
		d.Release(usage(640, 0))
		queries += 640
		c.advance(time.Second)
		l := &backends.Load{PrefixKnown: true, PrefixQueries: queries, PrefixHits: queries / 2, ScrapedAt: c.now}
		fleet[0].SetLoad(l)
		r.ObserveLoad(fleet[0], l)
	}
	if l := r.Estimates()[0]; l.ObservedTokens != 0 {
		t.Errorf("%.0f tokens counted of polls beside usage that says 0", l.ObservedTokens)
	}
}

// Prompts have a tenth more tokens than their bytes say. The counters tell, if
// no one else was there at either end of the window.
func TestCountersTeachTokensWhereNobodyElseIs(t *testing.T) {
	f := func(name string, before, after backends.Load, want float64) {
		t.Helper()
		r, fleet, c := newFleet(t, 1, "prefix")
		for key := range 400 {
			for _, l := range []backends.Load{before, after} {
				l.PrefixKnown, l.PrefixQueries, l.ScrapedAt = true, float64(key*704), c.now
				r.ObserveLoad(fleet[0], &l)
			}
			d := mustPick(t, r, ask(fleet, key, 10))
			c.advance(time.Second)
			d.RecordFirstEvent()
			d.Release(Outcome{End: Completed})
		}
		if got := r.Estimates()[0].BytesPerToken; math.Abs(got-want) > 0.02 {
			t.Errorf("%s: %.2f bytes a token, want %.2f", name, got, want)
		}
	}
	idle := backends.Load{QueuesKnown: true}
	f("nobody else", idle, idle, 4/1.1)
	f("another when it began", idle, backends.Load{QueuesKnown: true, Running: 1}, 4)
	f("another when it ended", backends.Load{QueuesKnown: true, Waiting: 1}, idle, 4)
	f("who is there is not known", backends.Load{}, backends.Load{}, 4)
}
