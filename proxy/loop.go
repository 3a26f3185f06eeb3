package proxy

import (
	"net/http"
	"slices"
	"strings"

	"warmroute/backends"
)

// maxInstanceBytes bounds the value of X-Warmroute-Instance: about 18 proxies one
// behind the other.
const maxInstanceBytes = 512

// instance names this proxy to others.
type instance struct {
	id     string   // random; empty: loops are not looked for
	header []string // id as a header's value; never modified
}

// passedProxies returns the ids of the proxies that a request came through, the
// first one first. ok is false when there are too many of them. A client can claim
// any, which has no effect but on its own request.
func passedProxies(h http.Header) (ids []string, ok bool) {
	value := strings.Join(h[backends.InstanceHeader], ",")
	if value == "" {
		return nil, true
	}
	if len(value) > maxInstanceBytes {
		return nil, false
	}
	ids = strings.Split(value, ",")
	for i, id := range ids {
		ids[i] = strings.TrimSpace(id)
	}
	return ids, true
}

// checkLoop returns an error for a request that has passed this proxy before, or
// more proxies than there can be, else nil.
func (p *Proxy) checkLoop(h http.Header) *apiError {
	if h[backends.InstanceHeader] == nil || p.instance.id == "" {
		return nil
	}
	ids, ok := passedProxies(h)
	switch {
	case !ok:
		return loopError("this request came through too many proxies: one of them leads back to another")
	case slices.Contains(ids, p.instance.id):
		return loopError("this request has passed this proxy before: a backend leads back to it")
	}
	return nil
}

// checkProbeLoop is checkLoop for another proxy's health check, which is refused
// as well when that proxy is a backend of this one. It names this proxy in the
// response's header.
func (p *Proxy) checkProbeLoop(w http.ResponseWriter, h http.Header) *apiError {
	if h[backends.InstanceHeader] == nil || p.instance.id == "" {
		return nil
	}
	w.Header()[backends.InstanceHeader] = p.instance.header
	if e := p.checkLoop(h); e != nil {
		return e
	}
	ids, _ := passedProxies(h)
	for _, b := range p.registry.All() {
		if id := b.Instance(); id != "" && slices.Contains(ids, id) && !b.Retiring() {
			return loopError("the proxy that asks is a backend of this one")
		}
	}
	return nil
}

func loopError(message string) *apiError {
	return &apiError{status: http.StatusLoopDetected, kind: "loop", code: "loop_detected", message: message}
}

// addInstance adds this proxy to those that h names.
func (p *Proxy) addInstance(h http.Header) {
	switch before := h[backends.InstanceHeader]; {
	case p.instance.id == "":
	case before == nil:
		h[backends.InstanceHeader] = p.instance.header
	default:
		h[backends.InstanceHeader] = []string{strings.Join(before, ", ") + ", " + p.instance.id}
	}
}
