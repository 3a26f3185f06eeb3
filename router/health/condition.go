package health

import (
	"fmt"
	"time"

	"warmroute/backends"
)

// ConditionState is whether a backend accepts new requests, and why not. Its values are shown to operators.
type ConditionState string

// The states of a backend.
const (
	Ready    ConditionState = "ready"
	Starting ConditionState = "starting" // no check has finished yet
	Down     ConditionState = "down"     // its checks fail
	Draining ConditionState = "draining" // it finishes what it has
	Stopping ConditionState = "stopping" // its replica refuses new requests because it shuts down or scales
	Paused   ConditionState = "paused"   // its engine takes no steps
	Asleep   ConditionState = "asleep"   // its replica reports so, or an operator has put it to sleep
	Stalled  ConditionState = "stalled"  // it has requests and makes no progress
)

// Condition is a backend's state with its cause and age.
type Condition struct {
	State  ConditionState
	Since  time.Time // zero: not known
	Reason string    // why it is not ready, or that it is slow; else empty
}

// Condition returns the state of a backend whose checks have the status s and whose last poll
// returned l; nil: it is not known.
func (r *Record) Condition(s *backends.Status, l *backends.Load, now time.Time) Condition {
	c := Condition{State: Ready, Since: s.Since, Reason: s.Reason}
	switch {
	case s.State == backends.Down && !s.Checked:
		c.State = Starting
	case s.State == backends.Down:
		c.State = Down
	case s.State == backends.Draining && s.Suspension == backends.PausedByOther && l != nil && l.Asleep:
		return Condition{Asleep, l.AsleepSince, "the replica reports that its engine is asleep"} // paused as well
	case s.State == backends.Draining && (s.Suspension == backends.Paused || s.Suspension == backends.PausedByOther):
		c.State = Paused
	case s.State == backends.Draining && s.Suspension == backends.Asleep:
		c.State = Asleep
	case s.State == backends.Draining:
		c.State = Draining
	case r.IsStopping(now):
		return Condition{Stopping, r.stoppingAt, "the replica reports that it is shutting down, or changing the number of its engines"}
	case l != nil && l.Asleep:
		return Condition{Asleep, l.AsleepSince, "the replica reports that its engine is asleep"}
	case r.stalled:
		return Condition{Stalled, r.work.since, "it has requests and makes no progress"}
	case r.speed.slow:
		c.Reason = fmt.Sprintf("slow: its steps take %.0f times as long as usual", r.speed.factor)
	}
	return c
}
