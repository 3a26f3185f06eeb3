package proxy

import (
	"fmt"
	"net/http"
	"strconv"

	"github.com/zeebo/xxh3"
)

const (
	priorityHeader = "X-Warmroute-Priority"
	// maxPriority is the lowest priority. Clients cannot ask for a higher one than their key
	// has, or they would starve the others.
	maxPriority = 100
	// maxSessionBytes is how much of a session's name counts.
	maxSessionBytes = 1 << 10
)

// applyRoutingHints takes the tenant, the session and the priority from the client's headers.
func (r *request) applyRoutingHints() *apiError {
	h, req := r.httpReq.Header, &r.input.request
	req.Tenant = r.tenantHash(h)
	if r.account != nil {
		req.Priority = r.account.Priority
	}
	if r.settings.SessionHeader != "" {
		if name := h.Get(r.settings.SessionHeader); name != "" {
			req.Session = nonzero(xxh3.HashString(name[:min(len(name), maxSessionBytes)]))
		}
	}
	given := h[priorityHeader]
	if len(given) == 0 {
		return nil
	}
	n, err := strconv.Atoi(given[0])
	if err != nil || n < 0 || n > maxPriority || len(given) > 1 {
		return invalidRequestError(priorityHeader, fmt.Sprintf("%s must be one integer from 0 to %d; lower values go first",
			priorityHeader, maxPriority))
	}
	req.Priority = max(req.Priority, n)
	return nil
}

// keyFingerprint returns a hash of the API key of a request, where keys are not configured; 0 if it has
// none.
func keyFingerprint(h http.Header) uint64 {
	for _, name := range []string{"Authorization", "X-Api-Key"} {
		if key := firstHeaderValue(h, name); key != "" {
			return nonzero(xxh3.HashString(key))
		}
	}
	return 0
}

// nonzero maps 0, which means none, to another hash.
func nonzero(hash uint64) uint64 { return max(hash, 1) }
