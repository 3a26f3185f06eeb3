// Package httpapi has what the HTTP APIs of this program share.
package httpapi

import (
	"encoding/json"
	"net/http"
	"sync"

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

// Mux is a mux of chi that can also be searched. It is safe for concurrent use once all paths are added.
type Mux struct {
	*chi.Mux
	contexts sync.Pool // of *chi.Context
}

// NewMux returns a Mux without paths.
func NewMux() *Mux {
	return &Mux{Mux: chi.NewMux(), contexts: sync.Pool{New: func() any { return chi.NewRouteContext() }}}
}

// Lookup returns the pattern that matches a method and a path, "" if there is none, and the value of its last parameter. Parameters
// are not empty, which chi allows before a slash. It does not allocate. Unlike ServeHTTP it leaves the request as it is, and no
// frame of the mux on the stack of what serves it.
func (m *Mux) Lookup(method, path string) (pattern, value string) {
	c := m.contexts.Get().(*chi.Context)
	defer m.contexts.Put(c)
	c.Reset()
	pattern = m.Find(c, method, path)
	if pattern == "" {
		return "", ""
	}
	for i, key := range c.URLParams.Keys {
		if value = c.URLParams.Values[i]; value == "" && key != "*" {
			return "", ""
		}
	}
	return pattern, value
}

// methods are those that an endpoint may have, in the order of an Allow header.
var methods = [...]string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete}

// AllowedMethods returns the methods of a path as in an Allow header; "" if it is unknown. chi tells them only to its own handler of
// wrong methods, whose response has no body.
func (m *Mux) AllowedMethods(path string) (allowed string) {
	for _, method := range methods {
		switch pattern, _ := m.Lookup(method, path); {
		case pattern == "":
		case allowed == "":
			allowed = method
		default:
			allowed += ", " + method
		}
	}
	return allowed
}
