package policy

// roundRobin takes the candidates in turn.
type roundRobin struct{ last uint64 }

// Choose picks the candidate whose name comes next after the last one's, and
// not the next place: places shift as backends come, go, or are excluded.
func (r *roundRobin) Choose(asked *Request, candidates []Candidate) int {
	next, first := -1, 0
	for i := range candidates {
		h := candidates[i].NameHash
		if h < candidates[first].NameHash {
			first = i
		}
		if h > r.last && (next < 0 || h < candidates[next].NameHash) {
			next = i
		}
	}
	if next < 0 {
		next = first
	}
	asked.tell("its turn", false, 0, nil)
	if asked.Trace == nil {
		r.last = candidates[next].NameHash
	}
	return next
}
