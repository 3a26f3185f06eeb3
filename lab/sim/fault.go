package sim

import (
	"errors"
	"fmt"
	"sync"
	"time"
)

// FaultKind names a fault.
type FaultKind string

// Faults that last until their number of requests or time is reached, or they are
// cleared.
const (
	Refuse      FaultKind = "refuse"        // new connections are refused; open ones go on
	Hang        FaultKind = "hang"          // requests are read and get no response
	Reset       FaultKind = "reset"         // the connection is reset before the status line
	ResetLate   FaultKind = "reset-late"    // the connection is reset after status and headers
	ResetAtWork FaultKind = "reset-at-work" // the engine begins, and after Delay the connection is reset before the status line
	// the connection is closed after at most Chunks chunks of the response, as when the process is killed
	Die FaultKind = "die"
	// on a connection that carried a request before, that one's response is sent once more before the response
	Surplus   FaultKind = "surplus"
	AbortEach FaultKind = "abort-each" // the engine aborts each request after Chunks output tokens, with 0 before the first
	Status    FaultKind = "status"     // requests get Status
	// with Limit sequences running or waiting, further requests are refused: streams after their 200, by an error event, others with a 503
	QueueFull      FaultKind = "queue-full"
	Hold           FaultKind = "hold"            // the first output is delayed by Delay
	Slow           FaultKind = "slow"            // the engine takes Factor times as long
	Freeze         FaultKind = "freeze"          // the engine takes no step; the server accepts requests and serves /health and /metrics
	MetricsGone    FaultKind = "metrics-gone"    // /metrics is a 404
	MetricsGarbled FaultKind = "metrics-garbled" // /metrics is a 200 that is not in the text format
	MetricsHuge    FaultKind = "metrics-huge"    // /metrics has 50 MB
	CloseIdle      FaultKind = "close-idle"      // connections are closed after each response without announcement
	Drain          FaultKind = "drain"           // as vLLM after SIGTERM with --shutdown-timeout: /health is 200, new requests get a 500
	// subscribers do not get each batch of KV events whose number, from 1 on, is divisible by Every; it can be replayed
	EventsLost    FaultKind = "events-lost"
	EventsGarbled FaultKind = "events-garbled" // batches of KV events are truncated in the middle, also when they are replayed
	ReplaySilent  FaultKind = "replay-silent"  // requests for a replay of KV events get no response
	TransferFail  FaultKind = "transfer-fail"  // transfers of KV from another replica fail
)

// Faults that happen at once.
const (
	Restart FaultKind = "restart" // Server.Restart
	Abort   FaultKind = "abort"   // Server.AbortAll
	Fail    FaultKind = "fail"    // Server.FailAll
	Clear   FaultKind = "clear"   // Server.ClearFaults
)

// Fault is a failure to simulate. Its JSON form is the body of POST /sim/fault. Fields that are zero are left out, so that
// replicas of an earlier version accept the faults that they know.
type Fault struct {
	Kind FaultKind `json:"kind"`

	Requests int     `json:"requests,omitempty"` // ends after this many, or batches of KV events; 0: no limit
	Seconds  float64 `json:"seconds,omitempty"`  // ends after this time; 0: no limit

	// Everything extends Hang, Reset, ResetLate and Status from inference requests to
	// /health, /v1/models and all others.
	Everything bool `json:"everything,omitempty"`

	Chunks int     `json:"chunks,omitempty"` // Die, AbortEach
	Status int     `json:"status,omitempty"` // Status: 429, 500, 502, 503 or 504
	Factor float64 `json:"factor,omitempty"` // Slow
	Delay  float64 `json:"delay,omitempty"`  // Hold and ResetAtWork, in seconds
	Every  int     `json:"every,omitempty"`  // EventsLost
	Limit  int     `json:"limit,omitempty"`  // QueueFull
}

func (f Fault) validate() error {
	switch f.Kind {
	case Refuse, Slow, Freeze, MetricsGone, MetricsGarbled, MetricsHuge, CloseIdle, Drain:
		if f.Requests != 0 {
			return fmt.Errorf("fault %q cannot be limited to a number of requests; use seconds", f.Kind)
		}
	case Hang, Reset, ResetLate, Surplus, Restart, Abort, Fail, Clear, EventsGarbled, ReplaySilent, TransferFail:
	case Die, AbortEach:
		if f.Chunks < 0 {
			return fmt.Errorf("fault %q needs chunks of 0 or more", f.Kind)
		}
	case QueueFull:
		if f.Limit < 0 {
			return fmt.Errorf("fault %q needs a limit of 0 or more", f.Kind)
		}
	case Status:
		if f.Status < 400 || f.Status > 599 {
			return fmt.Errorf(`fault "status" needs a status of 400 to 599, not %d`, f.Status)
		}
	case EventsLost:
		if f.Every < 1 {
			return errors.New(`fault "events-lost" needs an every of 1 or more`)
		}
	case Hold, ResetAtWork:
		if f.Delay <= 0 {
			return fmt.Errorf("fault %q needs a delay above 0", f.Kind)
		}
	default:
		return fmt.Errorf("unknown fault %q; choose a kind that warmroute sim --help lists", f.Kind)
	}
	if f.Kind == Slow && f.Factor <= 0 {
		return errors.New(`fault "slow" needs a factor above 0`)
	}
	if f.Requests < 0 || f.Seconds < 0 {
		return errors.New("requests and seconds must not be negative")
	}
	return nil
}

// SetFault starts f, replacing a fault of the same kind.
func (s *Server) SetFault(f Fault) error {
	if err := f.validate(); err != nil {
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
		s.listening.suspend()
	case Slow:
		s.setSpeed(s.cfg.Engine.Speed / f.Factor)
	}
	return nil
}

// ClearFaults ends all faults.
func (s *Server) ClearFaults() error {
	s.faults.clear()
	s.wakeFrozenEngines()
	s.setSpeed(s.cfg.Engine.Speed)
	return s.listening.reopenIfSuspended(s.address)
}

// endFault ends a fault whose time is over.
func (s *Server) endFault(k FaultKind) {
	s.faults.remove(k)
	switch k {
	case Slow:
		s.setSpeed(s.cfg.Engine.Speed)
	case Freeze:
		s.wakeFrozenEngines()
	case Refuse:
		// If another process has taken the port meanwhile, connections stay refused.
		_ = s.listening.reopenIfSuspended(s.address)
	}
}

// setSpeed sets the speed of the engines from their next steps on.
func (s *Server) setSpeed(speed float64) {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	s.speed = speed
}

// faults are the active faults. The zero value is ready for use.
type faults struct {
	mu     sync.Mutex
	active map[FaultKind]*fault
}

type fault struct {
	Fault
	left   int // requests still to fail, if limited
	expiry *time.Timer
}

func (f *faults) set(what Fault, onExpiry func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.active == nil {
		f.active = make(map[FaultKind]*fault)
	}
	f.removeLocked(what.Kind)
	in := &fault{Fault: what, left: what.Requests}
	if what.Seconds > 0 {
		in.expiry = time.AfterFunc(seconds(what.Seconds), onExpiry)
	}
	f.active[what.Kind] = in
}

// removeLocked ends fault k without its effects. It requires mu.
func (f *faults) removeLocked(k FaultKind) {
	if in := f.active[k]; in != nil && in.expiry != nil {
		in.expiry.Stop()
	}
	delete(f.active, k)
}

func (f *faults) remove(k FaultKind) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.removeLocked(k)
}

func (f *faults) clear() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for k := range f.active {
		f.removeLocked(k)
	}
}

// matchAndCount returns the first active fault of kinds that applies to a request, and
// counts the request against its limit.
func (f *faults) matchAndCount(inference bool, kinds ...FaultKind) (matched Fault, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, k := range kinds {
		in := f.active[k]
		if in == nil || !inference && !in.Everything {
			continue
		}
		if in.left > 0 {
			if in.left--; in.left == 0 {
				f.removeLocked(k)
			}
		}
		return in.Fault, true
	}
	return Fault{}, false
}

// isActive reports whether k is active, and counts no request.
func (f *faults) isActive(k FaultKind) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.active[k] != nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
