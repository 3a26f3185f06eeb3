package router

import (
	"time"

	"warmroute/backends"
)

// ConditionState says whether a backend takes new requests, and why not. Its
// values are what operators read.
type ConditionState string

// The states of a backend, as the checks, the polls, the operator and the
// backend's own answers have them.
const (
	Ready    ConditionState = "ready"
	Starting ConditionState = "starting" // no check has finished yet
	Down     ConditionState = "down"     // its checks fail
	Draining ConditionState = "draining" // it finishes what it has
	Stopping ConditionState = "stopping" // its replica refuses new requests because it shuts down
	Asleep   ConditionState = "asleep"   // its replica says so
	Stalled  ConditionState = "stalled"  // it has requests and makes no progress
)

// Condition is a backend's state with its cause and age.
type Condition struct {
	State  ConditionState
	Since  time.Time // zero: not known
	Reason string    // why it is not ready; empty when it is
}

// Condition returns the state of b as of now.
func (r *Router) Condition(b *backends.Backend) Condition {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	return r.condition(b)
}

// CountReady returns how many of the backends are Ready. A stalled one is not,
// though it gets requests where there is no other.
func (r *Router) CountReady(list []*backends.Backend) int {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	n := 0
	for _, b := range list {
		if r.isReady(b) {
			n++
		}
	}
	return n
}

func (r *Router) isReady(b *backends.Backend) bool {
	return r.available(b, nil) && !r.progress[b.Slot].stalled
}

func (r *Router) condition(b *backends.Backend) Condition {
	s := b.Status()
	c := Condition{State: Ready, Since: s.Since, Reason: s.Reason}
	switch r.absent(b, nil) {
	case away, draining:
		c.State = Draining
	case unready:
		if c.State = Down; !s.Checked {
			c.State = Starting
		}
	case ending:
		c.State, c.Since, c.Reason = Stopping, r.progress[b.Slot].stops, "the replica answers that it is shutting down"
	case asleep:
		c.State, c.Since, c.Reason = Asleep, b.Load().AsleepSince, "the replica reports that its engine sleeps"
	case present:
		if p := r.progress[b.Slot]; p.stalled {
			c.State, c.Since, c.Reason = Stalled, p.since, "it has requests and makes no progress"
		}
	}
	return c
}
