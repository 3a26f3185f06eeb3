package backends

import (
	"sync/atomic"
	"time"

	"warmroute/backends/vllm"
)

// Model is one card of a replica's /v1/models.
type Model = vllm.Model

// Load is one poll of a replica's /metrics.
type Load = vllm.Load

// EngineLoad is the part of a Load that one data-parallel engine has.
type EngineLoad = vllm.EngineLoad

// observed is what checks, polls and responses have shown of a replica. Safe for concurrent
// use; the zero value is that of a replica of which nothing is known.
type observed struct {
	server *observed // of the server of which this is a rank, with its models and endpoints; nil: none

	load        atomic.Pointer[Load]
	loadChanged Event
	models      atomic.Pointer[[]Model]
	instance    atomic.Pointer[string]
	version     atomic.Pointer[string]

	missing     [MaxEndpoints]atomic.Int64 // until when each Endpoint counts as missing, Unix time in nanoseconds; 0: it does not
	lastMissing atomic.Int64               // until when any does
	served      atomic.Uint64              // an EndpointSet: those of which a request has succeeded
	notFound    atomic.Uint64              // an EndpointSet: those of which a request got an empty 404

	reportsCached atomic.Uint64 // an EndpointSet; see ReportsCached
}

// ofServer returns where the server's models and endpoints are recorded.
func (o *observed) ofServer() *observed {
	if o.server != nil {
		return o.server
	}
	return o
}

// Load returns the last good poll, or nil while the load is unknown: before
// the first poll, after maxMissedPolls in a row, and without a /metrics.
func (o *observed) Load() *Load { return o.load.Load() }

// SetLoad is for the poller, and for tests that have none.
func (o *observed) SetLoad(l *Load) {
	o.load.Store(l)
	o.loadChanged.Notify()
}

// Models returns the cards that the replica listed last; nil before the first
// list. They stay when the backend goes down.
func (o *observed) Models() []Model {
	if m := o.ofServer().models.Load(); m != nil {
		return *m
	}
	return nil
}

// ProxyInstance returns the id of the proxy that responded to the last health check;
// empty if it was not a proxy of this kind.
func (o *observed) ProxyInstance() string {
	if id := o.ofServer().instance.Load(); id != nil {
		return *id
	}
	return ""
}

// Version returns the version of vLLM that the replica runs; "" if it has not told it, or may be another process since.
func (o *observed) Version() string {
	if v := o.ofServer().version.Load(); v != nil {
		return *v
	}
	return ""
}

// SetVersion is for the health checks and the poller, and for tests and simulations that have none. "": unknown.
func (o *observed) SetVersion(version string) { o.ofServer().version.Store(&version) }

// Endpoint is the number of an API path, below MaxEndpoints. The proxy assigns them.
type Endpoint uint8

// MaxEndpoints bounds the endpoints that a Backend remembers to be missing.
const MaxEndpoints = 64

// missingEndpointLifetime is for how long an endpoint counts as missing: a replica that
// was replaced unnoticed may serve it.
const missingEndpointLifetime = time.Minute

// EndpointSet is a set of endpoints, one bit for each.
type EndpointSet uint64

// Has reports whether e is in the set.
func (s EndpointSet) Has(e Endpoint) bool { return s&(1<<e) != 0 }

// ReportsCached reports whether a response of e has said how much of its prompt was cached. One
// without that figure means then that none was.
func (o *observed) ReportsCached(e Endpoint) bool { return EndpointSet(o.reportsCached.Load()).Has(e) }

// RecordReportsCached records that a response of e has said how much of its prompt was cached.
func (o *observed) RecordReportsCached(e Endpoint) {
	if !o.ReportsCached(e) {
		o.reportsCached.Or(1 << e)
	}
}

// ForgetReportsCached forgets which endpoints do: the replica may be another version.
func (o *observed) ForgetReportsCached() { o.reportsCached.Store(0) }

// RecordMissingEndpoint records that the replica does not serve e, as it has responded. It
// counts until missingEndpointLifetime is over, or the replica seems to be another process.
func (o *observed) RecordMissingEndpoint(e Endpoint, now time.Time) {
	o = o.ofServer()
	expiry := now.Add(missingEndpointLifetime).UnixNano()
	o.missing[e].Store(expiry)
	o.lastMissing.Store(expiry)
}

// RecordServedEndpoint records that a request of e has succeeded: until ForgetMissingEndpoints, an empty 404 is about its
// request.
func (o *observed) RecordServedEndpoint(e Endpoint) {
	o = o.ofServer()
	if !EndpointSet(o.served.Load()).Has(e) {
		o.served.Or(1 << e)
	}
}

// RecordEmptyNotFound records a 404 without a body, which may be about the endpoint or about the request. The second one
// counts as RecordMissingEndpoint, unless a request of e has succeeded.
func (o *observed) RecordEmptyNotFound(e Endpoint, now time.Time) {
	o = o.ofServer()
	if !EndpointSet(o.served.Load()).Has(e) && EndpointSet(o.notFound.Or(1<<e)).Has(e) {
		o.RecordMissingEndpoint(e, now)
	}
}

// MissingEndpoints returns the endpoints that the replica is known not to serve.
func (o *observed) MissingEndpoints(now time.Time) (missing EndpointSet) {
	o = o.ofServer()
	at := now.UnixNano()
	if o.lastMissing.Load() <= at {
		return 0
	}
	for e := range o.missing {
		if o.missing[e].Load() > at {
			missing |= 1 << e
		}
	}
	return missing
}

// LacksEndpoint reports whether the replica is known not to serve e.
func (o *observed) LacksEndpoint(e Endpoint, now time.Time) bool {
	return o.MissingEndpoints(now).Has(e)
}

// ForgetMissingEndpoints forgets which endpoints the replica lacks or has. The health checks and
// the poller call it when the replica may be another process.
func (o *observed) ForgetMissingEndpoints() {
	o = o.ofServer()
	for e := range o.missing {
		o.missing[e].Store(0)
	}
	o.served.Store(0)
	o.notFound.Store(0)
}
