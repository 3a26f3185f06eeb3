package proxy

import (
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

// shutdownMessages are how the messages begin with which vLLM refuses new requests
// while it finishes what it has (--shutdown-timeout), for seconds in which its checks
// pass: of its thread pools, and of its engine.
var shutdownMessages = [...]string{"cannot schedule new futures after ", "Server shutting down"}

// isShutdownError reports whether an error is one of those: no engine has seen the
// request. Only the start of its message counts, since an error may quote its request,
// and only JSON is parsed, since gjson finds objects in any text.
func isShutdownError(body []byte) bool {
	if !gjson.ValidBytes(body) {
		return false
	}
	message := gjson.GetBytes(body, "error.message")
	return message.Type == gjson.String && slices.ContainsFunc(shutdownMessages[:], func(start string) bool {
		return strings.HasPrefix(message.Str, start)
	})
}

// isGone waits until the checks have seen whether the replica of a failed attempt
// is gone, where no other is ready. If it is, it was stopped or has died, and it is
// another process when it is back: what it said last was not about the request, for
// which it may be asked again. If it stays, its words are worth as much as any.
func (x *exchange) isGone(f *failure) bool {
	if !(f.deadly || f.stops || f.full) || x.holdTime() == 0 || x.anotherIsReady() {
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
