// Package httpapi has what the HTTP APIs of this program share.
package httpapi

import (
	"encoding/json"
	"net/http"

	"github.com/go-chi/chi/v5"
)

// WriteJSON sends a response whose body is v as JSON. A json.RawMessage is sent as it is. v must be a value that always marshals.
func WriteJSON(w http.ResponseWriter, status int, v any) {
	body, isEncoded := v.(json.RawMessage)
	if !isEncoded {
		body, _ = json.Marshal(v)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	w.Write(body)
}

// methods are those that an endpoint may have, in the order of an Allow header.
var methods = [...]string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete}

// AllowedMethods returns the methods that routes has for a path; none if the path is unknown. chi tells them to its own
// handler of wrong methods only, whose response has no body.
func AllowedMethods(routes chi.Routes, path string) (allowed []string) {
	found := chi.NewRouteContext()
	for _, method := range methods {
		found.Reset()
		if routes.Match(found, method, path) {
			allowed = append(allowed, method)
		}
	}
	return allowed
}
