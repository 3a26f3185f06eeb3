package policies

import "warmroute/router/policy"

// roundRobin chooses the candidates in turn, in the order of their names: indexes
// shift as backends are added, removed or filtered.
type roundRobin struct{ last uint64 }

func (p *roundRobin) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	next, first := -1, 0
	for i := range candidates {
		name := candidates[i].NameHash
		if name < candidates[first].NameHash {
			first = i
		}
		if name > p.last && (next < 0 || name < candidates[next].NameHash) {
			next = i
		}
	}
	if next < 0 {
		next = first
	}
	traceCriterion(r, "order of names")
	return next
}

// RecordSent implements Recorder.
func (p *roundRobin) RecordSent(_ *policy.Request, c *policy.Candidate) { p.last = c.NameHash }
