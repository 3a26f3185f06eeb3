package main

import (
	"encoding/json"
	"math/rand/v2"
	"testing"

	"warmroute/lab/loadgen"
	"warmroute/lab/replay"
)

func TestFindGrowth(t *testing.T) {
	// RSS, heap, goroutines, descriptors, in flight
	before := usage{20, 3, 20, 20, 0}
	under := usage{100, 50, 200, 200, 90}
	after := usage{80, 5, 22, 18, 0}
	f := func(what string, want int, change func(end, after *usage)) {
		t.Helper()
		e, a := under, after
		change(&e, &a)
		if got := findGrowth(before, under, e, a); len(got) != want {
			t.Errorf("%s: %q, want %d", what, got, want)
		}
	}
	f("flat", 0, func(end, after *usage) {})
	f("random variation", 0, func(end, after *usage) { *end = usage{120, 60, 240, 200, 300} })
	f("memory grows", 2, func(end, after *usage) { end[0], end[1] = 140, 80 })
	f("counts grow", 2, func(end, after *usage) { end[2], end[3] = 300, 300 })
	f("not released", 4, func(end, after *usage) { *after = usage{80, 20, 60, 60, 1} })
}

func TestRequestKinds(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	seen := map[string]bool{}
	for range 5000 {
		seen[drawKind(random).name] = true
	}
	for _, k := range requestKinds {
		if !seen[k.name] {
			t.Errorf("%s is never drawn", k.name)
		}
		request := k.newRequest(random)
		var body struct{ Stream bool }
		if json.Unmarshal(request.Body, &body); body.Stream != request.Stream {
			t.Errorf("%s: the body has stream %v, the client expects %v", k.name, body.Stream, request.Stream)
		}
	}
}

func TestOnlyLimitedKeyMayBeRefused(t *testing.T) {
	s := &soakReport{Sent: map[string]int{}, Failed: map[string]int{}}
	refused := loadgen.Response{Result: replay.Result{Err: "status 429"}, Status: 429}
	s.countResponse(&requestKinds[0], loadgen.Request{}, true, refused)
	if s.OverLimit != 1 || len(s.Failed) != 0 {
		t.Errorf("limited key: %d refused, failed %v", s.OverLimit, s.Failed)
	}
	s.countResponse(&requestKinds[0], loadgen.Request{}, false, refused)
	s.countResponse(&requestKinds[0], loadgen.Request{}, true, loadgen.Response{Result: replay.Result{Err: loadgen.NoConnection}})
	if s.OverLimit != 1 || len(s.Failed) != 2 {
		t.Errorf("unlimited key and lost connection: %d refused, failed %v", s.OverLimit, s.Failed)
	}
}
