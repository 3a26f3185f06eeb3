package policy

import "math/rand/v2"

// Trace is filled by a Choose that is only asked what it would do: it remembers
// nothing, so that later choices are what they would have been, and tells here how
// it came to its choice. Chance is drawn from as ever, so where it decides, the next
// Choose may take another candidate.
type Trace struct {
	Criterion   string    // what decided, in words
	Scores      []float64 // by candidate, in What; nil: the rule compares none
	HighestWins bool      // the highest of Scores was to be chosen, and not the lowest
	Terms       []Terms   // by candidate, what the costs of the policy prefix are made of; nil for others
	Kappa       float64   // of the policy prefix
}

// tell notes by what the choice is about to be made. Of a rule that goes on to
// another one, that other one's is left in the end.
func (r *Request) tell(what string, highest bool, n int, score func(i int) float64) {
	t := r.Trace
	if t == nil {
		return
	}
	t.Criterion, t.HighestWins, t.Scores = what, highest, nil
	for i := range n {
		t.Scores = append(t.Scores, score(i))
	}
}

// lowest is the candidate, of n, of the lowest cost, a random one among equals.
func (r *Request) lowest(what string, n int, rng *rand.Rand, cost func(i int) float64) int {
	r.tell(what, false, n, cost)
	return lowest(n, rng, cost)
}

// highest is the candidate, of n, of the highest worth, a random one among equals.
func (r *Request) highest(what string, n int, rng *rand.Rand, worth func(i int) float64) int {
	r.tell(what, true, n, worth)
	return lowest(n, rng, func(i int) float64 { return -worth(i) })
}

// cost notes the next candidate's, under the policy prefix.
func (t *Trace) cost(sum, kappa float64, made Terms) {
	t.Criterion, t.Kappa = "cost in tokens of prefill", kappa
	t.Scores, t.Terms = append(t.Scores, sum), append(t.Terms, made)
}
