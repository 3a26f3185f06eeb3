package httpapi

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/go-chi/chi/v5"
)

func newTestMux() *Mux {
	none := func(http.ResponseWriter, *http.Request) {}
	mux := NewMux()
	mux.Get("/models/*", none)
	mux.Get("/items", none)
	mux.Post("/items", none)
	mux.Get("/items/{id}", none)
	mux.Delete("/items/{id}", none)
	mux.Post("/items/{id}/cancel", none)
	mux.Post("/items/render", none)
	mux.Route("/below/", func(r chi.Router) { r.Put("/{name}", none) })
	return mux
}

func TestLookup(t *testing.T) {
	mux := newTestMux()
	for _, c := range []struct{ method, path, pattern, value, allowed string }{
		{"GET", "/items", "/items", "", "GET POST"},
		{"GET", "/items/a", "/items/{id}", "a", "GET DELETE"},
		{"GET", "/items/a%2Fb", "/items/{id}", "a%2Fb", "GET DELETE"},
		{"POST", "/items/a/cancel", "/items/{id}/cancel", "a", "POST"},
		{"POST", "/items//cancel", "", "", ""},
		{"POST", "/items/render", "/items/render", "", "GET POST DELETE"},
		{"GET", "/items/render", "/items/{id}", "render", "GET POST DELETE"},
		{"POST", "/items/a", "", "", "GET DELETE"},
		{"HEAD", "/items", "", "", "GET POST"},
		{"get", "/items", "", "", "GET POST"},
		{"PURGE", "/items", "", "", "GET POST"},
		{"GET", "/models/a/b", "/models/*", "a/b", "GET"},
		{"GET", "/models/", "/models/*", "", "GET"},
		{"GET", "/items/", "", "", ""},
		{"GET", "//items", "", "", ""},
		{"PUT", "/below/x", "/below/{name}", "x", "PUT"},
		{"PUT", "/below", "", "", ""},
		{"GET", "", "", "", ""},
		{"OPTIONS", "*", "", "", ""},
	} {
		pattern, value := mux.Lookup(c.method, c.path)
		allowed := strings.ReplaceAll(mux.AllowedMethods(c.path), ",", "")
		if pattern != c.pattern || value != c.value || allowed != c.allowed {
			t.Errorf("%s %s: got %q, %q, allowed %s; want %q, %q, %s", c.method, c.path, pattern, value, allowed, c.pattern, c.value, c.allowed)
		}
	}
}

func TestWriteJSON(t *testing.T) {
	for want, v := range map[string]any{
		`{"a":"\u003c"}`: map[string]string{"a": "<"},
		`{"b":  [1] }`:   json.RawMessage(`{"b":  [1] }`),
	} {
		w := httptest.NewRecorder()
		WriteJSON(w, http.StatusAccepted, v)
		if w.Code != http.StatusAccepted || w.Header().Get("Content-Type") != "application/json" || w.Body.String() != want {
			t.Errorf("got %d %v %s, want %s", w.Code, w.Header(), w.Body, want)
		}
	}
}
