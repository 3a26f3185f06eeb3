// Package policy holds the rules by which a request's backend is chosen, one
// file a rule. They know neither HTTP nor the index: only numbers.
package policy

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Policy chooses among candidates. The Router calls it under its lock, so a
// policy may keep state without one of its own.
type Policy interface {
	// Choose returns a place in candidates, of which there is at least one.
	Choose(Request, []Candidate) int
}

// Request is what a policy may know of a request.
type Request struct {
	Key uint64 // the first block of its prompt; 0 when it has none
	Now time.Time
	// AnswerTokens is how long answers are on average, MeanUncached what earlier
	// requests had to compute where they were sent; 0 before the first one.
	AnswerTokens, MeanUncached float64
}

// Candidate is one backend that could take the request, in tokens of prefill.
type Candidate struct {
	NameHash uint64  // xxh3 of the backend's name
	Matched  float64 // prompt tokens that it likely holds
	Uncached float64 // u: prompt tokens that it would have to compute
	Pending  float64 // W: uncached tokens sent to it that it has yet to compute
	InFlight float64 // n: sequences on it, other clients' included
}

// Names are the values of the setting routing.policy.
var Names = []string{"prefix", "least-load", "round-robin", "random"}

// New makes the policy of that name. What a policy leaves to chance it draws
// from rng.
func New(name string, rng *rand.Rand) (Policy, error) {
	switch name {
	case "prefix":
		return &Prefix{}, nil
	case "least-load":
		return leastLoad{rng}, nil
	case "round-robin":
		return &roundRobin{}, nil
	case "random":
		return random{rng}, nil
	}
	return nil, fmt.Errorf("routing.policy %q is none of %v", name, slices.Sorted(slices.Values(Names)))
}
