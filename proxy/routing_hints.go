package proxy

import (
	"fmt"
	"net/http"
	"strconv"

	"github.com/zeebo/xxh3"

	"warmroute/prompt"
	"warmroute/proxy/fault"
	"warmroute/proxy/httpheader"
	"warmroute/proxy/upstream"
)

const (
	// maxPriority is the lowest priority. A client cannot ask for a higher one than its key has.
	maxPriority = 100
)

// applyRoutingHints takes the tenant, the session and the priority from the client's headers.
func (r *request) applyRoutingHints() *fault.Error {
	h, req := r.httpReq.Header, &r.input.request
	req.Tenant = r.fairnessID()
	if r.account != nil {
		req.Priority = r.account.Priority
	}
	r.setSessionFromHeader()
	given := h[upstream.PriorityHeader]
	if len(given) == 0 {
		return nil
	}
	n, err := strconv.Atoi(given[0])
	if err != nil || n < 0 || n > maxPriority || len(given) > 1 {
		return fault.InvalidRequest(upstream.PriorityHeader, fmt.Sprintf("%s must be one integer from 0 to %d; lower values go first",
			upstream.PriorityHeader, maxPriority))
	}
	req.Priority = max(req.Priority, n)
	return nil
}

// setSessionFromHeader sets the session from the first of the session headers that the request has.
func (r *request) setSessionFromHeader() {
	for _, name := range r.settings.SessionHeaders {
		if id := httpheader.First(r.httpReq.Header, name); id != "" {
			r.input.request.Session = nonzero(xxh3.HashString(id[:min(len(id), prompt.MaxSessionBytes)]))
			r.input.sessionSource = name
			return
		}
	}
}

// keyFingerprint returns a hash of the API key of a request, where keys are not configured; 0: none.
func keyFingerprint(h http.Header) uint64 {
	for _, name := range []string{"Authorization", "X-Api-Key"} {
		if key := httpheader.First(h, name); key != "" {
			return nonzero(xxh3.HashString(key))
		}
	}
	return 0
}

// nonzero maps 0, which means none, to another hash.
func nonzero(hash uint64) uint64 { return max(hash, 1) }
