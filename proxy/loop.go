package proxy

import (
	"net/http"
	"slices"
	"strings"

	"warmroute/backends"
	"warmroute/proxy/fault"
	"warmroute/proxy/httpheader"
)

// maxInstanceBytes bounds the value of X-Warmroute-Instance: about 18 proxies in a row.
const maxInstanceBytes = 512

// passedProxies returns the ids of the proxies that a request has passed, first one first. ok is false if
// there are too many. A client can claim any, which affects its own request alone.
func passedProxies(h http.Header) (ids []string, ok bool) {
	value := strings.Join(h[backends.InstanceHeader], ",")
	if len(value) > maxInstanceBytes {
		return nil, false
	}
	return slices.Collect(httpheader.Members([]string{value})), true
}

// checkLoop returns an error for a request that has passed this proxy before, or too many proxies.
func (p *Proxy) checkLoop(h http.Header) *fault.Error {
	if h[backends.InstanceHeader] == nil || p.instance == "" {
		return nil
	}
	ids, ok := passedProxies(h)
	switch {
	case !ok:
		return loopError("the request has passed too many proxies: one of them leads back to another")
	case slices.Contains(ids, p.instance):
		return loopError("the request has passed this proxy before: a backend leads back to it")
	}
	return nil
}

// setInstanceHeader names this proxy in the response to another one.
func (p *Proxy) setInstanceHeader(w http.ResponseWriter, requestHeader http.Header) {
	if requestHeader[backends.InstanceHeader] != nil && p.instance != "" {
		w.Header()[backends.InstanceHeader] = []string{p.instance}
	}
}

// checkHealthCheckLoop is checkLoop for the health check of another proxy, which is also refused if that proxy is a backend of
// this one.
func (p *Proxy) checkHealthCheckLoop(h http.Header) *fault.Error {
	if e := p.checkLoop(h); e != nil || p.instance == "" {
		return e
	}
	ids, _ := passedProxies(h)
	for _, b := range p.registry.All() {
		if id := b.ProxyInstance(); id != "" && slices.Contains(ids, id) && !b.Retiring() {
			return loopError("the proxy that sends this check is a backend of this one")
		}
	}
	return nil
}

func loopError(message string) *fault.Error {
	return fault.New(http.StatusLoopDetected, fault.CodeLoopDetected, message)
}

// appendInstanceID adds the id of this proxy to those in h.
func (p *Proxy) appendInstanceID(h http.Header) {
	switch before := h[backends.InstanceHeader]; {
	case p.instance == "":
	case before == nil:
		h[backends.InstanceHeader] = []string{p.instance}
	default:
		h[backends.InstanceHeader] = []string{strings.Join(before, ", ") + ", " + p.instance}
	}
}
