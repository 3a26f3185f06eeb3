package sim

import (
	"errors"
	"fmt"
	"sync"
	"time"
)

// FaultKind names a fault.
type FaultKind string

// The faults that stay until they have hit as many requests as they were meant
// for, their time is up, or they are cleared.
const (
	Refuse         FaultKind = "refuse"          // new connections are refused; open ones go on
	Hang           FaultKind = "hang"            // requests are read and never answered
	Reset          FaultKind = "reset"           // the connection is reset before the status line
	ResetLate      FaultKind = "reset-late"      // the connection is reset after status and headers
	ResetAtWork    FaultKind = "reset-at-work"   // the engine begins, and after Delay the connection is reset before the status line
	Die            FaultKind = "die"             // the connection ends after at most Chunks pieces of the answer, as when the process is killed
	AbortEach      FaultKind = "abort-each"      // the engine aborts each request after Chunks tokens of its answer, and with 0 before the first
	Status         FaultKind = "status"          // requests are answered with Status
	Hold           FaultKind = "hold"            // the first output of an answer is held back for Delay
	Slow           FaultKind = "slow"            // the engine takes Factor times as long
	Freeze         FaultKind = "freeze"          // the engine takes no step, while its server accepts requests and answers /health and /metrics
	MetricsGone    FaultKind = "metrics-gone"    // /metrics is a 404
	MetricsGarbled FaultKind = "metrics-garbled" // /metrics is a 200 that is no exposition
	MetricsHuge    FaultKind = "metrics-huge"    // /metrics is an exposition of 50 MB
	CloseIdle      FaultKind = "close-idle"      // connections are closed after each answer, without a word of it before
	Drain          FaultKind = "drain"           // as vLLM after SIGTERM with --shutdown-timeout: /health is 200, new requests get a 500
)

// The faults that happen at once.
const (
	Restart FaultKind = "restart" // Server.Restart
	Abort   FaultKind = "abort"   // Server.AbortAll
	Fail    FaultKind = "fail"    // Server.FailAll
	Clear   FaultKind = "clear"   // Server.ClearFaults
)

// Fault is something that a replica is told to get wrong. Its JSON form is the
// body of POST /sim/fault.
type Fault struct {
	Kind FaultKind `json:"kind"`

	Requests int     `json:"requests"` // ends after it hit so many; 0: no limit
	Seconds  float64 `json:"seconds"`  // ends after so long; 0: no limit

	// Everything extends Hang, Reset, ResetLate and Status from requests for
	// inference to /health, /v1/models and the rest.
	Everything bool `json:"everything"`

	Chunks int     `json:"chunks"` // Die, AbortEach
	Status int     `json:"status"` // Status: 429, 500, 502, 503 or 504
	Factor float64 `json:"factor"` // Slow
	Delay  float64 `json:"delay"`  // Hold and ResetAtWork, in seconds
}

func (f Fault) check() error {
	switch f.Kind {
	case Refuse, Slow, Freeze, MetricsGone, MetricsGarbled, MetricsHuge, CloseIdle, Drain:
		if f.Requests != 0 {
			return fmt.Errorf("fault %q cannot be limited to a number of requests; use seconds", f.Kind)
		}
	case Hang, Reset, ResetLate, Restart, Abort, Fail, Clear:
	case Die, AbortEach:
		if f.Chunks < 0 {
			return fmt.Errorf("fault %q needs chunks of 0 or more", f.Kind)
		}
	case Status:
		if f.Status < 400 || f.Status > 599 {
			return fmt.Errorf(`fault "status" needs a status of 400 to 599, not %d`, f.Status)
		}
	case Hold, ResetAtWork:
		if f.Delay <= 0 {
			return fmt.Errorf("fault %q needs a delay above 0", f.Kind)
		}
	default:
		return fmt.Errorf("unknown fault %q", f.Kind)
	}
	if f.Kind == Slow && f.Factor <= 0 {
		return errors.New(`fault "slow" needs a factor above 0`)
	}
	if f.Requests < 0 || f.Seconds < 0 {
		return errors.New("requests and seconds must not be negative")
	}
	return nil
}

// SetFault makes f happen, or begin. A fault of the same kind is replaced.
func (s *Server) SetFault(f Fault) error {
	if err := f.check(); err != nil {
		return err
	}
	switch f.Kind {
	case Restart:
		s.Restart()
		return nil
	case Abort:
		s.AbortAll()
		return nil
	case Fail:
		s.FailAll()
		return nil
	case Clear:
		return s.ClearFaults()
	}
	s.faults.set(f, func() { s.endFault(f.Kind) })
	switch f.Kind {
	case Refuse:
		s.listening.stop()
	case Slow:
		s.setSpeed(s.cfg.Engine.Speed / f.Factor)
	}
	return nil
}

// ClearFaults ends all faults.
func (s *Server) ClearFaults() error {
	s.faults.clear()
	s.thaw()
	s.setSpeed(s.cfg.Engine.Speed)
	return s.listening.resume(s.address)
}

// endFault ends a fault whose time is up.
func (s *Server) endFault(k FaultKind) {
	s.faults.drop(k)
	switch k {
	case Slow:
		s.setSpeed(s.cfg.Engine.Speed)
	case Freeze:
		s.thaw()
	case Refuse:
		// The port was ours a moment ago. Should somebody have taken it, the
		// replica stays refused, which is what its clients see anyway.
		_ = s.listening.resume(s.address)
	}
}

func (s *Server) setSpeed(speed float64) {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	s.engine.SetSpeed(speed)
}

// faults are those in force. The zero value is ready to use.
type faults struct {
	mu      sync.Mutex
	inForce map[FaultKind]*fault
}

type fault struct {
	Fault
	left   int // requests still to hit, when limited
	expiry *time.Timer
}

func (f *faults) set(what Fault, expired func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.inForce == nil {
		f.inForce = make(map[FaultKind]*fault)
	}
	f.remove(what.Kind)
	in := &fault{Fault: what, left: what.Requests}
	if what.Seconds > 0 {
		in.expiry = time.AfterFunc(seconds(what.Seconds), expired)
	}
	f.inForce[what.Kind] = in
}

// remove wants mu held.
func (f *faults) remove(k FaultKind) {
	if in := f.inForce[k]; in != nil && in.expiry != nil {
		in.expiry.Stop()
	}
	delete(f.inForce, k)
}

func (f *faults) drop(k FaultKind) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.remove(k)
}

func (f *faults) clear() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for k := range f.inForce {
		f.remove(k)
	}
}

// hit returns the first fault of kinds that is in force for a request, and
// counts the request against it.
func (f *faults) hit(inference bool, kinds ...FaultKind) (Fault, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, k := range kinds {
		in := f.inForce[k]
		if in == nil || !inference && !in.Everything {
			continue
		}
		if in.left > 0 {
			if in.left--; in.left == 0 {
				f.remove(k)
			}
		}
		return in.Fault, true
	}
	return Fault{}, false
}

// has reports whether k is in force, without counting anything against it.
func (f *faults) has(k FaultKind) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.inForce[k] != nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
