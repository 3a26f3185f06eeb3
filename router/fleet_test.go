package router

import (
	"fmt"
	"math/rand/v2"
	"net/url"
	"slices"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/lab/policies"
	"warmroute/router/decide"
	"warmroute/router/queue"
)

// guest is a backend with a slot that nobody in the fleet of newFleet has, or
// that one there has left.
func guest(name string, slot int) *backends.Backend {
	b := &backends.Backend{Name: name, URL: &url.URL{}, Slot: slot}
	b.SetState(backends.Ready)
	return b
}

// only makes a request that b alone may take.
func only(b *backends.Backend, key, n int) *Request { return ask([]*backends.Backend{b}, key, n) }

func TestAddAndRemoveBackend(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	b := guest("guest", 1)
	refuses := func(when string) {
		t.Helper()
		if _, err := r.Pick(t.Context(), ask([]*backends.Backend{b}, 1, 4)); err != ErrNoneReady {
			t.Errorf("%s: %v", when, err)
		}
	}
	refuses("before")
	r.AddBackend(b)
	mustPick(t, r, only(b, 1, 4)).Release(Outcome{End: Completed})
	r.RemoveBackend(b)
	refuses("after")
	r.RemoveBackend(b) // once more changes nothing
	mustPick(t, r, ask(fleet, 1, 4)).Release(Outcome{End: Completed})
}

func TestDevicesInView(t *testing.T) {
	r, fleet, c := newFleet(t, 5, "prefix")
	setDevices := func(names ...string) {
		for i, name := range names {
			fleet[i].SetOptions(backends.Options{Device: name})
		}
	}
	numbers := func(v *decide.Fleet) (list []int) {
		for i := range v.Backends {
			if v.Backends[i].Backend != nil {
				list = append(list, v.Backends[i].Device)
			}
		}
		return list
	}
	f, s := &r.fleet, &r.fleet.scratch
	setDevices("", "gpu7", "gpu1", "gpu7", "")
	if got := numbers(f.viewAll(s, nil, c.now)); !slices.Equal(got, []int{0, 1, 2, 1, 0}) {
		t.Error(got)
	}
	setDevices("gpu1", "gpu1", "gpu1", "", "gpu8") // as a reload may
	if got := numbers(f.viewAll(s, nil, c.now)); !slices.Equal(got, []int{1, 1, 1, 0, 2}) {
		t.Error(got)
	}
	if got := numbers(f.viewOf(s, fleet[3:], nil, c.now)); !slices.Equal(got, []int{0, 1}) {
		t.Error(got)
	}
	if n := testing.AllocsPerRun(10, func() { f.viewAll(s, nil, c.now) }); n != 0 {
		t.Errorf("a view makes %v allocations", n)
	}
}

func TestSlotReuse(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix")
	first := fleet[1]
	r.ObserveLoad(first, &backends.Load{CacheTokens: 4000, PolledAt: c.now, TokensKnown: true, QueuesKnown: true})
	for key := range 30 {
		d := mustPick(t, r, only(first, key, 40))
		c.advance(500 * time.Millisecond)
		d.RecordFirstEvent()
		d.Release(Outcome{End: Completed, OutputTokens: 900, PromptTokens: 1280, CachedTokens: 0, CachedKnown: true})
	}
	open := mustPick(t, r, only(first, 99, 400))
	fresh := r.Estimates()[0]
	if taught := r.Estimates()[1]; taught.OutputTokens == fresh.OutputTokens || taught.BytesPerToken == fresh.BytesPerToken {
		t.Fatalf("nothing was learned: %+v", taught)
	}
	r.RemoveBackend(first)
	next := guest("next", 1)
	r.AddBackend(next)
	got, want := r.Estimates()[1], fresh
	want.Backend = next
	want.PrefillRate = got.PrefillRate // the fleet's
	if got != want {
		t.Errorf("what is known of the next owner: %+v, want %+v", got, want)
	}
	parts, _ := r.IndexStats()
	if p := parts[1]; p.Backend != next || p.Blocks != 0 || p.Evictions != 0 || p.Capacity != parts[0].Capacity {
		t.Errorf("its part of the index: %+v", p)
	}
	d := mustPick(t, r, only(next, 5, 40))
	if d.MatchedBlocks != 0 {
		t.Errorf("%d blocks matched that its predecessor held", d.MatchedBlocks)
	}
	// What the first owner had in flight ends, and is none of the next one's.
	before, blocks := figuresOf(r, next, c.now), r.fleet.index.CountPinned(1)
	open.RecordOutput()
	open.RecordFirstEvent()
	open.Commit()
	open.Release(Outcome{End: Completed, OutputTokens: 1})
	if after := figuresOf(r, next, c.now); after != before || r.fleet.index.CountPinned(1) != blocks {
		t.Errorf("the account was %+v, and is %+v", before, after)
	}
	if first.InFlight.Load() != 0 || next.InFlight.Load() != 1 {
		t.Errorf("in flight: %d and %d", first.InFlight.Load(), next.InFlight.Load())
	}
	if !r.fleet.states[1].health.LastProgress().Equal(r.fleet.start) {
		t.Error("output of the first owner counts for the next one")
	}
	d.Release(Outcome{End: Completed, OutputTokens: 1})
}

// A Release that comes after the same backend left and joined again is not for
// the account that was begun since.
func TestBackendAddedAgain(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	open := mustPick(t, r, ask(fleet, 1, 40))
	r.RemoveBackend(fleet[0])
	r.AddBackend(fleet[0])
	open.Release(Outcome{End: Completed})
	if n := fleet[0].InFlight.Load(); n != 0 {
		t.Errorf("%d in flight", n)
	}
	expectEmptyAccount(t, "added again", r, 0, c.now)
}

func TestMoreThan64Backends(t *testing.T) {
	r, _, _ := newFleet(t, 1, "prefix")
	for slot := 1; slot < 200; slot++ {
		b := guest(fmt.Sprint("g", slot), slot)
		r.AddBackend(b)
		mustPick(t, r, only(b, slot, 4)).Release(Outcome{End: Completed})
		if d := mustPick(t, r, only(b, slot, 4)); d.MatchedBlocks != 4 {
			t.Fatalf("slot %d: %d blocks matched, want 4", slot, d.MatchedBlocks)
		}
	}
}

func TestPoliciesForgetRemovedBackend(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "hashtrie")
	first := mustPick(t, r, ask(fleet, 1, 8)).Backend
	r.RemoveBackend(first)
	next := guest("next", first.Slot)
	r.AddBackend(next)
	now := slices.Clone(fleet)
	now[first.Slot] = next
	elsewhere := false
	for range 50 { // it would go back to the slot that has it, each time
		if mustPick(t, r, ask(now, 1, 8)).Backend != next {
			elsewhere = true
			break
		}
		r.RemoveBackend(next)
		r.AddBackend(next)
	}
	if !elsewhere {
		t.Error("a prompt goes to the next owner of the slot that it was sent to before")
	}
}

// Backends come and go at random between the events of random requests. At the
// end all accounts are empty and nothing is in flight anywhere.
func TestFleetChangesRandomized(t *testing.T) {
	for seed := range uint64(60) {
		fluxOnce(t, seed)
	}
}

func fluxOnce(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 7))
	first := named("first", backends.Ready)
	r, registry, c := following(t, first)
	all := []*backends.Backend{first}
	var open []*Reservation
	var queued []*waiter
	for step := range 400 {
		c.advance(time.Duration(rng.IntN(300)) * time.Millisecond)
		switch rng.IntN(8) {
		case 0:
			b := named(fmt.Sprint("b", step), backends.Ready)
			joins(t, r, registry, b)
			all = append(all, b)
		case 1:
			there := registry.All()
			if b := there[rng.IntN(len(there))]; len(there) > 1 {
				r.RemoveBackend(b)
				registry.Remove(b)
			}
		case 2:
			reconfigured(t, r, func(o *Options) {
				names := policies.All().Names()
				o.Policy = names[rng.IntN(len(names))]
			})
		case 3:
			there := registry.All()
			r.ObserveLoad(there[rng.IntN(len(there))], &backends.Load{CacheTokens: 50_000, QueuesKnown: true, TokensKnown: true, PolledAt: c.now})
		case 4, 5:
			queued = append(queued, submit(r, request(registry, rng.IntN(20), 1+rng.IntN(200))))
		default:
			if len(open) > 0 {
				at := rng.IntN(len(open))
				if rng.IntN(2) == 0 {
					open[at].RecordFirstEvent()
				}
				open[at].Release(Outcome{End: End(rng.IntN(4)), OutputTokens: rng.IntN(100)})
				open = slices.Delete(open, at, at+1)
			}
		}
		queued = slices.DeleteFunc(queued, func(w *waiter) bool {
			if w.d != nil {
				open = append(open, w.d)
			}
			return !w.waits()
		})
	}
	reconfigured(t, r, func(o *Options) { o.Policy = "random" }) // which holds nothing
	for _, w := range queued {
		open = append(open, sent(t, fmt.Sprint("seed ", seed), w))
	}
	for _, d := range open {
		d.Release(Outcome{End: Completed})
	}
	for _, b := range all {
		if n := b.InFlight.Load(); n != 0 {
			t.Fatalf("seed %d: %s has %d in flight", seed, b.Name, n)
		}
	}
	for slot := range r.fleet.states {
		expectEmptyAccount(t, fmt.Sprint("seed ", seed), r, slot, c.now)
	}
}

// listed is a registry's catalog of one model.
func listed(t *testing.T, fleet ...*backends.Backend) *backends.Registry {
	t.Helper()
	registry, err := backends.NewRegistry(fleet)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range fleet {
		b.SetModels([]backends.Model{{ID: "m"}})
	}
	return registry
}

func named(name string, state backends.State) *backends.Backend {
	b := &backends.Backend{Name: name}
	b.SetState(state)
	return b
}

// following makes a router that follows its registry.
func following(t *testing.T, fleet ...*backends.Backend) (*Router, *backends.Registry, *clock) {
	t.Helper()
	registry := listed(t, fleet...)
	r, _, c := newFleet(t, 0, "prefix", withQueue, func(o *Options) { o.Backends, o.Catalog = fleet, registry.Catalog })
	return r, registry, c
}

func request(registry *backends.Registry, key, n int) *Request {
	e, _ := registry.Catalog().Find("m")
	req := ask(e.Backends, key, n)
	req.CatalogID = "m"
	return req
}

func joins(t *testing.T, r *Router, registry *backends.Registry, b *backends.Backend) {
	t.Helper()
	registry.Add(b)
	r.AddBackend(b)
	b.SetModels([]backends.Model{{ID: "m"}})
	r.BackendStateChanged(b)
}

func TestQueuedRequestFollowsCatalog(t *testing.T) {
	a := named("a", backends.Down)
	r, registry, _ := following(t, a)
	first, second := submit(r, request(registry, 1, 4)), submit(r, request(registry, 2, 4))
	waits(t, "no backend is ready", first)
	b := named("b", backends.Ready)
	joins(t, r, registry, b)
	if d := sent(t, "one joined", first); d.Backend != b {
		t.Errorf("sent to %s", d.Backend.Name)
	}
	sent(t, "and took the second", second).Release(Outcome{})
}

func TestQueuedRequestOfRemovedBackend(t *testing.T) {
	a, b := named("a", backends.Down), named("b", backends.Down)
	r, registry, _ := following(t, a, b)
	w := submit(r, request(registry, 1, 4))
	r.RemoveBackend(a)
	registry.Remove(a)
	a.SetState(backends.Ready) // a late update of its state
	r.BackendStateChanged(a)
	waits(t, "the ready one is in the fleet no more", w)
	b.SetState(backends.Ready)
	r.BackendStateChanged(b)
	if d := sent(t, "the other is ready", w); d.Backend != b {
		t.Errorf("sent to %s", d.Backend.Name)
	}
}

func TestStaleBackendsAreRefreshed(t *testing.T) {
	a, b := named("a", backends.Ready), named("b", backends.Ready)
	r, registry, _ := following(t, a)
	req := request(registry, 1, 4)
	joins(t, r, registry, b)
	r.RemoveBackend(a)
	registry.Remove(a)
	if d := mustPick(t, r, req); d.Backend != b {
		t.Errorf("sent to %s", d.Backend.Name)
	}
	retry := request(registry, 2, 4)
	retry.Backends = []*backends.Backend{a}
	if _, err := r.Pick(t.Context(), retry, b); err != ErrNoneReady {
		t.Errorf("all that are left were tried: %v", err)
	}
}

func TestModelUnlistedForAMoment(t *testing.T) {
	a := named("a", backends.Ready)
	r, registry, _ := following(t, a)
	req := request(registry, 1, 4)
	r.RemoveBackend(a)
	registry.Remove(a)
	w := submit(r, req)
	waits(t, "no backend lists the model", w)
	joins(t, r, registry, named("b", backends.Ready))
	sent(t, "one joined", w)
}

func TestQueuedClaimAfterSlotReuse(t *testing.T) {
	a, b := named("a", backends.Ready), named("b", backends.Ready)
	r, registry, _ := following(t, a, b)
	busyA, busyB := mustPick(t, r, request(registry, 1, 1000)), mustPick(t, r, request(registry, 2, 1000))
	w := submit(r, request(registry, 3, 1000))
	waits(t, "both are busy", w)
	left := busyA.Backend
	r.RemoveBackend(left)
	registry.Remove(left)
	if w.queued.waitsFor == left.Slot {
		t.Error("it waits for a backend that left")
	}
	busyB.RecordFirstEvent()
	busyA.Release(Outcome{End: ClientDisconnected})
	if d := sent(t, "the other has room", w); d.Backend != busyB.Backend {
		t.Errorf("sent to %s", d.Backend.Name)
	}
}

func reconfigured(t *testing.T, r *Router, change func(*Options)) {
	t.Helper()
	o := Options{Settings: Settings{Policy: "prefix", PollInterval: time.Second}}
	withQueue(&o)
	change(&o)
	if err := configure(r, o.Settings); err != nil {
		t.Fatal(err)
	}
}

func TestConfigurePolicyEmptiesQueue(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix", withQueue)
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
	waits(t, "and under prefix it is queued again", submit(r, ask(fleet, 9999, 100)))
	busy.Release(Outcome{})
}

func TestConfigureShorterQueue(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	busy := mustPick(t, r, ask(fleet, 0, 1000))
	early, late := submit(r, ask(fleet, 1, 100)), submit(r, ask(fleet, 2, 100))
	reconfigured(t, r, func(o *Options) {
		o.Queue = QueueSettings{Requests: 1, NoneReadyTimeout: time.Second, BusyTimeout: time.Second}
	})
	if w := submit(r, ask(fleet, 3, 100)); w.err != ErrQueueFull {
		t.Errorf("a third: %v", w.err)
	}
	c.advance(30 * time.Second)
	r.Tick()
	waits(t, "it may be queued for a minute, as of its arrival", early)
	reconfigured(t, r, func(o *Options) {
		o.Queue = QueueSettings{Requests: 3, NoneReadyTimeout: time.Second, BusyTimeout: time.Second}
	})
	short := submit(r, ask(fleet, 4, 100))
	busy.RecordFirstEvent()
	sent(t, "the backend is free", early).RecordFirstEvent()
	sent(t, "and again", late)
	c.advance(time.Second)
	r.Tick()
	if short.waits() {
		t.Error("one that came under the new limit is queued beyond it")
	}
}

func TestConfigureQueueTimeout(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	reconfigured(t, r, func(o *Options) { o.Queue.BusyTimeout = 0 })
	mustPick(t, r, ask(fleet, 0, 1000))
	var forever, limited []*waiter
	enqueue := func(all *[]*waiter, limit time.Duration) {
		reconfigured(t, r, func(o *Options) { o.Queue.BusyTimeout = limit })
		for range 3 {
			*all = append(*all, submit(r, ask(fleet, 100+len(forever)*10+len(limited), 100)))
		}
	}
	enqueue(&forever, 0)
	enqueue(&limited, time.Second)
	enqueue(&forever, 0)
	enqueue(&limited, time.Second)
	limited[0].queued.Cancel()
	c.advance(time.Second)
	r.Tick()
	for i, w := range limited[1:] {
		if w.err != ErrBusy {
			t.Errorf("%d of those with a limit: %v", i+1, w.err)
		}
	}
	for i, w := range forever {
		waits(t, fmt.Sprint(i, " of those without"), w)
	}
}

func TestConfigureError(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix", withQueue)
	if err := configure(r, Settings{Policy: "fastest"}); err == nil {
		t.Fatal("accepted")
	}
	mustPick(t, r, ask(fleet, 0, 1000))
	waits(t, "prefix holds", submit(r, ask(fleet, 1, 100)))
}
