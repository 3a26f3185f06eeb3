package proxy

import (
	"context"
	"errors"
	"net/http"
)

// ErrCutOff is the cause with which the contexts of requests are cancelled that
// took longer than a proxy waits at its end. Their clients get to know.
var ErrCutOff = errors.New("the proxy ended before the answer did (timeouts.shutdown)")

// leaving is how far a Proxy is on its way out.
type leaving int32

const (
	staying  leaving = iota
	handing          // another process has the listener
	refusing         // nothing new is begun
)

// Refuse begins the end: readiness fails, and requests that arrive get a 503
// that sends them elsewhere. Those in flight go on.
func (p *Proxy) Refuse() { p.leaving.Store(int32(refusing)) }

// HandOver is for a Proxy whose listener another process has taken: what still
// arrives on connections made before is answered, and told to connect anew.
func (p *Proxy) HandOver() { p.leaving.Store(int32(handing)) }

func (p *Proxy) isLeaving() leaving { return leaving(p.leaving.Load()) }

// closeConnection has the client close its connection after this answer: in
// HTTP/1.1 by the header itself, in HTTP/2 net/http sends a GOAWAY for it.
func closeConnection(w http.ResponseWriter) { w.Header()["Connection"] = []string{"close"} }

func shuttingDown() *apiError {
	e := unavailable("this proxy is shutting down; try again")
	e.code = "shutting_down"
	return e
}

// cutOff reports whether the request was ended by the end of the proxy.
func (x *exchange) cutOff() bool { return context.Cause(x.r.Context()) == ErrCutOff }

// clientLeft reports whether the request was ended by its client.
func (x *exchange) clientLeft() bool { return x.r.Context().Err() != nil && !x.cutOff() }
