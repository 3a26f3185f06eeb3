package admin

import (
	"cmp"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"
	"github.com/go-chi/chi/v5/middleware"

	"warmroute/backends/control"
	"warmroute/httpapi"
)

const (
	maxScrapes    = 8
	maxProfiles   = 2
	maxDryRuns    = 4  // each has its body in memory, within the bounds of the proxy
	maxStreams    = 16 // pages that are open
	maxActions    = 8  // requests for actions on backends
	maxSearches   = 4  // of finished requests, of which a response has 7 MB at most
	maxReports    = 4  // of usage, each of which reads the file
	maxRecordings = 2  // that are compressed and sent
)

// newMux returns the mux of all paths. The metrics and the files of the page are for others too, all else is for operators.
func (h *Handler) newMux() *httpapi.Mux {
	mux := httpapi.NewMux()
	mux.Use(h.setTimeouts, setHeaders, h.requireKnownOrigin, routeByDecodedPath, middleware.GetHead)
	refuse := h.requireOperator(http.HandlerFunc(h.writeRouteError)).ServeHTTP
	mux.NotFound(refuse)
	mux.MethodNotAllowed(refuse)
	mux.With(limitConcurrency(maxScrapes)).Method(http.MethodGet, "/metrics", h.Metrics)
	mux.Group(h.addPageRoutes)
	mux.Route("/", func(r chi.Router) {
		r.Use(h.requireOperator, requireCleanPath, requireJSON)
		r.NotFound(h.writeRouteError)
		r.MethodNotAllowed(h.writeRouteError)
		r.Route("/api/", h.addAPIRoutes)
		r.Method(http.MethodGet, "/debug/pprof", http.RedirectHandler("/debug/pprof/", http.StatusTemporaryRedirect))
		r.Route("/debug/pprof/", addProfileRoutes)
	})
	return mux
}

// addAPIRoutes adds the paths below /api/. A pattern that ends with / matches paths below it only: else chi.Mux.Match,
// by which HEAD and Allow work, would find every method at it.
func (h *Handler) addAPIRoutes(r chi.Router) {
	r.Get("/state", h.serveState)
	r.Get("/history", h.serveHistory)
	r.With(limitConcurrency(maxStreams)).Get("/events", h.streamState)
	r.With(limitConcurrency(maxSearches)).Get("/requests", h.findFinishedRequests)
	r.With(limitConcurrency(maxReports)).Get("/usage", h.serveUsage)
	r.With(limitConcurrency(maxRecordings)).Get("/recording", h.serveRecording)
	r.With(readBody).Post("/requests/{handle}/cancel", h.cancelRequest)
	r.Group(func(r chi.Router) {
		r.Use(limitConcurrency(maxDryRuns))
		r.Post("/explain", h.explainDecision)
		r.Post("/sent", h.recordSentRequest)
	})
	r.Get("/backends", h.listBackends)
	r.Post("/backends", h.addBackend)
	r.Route("/backends/", h.addBackendRoutes)
}

func (h *Handler) addBackendRoutes(r chi.Router) {
	r.Use(readBody)
	r.Get("/{name}", h.showBackend)
	r.Delete("/{name}", h.removeBackend)
	r.Post("/{name}/drain", h.changeBackend("drain", h.drain))
	r.Post("/{name}/undrain", h.changeBackend("undrain", h.undrain))
	r.Post("/{name}/reset", h.resetBackend)
	r.Group(func(r chi.Router) {
		r.Use(limitConcurrency(maxActions))
		for _, action := range control.ActionNames() {
			r.Post("/"+action, h.controlBackends(action))
			r.Post("/{name}/"+action, h.controlBackends(action))
		}
	})
}

// setTimeouts bounds the time for a request to arrive, and for its response to be read. A connection
// without deadlines gets no timeout.
func (h *Handler) setTimeouts(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(h.timeout))
		if r.ContentLength != 0 {
			w.Header().Set("Connection", "close") // the next request must not wait for an unread body
			body := h.setBodyTimeout(w, r)
			defer body.setLingerDeadline()
		}
		next.ServeHTTP(w, r)
	})
}

func setHeaders(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		next.ServeHTTP(w, r)
	})
}

// limitConcurrency returns a middleware that serves at most n requests at a time, those of all handlers together that it is
// given, and refuses others at once. chi's Throttle responds with text.
func limitConcurrency(n int) func(http.Handler) http.Handler {
	inProgress := make(chan struct{}, n)
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			select {
			case inProgress <- struct{}{}:
				defer func() { <-inProgress }()
				next.ServeHTTP(w, r)
			default:
				w.Header().Set("Retry-After", "1")
				writeError(w, http.StatusServiceUnavailable, "too many requests of this kind at once")
			}
		})
	}
}

// routeByDecodedPath has a path routed as if it had escapes only where a segment needs them, and no . and .. and empty
// segments: the same path in another spelling is the same call.
func routeByDecodedPath(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		chi.RouteContext(r.Context()).RoutePath = normalizePath(r.URL.EscapedPath())
		next.ServeHTTP(w, r)
	})
}

// requireCleanPath refuses requests that may change something where their path has empty segments, or . or ..: in a script
// whose variable is empty, /api/backends/$NAME/sleep would be the call for all backends.
func requireCleanPath(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		escaped := r.URL.EscapedPath()
		clean := path.Clean("/" + escaped)
		if r.Method != http.MethodGet && r.Method != http.MethodHead && escaped != clean && escaped != clean+"/" {
			writeError(w, http.StatusBadRequest, "the path "+escaped+" has an empty segment, or one that is . or ..: write "+clean+" if you mean it")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// normalizePath returns another spelling of an escaped path. A slash at its end stays.
func normalizePath(escaped string) string {
	segments := strings.Split(path.Clean("/"+escaped), "/")
	for i, segment := range segments {
		if text, err := url.PathUnescape(segment); err == nil {
			segments[i] = url.PathEscape(text)
		}
	}
	if strings.HasSuffix(escaped, "/") && segments[len(segments)-1] != "" {
		segments = append(segments, "")
	}
	return strings.Join(segments, "/")
}

// pathValue returns the segment of the path for which a pattern has {name}.
func pathValue(r *http.Request, name string) string {
	value, _ := url.PathUnescape(r.PathValue(name)) // routeByDecodedPath has escaped it
	return value
}

// writeRouteError responds to a request without a handler: 405 if its path has other methods, else 404.
func (h *Handler) writeRouteError(w http.ResponseWriter, r *http.Request) {
	allowed := h.mux.AllowedMethods(normalizePath(r.URL.EscapedPath()))
	if allowed == "" {
		writeError(w, http.StatusNotFound, "unknown path; available: "+h.calls)
		return
	}
	if others, ok := strings.CutPrefix(allowed, http.MethodGet); ok {
		allowed = http.MethodGet + ", " + http.MethodHead + others // as middleware.GetHead serves it
	}
	w.Header().Set("Allow", allowed)
	writeError(w, http.StatusMethodNotAllowed, "method not allowed on this path, allowed: "+allowed+"; available: "+h.calls)
}

// listCalls returns methods and paths as text. It leaves out the files that the page loads.
func listCalls(routes chi.Routes) string {
	var calls []string
	_ = chi.Walk(routes, func(method, route string, _ http.Handler, _ ...func(http.Handler) http.Handler) error {
		if path.Ext(route) == "" {
			calls = append(calls, method+" "+route)
		}
		return nil
	})
	slices.SortFunc(calls, func(a, b string) int {
		methodA, pathA, _ := strings.Cut(a, " ")
		methodB, pathB, _ := strings.Cut(b, " ")
		return cmp.Or(cmp.Compare(pathA, pathB), cmp.Compare(methodA, methodB))
	})
	return strings.Join(calls, ", ")
}
