package replay

import (
	"testing"
	"time"

	"warmroute/backends"
)

func TestARestartLosesTheCacheAndSendsItsRequestsElsewhere(t *testing.T) {
	restart := Change{At: 500 * time.Millisecond, Backend: 0, What: Restart, Away: time.Second}
	_, sum := mustPlay(t, &Scenario{
		Backends: 2, Policy: "prefix", Changes: []Change{restart}, NonStreaming: 1,
		Workload: jobs{asks(0, 8000, 10, 1), asks(0, 8000, 10, 2)},
	})
	// One of the two was on backend 0, and began again behind the other, whose
	// step ends at 1.008 s.
	seconds(t, "TTFT of the request sent again", sum.TTFTP99, 1.008+0.008+40e-6+8001*24e-9+1)
	if sum.Timeline.Work[0][0] != 0 {
		t.Errorf("the restarted replica is said to have prefilled %.0f tokens, of a step that never ended", sum.Timeline.Work[0][0])
	}

	again := Change{At: 5 * time.Second, Backend: 0, What: Restart}
	r, sum := mustPlay(t, &Scenario{
		Backends: 1, Policy: "prefix", Changes: []Change{again},
		Workload: jobs{asks(0, 8000, 1, 1), asks(10*time.Second, 8000, 1, 1)},
	})
	if sum.HitRatio != 0 || r.measured.matched != 0 {
		t.Errorf("after the restart %.2f hit and %d tokens predicted, want none", sum.HitRatio, r.measured.matched)
	}
}

func TestABackendThatJoinsGetsNothingBeforeAndOneThatLeavesNothingAfter(t *testing.T) {
	r, sum := mustPlay(t, &Scenario{
		Backends: 3, Policy: "least-load", Workload: Hot(1, 20),
		Changes: []Change{{At: 100 * time.Second, Backend: 2, What: Join}, {At: 200 * time.Second, Backend: 0, What: Leave}},
	})
	work := func(backend, from, to int) float64 {
		total := 0.0
		for _, x := range sum.Timeline.InFlight[backend][from:min(to, len(sum.Timeline.InFlight[backend]))] {
			total += x
		}
		return total
	}
	if n := work(2, 0, 100); n != 0 {
		t.Errorf("before it joined, backend 2 had %.2f in flight", n)
	}
	if n, all := work(2, 101, 200), work(0, 101, 200)+work(1, 101, 200); n < 0.4*all {
		t.Errorf("after it joined, backend 2 had %.0f in flight, where the others together had %.0f", n, all)
	}
	if n := work(0, 210, 300); n != 0 {
		t.Errorf("long after it left, backend 0 had %.2f in flight", n)
	}
	if s := r.fleet[0].backend.State(); s != backends.Down {
		t.Errorf("the backend that left is %v", s)
	}
}

func TestABackendComesBackWhenItsLastRestartIsOverUnlessItLeft(t *testing.T) {
	const away = 20 * time.Second
	at := func(seconds int, what WhatChanges) Change {
		return Change{At: time.Duration(seconds) * time.Second, Backend: 1, What: what, Away: away}
	}
	f := func(why string, from, until int, changes ...Change) {
		t.Helper()
		work := Hot(1, 20)
		work.For = 100 * time.Second
		_, sum := mustPlay(t, &Scenario{Backends: 2, Policy: "round-robin", Workload: work, Changes: changes})
		for second, n := range sum.Timeline.InFlight[1][:95] {
			// Whoever leaves finishes what it has.
			if gone := second > from && second < until; gone != (n == 0) && second > 1 && second != from && second != until {
				t.Errorf("%s: in second %d the backend has %.2f in flight, and is to be away from %d until %d", why, second, n, from, until)
				return
			}
		}
	}
	f("a restart", 20, 40, at(20, Restart))
	f("left while it restarts", 20, 95, at(20, Restart), at(30, Leave))
	f("restarted after it left", 40, 95, at(39, Leave), at(40, Restart))
	f("restarted again while it restarts", 20, 50, at(20, Restart), at(30, Restart))
	f("joined again, and left", 20, 95, at(20, Restart), at(25, Leave), at(39, Join), at(39, Leave))
	f("joined again", 20, 30, at(20, Restart), at(25, Leave), at(30, Join))
}

func TestAFrozenReplicaGetsNothingNewAndGoesOnLater(t *testing.T) {
	freeze := Change{At: 100 * time.Second, Backend: 1, What: Freeze, Away: time.Minute}
	_, sum := mustPlay(t, &Scenario{Backends: 4, Policy: "round-robin", Workload: Hot(1, 20), Changes: []Change{freeze}})
	stuck := sum.Timeline.InFlight[1]
	if stuck[105] == 0 || stuck[155] != stuck[110] {
		t.Errorf("frozen for a minute, the replica has %.0f in flight after 5 s, %.0f after 10 and %.0f after 55", stuck[105], stuck[110], stuck[155])
	}
	if before, after := stuck[90], stuck[190]; after < before/2 {
		t.Errorf("half a minute after it goes on it has %.1f in flight, and %.1f before", after, before)
	}
}

func TestForeignRequestsTakeTimeAndAreNotCounted(t *testing.T) {
	work := Hot(1, 4)
	work.For = 100 * time.Second
	alone := &Scenario{Backends: 2, Policy: "random", Workload: work}
	_, quiet := mustPlay(t, alone)
	shared := *alone
	shared.Foreign = []Foreign{{Backends: []int{1}, Rate: 0.5, Prompt: 8000, Answer: 100}}
	_, loud := mustPlay(t, &shared)
	if loud.Requests != quiet.Requests || loud.PromptTokens != quiet.PromptTokens {
		t.Errorf("%d requests of %d tokens beside a foreign client, %d of %d alone", loud.Requests, loud.PromptTokens, quiet.Requests, quiet.PromptTokens)
	}
	if loud.TTFTMean < 4*quiet.TTFTMean {
		t.Errorf("mean TTFT %.3f s beside a foreign client that prefills half of the time, %.3f alone", loud.TTFTMean, quiet.TTFTMean)
	}
}

// What a poll says goes through the router's own types, so the fields are
// compared with what the replica is known to have.
func TestAScrapeSaysWhatARealOneWould(t *testing.T) {
	s := &Scenario{Backends: 1, Policy: "prefix", KVTokens: 20_480, IndexFactor: 0.5, Workload: jobs{asks(0, 8192, 400, 1), asks(0, 9000, 400, 2)}}
	requests, err := s.Workload.Requests(1, 0)
	if err != nil {
		t.Fatal(err)
	}
	r, err := newRun(s, requests)
	if err != nil {
		t.Fatal(err)
	}
	if l := r.fleet[0].backend.Load(); l == nil || l.CacheTokens != 10_240 {
		t.Fatalf("before the first request the router sees %+v, want a cache of half the true 20,480 tokens", l)
	}
	for r.now < 1500*time.Millisecond {
		e := r.agenda.next()
		r.now = e.at
		r.handle(&e)
		r.act()
	}
	// The first, which decodes by now, holds 17 of 40 blocks, the second 18.
	l := r.fleet[0].scrape(instant(r.now), r.told)
	if l.Running != 2 || l.Waiting != 0 || l.OwnInFlight != 2 || l.StepTokens != 8192 || l.BlockSize != 512 ||
		l.KVCacheUsage != 35.0/40 || l.PromptTokens != 17_192 || !l.ScrapedAt.Equal(time.Unix(epoch, 0).Add(r.now)) {
		t.Errorf("the scrape says %+v", l)
	}
}
