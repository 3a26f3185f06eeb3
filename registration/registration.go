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

	"golang.org/x/time/rate"

	"warmroute/backends"
	"warmroute/backends/control"
	"warmroute/config"
	"warmroute/fleet"
	"warmroute/metrics"
	"warmroute/proxy"
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
	access
	writeTimeout time.Duration // for a response; 0: no limit
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
	h.settings.Store(&settings{newAccess(c.Registration, c.TrustedProxies), c.Timeouts.WriteIdle})
}

// call is one request to a route.
type call struct {
	*Handler
	access *access
	w      http.ResponseWriter
	r      *http.Request
	from   netip.Addr // the caller
	worker string     // that the path or the query names, by its id or URL
}

// route is a path for registration.
type route struct {
	method string
	serve  func(*call)
}

// findRoutes returns the routes of an escaped path, one for each method, and the worker that it names; nil for a path
// that is not for registration.
func findRoutes(path string) (routes []route, worker string) {
	if rest, ok := strings.CutPrefix(path, "/workers/"); ok && rest != "" {
		worker, err := url.PathUnescape(rest)
		if err != nil {
			return nil, ""
		}
		return []route{{http.MethodGet, (*call).showWorker}, {http.MethodDelete, (*call).removeWorker}}, worker
	}
	switch strings.TrimSuffix(path, "/") {
	case "/workers":
		return []route{{http.MethodGet, (*call).listWorkers}, {http.MethodPost, (*call).addWorker}}, ""
	case "/add_worker":
		return []route{{http.MethodPost, (*call).addWorkerByQuery}}, ""
	case "/remove_worker":
		return []route{{http.MethodPost, (*call).removeWorkerByQuery}}, ""
	case "/list_workers":
		return []route{{http.MethodGet, (*call).listURLs}}, ""
	case "/flush_cache":
		return []route{{http.MethodPost, (*call).flushCaches}}, ""
	case "/get_loads":
		return []route{{http.MethodGet, (*call).listLoads}}, ""
	}
	return nil, ""
}

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s := h.settings.Load()
	if s == nil {
		h.Next.ServeHTTP(w, r)
		return
	}
	path := r.URL.EscapedPath()
	if own := ownProbePath(path); own != "" {
		h.serveProbe(w, r, own)
		return
	}
	routes, worker := findRoutes(path)
	if routes == nil {
		h.Next.ServeHTTP(w, r)
		return
	}
	c := &call{Handler: h, access: &s.access, w: w, r: r, from: proxy.ClientAddress(r.RemoteAddr, r.Header["X-Forwarded-For"], s.trusted), worker: worker}
	conn := http.NewResponseController(w) // deadlines fail where the connection has none
	_ = conn.SetReadDeadline(time.Now().Add(bodyTimeout))
	if s.writeTimeout > 0 {
		_ = conn.SetWriteDeadline(time.Now().Add(maxReadyWait + s.writeTimeout))
	}
	if refused := c.access.checkCaller(r, c.from); refused != nil {
		c.refuse(refused)
		return
	}
	i := slices.IndexFunc(routes, func(one route) bool { return one.method == r.Method })
	if i < 0 {
		c.writeMethodError(routes)
		return
	}
	routes[i].serve(c)
}

// ownProbePath returns the path that says what a path of other routers says about the state of the proxy, "" if it is
// none of these.
func ownProbePath(path string) string {
	switch path {
	case "/liveness":
		return "/livez"
	case "/readiness", "/health_generate":
		return "/readyz"
	}
	return ""
}

// serveProbe responds as the path at which this proxy serves the same, but that there must be a ready replica where
// that path is /readyz: callers of the other routers wait for one there.
func (h *Handler) serveProbe(w http.ResponseWriter, r *http.Request, path string) {
	isReady := func(b *backends.Backend) bool { return b.State() == backends.Ready }
	if path == "/readyz" && !slices.ContainsFunc(h.Registry.All(), isReady) {
		writeJSON(w, http.StatusServiceUnavailable, map[string]string{"status": "not ready", "reason": "no replica is ready"})
		return
	}
	r.URL.Path, r.URL.RawPath = path, ""
	h.Next.ServeHTTP(w, r)
}

// refuse writes why a call is refused, logs and counts it.
func (c *call) refuse(refused *refusal) {
	c.Metrics.CountRegistration(refused.result)
	c.refusals.Do(func() {
		c.Log.Warn("registration refused", "reason", string(refused.result), "by", c.from.String(), "method", c.r.Method, "replica", refused.replica)
	})
	if refused.status == http.StatusUnauthorized {
		c.w.Header().Set("WWW-Authenticate", "Bearer")
	}
	writeError(c.w, refused.status, refused.code, refused.message)
}

func (c *call) writeMethodError(routes []route) {
	var allowed []string
	for _, one := range routes {
		allowed = append(allowed, one.method)
	}
	list := strings.Join(allowed, ", ")
	c.w.Header().Set("Allow", list)
	writeError(c.w, http.StatusMethodNotAllowed, "METHOD_NOT_ALLOWED", "method not allowed on this path; allowed: "+list)
}

// logAction logs a change that a caller has made.
func (c *call) logAction(action, backend, result string) {
	c.Log.Info("operator action", "action", action, "backend", backend, "by", c.from.String(), "result", result)
}
