package router

import "warmroute/backends"

// liveState is what health checks, polls, operators and reloads change of a backend at any time,
// without the router's lock.
type liveState struct {
	readIn  uint64 // Router.lockHolds then; 0: never
	state   backends.State
	load    *backends.Load // nil: not known
	options *backends.Options
}

// liveStateOf returns the live state of a backend in the fleet. It is read once while the lock is held,
// since two reads could contradict each other.
func (r *Router) liveStateOf(b *backends.Backend) *liveState {
	l := &r.states[b.Slot].live
	if l.readIn != r.lockHolds {
		*l = liveState{r.lockHolds, b.State(), b.Load(), b.Options()}
	}
	return l
}
