package proxy

import (
	"context"
	"errors"
)

// ErrCutOff is the cause with which the contexts of requests are cancelled that
// took longer than a proxy waits at its end. Their clients get to know.
var ErrCutOff = errors.New("the proxy ended before the answer did (timeouts.shutdown)")

// Refuse begins the end: readiness fails, and requests that arrive get a 503
// that sends them elsewhere. Those in flight go on.
func (p *Proxy) Refuse() { p.refusing.Store(true) }

// InFlight is how many requests have come and not ended, held ones included.
func (p *Proxy) InFlight() int64 { return p.inFlight.Load() }

func shuttingDown() *apiError {
	e := unavailable("this proxy is shutting down; try again")
	e.code = "shutting_down"
	return e
}

// cutOff reports whether the request was ended by the end of the proxy.
func (x *exchange) cutOff() bool { return context.Cause(x.r.Context()) == ErrCutOff }

// over reports whether nobody waits for an answer any more.
func (x *exchange) over() bool { return x.r.Context().Err() != nil }

// clientLeft reports whether the request was ended by its client.
func (x *exchange) clientLeft() bool { return x.over() && !x.cutOff() }
