// Package admin serves the operators' HTTP API and the live page of a running proxy.
package admin

import (
	"encoding/json"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"warmroute/backends"
	"warmroute/backends/control"
	"warmroute/cluster"
	"warmroute/fleet"
	"warmroute/httpapi"
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
	Recorder *recorder.Recorder    // nil: requests are not recorded
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
	mux         *httpapi.Mux
	calls       string // methods and paths of mux, for errors
	cache       stateCache

	streamsEnded   chan struct{} // closed by EndEventStreams; actions on backends end too
	endStreamsOnce sync.Once
}

// New returns a Handler. It starts no goroutine.
func New(o Options) *Handler {
	h := &Handler{Options: o, started: time.Now(), timeout: requestTimeout, streamsEnded: make(chan struct{})}
	h.SetToken(o.Token)
	h.mux = h.newMux()
	h.calls = listCalls(h.mux)
	return h
}

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) { h.mux.ServeHTTP(w, r) }

// writeJSON writes a line of JSON.
func writeJSON(w http.ResponseWriter, status int, v any) {
	body, _ := json.Marshal(v) // strings and numbers always marshal
	httpapi.WriteJSON(w, status, json.RawMessage(append(body, '\n')))
}

// errorDetail is the error in a response.
type errorDetail struct {
	Message string `json:"message"`
	Source  string `json:"src"`
}

func writeError(w http.ResponseWriter, status int, message string) {
	writeJSON(w, status, map[string]any{"error": errorDetail{message, "warmroute"}})
}
