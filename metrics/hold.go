package metrics

import "time"

// HeldEnd is how a request's time in the hold queue ended.
type HeldEnd string

// Sent, or let in only to be sent, is the good one.
const (
	HeldSent      HeldEnd = "sent"
	HeldRefused   HeldEnd = "full"       // not let in
	HeldTooLong   HeldEnd = "too_long"   // no backend had room in time
	HeldNoneReady HeldEnd = "none_ready" // no backend was ready in time
	HeldLeft      HeldEnd = "left"       // the client left
)

// Held records a request that was in the hold queue, or was not let in.
func (m *Metrics) Held(end HeldEnd, waited time.Duration) {
	m.holdEnds.WithLabelValues(string(end)).Inc()
	if end != HeldRefused {
		m.hold.Observe(waited)
	}
}
