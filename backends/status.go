package backends

import (
	"sync"
	"time"
)

// Status is a backend's State with its cause and age.
type Status struct {
	State     State
	Checked   bool      // a readiness check has finished
	Since     time.Time // of State; zero on a backend that New did not make
	Reason    string    // why it is not Ready; empty when it is
	NextCheck time.Time // when it is checked next, unless something asks for it sooner; zero: not known
}

// statusRecord is what a Status needs beside the State.
type statusRecord struct {
	mu         sync.Mutex // guards what follows, and changes of the state
	since      time.Time
	checked    bool
	checkError string // of the last check; empty: it passed
	nextCheck  time.Time
}

// stateWas notes the time, and tells of the change, if the state is another than before. r.mu is held.
func (r *statusRecord) stateWas(before State, b *Backend) {
	if b.State() != before {
		r.since = time.Now()
		if b.changed != nil {
			b.changed.Notify()
		}
	}
}

// Status returns the state of b with its cause and age.
func (b *Backend) Status() Status {
	r := &b.status
	r.mu.Lock()
	defer r.mu.Unlock()
	s := Status{State: b.State(), Checked: r.checked, Since: r.since, NextCheck: r.nextCheck}
	switch {
	case b.Retiring():
		s.Reason = "no longer in the configuration"
	case b.Drained():
		s.Reason = "drained by an operator"
	case s.State == Ready:
		return s
	case !r.checked:
		s.Reason = "not checked yet"
		return s
	}
	if r.checkError != "" {
		if s.Reason != "" {
			s.Reason += "; its last check failed: "
		}
		s.Reason += r.checkError
	}
	return s
}

// SetNextCheck is for the readiness checks, and for tests that have none.
func (b *Backend) SetNextCheck(at time.Time) {
	b.status.mu.Lock()
	defer b.status.mu.Unlock()
	b.status.nextCheck = at
}

// setCheckResult notes the outcome of a readiness check.
func (b *Backend) setCheckResult(err error) {
	b.status.mu.Lock()
	defer b.status.mu.Unlock()
	b.status.checked, b.status.checkError = true, ""
	if err != nil {
		b.status.checkError = err.Error()
	}
}
