package backends

import (
	"errors"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// State is whether a backend accepts requests.
type State int32

const (
	Down     State = iota // fails its checks, or was not checked yet
	Ready                 // /health is 200 and /v1/models lists a model
	Draining              // finishes its requests, gets no new ones
)

func (s State) String() string { return [...]string{"down", "ready", "draining"}[s] }

// Suspension is an action of an operator, or of another caller, because of which a backend gets no new requests.
type Suspension int

const (
	NotSuspended   Suspension = iota
	Pausing                   // its requests in flight end before its engine is paused
	Paused                    // its engine is paused
	FallingAsleep             // its requests in flight end before its engine goes to sleep
	Asleep                    // its engine is asleep
	ResettingCache            // its requests in flight end before its prefix cache is reset
	PausedByOther             // the replica reports that its engine is paused, which this proxy has not done
)

func (s Suspension) String() string {
	return [...]string{
		"not suspended", "being paused by an operator", "paused by an operator", "being put to sleep by an operator",
		"put to sleep by an operator", "its cache is being reset by an operator",
		"the replica reports that its engine is paused",
	}[s]
}

// condition is a backend's State and its causes. Safe for concurrent use.
type condition struct {
	flags   atomic.Int32
	server  *condition // of the server of which this is a rank, which is checked instead; its flags count as well; nil: none
	changed *Event     // notified of a change of State; nil: none

	mu           sync.Mutex // guards what follows, and changes of the flags
	since        time.Time  // of the State
	suspension   Suspension
	checked      bool
	checkError   string // of the last check; empty: it passed
	refused      bool   // the last check: nothing listens there
	nextCheck    time.Time
	begunChecks  int
	finishedLast int // number of the last check that has finished, among begunChecks
	finished     Event
}

// The flags that a State is made of. The checks, the operator and the
// configuration each have one, so that none can undo another's in any order.
const (
	healthy   = 1 << iota // passed its last check
	drained               // by an operator
	retired               // no longer in the configuration
	suspended             // suspension is not NotSuspended
)

// State reports whether the backend may take traffic.
func (c *condition) State() State {
	switch s := c.allFlags(); {
	case s == healthy:
		return Ready
	case s&(drained|retired|suspended) != 0:
		return Draining
	}
	return Down
}

// allFlags returns the flags, those of the server included.
func (c *condition) allFlags() int32 {
	if c.server == nil {
		return c.flags.Load()
	}
	return c.flags.Load() | c.server.flags.Load()
}

// checks returns the condition that has the outcome of the checks.
func (c *condition) checks() *condition {
	if c.server != nil {
		return c.server
	}
	return c
}

// isHealthy reports whether the last check passed.
func (c *condition) isHealthy() bool { return c.flags.Load()&healthy != 0 }

// Drained reports whether the operator drained the backend.
func (c *condition) Drained() bool { return c.allFlags()&drained != 0 }

// Retiring reports whether the backend is retired.
func (c *condition) Retiring() bool { return c.allFlags()&retired != 0 }

// Suspension returns what SetSuspension has set last.
func (c *condition) Suspension() Suspension {
	c = c.checks()
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.suspension
}

// SetState is for tests and simulations, which have no health checks.
func (c *condition) SetState(s State) {
	c.setFlags([...]int32{Down: 0, Ready: healthy, Draining: healthy | drained}[s], healthy|drained|retired)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.checked = true
}

// setFlag sets or clears a flag and reports whether it changed.
func (c *condition) setFlag(flag int32, on bool) (changed bool) {
	if on {
		return c.setFlags(flag, flag)
	}
	return c.setFlags(0, flag)
}

// setFlags gives the flags in mask the values in flags, broadcasts a change of State, and
// reports whether a flag changed.
func (c *condition) setFlags(flags, mask int32) (changed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.setFlagsAndNotifyLocked(flags, mask)
}

// setSuspension sets the suspension and the flag for it.
func (c *condition) setSuspension(s Suspension) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.suspension = s
	var flags int32
	if s != NotSuspended {
		flags = suspended
	}
	c.setFlagsAndNotifyLocked(flags, suspended)
}

// setFlagsAndNotifyLocked is setFlags while mu is held: it broadcasts a change of State.
func (c *condition) setFlagsAndNotifyLocked(flags, mask int32) (changed bool) {
	before, state := c.flags.Load(), c.State()
	c.flags.Store(before&^mask | flags)
	if c.State() != state {
		c.since = time.Now()
		if c.changed != nil {
			c.changed.Notify()
		}
	}
	return c.flags.Load() != before
}

// Status is a backend's State with its cause and age.
type Status struct {
	State      State
	Suspension Suspension
	Checked    bool      // a health check has finished
	Since      time.Time // of State; zero on a backend that New did not make
	Reason     string    // why it is not Ready; empty when it is
	NextCheck  time.Time // unless something requests one sooner; zero: unknown
}

// Status returns the backend's state with its cause and age.
func (c *condition) Status() Status {
	c.mu.Lock()
	since := c.since
	c.mu.Unlock()
	checks := c.checks()
	checks.mu.Lock()
	defer checks.mu.Unlock()
	s := Status{State: c.State(), Suspension: checks.suspension, Checked: checks.checked, Since: checks.since, NextCheck: checks.nextCheck}
	if since.After(s.Since) {
		s.Since = since
	}
	switch {
	case c.Retiring():
		s.Reason = "being removed"
	case c.Drained():
		s.Reason = "being drained by an operator"
	case s.Suspension != NotSuspended:
		s.Reason = s.Suspension.String()
	case s.State == Ready:
		return s
	case !s.Checked:
		s.Reason = "not checked yet"
		return s
	}
	if checks.checkError != "" {
		if s.Reason != "" {
			s.Reason += "; its last check failed: "
		}
		s.Reason += checks.checkError
	}
	return s
}

// RefusesConnections reports whether the last health check found that nothing listens:
// the replica's process is gone, with all that it had in memory.
func (c *condition) RefusesConnections() bool {
	c = c.checks()
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.refused
}

// RecordNextCheck sets the time that Status reports. It is for the health checks, and
// for tests that have none.
func (c *condition) RecordNextCheck(at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nextCheck = at
}

// recordCheckBegun records that a health check begins. None is in progress.
func (c *condition) recordCheckBegun() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.begunChecks++
}

// recordCheckResult records the outcome of the health check that was begun last.
func (c *condition) recordCheckResult(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.checked, c.checkError, c.refused = true, "", errors.Is(err, syscall.ECONNREFUSED)
	if err != nil {
		c.checkError = err.Error()
	}
}

// recordCheckFinished wakes the callers of AwaitCheck, at the end of the health check that was begun last: its
// outcome is recorded, the flags are set and changes were reported.
func (c *condition) recordCheckFinished() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.finishedLast = c.begunChecks
	c.finished.Notify()
}
