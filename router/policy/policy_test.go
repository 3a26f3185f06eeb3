package policy

import (
	"math/rand/v2"
	"testing"
)

func TestLeastLoad(t *testing.T) {
	p, _ := New("least-load", Settings{}, rand.New(rand.NewPCG(1, 1)))
	if got := p.Choose(&Request{}, []Candidate{{Requests: 3}, {Requests: 1}, {Requests: 2}}); got != 1 {
		t.Errorf("got %d, want the one with the fewest in flight", got)
	}
	seen := map[int]int{}
	for range 600 {
		seen[p.Choose(&Request{}, []Candidate{{Requests: 2}, {Requests: 1}, {Requests: 1}, {Requests: 1}})]++
	}
	if seen[0] != 0 || seen[1] < 100 || seen[2] < 100 || seen[3] < 100 {
		t.Errorf("ties are not spread: %v", seen)
	}
}

func TestRoundRobinTakesTurnsWhileBackendsComeAndGo(t *testing.T) {
	p, _ := New("round-robin", Settings{}, nil)
	a, b, c := Candidate{NameHash: 10}, Candidate{NameHash: 20}, Candidate{NameHash: 30}
	f := func(want Candidate, candidates ...Candidate) {
		t.Helper()
		if got := candidates[p.Choose(&Request{}, candidates)]; got != want {
			t.Errorf("got %d, want %d", got.NameHash, want.NameHash)
		}
	}
	f(a, a, b, c)
	f(b, c, b, a)
	f(c, a, c)
	f(a, a, b)
	f(b, a, b, c)
}

func TestUnknownPolicyIsAnErrorThatNamesTheKnown(t *testing.T) {
	if _, err := New("best", Settings{}, nil); err == nil {
		t.Error("no error")
	}
	for _, name := range Names {
		if _, err := New(name, Settings{}, rand.New(rand.NewPCG(1, 1))); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
