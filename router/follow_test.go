package router

import (
	"testing"

	"warmroute/backends"
)

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
	r, _, c := newFleet(t, 0, "prefix", holding, func(o *Options) { o.Backends, o.Catalog = fleet, registry.Catalog })
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
	if err := registry.Add(b); err != nil {
		t.Fatal(err)
	}
	r.AddBackend(b)
	b.SetModels([]backends.Model{{ID: "m"}})
	r.BackendChanged(b)
}

func TestARequestThatIsHeldFollowsTheFleet(t *testing.T) {
	a := named("a", backends.Down)
	r, registry, _ := following(t, a)
	first, second := submit(r, request(registry, 1, 4)), submit(r, request(registry, 2, 4))
	waits(t, "nobody is ready", first)
	b := named("b", backends.Ready)
	joins(t, r, registry, b)
	if d := sent(t, "one joined", first); d.Backend != b {
		t.Errorf("sent to %s", d.Backend.Name)
	}
	sent(t, "and took the second", second).Release(Outcome{})
}

func TestARequestIsNotHeldForABackendThatLeft(t *testing.T) {
	a, b := named("a", backends.Down), named("b", backends.Down)
	r, registry, _ := following(t, a, b)
	w := submit(r, request(registry, 1, 4))
	r.RemoveBackend(a)
	registry.Remove(a)
	a.SetState(backends.Ready) // somebody's late word on it
	r.BackendChanged(a)
	waits(t, "the ready one is in the fleet no more", w)
	b.SetState(backends.Ready)
	r.BackendChanged(b)
	if d := sent(t, "the other is ready", w); d.Backend != b {
		t.Errorf("sent to %s", d.Backend.Name)
	}
}

func TestARequestThatLooksAtAnOldListIsSentToTheNewFleet(t *testing.T) {
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

func TestARequestOutlastsAMomentInWhichNobodyListsItsModel(t *testing.T) {
	a := named("a", backends.Ready)
	r, registry, _ := following(t, a)
	req := request(registry, 1, 4)
	r.RemoveBackend(a)
	registry.Remove(a)
	w := submit(r, req)
	waits(t, "nobody lists the model", w)
	joins(t, r, registry, named("b", backends.Ready))
	sent(t, "one joined", w)
}

func TestWhatWaitsForASlotWaitsForItsOwner(t *testing.T) {
	a, b := named("a", backends.Ready), named("b", backends.Ready)
	r, registry, _ := following(t, a, b)
	busyA, busyB := mustPick(t, r, request(registry, 1, 1000)), mustPick(t, r, request(registry, 2, 1000))
	w := submit(r, request(registry, 3, 1000))
	waits(t, "both are busy", w)
	left := busyA.Backend
	r.RemoveBackend(left)
	registry.Remove(left)
	if w.held.waitsFor == left.Slot {
		t.Error("it waits for a backend that left")
	}
	busyB.RecordFirstEvent()
	busyA.Release(Outcome{End: ClientDisconnected})
	if d := sent(t, "the other has room", w); d.Backend != busyB.Backend {
		t.Errorf("sent to %s", d.Backend.Name)
	}
}
