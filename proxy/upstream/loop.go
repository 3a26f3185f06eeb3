package upstream

import (
	"net/http"
	"slices"
	"strings"

	"warmroute/backends"
	"warmroute/proxy/fault"
	"warmroute/proxy/httpheader"
)

// MaxInstanceBytes bounds the value of X-Warmroute-Instance: about 18 proxies in a row.
const MaxInstanceBytes = 512

// passedProxies returns the ids of the proxies that a request has passed, first one first. ok is false if
// there are too many. A client can claim any, which affects its own request alone.
func passedProxies(h http.Header) (ids []string, ok bool) {
	value := strings.Join(h[backends.InstanceHeader], ",")
	if len(value) > MaxInstanceBytes {
		return nil, false
	}
	return slices.Collect(httpheader.Members([]string{value})), true
}

// Instance is a random id of this proxy, by which it finds requests that come back to it. Empty: it does not look.
type Instance string

// CheckLoop returns an error for a request that has passed this proxy before, or too many proxies.
func (i Instance) CheckLoop(h http.Header) *fault.Error {
	if h[backends.InstanceHeader] == nil || i == "" {
		return nil
	}
	ids, ok := passedProxies(h)
	switch {
	case !ok:
		return loopError("the request has passed too many proxies: one of them leads back to another")
	case slices.Contains(ids, string(i)):
		return loopError("the request has passed this proxy before: a backend leads back to it")
	}
	return nil
}

// SetHeader names this proxy in the response to another one.
func (i Instance) SetHeader(response, request http.Header) {
	if request[backends.InstanceHeader] != nil && i != "" {
		response[backends.InstanceHeader] = []string{string(i)}
	}
}

// CheckHealthCheckLoop is CheckLoop for the health check of another proxy, which is also refused if that proxy is one of all, the
// backends of this one.
func (i Instance) CheckHealthCheckLoop(h http.Header, all []*backends.Backend) *fault.Error {
	if e := i.CheckLoop(h); e != nil || i == "" {
		return e
	}
	ids, _ := passedProxies(h)
	for _, b := range all {
		if id := b.ProxyInstance(); id != "" && slices.Contains(ids, id) && !b.Retiring() {
			return loopError("the proxy that sends this check is a backend of this one")
		}
	}
	return nil
}

func loopError(message string) *fault.Error {
	return fault.New(http.StatusLoopDetected, fault.CodeLoopDetected, message)
}

// AppendTo adds the id of this proxy to those in h.
func (i Instance) AppendTo(h http.Header) {
	switch before := h[backends.InstanceHeader]; {
	case i == "":
	case before == nil:
		h[backends.InstanceHeader] = []string{string(i)}
	default:
		h[backends.InstanceHeader] = []string{strings.Join(before, ", ") + ", " + string(i)}
	}
}
