package policy

// roundRobin chooses the candidates in turn. Turns go by name and not by index:
// indexes shift as backends come, go or are left out.
type roundRobin struct{ last uint64 }

func (p *roundRobin) Choose(r *Request, candidates []Candidate) int {
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
	r.traceCriterion("its turn")
	if r.Trace == nil {
		p.last = candidates[next].NameHash
	}
	return next
}
