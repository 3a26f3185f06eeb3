package proxy

import (
	"fmt"
	"net/http"
	"strconv"

	"github.com/zeebo/xxh3"
)

const (
	priorityHeader = "X-Warmroute-Priority"
	// maxPriority is the farthest behind plain requests that one may go. None may
	// go before them, or before what its key allows: any client could, and starve
	// the others.
	maxPriority = 100
	// maxSessionBytes is how much of a session's name is looked at.
	maxSessionBytes = 1 << 10
)

// applyRoutingHints takes from the client's headers what routing may know of it.
func (r *request) applyRoutingHints() *apiError {
	h, req := r.httpReq.Header, &r.input.request
	req.Tenant = r.tenant(h)
	if r.holder != nil {
		req.Priority = r.holder.Priority
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
		return invalidRequestError(priorityHeader, fmt.Sprintf("%s must be one whole number from 0 to %d: higher ones let those of lower ones go first",
			priorityHeader, maxPriority))
	}
	req.Priority = max(req.Priority, n)
	return nil
}

// keyFingerprint stands for whoever presents the API key that came with a request, where
// keys are not known here; 0 when none came.
func keyFingerprint(h http.Header) uint64 {
	for _, name := range []string{"Authorization", "X-Api-Key"} {
		if key := headerValue(h, name); key != "" {
			return nonzero(xxh3.HashString(key))
		}
	}
	return 0
}

// nonzero keeps a hash apart from 0, which says that there is nothing to hash.
func nonzero(hash uint64) uint64 { return max(hash, 1) }
