package policy

import (
	"math/rand/v2"
	"strings"
	"testing"
)

// mustNew makes the policy of that name.
func mustNew(t testing.TB, name string, s Settings, rng *rand.Rand) Policy {
	t.Helper()
	d, err := Lookup(name)
	if err != nil {
		t.Fatal(err)
	}
	return d.New(s, rng)
}

func TestLeastLoad(t *testing.T) {
	p := mustNew(t, "least-load", Settings{}, rand.New(rand.NewPCG(1, 1)))
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
	p := mustNew(t, "round-robin", Settings{}, nil)
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

func TestLookup(t *testing.T) {
	if _, err := Lookup("best"); err == nil || !strings.Contains(err.Error(), "choose one of aibrix, cache-threshold,") {
		t.Errorf("error %v does not name the policies", err)
	}
	for _, name := range Names() {
		if d, err := Lookup(name); err != nil || d.Name != name {
			t.Errorf("%s: %q, %v", name, d.Name, err)
		}
	}
}
