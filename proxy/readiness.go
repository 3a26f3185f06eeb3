package proxy

import (
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"time"

	"warmroute/backends"
	"warmroute/httpapi"
	"warmroute/proxy/api"
	"warmroute/proxy/apikey"
	"warmroute/proxy/fault"
	"warmroute/router"
)

// serveReadyz serves GET /readyz: 200 if a replica is ready, or replicas may be added. With ?model=NAME it needs an API key where keys are configured, and
// is 200 only if a replica that lists the model is ready. A model that the key may not use is a 404.
func (p *Proxy) serveReadyz(w http.ResponseWriter, r *http.Request) {
	if p.unready.Load() {
		fault.Write(w, api.OpenAI, fault.ShuttingDown())
		return
	}
	if names, given := r.URL.Query()["model"]; given {
		p.requireKey(func(w http.ResponseWriter, _ *http.Request, holder *apikey.Account) {
			p.serveModelReadyz(w, names, holder)
		})(w, r)
		return
	}
	all := p.registry.All()
	for _, b := range all {
		if b.State() == backends.Ready {
			w.WriteHeader(http.StatusOK)
			return
		}
	}
	if p.settings.Load().ReadyIfEmpty { // an orchestrator would let nobody in who adds one
		io.WriteString(w, "0 replicas\n")
		return
	}
	fault.Write(w, api.OpenAI, p.notReadyError("no replica is ready", all))
}

// serveModelReadyz serves GET /readyz?model=NAME for the holder of a key.
func (p *Proxy) serveModelReadyz(w http.ResponseWriter, names []string, holder *apikey.Account) {
	if len(names) != 1 || names[0] == "" {
		fault.Write(w, api.OpenAI, fault.InvalidRequest("model", "name one model: /readyz?model=NAME"))
		return
	}
	entry, ok := findModel(p.registry.Catalog(), names[0], holder)
	switch {
	case !ok:
		fault.Write(w, api.OpenAI, p.unknownModelError(names[0], holder))
	case p.router.CountReady(entry.Backends) == 0:
		fault.Write(w, api.OpenAI, p.notReadyError("no replica that serves this model is ready", entry.Backends))
	default:
		httpapi.WriteJSON(w, http.StatusOK, map[string]any{"model": entry.ID, "ready": true})
	}
}

// notReadyError returns the error where none of the backends is ready.
func (p *Proxy) notReadyError(message string, list []*backends.Backend) *fault.Error {
	e := fault.Unavailable(fault.CodeNoneReady, message)
	e.RetryAfter = p.unreadyRetryAfter(list)
	return e
}

// maxRetryAfter is the longest Retry-After in seconds: OpenAI's SDKs ignore longer ones.
const maxRetryAfter = 60

// unreadyRetryAfter returns the Retry-After for backends of which none is ready: half of the time for which none has been, since
// an outage that has lasted long is likely to last long, and not before the next check.
func (p *Proxy) unreadyRetryAfter(list []*backends.Backend) (seconds int) {
	now := time.Now()
	outage, untilCheck := time.Duration(0), time.Duration(0)
	for i, b := range list {
		down, next := time.Duration(0), b.Status().NextCheck.Sub(now)
		if c := p.router.Status(b); c.State != router.Ready && !c.Since.IsZero() {
			down = now.Sub(c.Since)
		}
		if i == 0 {
			outage, untilCheck = down, next
		}
		outage, untilCheck = min(outage, down), min(untilCheck, next)
	}
	return outageRetryAfter(outage, untilCheck)
}

func outageRetryAfter(outage, untilCheck time.Duration) (seconds int) {
	wait := math.Ceil(max(outage/2, untilCheck, time.Second).Seconds())
	return withJitter(int(min(wait, maxRetryAfter*4/5)))
}

// withJitter adds up to a quarter, so that clients which were refused together do not come back together.
func withJitter(seconds int) int {
	return min(seconds+rand.IntN(seconds/4+1), maxRetryAfter)
}
