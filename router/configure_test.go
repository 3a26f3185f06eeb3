package router

import (
	"fmt"
	"testing"
	"time"

	"warmroute/router/queue"
)

func reconfigured(t *testing.T, r *Router, change func(*Options)) {
	t.Helper()
	o := Options{Settings: Settings{Policy: "prefix", PollInterval: time.Second}}
	holding(&o)
	change(&o)
	if err := r.Configure(o.Settings); err != nil {
		t.Fatal(err)
	}
}

func TestAnotherPolicySendsWhatTheOneBeforeHeld(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix", holding)
	busy := mustPick(t, r, ask(fleet, 0, 1000))
	var all []*waiter
	for key := range 5 * queue.MaxTurns {
		all = append(all, submit(r, ask(fleet, 1+key, 100)))
	}
	waits(t, "the backend is busy", all[len(all)-1])
	reconfigured(t, r, func(o *Options) { o.Policy = "least-load" })
	for i, w := range all {
		if d := sent(t, fmt.Sprint("request ", i), w); d.Reason != "least-load" && i > 0 {
			t.Errorf("reason %q", d.Reason)
		}
	}
	reconfigured(t, r, func(*Options) {})
	waits(t, "and under prefix it is held again", submit(r, ask(fleet, 9999, 100)))
	busy.Release(Outcome{})
}

func TestAShorterQueueIsForThoseToCome(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	busy := mustPick(t, r, ask(fleet, 0, 1000))
	early, late := submit(r, ask(fleet, 1, 100)), submit(r, ask(fleet, 2, 100))
	reconfigured(t, r, func(o *Options) { o.Queue = QueueSettings{Requests: 1, Timeout: time.Second} })
	if w := submit(r, ask(fleet, 3, 100)); w.err != ErrQueueFull {
		t.Errorf("a third: %v", w.err)
	}
	c.advance(30 * time.Second)
	r.Tick()
	waits(t, "it may be held for a minute, as of its arrival", early)
	reconfigured(t, r, func(o *Options) { o.Queue = QueueSettings{Requests: 3, Timeout: time.Second} })
	short := submit(r, ask(fleet, 4, 100))
	busy.RecordFirstEvent()
	sent(t, "the backend is free", early).RecordFirstEvent()
	sent(t, "and again", late)
	c.advance(time.Second)
	r.Tick()
	if short.waits() {
		t.Error("one that came under the new limit is held beyond it")
	}
}

func TestALimitIsForThoseToComeThoughOlderOnesHaveNone(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	reconfigured(t, r, func(o *Options) { o.Queue.Timeout = 0 })
	mustPick(t, r, ask(fleet, 0, 1000))
	var forever, limited []*waiter
	hold := func(all *[]*waiter, limit time.Duration) {
		reconfigured(t, r, func(o *Options) { o.Queue.Timeout = limit })
		for range 3 {
			*all = append(*all, submit(r, ask(fleet, 100+len(forever)*10+len(limited), 100)))
		}
	}
	hold(&forever, 0)
	hold(&limited, time.Second)
	hold(&forever, 0)
	hold(&limited, time.Second)
	limited[0].held.Cancel()
	c.advance(time.Second)
	r.Tick()
	for i, w := range limited[1:] {
		if w.err != ErrQueueTimeout {
			t.Errorf("%d of those with a limit: %v", i+1, w.err)
		}
	}
	for i, w := range forever {
		waits(t, fmt.Sprint(i, " of those without"), w)
	}
}

func TestARefusedConfigurationChangesNothing(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix", holding)
	if err := r.Configure(Settings{Policy: "fastest"}); err == nil {
		t.Fatal("accepted")
	}
	mustPick(t, r, ask(fleet, 0, 1000))
	waits(t, "prefix holds", submit(r, ask(fleet, 1, 100)))
}
