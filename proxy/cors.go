package proxy

import (
	"net/http"
	"strings"
	"time"

	"github.com/rs/cors"

	"warmroute/proxy/httpheader"
	"warmroute/proxy/upstream"
)

// preflightMaxAge is how long a browser may keep the response to a preflight. Chrome keeps none longer.
const preflightMaxAge = 2 * time.Hour

// newCORS returns the handler of cross-origin requests for the origins, or nil if there are none. It allows
// the methods that vLLM allows, so that a page can read why one of them is a 405.
func newCORS(origins []string) *cors.Cors {
	if len(origins) == 0 {
		return nil
	}
	exposed := append([]string{
		upstream.RequestIDHeader, "Retry-After", queueTimeHeader,
		"X-Ratelimit-Limit-Requests", "X-Ratelimit-Remaining-Requests", "X-Ratelimit-Reset-Requests",
		"X-Ratelimit-Limit-Tokens", "X-Ratelimit-Remaining-Tokens", "X-Ratelimit-Reset-Tokens",
	}, routeHeaders[:]...)
	return cors.New(cors.Options{
		AllowedOrigins: origins,
		AllowedMethods: []string{http.MethodDelete, http.MethodGet, http.MethodHead, http.MethodPatch, http.MethodPost, http.MethodPut},
		AllowedHeaders: []string{"*"},
		ExposedHeaders: exposed,
		MaxAge:         int(preflightMaxAge.Seconds()),
	})
}

// isPreflight reports whether a browser asks whether a page may send a request.
func isPreflight(r *http.Request) bool {
	return r.Method == http.MethodOptions && httpheader.First(r.Header, "Access-Control-Request-Method") != ""
}

// addReplicaVary adds a replica's Vary to that of this proxy. It leaves out Origin, which replicas do not see.
func addReplicaVary(h http.Header, from []string) {
	names := h["Vary"]
	for name := range httpheader.Members(from) {
		if !strings.EqualFold(name, "Origin") {
			names = append(names[:len(names):len(names)], name)
		}
	}
	if len(names) > 0 {
		h["Vary"] = names
	}
}
