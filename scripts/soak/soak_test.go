package main

import (
	"encoding/json"
	"math/rand/v2"
	"testing"

	"warmroute/loadgen"
	"warmroute/replay"
)

func TestFaults(t *testing.T) {
	idle := sample{RSS: 20, Heap: 3, Goroutines: 20, Descriptors: 20}
	under := sample{RSS: 100, Heap: 50, Goroutines: 200, Descriptors: 200, InFlight: 90}
	after := sample{RSS: 80, Heap: 5, Goroutines: 22, Descriptors: 18}
	f := func(what string, want int, change func(end, after *sample)) {
		t.Helper()
		e, a := under, after
		change(&e, &a)
		if got := faults(idle, under, e, a); len(got) != want {
			t.Errorf("%s: %q, want %d", what, got, want)
		}
	}
	f("flat", 0, func(end, after *sample) {})
	f("what chance does", 0, func(end, after *sample) { end.RSS, end.Heap, end.Goroutines = 120, 60, 240 })
	f("memory that grows", 2, func(end, after *sample) { end.RSS, end.Heap = 140, 80 })
	f("counts that grow", 2, func(end, after *sample) { end.Goroutines, end.Descriptors = 300, 300 })
	f("what stays", 4, func(end, after *sample) {
		after.Heap, after.Goroutines, after.Descriptors, after.InFlight = 20, 60, 60, 1
	})
}

// TestKinds holds that every kind comes, and that what it sends is what it says.
func TestKinds(t *testing.T) {
	from := rand.New(rand.NewPCG(1, 1))
	seen := map[string]bool{}
	for range 5000 {
		seen[draw(from).name] = true
	}
	for _, k := range kinds {
		if !seen[k.name] {
			t.Errorf("%s never comes", k.name)
		}
		a := k.ask(from)
		var sent struct{ Stream bool }
		if json.Unmarshal(a.Body, &sent); sent.Stream != a.Stream {
			t.Errorf("%s asks for a stream: %v, and expects one: %v", k.name, sent.Stream, a.Stream)
		}
	}
}

func TestOnlyAKeyWithBoundsMayBeRefused(t *testing.T) {
	o := &outcomes{sent: map[string]int{}, failed: map[string]int{}}
	refused := loadgen.Response{Result: replay.Result{Err: "status 429"}, Status: 429}
	o.add(&kinds[0], loadgen.Request{}, true, refused)
	if o.over != 1 || len(o.failed) != 0 {
		t.Errorf("with bounds: %d, failed %v", o.over, o.failed)
	}
	o.add(&kinds[0], loadgen.Request{}, false, refused)
	o.add(&kinds[0], loadgen.Request{}, true, loadgen.Response{Result: replay.Result{Err: loadgen.NoConnection}})
	if o.over != 1 || len(o.failed) != 2 {
		t.Errorf("without, and a connection lost: %d, failed %v", o.over, o.failed)
	}
}
