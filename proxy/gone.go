package proxy

import (
	"bytes"
	"slices"
	"strings"
	"time"

	"github.com/tidwall/gjson"

	"warmroute/backends"
)

// farewell is how long a replica takes, at most, from the last word on what it
// had until its checks fail. A busy vLLM that is told to stop took up to 0.8 s.
const farewell = 1500 * time.Millisecond

// fallen is a backend that failed an attempt as one does that dies, or stops.
type fallen struct {
	backend *backends.Backend
	at      time.Time
	deadly  bool // it may have died of the request
}

func (x *exchange) fell(b *backends.Backend) bool {
	return slices.ContainsFunc(x.fallen, func(o fallen) bool { return o.backend == b })
}

// killed reports whether the request may be what b died of.
func (x *exchange) killed(b *backends.Backend) bool {
	return slices.ContainsFunc(x.fallen, func(o fallen) bool { return o.backend == b && o.deadly })
}

// orderly reports whether an error's text says that the replica stops in good
// order.
func orderly(body []byte) bool { return bytes.Contains(body, []byte("shutdown")) }

// drains reports whether an error is what vLLM says to new requests while it
// finishes what it has (--shutdown-timeout), for seconds in which its checks pass.
// Its beginning has to be that: an error may quote its request.
func drains(body []byte) bool {
	return strings.HasPrefix(gjson.GetBytes(body, "error.message").Str, "cannot schedule new futures after")
}

// isGone waits until the checks have seen whether the replica of a failed attempt
// is gone, where no other is ready. If it is, it was stopped or has died, and it is
// another process when it is back: what it said last was not about the request, for
// which it may be asked again. If it stays, its words are worth as much as any.
func (x *exchange) isGone(f *failure) bool {
	if !(f.deadly || f.stops || f.full) || x.settings.HoldTime == 0 || x.anotherIsReady() {
		return false
	}
	b, begun, limit := f.decision.Backend, time.Now(), verdict
	switch {
	case f.full:
		limit = 0 // whoever says that has stayed, mostly; and awaitPlace gave the time
	case f.status != 0:
		limit = farewell
	}
	for b.State() != backends.Down {
		if x.p.suspect(b); time.Since(begun) >= limit || !x.rest(verdict/10) {
			if f.status != 0 {
				x.spoke(b, begun)
			}
			return false
		}
	}
	x.tried = slices.DeleteFunc(x.tried, func(o *backends.Backend) bool { return o == b || x.fell(o) && !x.killed(o) })
	return true
}

// spoke notes that a replica has answered, if only with an error.
func (x *exchange) spoke(b *backends.Backend, at time.Time) {
	if x.hasWords() {
		return
	}
	x.speaker = b
	if x.spoken.IsZero() {
		x.spoken = at
	}
}

// hasWords reports whether there are a replica's words to relay, if no other does
// better. Those of one that is down by now are about its end, and not worth more
// than an answer.
func (x *exchange) hasWords() bool { return x.speaker != nil && x.speaker.State() != backends.Down }
