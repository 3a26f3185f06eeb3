package router

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"warmroute/backends"
)

func TestAReplicaWhoseCacheIsAllButFullGetsNothingWhileAnotherCanTakeIt(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix")
	f := func(name string, usage [2]float64, known bool, want *backends.Backend) {
		t.Helper()
		for i, b := range fleet {
			b.SetLoad(&backends.Load{KVCacheUsage: usage[i], KVKnown: known, ScrapedAt: c.now})
		}
		d := mustPick(t, r, ask(fleet, 1, 10))
		if d.Backend != want {
			t.Errorf("%s: sent to %s", name, d.Backend.Name)
		}
		d.Release(Outcome{End: Completed})
	}
	d := mustPick(t, r, ask(fleet[:1], 1, 10))
	d.Release(Outcome{End: Completed})
	f("its cache holds the prompt", [2]float64{0.95, 0}, true, fleet[0])
	f("98 %", [2]float64{0.98, 0}, true, fleet[1])
	f("unknown is not full", [2]float64{0.98, 0}, false, fleet[0])
	f("98 % on both", [2]float64{0.98, 0.98}, true, fleet[0])
	fleet[1].SetState(backends.Down)
	f("98 %, and the other is down", [2]float64{0.98, 0}, true, fleet[0])
}

func TestAStalledReplicaIsWorseThanAFullOne(t *testing.T) {
	s := newStalls(t, 2)
	s.loads[1].KVCacheUsage, s.loads[1].KVKnown = 0.98, true
	s.send(1, 640, true)
	s.pass(5*time.Second, nil)
	if d := mustPick(t, s.r, ask(s.fleet, 1, 10)); d.Backend != s.fleet[1] {
		t.Error("sent to the stalled one")
	}
}

// Other rules are to do what they do elsewhere.
func TestOtherPoliciesKnowNoKVGuard(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "round-robin")
	fleet[0].SetLoad(&backends.Load{KVCacheUsage: 0.98, KVKnown: true, ScrapedAt: c.now})
	seen := map[*backends.Backend]bool{}
	for range 2 {
		seen[mustPick(t, r, ask(fleet, 1, 1)).Backend] = true
	}
	if len(seen) != 2 {
		t.Error("round-robin left one out")
	}
}

func TestMaxInFlightIsKept(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix")
	fleet[0].SetOptions(backends.Options{MaxInFlight: 2})
	fleet[1].SetOptions(backends.Options{MaxInFlight: 3})
	var open []*Decision
	for range 5 {
		open = append(open, mustPick(t, r, ask(fleet, 1, 10)))
	}
	if a, b := fleet[0].InFlight.Load(), fleet[1].InFlight.Load(); a != 2 || b != 3 {
		t.Errorf("%d and %d in flight, want 2 and 3", a, b)
	}
	refused := func(want error, tried ...*backends.Backend) {
		t.Helper()
		if _, err := r.Pick(context.Background(), ask(fleet, 1, 10), tried...); !errors.Is(err, want) {
			t.Errorf("got %v, want %v", err, want)
		}
	}
	refused(ErrMaxInFlight)
	refused(ErrMaxInFlight, fleet[0])
	refused(ErrNoneReady, fleet...)
	open[0].Release(Outcome{End: Completed})
	if d := mustPick(t, r, ask(fleet, 1, 10)); d.Backend != open[0].Backend {
		t.Errorf("sent to %s, where there was no place", d.Backend.Name)
	}
}

func TestARequestOfManySequencesCountsAsManyAndStillFindsAPlace(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	fleet[0].SetOptions(backends.Options{MaxInFlight: 4})
	many := ask(fleet, 1, 10)
	many.Sequences = 9
	d := mustPick(t, r, many) // more than there ever is room for: it goes alone
	if _, err := r.Pick(context.Background(), ask(fleet, 1, 10)); !errors.Is(err, ErrMaxInFlight) {
		t.Errorf("one beside it: %v", err)
	}
	d.Release(Outcome{End: Completed})
	mustPick(t, r, ask(fleet, 1, 10))
	many.Sequences = 4
	if _, err := r.Pick(context.Background(), many); !errors.Is(err, ErrMaxInFlight) {
		t.Errorf("four beside one: %v", err)
	}
	many.Sequences = 3
	mustPick(t, r, many)
}

func TestWeightShiftsTraffic(t *testing.T) {
	for _, name := range []string{"prefix", "least-load"} {
		r, fleet, _ := newFleet(t, 2, name)
		fleet[1].SetOptions(backends.Options{Weight: 3})
		for key := range 400 {
			d := mustPick(t, r, ask(fleet, key, 4))
			d.RecordFirstEvent()
		}
		if share := float64(fleet[1].InFlight.Load()) / 400; math.Abs(share-0.75) > 0.03 {
			t.Errorf("%s: a backend of three times the weight has %.2f of the requests", name, share)
		}
	}
}

func TestRequestsGoWhereTheirAdapterIs(t *testing.T) {
	r, fleet, c := newFleet(t, 3, "prefix")
	f := func(name string, want *backends.Backend, loads ...*backends.Load) {
		t.Helper()
		for i, b := range fleet {
			b.SetLoad(loads[i])
			if loads[i] != nil {
				b.Load().ScrapedAt = c.now
			}
		}
		req := ask(fleet, 1, 10)
		req.Adapter = "sql"
		d := mustPick(t, r, req)
		if d.Backend != want {
			t.Errorf("%s: sent to %s", name, d.Backend.Name)
		}
		d.Release(Outcome{End: NotProcessed})
	}
	has := func(adapters ...string) *backends.Load {
		return &backends.Load{RunningAdapters: adapters, MaxAdapters: 2}
	}
	f("one has it", fleet[2], has(), has("chat"), has("chat", "sql"))
	f("who says nothing may not have it", fleet[0], has("sql"), nil, &backends.Load{})
	f("nobody has it: where there is a place", fleet[1], has("a", "b"), has("a"), has("a", "b", "c"))
}

func TestABurstForAColdAdapterLoadsItOnce(t *testing.T) {
	r, fleet, _ := newFleet(t, 8, "prefix")
	for _, b := range fleet {
		b.SetLoad(&backends.Load{MaxAdapters: 4})
	}
	var burst []*Decision
	for key := range 8 {
		req := ask(fleet, key, 1)
		req.Adapter = "sql"
		burst = append(burst, mustPick(t, r, req))
	}
	for _, d := range burst {
		if d.Backend != burst[0].Backend {
			t.Errorf("loaded on %s as well as on %s", d.Backend.Name, burst[0].Backend.Name)
		}
		d.Release(Outcome{End: Completed})
	}
	for key := range 2 * maxAdapters { // more than are kept apart
		req := ask(fleet[:1], key, 1)
		req.Adapter = fmt.Sprint(key)
		burst = append(burst, mustPick(t, r, req))
	}
	for _, d := range burst[8:] {
		d.Release(Outcome{End: Completed})
	}
	for slot := range r.states {
		if n := len(r.states[slot].load.adapters); n > 0 {
			t.Errorf("%d adapters in use when nothing is in flight", n)
		}
	}
}

// The first replica that has an adapter must not get all of its requests.
func TestAHotAdapterSpreads(t *testing.T) {
	r, fleet, c := newFleet(t, 4, "prefix")
	for i, b := range fleet {
		l := &backends.Load{MaxAdapters: 2, ScrapedAt: c.now}
		if i == 0 {
			l.RunningAdapters = []string{"sql"}
		}
		b.SetLoad(l)
	}
	for key := range 200 {
		req := ask(fleet, key, 8)
		req.Adapter = "sql"
		mustPick(t, r, req).RecordFirstEvent()
	}
	for _, b := range fleet {
		if n := b.InFlight.Load(); n < 40 || n > 70 {
			t.Errorf("%s has %d of 200 in flight", b.Name, n)
		}
	}
}

func TestContextCountsSharedBlocksOnceAndGrowsWithAnswers(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "dynamo")
	f := func(when string, want float64) {
		t.Helper()
		r.begin(ask(fleet, 9, 1), nil, c.now)
		r.match()
		if err := r.filter(); err != nil {
			t.Fatal(err)
		}
		if got := r.decision.candidates[0].ContextTokens; got != want {
			t.Errorf("%s: a context of %.0f tokens, want %.0f", when, got, want)
		}
	}
	f("nothing sent", 0)
	a, b := mustPick(t, r, ask(fleet, 1, 10)), mustPick(t, r, ask(fleet, 1, 10))
	f("ten blocks of 64 tokens, sent twice", 640)
	a.RecordFirstEvent()
	c.advance(time.Second)
	f("an answer for a second", 640+defaultDecodeRate)
	a.Release(Outcome{End: ClientDisconnected})
	f("the other request still needs them", 640)
	b.Release(Outcome{End: Completed})
	f("nothing in flight", 0)
}
