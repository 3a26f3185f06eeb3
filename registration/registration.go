// Package registration serves the calls by which callers register replicas over the public listener. Their shapes are
// those of vllm-router and of SGLang's routers, so that the clients of these need no change.
package registration

import (
	"log/slog"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-chi/chi/v5"
	"golang.org/x/time/rate"

	"warmroute/backends"
	"warmroute/backends/control"
	"warmroute/config"
	"warmroute/fleet"
	"warmroute/httpapi"
	"warmroute/metrics"
	"warmroute/proxy/admit"
)

// Options are what a Handler is made of. All are required.
type Options struct {
	Next     http.Handler // serves all other requests, and /livez and /readyz
	Fleet    *fleet.Fleet
	Registry *backends.Registry
	Control  *control.Controller
	Metrics  *metrics.Metrics
	Log      *slog.Logger
}

// Handler serves the calls for registration, and passes other requests on. Safe for concurrent use.
type Handler struct {
	Options
	settings atomic.Pointer[settings] // nil: registration is off
	waiting  chan struct{}            // has an element for each call that waits until its replica is ready
	refusals rate.Sometimes           // limits the log lines about refused calls
}

// settings are those of a configuration. Never modified.
type settings struct {
	*Handler
	access
	writeTimeout time.Duration // for a response; 0: no limit
	calls        *httpapi.Mux  // for those who may register
	paths        *httpapi.Mux  // those of calls and the probes, all with GET
}

const (
	// maxWaiting bounds how many calls wait until their replicas are ready. Others are answered at once.
	maxWaiting         = 256
	refusalLogInterval = time.Second
)

// New returns a Handler with the settings of a configuration. It starts nothing.
func New(o Options, c *config.Config) *Handler {
	h := &Handler{Options: o, waiting: make(chan struct{}, maxWaiting), refusals: rate.Sometimes{Interval: refusalLogInterval}}
	h.Configure(c)
	return h
}

// Configure gives the requests that arrive from now on the settings of a configuration.
func (h *Handler) Configure(c *config.Config) {
	if !c.Registration.IsOnPublicListener() {
		h.settings.Store(nil)
		return
	}
	h.settings.Store(h.newSettings(c))
}

// call is one request for registration.
type call struct {
	*settings
	w    http.ResponseWriter
	r    *http.Request
	from netip.Addr // the caller
}

// probes are the paths at which other routers say what this proxy says at its own.
var probes = map[string]string{"/liveness": "/livez", "/readiness": "/readyz", "/health_generate": "/readyz"}

// newSettings returns the settings of a configuration, and the mux that serves by them.
func (h *Handler) newSettings(c *config.Config) *settings {
	s := &settings{Handler: h, access: newAccess(c.Registration, c.TrustedProxies), writeTimeout: c.Timeouts.WriteIdle}
	s.calls, s.paths = s.newCalls(), httpapi.NewMux()
	addPath := func(path string) { s.paths.Method(http.MethodGet, path, s.calls) }
	_ = chi.Walk(s.calls, func(_, path string, _ http.Handler, _ ...func(http.Handler) http.Handler) error {
		addPath(path)
		return nil
	})
	for path := range probes {
		addPath(path)
	}
	return s
}

func (s *settings) newCalls() *httpapi.Mux {
	calls := httpapi.NewMux()
	calls.Use(s.setTimeouts, s.requireAllowedCaller, routeByEscapedPath)
	calls.MethodNotAllowed(s.writeMethodError)
	calls.Get("/workers", s.serve((*call).listWorkers))
	calls.Post("/workers", s.serve((*call).addWorker))
	calls.Get("/workers/*", s.serve((*call).showWorker))
	calls.Delete("/workers/*", s.serve((*call).removeWorker))
	calls.Post("/add_worker", s.serve((*call).addWorkerByQuery))
	calls.Post("/remove_worker", s.serve((*call).removeWorkerByQuery))
	calls.Get("/list_workers", s.serve((*call).listURLs))
	calls.Post("/flush_cache", s.serve((*call).flushCaches))
	calls.Get("/get_loads", s.serve((*call).listLoads))
	return calls
}

// ServeHTTP implements http.Handler. Requests that are not for registration do not pass a mux, which would copy them.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s := h.settings.Load()
	if s == nil {
		h.Next.ServeHTTP(w, r)
		return
	}
	path, _ := s.paths.Lookup(http.MethodGet, routePath(r.URL)) // whatever the request's method
	switch {
	case path == "":
		h.Next.ServeHTTP(w, r)
	case probes[path] != "":
		h.serveProbe(w, r, probes[path])
	default:
		s.calls.ServeHTTP(w, r)
	}
}

// routePath returns the path by which a request is routed: as it was written, since a worker's id or URL may have escaped slashes,
// and without a slash at its end, unless that is part of a worker's URL.
func routePath(u *url.URL) string {
	path := u.EscapedPath()
	if worker, ok := strings.CutPrefix(path, "/workers/"); ok && worker != "" {
		return path
	}
	return strings.TrimSuffix(path, "/")
}

func routeByEscapedPath(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		chi.RouteContext(r.Context()).RoutePath = routePath(r.URL)
		next.ServeHTTP(w, r)
	})
}

// serve returns the handler of a call.
func (s *settings) serve(handle func(*call)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) { handle(s.newCall(w, r)) }
}

func (s *settings) newCall(w http.ResponseWriter, r *http.Request) *call {
	return &call{settings: s, w: w, r: r, from: admit.ClientAddress(r.RemoteAddr, r.Header["X-Forwarded-For"], s.trusted)}
}

// setTimeouts bounds the time for a request to arrive, and for its response to be read. Deadlines fail where the connection
// has none.
func (s *settings) setTimeouts(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn := http.NewResponseController(w)
		_ = conn.SetReadDeadline(time.Now().Add(bodyTimeout))
		if s.writeTimeout > 0 {
			_ = conn.SetWriteDeadline(time.Now().Add(maxReadyWait + s.writeTimeout))
		}
		next.ServeHTTP(w, r)
	})
}

// requireAllowedCaller serves those who may register replicas.
func (s *settings) requireAllowedCaller(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := s.newCall(w, r)
		if refused := s.checkCaller(r, c.from); refused != nil {
			c.refuse(refused)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// namedWorker returns the worker that the path names, by its id or URL.
func (c *call) namedWorker() string {
	worker, _ := url.PathUnescape(c.r.PathValue("*")) // an escaped path has no invalid escape
	return worker
}

// serveProbe responds as the path at which this proxy serves the same, but that there must be a ready replica where
// that path is /readyz: callers of the other routers wait for one there.
func (h *Handler) serveProbe(w http.ResponseWriter, r *http.Request, path string) {
	isReady := func(b *backends.Backend) bool { return b.State() == backends.Ready }
	if path == "/readyz" && !slices.ContainsFunc(h.Registry.All(), isReady) {
		httpapi.WriteJSON(w, http.StatusServiceUnavailable, map[string]string{"status": "not ready", "reason": "no replica is ready"})
		return
	}
	r.URL.Path, r.URL.RawPath = path, ""
	h.Next.ServeHTTP(w, r)
}

// refuse writes why a call is refused, logs and counts it.
func (c *call) refuse(refused *refusal) {
	c.Metrics.CountRegistration(refused.result)
	c.refusals.Do(func() {
		c.Log.Warn("registration refused", "reason", string(refused.result), "by", c.from.String(), "method", c.r.Method, "replica",
			refused.replica)
	})
	if refused.status == http.StatusUnauthorized {
		c.w.Header().Set("WWW-Authenticate", "Bearer")
	}
	writeError(c.w, refused.status, refused.code, refused.message)
}

func (s *settings) writeMethodError(w http.ResponseWriter, r *http.Request) {
	allowed := s.calls.AllowedMethods(routePath(r.URL))
	w.Header().Set("Allow", allowed)
	writeError(w, http.StatusMethodNotAllowed, "METHOD_NOT_ALLOWED", "method not allowed on this path; allowed: "+allowed)
}

// logAction logs a change that a caller has made.
func (c *call) logAction(action, backend, result string) {
	c.Log.Info("operator action", "action", action, "backend", backend, "by", c.from.String(), "result", result)
}
