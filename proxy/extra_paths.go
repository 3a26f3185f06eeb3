package proxy

import (
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"

	"warmroute/backends"
	"warmroute/backends/vllm"
	"warmroute/prompt"
)

const (
	// MaxExtraPaths bounds Settings.ExtraPaths. Those before and after a reload, and the endpoints of every proxy,
	// have different numbers below backends.MaxEndpoints.
	MaxExtraPaths     = 16
	maxExtraPathBytes = 200
)

// plainPath matches absolute paths whose segments are plain words, none of them . or .., without a slash at the end.
var plainPath = regexp.MustCompile(`^(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+$`)

// reservedPaths are served without a replica, as are those below them: the proxy's own, and those by which replicas
// register at routers.
var reservedPaths = [...]string{
	"/v1/models", "/version", "/livez", "/readyz", "/health", "/workers", "/add_worker", "/remove_worker", "/list_workers", "/get_loads", "/flush_cache", "/health_generate", "/liveness", "/readiness",
	"/finish_session", "/get_server_info", "/get_model_info",
}

// CheckExtraPath returns why a path cannot be one of Settings.ExtraPaths, or nil.
func CheckExtraPath(path string) error {
	isReserved := func(p string) bool { return path == p || strings.HasPrefix(path, p+"/") }
	switch {
	case len(path) > maxExtraPathBytes:
		return fmt.Errorf("the path has %d bytes; the maximum is %d", len(path), maxExtraPathBytes)
	case !plainPath.MatchString(path):
		return fmt.Errorf("%q is not a plain absolute path; write one as /skyrl/v1/generate, without wildcards, escapes, a query or a slash at its end", path)
	case vllm.IsOperatorPath(path):
		return fmt.Errorf("%s is for the operator of a replica, and clients must not reach it; use the admin listener", path)
	case isServed(path), slices.ContainsFunc(reservedPaths[:], isReserved):
		return errors.New(path + " is served already; remove it")
	}
	return nil
}

// isServed reports whether every proxy serves POSTs to a path. One to /v1/responses/render is not about the stored response of that id.
func isServed(path string) bool {
	found, _ := newRouteTable(nil).find(http.MethodPost, path)
	return found.endpoint != nil
}

// newExtraEndpoints returns the endpoints of Settings.ExtraPaths. Those that were there before keep their numbers,
// and no other gets the number of one that was.
func newExtraEndpoints(paths []string, before []endpoint) []endpoint {
	extra := make([]endpoint, 0, len(paths))
	hasNumber := func(list []endpoint, n backends.Endpoint) bool {
		return slices.ContainsFunc(list, func(e endpoint) bool { return e.number == n })
	}
	next := backends.Endpoint(len(endpoints))
	for _, path := range paths {
		e := endpoint{path: path, promptKind: prompt.Other, isExtra: true}
		if i := slices.IndexFunc(before, func(b endpoint) bool { return b.path == path }); i >= 0 {
			e.number = before[i].number
		} else {
			for hasNumber(before, next) {
				next++
			}
			e.number = next
			next++
		}
		extra = append(extra, e)
	}
	return extra
}

// configureExtraPaths makes paths the extra paths. What backends lack is forgotten if the paths have changed, since
// a number may have been another path's.
func (p *Proxy) configureExtraPaths(paths []string) {
	var before []endpoint
	if t := p.routes.Load(); t != nil {
		before = t.extra
	}
	after := newExtraEndpoints(paths, before)
	t := newRouteTable(after)
	p.addLocalRoutes(t)
	p.routes.Store(t)
	if slices.EqualFunc(before, after, func(a, b endpoint) bool { return a.path == b.path }) {
		return
	}
	for _, b := range p.registry.All() {
		b.ForgetMissingEndpoints()
	}
	for _, e := range before {
		if !slices.Contains(paths, e.path) {
			p.metrics.DeleteEndpoint(e.path)
		}
	}
}
