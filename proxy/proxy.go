// Package proxy is the public data plane: it accepts requests of OpenAI's and Anthropic's
// APIs, has the router pick a backend for each, and relays the response as it comes.
package proxy

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/cors"
	"golang.org/x/sync/semaphore"

	"warmroute/backends"
	"warmroute/metrics"
	"warmroute/prompt"
	"warmroute/proxy/accesslog"
	"warmroute/proxy/activity"
	"warmroute/proxy/admit"
	"warmroute/proxy/api"
	"warmroute/proxy/apikey"
	"warmroute/proxy/clientconn"
	"warmroute/proxy/fault"
	"warmroute/proxy/modelname"
	"warmroute/proxy/recorder"
	"warmroute/proxy/relay"
	"warmroute/proxy/retrybudget"
	"warmroute/proxy/stored"
	"warmroute/proxy/tracing"
	"warmroute/proxy/upstream"
	"warmroute/recovery"
	"warmroute/router"
	"warmroute/router/responseindex"
	"warmroute/usage"
)

// Options configure a Proxy.
type Options struct {
	Registry *backends.Registry
	Router   *router.Router
	Metrics  *metrics.Metrics
	Log      *slog.Logger
	Version  string

	// Instance is a random id of this proxy, by which it finds requests that come back to it. Empty: it does not look.
	Instance string

	// RecheckHealth is called for a backend on which an attempt failed, to check its health at once. It must not block.
	RecheckHealth func(*backends.Backend)

	// OutOfDescriptors is called when no connection to a backend could be made for want of a file descriptor. It must not
	// block. It may be nil.
	OutOfDescriptors func(err error)

	// Panics receives the panics of goroutines that requests start. nil: none is recovered.
	Panics recovery.Reporter

	BlockBytes int                // bytes of canonical prompt in a block
	Recorder   *recorder.Recorder // nil: requests are not recorded
	AccessLog  *accesslog.Log     // nil: there is none
	Tracer     *tracing.Tracer    // nil: requests are not traced
	Keys       *apikey.Set        // nil: requests need none
	Usage      *usage.Table       // of the keys; nil: nobody reads it

	// Responses has the stored responses that replicas hold. nil: none is remembered.
	Responses *responseindex.Index

	Settings
}

// Proxy serves the public listener. Safe for concurrent use.
type Proxy struct {
	registry *backends.Registry
	router   *router.Router
	keys     *apikey.Set
	settings atomic.Pointer[Settings]
	cors     atomic.Pointer[cors.Cors] // nil: pages of other origins are not served
	routes   atomic.Pointer[api.Table]

	version    string
	instance   upstream.Instance
	tokens     upstream.AttemptTokens
	blockBytes int
	unready    atomic.Bool // FailReadiness was called

	retries    retrybudget.Budget
	responses  stored.Responses
	models     *modelname.Chooser
	background *backgroundResponses

	recheckHealth    func(*backends.Backend)
	outOfDescriptors func(error)
	panics           recovery.Reporter

	inFlight  atomic.Int64 // requests, queued ones included
	lingering atomic.Int64 // refused requests whose bodies are still read
	clients   clientconn.Tracker
	tenants   admit.Tenants // what the requests of each use
	bodies    *admit.BodyPool
	parsing   *semaphore.Weighted // of maxParsedBytes
	buffers   relay.Buffers
	pools     pools

	observers
}

// observers are told of requests.
type observers struct {
	metrics    *metrics.Metrics
	log        *slog.Logger
	failureLog failureLog
	activity   *activity.Activity
	recorder   *recorder.Recorder // nil: requests are not recorded
	accessLog  *accesslog.Log     // nil: there is none
	tracer     *tracing.Tracer    // nil: requests are not traced
	usage      *usage.Table
}

// pools hold memory that requests pass on to each other.
type pools struct {
	scratch sync.Pool // of *scratch
	prompts sync.Pool // of *prompt.Prompt
	chunks  sync.Pool // of *[]byte, relay.ChunkBytes long
	replies sync.Pool // of *prompt.Response
}

// SampleQueue records how many requests are queued until ctx is done.
func (p *Proxy) SampleQueue(ctx context.Context) { p.activity.SampleQueue(ctx, p.router.CountWaiting) }

// ConnectionActivity returns how many connections of clients are open, and for how long none has carried a request or been
// opened: 0 while one carries a request.
func (p *Proxy) ConnectionActivity() (open int, idle time.Duration) {
	open, _, idle = p.clients.Activity()
	return open, idle
}

// TrackAndLimitConnections bounds the connections of a server of this Proxy, whose ConnState it is to be, and what the kernel
// buffers for each. Beyond the limit it closes the one that is idle longest.
func (p *Proxy) TrackAndLimitConnections(conn net.Conn, state http.ConnState) {
	s := p.settings.Load()
	limits := clientconn.Limits{Connections: s.Connections, DescriptorConnections: s.DescriptorConnections, AckTimeout: s.WriteIdle}
	for range p.clients.SetState(conn, state, limits) {
		p.metrics.CountEvictedConnection()
	}
}

// EvictIdleConnection closes the connection that has been idle longest, whose file descriptor is free when it returns. It reports
// whether any was idle for long enough.
func (p *Proxy) EvictIdleConnection() bool {
	evicted := p.clients.EvictIdle()
	if evicted {
		p.metrics.CountEvictedConnection()
	}
	return evicted
}

// Activity returns what operators see of the requests.
func (p *Proxy) Activity() *activity.Activity { return p.activity }

// New makes a Proxy. It starts nothing. Close ends what requests have started.
func New(o Options) *Proxy {
	p := &Proxy{
		registry:   o.Registry,
		router:     o.Router,
		keys:       o.Keys,
		version:    o.Version,
		instance:   upstream.Instance(o.Instance),
		tokens:     upstream.NewAttemptTokens(),
		blockBytes: o.BlockBytes,
		parsing:    semaphore.NewWeighted(maxParsedBytes),
		buffers:    relay.Buffers{Pool: sync.Pool{New: func() any { return new(bytes.Buffer) }}},
		responses:  stored.NewResponses(o.Responses),
		models:     modelname.NewChooser(),
		background: newBackgroundResponses(),

		recheckHealth: o.RecheckHealth, outOfDescriptors: o.OutOfDescriptors, panics: o.Panics,
		observers: observers{
			metrics: o.Metrics, log: o.Log, activity: activity.New(),
			recorder: o.Recorder, accessLog: o.AccessLog, tracer: o.Tracer, usage: o.Usage,
		},
		pools: pools{
			scratch: sync.Pool{New: func() any { return new(scratch) }},
			prompts: sync.Pool{New: func() any { return new(prompt.Prompt) }},
			chunks:  sync.Pool{New: func() any { b := make([]byte, relay.ChunkBytes); return &b }},
			replies: sync.Pool{New: func() any { return new(prompt.Response) }},
		},
	}
	p.bodies = admit.NewBodyPool(&p.tenants)
	if p.outOfDescriptors == nil {
		p.outOfDescriptors = func(error) {}
	}
	if o.Responses == nil {
		p.responses.Index = responseindex.New(responseindex.Settings{}, time.Now, nil)
	}
	if p.keys == nil {
		p.keys = apikey.New(nil)
	}
	if p.usage == nil {
		p.usage = usage.NewInMemory()
	}
	p.metrics.RegisterKeyUsage(p.keyUsage)
	p.metrics.RegisterRequestsInFlight(p.inFlight.Load)
	p.Configure(o.Settings)
	return p
}

// keyUsage returns the usage of each valid key.
func (p *Proxy) keyUsage() []metrics.KeyUsage {
	list := p.keys.Usage()
	for i := range list {
		list[i].Ended = p.usage.OfKey(list[i].Name)
	}
	return list
}

// CountInFlightByKey returns the number of unfinished requests of each key; without keys, that of all as the key "".
func (p *Proxy) CountInFlightByKey() map[string]int64 {
	if p.keys.Empty() {
		return map[string]int64{"": p.inFlight.Load()}
	}
	inFlight := map[string]int64{}
	for _, k := range p.keys.Usage() {
		inFlight[k.Name] = k.InFlight
	}
	return inFlight
}

// ServeHTTP implements http.Handler. Every response carries the request's id.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	id := requestIDOrNew(r.Header)
	ids := []string{id, id} // the first is replaced by that of each attempt
	r.Header[upstream.RequestIDHeader], w.Header()[upstream.RequestIDHeader] = ids[:1:1], ids[1:]
	if c := p.cors.Load(); c != nil && !isPreflight(r) {
		c.HandlerFunc(w, r) // adds headers to the response, whatever it will be
	}
	if clientconn.HasTooManyLines(r.Header) { // over clear text this is a request that came together with the one before
		w.Header()["Connection"] = []string{"close"} // its body is not read
		fault.Write(w, api.DialectOf(r.URL.Path), fault.New(http.StatusRequestHeaderFieldsTooLarge, fault.CodeTooManyHeaders,
			clientconn.TooManyHeaderLines))
		return
	}
	api.TrimTrailingSlashes(r.URL)
	routes := p.routes.Load()
	found, responseID := routes.FindRoute(r)
	if found.Endpoint != nil && !isWebSocketHandshake(r) {
		p.serveEndpoint(found.Endpoint, responseID, w, r)
		return
	}
	p.serveLocal(w, r, routes, found.Local)
}

// serveLocal serves a request without a replica, to a client that may read none of the response. handler is nil where the request
// has no route.
func (p *Proxy) serveLocal(w http.ResponseWriter, r *http.Request, routes *api.Table, handler http.HandlerFunc) {
	c := relay.NewClientWriter(w, r, p.settings.Load().WriteIdle)
	if r.ContentLength != 0 {
		c.SetLingerReadDeadline() // none of them reads a body
	}
	c.ExtendWriteDeadline()
	p.instance.SetHeader(c.Header(), r.Header)
	if apiErr := p.instance.CheckHealthCheckLoop(r.Header, p.registry.All()); apiErr != nil {
		fault.Write(&c, api.OpenAI, apiErr)
		return
	}
	if crossOrigin := p.cors.Load(); crossOrigin != nil && isPreflight(r) {
		crossOrigin.HandlerFunc(&c, r)
		return
	}
	if isWebSocketHandshake(r) {
		writeUpgradeError(&c, r)
		return
	}
	if handler == nil {
		writeNoRoute(&c, r, routes)
		return
	}
	handler(&c, r)
}
