// Package proxy is the front door: it takes OpenAI's API in, lets the router
// choose a backend for each request, and relays the answer as it comes.
package proxy

import (
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/go-chi/chi/v5"

	"warmroute/backends"
	"warmroute/metrics"
	"warmroute/proxy/accesslog"
	"warmroute/proxy/apikey"
	"warmroute/proxy/recorder"
	"warmroute/proxy/tracing"
	"warmroute/router"
	"warmroute/router/prompt"
)

// Options are what a Proxy is made of.
type Options struct {
	Registry *backends.Registry
	Router   *router.Router
	Metrics  *metrics.Metrics
	Log      *slog.Logger
	Version  string

	// Instance is a random id of this proxy, by which it finds requests that come
	// back to it. Empty: they are not looked for.
	Instance string

	// Suspect is told of a backend on which an attempt failed, so that its
	// readiness is checked at once. It must not block.
	Suspect func(*backends.Backend)

	// OutOfDescriptors is told when no connection to a backend could be made for want
	// of a file descriptor. It must not block. nil: nobody is told.
	OutOfDescriptors func(err error)

	BlockBytes int                // bytes of canonical prompt in a block
	Record     *recorder.Recorder // nil: traffic is not recorded
	AccessLog  *accesslog.Log     // nil: there is none
	Traces     *tracing.Tracer    // nil: requests are not traced
	Keys       *apikey.Set        // nil: everybody may come in

	Settings
}

// Proxy serves the public listener. Safe for concurrent use.
type Proxy struct {
	registry   *backends.Registry
	router     *router.Router
	metrics    *metrics.Metrics
	log        *slog.Logger
	version    string
	instance   string
	suspect    func(*backends.Backend)
	blockBytes int
	record     *recorder.Recorder
	access     *accesslog.Log
	traces     *tracing.Tracer
	keys       *apikey.Set
	settings   atomic.Pointer[Settings]
	retries    *retryBudget
	failureLog failureLog
	unready    atomic.Bool // the proxy is about to end

	backendIdle backends.Event // a backend has nothing of ours in flight any more

	inFlight  atomic.Int64 // requests, held ones included
	lingering atomic.Int64 // requests refused, of whose bodies the rest is still awaited
	clients   connectionTracker
	bodies    bodyPool
	activity  *Activity
	scratch   sync.Pool // of *scratch
	chunks    sync.Pool // of *[]byte, chunkBytes long
	buffers   responseBuffers
	replies   sync.Pool // of *prompt.Reply
	handlers  http.Handler

	outOfDescriptors func(error)

	instanceHeader []string // instance as a header has it; never modified
}

// Activity is what operators see of the requests.
func (p *Proxy) Activity() *Activity { return p.activity }

// New makes a Proxy. It starts nothing.
func New(o Options) *Proxy {
	p := &Proxy{
		registry:   o.Registry,
		router:     o.Router,
		metrics:    o.Metrics,
		log:        o.Log,
		version:    o.Version,
		instance:   o.Instance,
		suspect:    o.Suspect,
		blockBytes: o.BlockBytes,
		record:     o.Record,
		access:     o.AccessLog,
		traces:     o.Traces,
		retries:    newRetryBudget(),
		activity:   newActivity(),
		keys:       o.Keys,
		scratch:    sync.Pool{New: func() any { return new(scratch) }},
		chunks:     sync.Pool{New: func() any { b := make([]byte, chunkBytes); return &b }},
		replies:    sync.Pool{New: func() any { return new(prompt.Reply) }},
	}
	p.instanceHeader = []string{p.instance}
	if p.outOfDescriptors = o.OutOfDescriptors; p.outOfDescriptors == nil {
		p.outOfDescriptors = func(error) {}
	}
	if p.keys == nil {
		p.keys = apikey.New(nil)
	}
	p.metrics.RegisterKeys(p.keyUsage)
	p.metrics.RegisterInFlight(p.inFlight.Load)
	p.Configure(o.Settings)
	p.handlers = p.routes()
	return p
}

// routes is the rest of the allowlist, besides the endpoints. chi matches a path
// that was written with escapes as it was written, so no spelling but the plain
// one gets through.
func (p *Proxy) routes() http.Handler {
	r := chi.NewRouter()
	for path, h := range map[string]http.HandlerFunc{
		"/v1/models": p.requireKey(p.models), "/v1/models/*": p.requireKey(p.model), "/version": p.requireKey(p.versionInfo),
		"/livez": p.livez, "/readyz": p.readyz, "/health": p.readyz,
	} {
		r.Get(path, h)
		r.Head(path, h)
	}
	unhandled := func(w http.ResponseWriter, req *http.Request) { writeRouteError(w, req, r) }
	r.NotFound(unhandled)
	r.MethodNotAllowed(unhandled) // which chi also calls for any path with a method that it does not know
	return r
}

// ServeHTTP implements http.Handler. Every answer carries the request's id.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	id := []string{requestID(r.Header)}
	r.Header["X-Request-Id"], w.Header()["X-Request-Id"] = id, id
	if e := findEndpoint(r); e != nil {
		p.serveEndpoint(e, w, r)
		return
	}
	p.serveLocal(w, r)
}

// serveLocal is for what is answered without a replica: at once, to a client that
// may read none of it.
func (p *Proxy) serveLocal(w http.ResponseWriter, r *http.Request) {
	c := newClientWriter(w, r, p.settings.Load().WriteIdle)
	if r.ContentLength != 0 {
		c.setLingerDeadline() // none of them reads a body
	}
	c.extendDeadline()
	if fault := p.checkProbeLoop(&c, r.Header); fault != nil {
		openAI.writeError(&c, fault)
		return
	}
	p.handlers.ServeHTTP(&c, r)
}

// findEndpoint is the endpoint that a request is for, if it is for one, in the plain
// spelling of its path; and what a replica is asked for is the endpoint's own path,
// never the client's. Not chi's to find: its context would stay with each stream,
// on a stack twice the size.
func findEndpoint(r *http.Request) *endpoint {
	if r.Method != http.MethodPost || r.URL.RawPath != "" {
		return nil
	}
	for i := range endpoints {
		if endpoints[i].path == r.URL.Path {
			return &endpoints[i]
		}
	}
	return nil
}

// writeRouteError answers a request for which there is no handler: with a 405 where
// its path has another method, of the endpoints or of routes, else with a 404.
func writeRouteError(w http.ResponseWriter, r *http.Request, routes chi.Routes) {
	e := &apiError{status: http.StatusNotFound, kind: "invalid_request_error", code: "not_found",
		message: "no such endpoint; the OpenAI API is served under /v1, for instance POST /v1/chat/completions"}
	if allowed := allowedMethods(r, routes); allowed != "" {
		w.Header().Set("Allow", allowed)
		e.status, e.code, e.message = http.StatusMethodNotAllowed, "method_not_allowed", "this path takes "+allowed+" only"
	}
	dialectOf(r.URL.Path).writeError(w, e)
}

// allowedMethods is what the header Allow says of a path; empty if nothing is there.
func allowedMethods(r *http.Request, routes chi.Routes) string {
	path := r.URL.RawPath
	if path == "" {
		path = r.URL.Path
	}
	switch {
	case slices.ContainsFunc(endpoints, func(e endpoint) bool { return e.path == path }):
		return http.MethodPost
	case routes.Match(chi.NewRouteContext(), http.MethodGet, path):
		return http.MethodGet + ", " + http.MethodHead
	}
	return ""
}
