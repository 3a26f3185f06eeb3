package api

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"

	"warmroute/backends"
	"warmroute/backends/vllm"
	"warmroute/httpapi"
	"warmroute/prompt"
)

const (
	// MaxExtraPaths bounds proxy.Settings.ExtraPaths. Those before and after a reload, and the endpoints of every proxy,
	// have different numbers below backends.MaxEndpoints.
	MaxExtraPaths     = 16
	maxExtraPathBytes = 200
)

// plainPath matches absolute paths whose segments are plain words, none of them . or .., without a slash at the end.
var plainPath = regexp.MustCompile(`^(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+$`)

// reservedPaths are served without a replica, as are those below them: the proxy's own, and those by which replicas
// register at routers.
var reservedPaths = [...]string{
	"/v1/models", "/version", "/livez", "/readyz", "/health", "/workers", "/add_worker", "/remove_worker", "/list_workers", "/get_loads",
	"/flush_cache", "/health_generate", "/liveness", "/readiness",
	"/finish_session", "/get_server_info", "/get_model_info",
}

// CheckExtraPath returns why a path cannot be one of proxy.Settings.ExtraPaths, or nil.
func CheckExtraPath(path string) error {
	isReserved := func(p string) bool { return path == p || strings.HasPrefix(path, p+"/") }
	switch {
	case len(path) > maxExtraPathBytes:
		return fmt.Errorf("the path has %d bytes; the maximum is %d", len(path), maxExtraPathBytes)
	case !plainPath.MatchString(path):
		return fmt.Errorf("%q is not a plain absolute path; write one as /skyrl/v1/generate, without wildcards, escapes, a query or a slash "+
			"at its end", path)
	case vllm.IsOperatorPath(path):
		return fmt.Errorf("%s is for the operator of a replica, and clients must not reach it; use the admin listener", path)
	case isServed(path), slices.ContainsFunc(reservedPaths[:], isReserved):
		return errors.New(path + " is served already; remove it")
	}
	return nil
}

// isServed reports whether every proxy serves POSTs to a path. One to /v1/responses/render is not about the stored response of that id.
func isServed(path string) bool {
	found, _ := NewTable(nil).Find(http.MethodPost, path)
	return found.Endpoint != nil
}

// NewExtraEndpoints returns the endpoints of proxy.Settings.ExtraPaths. Those that were there before keep their numbers,
// and no other gets the number of one that was.
func NewExtraEndpoints(paths []string, before []Endpoint) []Endpoint {
	extra := make([]Endpoint, 0, len(paths))
	hasNumber := func(list []Endpoint, n backends.Endpoint) bool {
		return slices.ContainsFunc(list, func(e Endpoint) bool { return e.Number == n })
	}
	next := backends.Endpoint(len(Endpoints))
	for _, path := range paths {
		e := Endpoint{Path: path, PromptKind: prompt.Other, IsExtra: true}
		if i := slices.IndexFunc(before, func(b Endpoint) bool { return b.Path == path }); i >= 0 {
			e.Number = before[i].Number
		} else {
			for hasNumber(before, next) {
				next++
			}
			e.Number = next
			next++
		}
		extra = append(extra, e)
	}
	return extra
}

// Table has the paths of the public listener. It is not modified once it is served.
type Table struct {
	Mux       *httpapi.Mux
	ByPattern map[string]Route
	Extra     []Endpoint // of proxy.Settings.ExtraPaths
}

// Route is what serves the requests of a pattern: replicas, or a handler that needs none.
type Route struct {
	Endpoint *Endpoint // nil: there is none
	Local    http.HandlerFunc
}

// NewTable returns the table of the endpoints that every proxy serves and of extra ones.
func NewTable(extra []Endpoint) *Table {
	t := &Table{Mux: httpapi.NewMux(), ByPattern: map[string]Route{}, Extra: extra}
	for _, list := range [][]Endpoint{Endpoints, extra} {
		for i := range list {
			t.Add(list[i].Path, Route{Endpoint: &list[i]}, list[i].AllowedMethod())
		}
	}
	return t
}

// Add adds a pattern. The mux only finds it: were it to call the handler, it would copy each request, and stay on the stack of each stream.
func (t *Table) Add(pattern string, r Route, methods ...string) {
	for _, method := range methods {
		t.Mux.Method(method, pattern, http.NotFoundHandler())
	}
	t.ByPattern[pattern] = r
}

// Find returns the route of a method and a path, zero if there is none. responseID is what stands for the id of a stored
// response, valid or not.
func (t *Table) Find(method, path string) (found Route, responseID string) {
	pattern, value := t.Mux.Lookup(method, path)
	return t.ByPattern[pattern], value
}

// FindRoute returns the route of a request. Only the plain spelling of an endpoint's path is one: a replica is asked for that, never for
// the client's.
func (t *Table) FindRoute(r *http.Request) (found Route, responseID string) {
	found, responseID = t.Find(r.Method, WrittenPath(r.URL))
	if found.Endpoint != nil && r.URL.RawPath != "" {
		return Route{}, ""
	}
	return found, responseID
}

// WrittenPath returns a path as it was written: escapes do not match.
func WrittenPath(u *url.URL) string { return cmp.Or(u.RawPath, u.Path) }

// TrimTrailingSlashes removes the slashes that some clients send at the end of a path.
func TrimTrailingSlashes(u *url.URL) {
	if len(u.Path) > 1 && strings.HasSuffix(u.Path, "/") {
		u.Path, u.RawPath = cmp.Or(strings.TrimRight(u.Path, "/"), "/"), strings.TrimRight(u.RawPath, "/")
	}
}

// FindIntendedPath returns the served path that a client with a wrong base URL most likely means: its own has /v1 twice or not at
// all, a prefix or doubled slashes. Empty: none.
func (t *Table) FindIntendedPath(path string) string {
	segments := strings.FieldsFunc(path, func(c rune) bool { return c == '/' })
	path = "/" + strings.Join(segments, "/")
	candidates := []string{path, "/v1" + path, path[max(strings.LastIndex(path, "/v1/"), 0):]}
	for _, candidate := range candidates {
		found, _ := t.Find(http.MethodPost, candidate)
		if found.Endpoint != nil && !found.Endpoint.IsAboutResponse() || candidate == "/v1/models" {
			return candidate
		}
	}
	return ""
}
