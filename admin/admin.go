// Package admin is what operators ask and tell a running proxy: its metrics, its
// profile, and which backends take traffic.
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
	"warmroute/proxy"
	"warmroute/router"
)

// Options are what a Handler is made of.
type Options struct {
	Registry *backends.Registry
	Proxy    *proxy.Proxy                               // which is asked where requests would go
	Reset    func(*backends.Backend) router.ResetReport // forgets what is believed of a backend
	Router   *router.Router
	Metrics  http.Handler
	Version  string
	Log      *slog.Logger
	Host     string // that the listener's address names; "" for every interface
	Token    string // as SetToken takes it
}

// Handler serves the admin listener. Safe for concurrent use.
type Handler struct {
	registry *backends.Registry
	log      *slog.Logger
	host     string
	token    atomic.Pointer[string]
	// connections are those of the server that has ConnState and ConnContext.
	connections connections
	scrapes     chan struct{} // holds one for each scrape under way
	profiles    chan struct{} // and for each profile
	questions   chan struct{} // and for each request that is asked or told about
	proxy       *proxy.Proxy
	router      *router.Router
	forget      func(*backends.Backend) router.ResetReport
	metrics     http.Handler
	routes      http.Handler // what operators alone may ask
	version     string
	patience    time.Duration // that a request has to come, and its answer to be taken
	started     time.Time
	account     account

	listeners chan struct{} // holds one for each that hears events
	ended     chan struct{} // closed when they are to end
	endOnce   sync.Once
}

// New makes a Handler. It starts nothing.
func New(o Options) *Handler {
	h := &Handler{
		registry: o.Registry, router: o.Router, version: o.Version, started: time.Now(), log: o.Log, host: o.Host, metrics: o.Metrics, patience: patience,
		scrapes: make(chan struct{}, mostScrapes), profiles: make(chan struct{}, mostProfiles),
		questions: make(chan struct{}, mostQuestions), proxy: o.Proxy, forget: o.Reset,
		listeners: make(chan struct{}, mostListeners), ended: make(chan struct{}),
	}
	h.SetToken(o.Token)
	mux := http.NewServeMux()
	mux.HandleFunc("POST /api/backends/{name}/drain", h.drain)
	mux.HandleFunc("POST /api/backends/{name}/undrain", h.undrain)
	mux.HandleFunc("POST /api/backends/{name}/reset", h.reset)
	mux.HandleFunc("POST /api/explain", h.explain)
	mux.HandleFunc("POST /api/placed", h.placed)
	mux.HandleFunc("GET /api/state", h.showState)
	mux.HandleFunc("GET /api/events", h.events)
	mux.HandleFunc("POST /api/requests/{handle}/cancel", h.cancel)
	h.profile(mux)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		fail(w, http.StatusNotFound, "no such path or method; there are GET /metrics, GET / (the live page), GET /api/state, GET /api/events, POST /api/requests/{handle}/cancel, POST /api/backends/{name}/drain, /undrain and /reset, POST /api/explain, POST /api/placed, and GET /debug/pprof/")
	})
	h.routes = mux
	return h
}

// SetToken makes token what operators have to send; "" for none, and then only
// those who connect over loopback are operators.
func (h *Handler) SetToken(token string) {
	if before := h.token.Swap(&token); before != nil && *before != token {
		h.connections.clearAuthentication()
	}
}

func (h *Handler) drain(w http.ResponseWriter, r *http.Request) {
	h.change(w, r, "backend is drained: it finishes what it has and gets nothing new", (*backends.Backend).Drain)
}

func (h *Handler) undrain(w http.ResponseWriter, r *http.Request) {
	h.change(w, r, "backend is drained no more", (*backends.Backend).Undrain)
}

// change does to the named backend what an operator asks for, and answers with
// the state that it has then.
func (h *Handler) change(w http.ResponseWriter, r *http.Request, what string, do func(*backends.Backend)) {
	b := h.backend(w, r)
	if b == nil {
		return
	}
	do(b)
	h.account.forget()
	h.log.Info(what, "backend", b.Name, "in_flight", b.InFlight.Load(), "by", r.RemoteAddr)
	reply(w, http.StatusOK, map[string]any{"backend": b.Name, "state": b.State().String(), "in_flight": b.InFlight.Load()})
}

// backend is the one that the path names; where there is none, the request is
// answered.
func (h *Handler) backend(w http.ResponseWriter, r *http.Request) *backends.Backend {
	b := h.registry.Find(r.PathValue("name"))
	if b == nil {
		var names []string
		for _, b := range h.registry.All() {
			names = append(names, b.Name)
		}
		fail(w, http.StatusNotFound, "no backend has that name; there are: "+strings.Join(names, ", "))
	}
	return b
}

func reply(w http.ResponseWriter, status int, what any) {
	body, _ := json.Marshal(what) // strings and numbers always marshal
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	w.Write(append(body, '\n'))
}

// fail answers with what to do instead.
func fail(w http.ResponseWriter, status int, message string) {
	reply(w, status, map[string]any{"error": map[string]string{"message": message, "src": "warmroute"}})
}
