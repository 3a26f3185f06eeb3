package queue

import "time"

// Class is a priority class. Requests of the classes before LowPriority are interactive.
type Class int

const (
	Urgent      Class = iota // priority below 0
	Normal                   // 0
	LowPriority              // above 0
	classCount
)

func (c Class) String() string { return [...]string{"urgent", "normal", "low"}[c] }

// ClassOf returns the class of a priority; lower priorities go first.
func ClassOf(priority int) Class {
	switch {
	case priority < 0:
		return Urgent
	case priority > 0:
		return LowPriority
	}
	return Normal
}

// Settings bound the admission queue. A zero Requests turns it off.
type Settings struct {
	Requests int `mapstructure:"requests" range:"0..1048576"` // maximum of each priority class but low
	// maximum of the bodies of each of these classes; 0: no limit
	Bytes               int64         `mapstructure:"bytes"`
	LowPriorityRequests int           `mapstructure:"low_priority_requests" range:"0..1048576"` // maximum of low-priority requests
	LowPriorityBytes    int64         `mapstructure:"low_priority_bytes"`                       // maximum of their bodies; 0: no limit
	NoneReadyTimeout    time.Duration `mapstructure:"none_ready_timeout"`                       // see Timeouts, of a request without its own
	BusyTimeout         time.Duration `mapstructure:"busy_timeout"`                             // likewise
	// maximum share by which low-priority requests may slow down others; 0: no limit
	LowPrioritySlowdown float64 `mapstructure:"-"`
}

// Timeouts returns those of a request without its own.
func (s *Settings) Timeouts() Timeouts {
	return Timeouts{NoneReady: s.NoneReadyTimeout, Busy: s.BusyTimeout}
}

// limits returns how many requests of a class may be queued, and the bytes of their bodies; 0 bytes: no limit.
func (s *Settings) limits(c Class) Waiting {
	if c == LowPriority {
		return Waiting{Count: s.LowPriorityRequests, Bytes: s.LowPriorityBytes}
	}
	return Waiting{Count: s.Requests, Bytes: s.Bytes}
}

// Waiting sums over waiting requests.
type Waiting struct {
	Count  int
	Bytes  int64   // of bodies
	Tokens float64 // that they have to compute at least
}

func (w *Waiting) add(count int, bytes int64, tokens float64) {
	w.Count += count
	w.Bytes += bytes
	if w.Tokens += tokens; w.Count == 0 {
		w.Tokens = 0 // no rounding error is left
	}
}

// waitingUpTo sums over a class and those before it.
func waitingUpTo(byClass *[classCount]Waiting, c Class) (sum Waiting) {
	for _, w := range byClass[:c+1] {
		sum.add(w.Count, w.Bytes, w.Tokens)
	}
	return sum
}
