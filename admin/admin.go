// Package admin serves the operators' HTTP API and the live page of a running proxy.
package admin

import (
	"encoding/json"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"warmroute/backends"
	"warmroute/backends/control"
	"warmroute/cluster"
	"warmroute/fleet"
	"warmroute/proxy"
	"warmroute/proxy/recorder"
	"warmroute/router"
	"warmroute/usage"
)

// Options configure a Handler.
type Options struct {
	Registry *backends.Registry
	Proxy    *proxy.Proxy
	Reset    func(*backends.Backend) router.ResetReport // forgets what is known of a backend
	Control  *control.Controller
	Router   *router.Router
	Fleet    *fleet.Fleet
	Cluster  func() cluster.Status // nil: this proxy is the only one
	Usage    *usage.Table          // of the API keys
	Recorder *recorder.Recorder    // nil: traffic is not recorded
	Metrics  http.Handler
	Version  string
	Log      *slog.Logger
	Host     string // in the listener's address; empty: all interfaces
	Token    string // see SetToken
}

// Handler serves the admin listener. It is safe for concurrent use.
type Handler struct {
	Options
	token       atomic.Pointer[string]
	connections connections // of the server that uses ConnState and ConnContext
	started     time.Time
	timeout     time.Duration // for a request to arrive, and for its response to be read
	api         http.Handler  // for operators only
	cache       stateCache

	// Semaphores: each has an element for each request in progress.
	scrapes    chan struct{}
	profiles   chan struct{}
	dryRuns    chan struct{}
	streams    chan struct{}
	actions    chan struct{}
	searches   chan struct{}
	reports    chan struct{}
	recordings chan struct{}

	streamsEnded   chan struct{} // closed by EndEventStreams; actions on backends end too
	endStreamsOnce sync.Once
}

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

// New returns a Handler. It starts no goroutine.
func New(o Options) *Handler {
	h := &Handler{
		Options: o, started: time.Now(), timeout: requestTimeout,
		scrapes: make(chan struct{}, maxScrapes), profiles: make(chan struct{}, maxProfiles),
		dryRuns: make(chan struct{}, maxDryRuns), streams: make(chan struct{}, maxStreams),
		actions: make(chan struct{}, maxActions), searches: make(chan struct{}, maxSearches), reports: make(chan struct{}, maxReports),
		recordings:   make(chan struct{}, maxRecordings),
		streamsEnded: make(chan struct{}),
	}
	h.SetToken(o.Token)
	mux := http.NewServeMux()
	mux.HandleFunc("POST /api/backends/{name}/drain", h.changeBackend("drain", h.drain))
	mux.HandleFunc("POST /api/backends/{name}/undrain", h.changeBackend("undrain", h.undrain))
	mux.HandleFunc("POST /api/backends/{name}/reset", h.resetBackend)
	h.addBackendRoutes(mux)
	for _, action := range control.ActionNames() {
		mux.HandleFunc("POST /api/backends/"+action, h.controlBackends(action))
		mux.HandleFunc("POST /api/backends/{name}/"+action, h.controlBackends(action))
	}
	mux.HandleFunc("POST /api/explain", h.explainDecision)
	mux.HandleFunc("POST /api/placed", h.recordPlacement)
	mux.HandleFunc("GET /api/state", h.serveState)
	mux.HandleFunc("GET /api/recording", h.serveRecording)
	mux.HandleFunc("GET /api/events", h.streamState)
	mux.HandleFunc("GET /api/usage", h.serveUsage)
	mux.HandleFunc("POST /api/requests/{handle}/cancel", h.cancelRequest)
	mux.HandleFunc("GET /api/requests", h.findFinishedRequests)
	mux.HandleFunc("GET /api/history", h.serveHistory)
	h.addProfileRoutes(mux)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, http.StatusNotFound, "unknown path or method; available: GET /metrics, GET / (the live page), GET /api/state, GET /api/recording, GET /api/events, GET /api/history, GET /api/requests, GET /api/usage, POST /api/requests/{handle}/cancel, GET and POST /api/backends, GET and DELETE /api/backends/{name}, POST /api/backends/{name}/drain, /undrain and /reset, POST /api/backends/{name}/{action} and /api/backends/{action} with the actions "+strings.Join(control.ActionNames(), ", ")+", POST /api/explain, POST /api/placed, and GET /debug/pprof/")
	})
	h.api = mux
	return h
}

// ServeHTTP implements http.Handler. It rejects what a web page of another origin may have sent, and serves all
// but the metrics and the page to operators only. A client that connects over loopback is on this machine; a
// browser may be too, so its pages are recognized by the host name, the origin and the content type.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// It fails if the connection has no deadlines; then there is no timeout.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(h.timeout))
	if r.ContentLength != 0 {
		w.Header().Set("Connection", "close") // the next request must not wait for an unread body
		body := h.setBodyTimeout(w, r)
		defer body.setLingerDeadline()
	}
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if h.hasValidToken(r) {
		h.markAuthenticated(r)
	}
	local := isLocal(r)
	switch {
	case local && !h.isAllowedHost(r.Host):
		writeError(w, http.StatusForbidden, "the Host header is neither this machine nor the address in the setting admin: use http://127.0.0.1 and the port")
	case !isSameOrigin(r) && !isNavigationToPage(r):
		writeError(w, http.StatusForbidden, "request of a web page from another origin")
	case r.URL.Path == "/metrics" && (r.Method == http.MethodGet || r.Method == http.MethodHead):
		serveLimited(h.scrapes, w, r, h.Metrics)
	case pageFile(r) != "" && (local || *h.token.Load() != ""): // the page prompts for the token
		h.servePageFile(w, pageFile(r))
	case !h.checkOperator(w, r, local) || r.Method == http.MethodPost && !checkPostTypeAndSize(w, r):
	default:
		h.api.ServeHTTP(w, r)
	}
}

// serveLimited serves the request if the semaphore has room.
func serveLimited(semaphore chan struct{}, w http.ResponseWriter, r *http.Request, next http.Handler) {
	select {
	case semaphore <- struct{}{}:
		defer func() { <-semaphore }()
		next.ServeHTTP(w, r)
	default:
		w.Header().Set("Retry-After", "1")
		writeError(w, http.StatusServiceUnavailable, "too many requests of this kind at once")
	}
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	body, _ := json.Marshal(v) // strings and numbers always marshal
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	w.Write(append(body, '\n'))
}

// errorDetail is the error in a response.
type errorDetail struct {
	Message string `json:"message"`
	Source  string `json:"src"`
}

func writeError(w http.ResponseWriter, status int, message string) {
	writeJSON(w, status, map[string]any{"error": errorDetail{message, "warmroute"}})
}
