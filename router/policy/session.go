package policy

import "math/rand/v2"

// session keeps a session on one backend, by a consistent hash of its name,
// whatever the load there. A request without one goes by the beginning of its
// first message, or of its prompt; without any, to the fewest in flight.
type session struct{ rng *rand.Rand }

func (s session) Choose(r *Request, candidates []Candidate) int {
	key := r.Session
	if key == 0 {
		key = r.head()
	}
	if key == 0 {
		return fewest(r, candidates, s.rng)
	}
	r.tell("its rank in a consistent hash of the session, or of the prompt's beginning", false, 0, nil)
	best := 0
	for i := range candidates {
		if rendezvous(key, candidates[i].NameHash) > rendezvous(key, candidates[best].NameHash) {
			best = i
		}
	}
	return best
}
