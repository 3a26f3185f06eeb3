package router

import (
	"math"
	"testing"
	"time"

	"warmroute/backends"
)

func TestForeignLoad(t *testing.T) {
	r, _, c := newFleet(t, 1, "prefix")
	r.meanUncached.Value = 1
	f := func(name string, age time.Duration, l backends.Load, requests, queued float64) {
		t.Helper()
		l.ScrapedAt = c.now
		a, b := r.externalLoad(&l, c.now.Add(age))
		if math.Abs(a-requests) > 1e-9 || math.Abs(b-queued) > 1e-9 {
			t.Errorf("%s: %.3f requests, %.3f of them waiting; want %.3f, %.3f", name, a, b, requests, queued)
		}
	}
	f("all are ours", 0, backends.Load{QueuesKnown: true, Running: 3, Waiting: 2, OwnInFlight: 5}, 0, 0)
	f("ours are on their way", 0, backends.Load{QueuesKnown: true, Running: 3, OwnInFlight: 5}, 0, 0)
	f("some are not", 0, backends.Load{QueuesKnown: true, Running: 7, Waiting: 3, OwnInFlight: 4}, 6, 3)
	f("more wait than are foreign", 0, backends.Load{QueuesKnown: true, Running: 7, Waiting: 3, OwnInFlight: 9}, 1, 1)
	f("not known", 0, backends.Load{Running: 7, Waiting: 3}, 0, 0)
	others := backends.Load{QueuesKnown: true, Running: 8, Waiting: 2}
	f("after two intervals", 2*time.Second, others, 10/math.E, 2/math.E)
	f("after three missed polls", 3001*time.Millisecond, others, 0, 0)
	if a, b := r.externalLoad(nil, c.now); a != 0 || b != 0 {
		t.Errorf("no scrape: %.3f, %.3f", a, b)
	}
}

func TestForeignLoadSendsRequestsElsewhere(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix")
	holder := mustPick(t, r, ask(fleet, 1, 10)) // 640 tokens: the mean u
	holder.RecordFirstEvent()
	holder.Release(Outcome{End: Completed, AnswerTokens: 250})
	other := fleet[1-holder.Backend.Slot]
	f := func(name string, running, waiting int, want *backends.Backend) {
		t.Helper()
		holder.Backend.SetLoad(&backends.Load{QueuesKnown: true, Running: running, Waiting: waiting, ScrapedAt: c.now})
		d := mustPick(t, r, ask(fleet, 1, 10))
		if d.Backend != want {
			t.Errorf("%s: sent to %s", name, d.Backend.Name)
		}
		d.Release(Outcome{End: NotProcessed})
	}
	// Each costs 160 tokens of decoding and stalls: 16·(1+0.6) + 160·2 against 640, then 5 of them.
	f("two others decode", 2, 0, holder.Backend)
	f("five others decode", 5, 0, other)
	f("one waits: 640 tokens more", 1, 1, other)
	c.advance(4 * time.Second)
	d := mustPick(t, r, ask(fleet, 1, 10))
	if d.Backend != holder.Backend {
		t.Error("foreign load lasts longer than three missed polls")
	}
}

func TestALongPromptIsSentWhereOnlyOthersHaveSomethingWaiting(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	running := sent(t, "", submit(r, ask(fleet, 1, 160)))
	long := submit(r, ask(fleet, 2, 160)) // 10,240 tokens: more than a step
	poll := func() {
		l := &backends.Load{QueuesKnown: true, Running: 40, Waiting: 1, ScrapedAt: c.now, OwnInFlight: 1}
		fleet[0].SetLoad(l)
		r.ObserveLoad(fleet[0], l)
	}
	poll()
	waits(t, "10,240 tokens of ours are pending", long)
	running.RecordFirstEvent()
	sent(t, "none of ours are", long)
}
