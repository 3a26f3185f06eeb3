package proxy

import (
	"net/netip"
	"slices"
	"time"

	"warmroute/proxy/api"
	"warmroute/proxy/modelname"
	"warmroute/router"
)

// Settings may change while a Proxy runs. A request keeps those of its arrival.
type Settings struct {
	Limits
	Timeouts
	Retry RetrySettings

	Attempts            int                  // maximum for one request; a refused connection does not count
	QueueTimeouts       router.QueueTimeouts // as the router has them; none: no queue
	Keepalive           time.Duration        // interval of comments on a silent stream; 0: none
	QueueKeepalive      time.Duration        // the same before a replica has responded; 0: none
	KVLease             time.Duration        // for how long a replica keeps a prompt's KV cache for another one
	QueueForRoles       bool                 // requests wait for replicas for decode: those for prefill serve none whole
	TTFTTarget          time.Duration        // of a request whose key and header have none; 0: none
	RefuseLate          bool                 // requests are refused that are predicted to miss their target
	TrustedProxies      []netip.Prefix       // their X-Forwarded-For states the address of a client
	ConversationHeaders []string             // canonical names; the first one present names the session that a request belongs to
	UserHeaders         []string             // likewise; the first one present names the user, who has a part of the tenant's share
	RouteHeaders        bool                 // explain the routing to clients whose key allows it
	IsolateTenants      bool                 // prompts match only those of the same tenant
	CORSOrigins         []string             // whose pages browsers let use the API, or "*" for all
	ReadyIfEmpty        bool                 // GET /readyz is 200 without a ready replica, since others may yet be added
	// AdapterPatterns are those of adapters that replicas load when they are asked for; the first that matches counts.
	AdapterPatterns []AdapterPattern
	// ModelNames are the names by which clients ask for models of replicas.
	ModelNames []modelname.Settings
	// StartTimeouts are of the models that are started when requests wait for them: for how long these wait.
	StartTimeouts map[string]time.Duration

	ExtraPaths []string // to which POSTs are relayed as well, as api.CheckExtraPath allows and at most api.MaxExtraPaths

	// DescriptorConnections is for how many client connections there are file descriptors. Beyond it a new one closes all
	// that have been idle for a second. 0: unknown.
	DescriptorConnections int

	names *modelname.Table // of ModelNames
}

// Limits bound what clients may send.
type Limits struct {
	InFlight       int   `mapstructure:"in_flight" range:"1..1048576"`           // requests at once, queued ones included
	Connections    int   `mapstructure:"connections" range:"16..1048576"`        // of clients; idle ones are closed for new ones
	QueryBytes     int64 `mapstructure:"query_bytes" range:"0..1MiB"`            // of a URL
	BodyBytes      int64 `mapstructure:"body_bytes" range:"1KiB..1TiB"`          // of one request
	BodyBytesTotal int64 `mapstructure:"body_bytes_total" range:"1KiB..1024TiB"` // of all requests in memory

	KVTransferParams string `mapstructure:"kv_transfer_params" oneof:"refuse allow"` // AllowTransferParams, or they are refused
}

// Timeouts bound the waits of a request. They are off when 0.
type Timeouts struct {
	FirstByte time.Duration `mapstructure:"first_byte" range:"0s.."` // of a stream
	Response  time.Duration `mapstructure:"response" range:"0s.."`   // without progress of the replica, of a response that is not a stream
	Idle      time.Duration `mapstructure:"idle" range:"0s.."`       // between two reads of a response
	BodyIdle  time.Duration `mapstructure:"body_idle" range:"0s.."`  // between two reads of a request's body, and the window of its rate
	WriteIdle time.Duration `mapstructure:"write_idle" range:"0s.."` // for a client to read some of its response
}

// RetrySettings bound the retries of all requests.
type RetrySettings struct {
	Share        float64 `mapstructure:"share" range:"0..1"`            // of the requests of the last 10 s
	PerSecond    int     `mapstructure:"per_second" range:"0..1048576"` // always allowed
	Stalled      bool    `mapstructure:"stalled"`                       // retry requests that wait for a stalled replica
	AfterTimeout bool    `mapstructure:"after_timeout"`                 // retry after Timeouts.FirstByte and Timeouts.Response
}

// Configure gives the requests that arrive from now on other settings.
func (p *Proxy) Configure(s Settings) {
	s.names = modelname.NewTable(s.ModelNames)
	p.settings.Store(&s)
	p.metrics.RestrictModelNames(func(name string) bool { return s.names.Find(name) != nil })
	p.cors.Store(newCORS(s.CORSOrigins))
	p.configureExtraPaths(s.ExtraPaths)
}

// AllowTransferParams is the value of limits.kv_transfer_params by which they are accepted.
const AllowTransferParams = "allow"

// configureExtraPaths makes paths the extra paths. What backends lack is forgotten if the paths have changed, since
// a number may have been another path's.
func (p *Proxy) configureExtraPaths(paths []string) {
	var before []api.Endpoint
	if t := p.routes.Load(); t != nil {
		before = t.Extra
	}
	after := api.NewExtraEndpoints(paths, before)
	t := api.NewTable(after)
	p.addLocalRoutes(t)
	p.routes.Store(t)
	if slices.EqualFunc(before, after, func(a, b api.Endpoint) bool { return a.Path == b.Path }) {
		return
	}
	for _, b := range p.registry.All() {
		b.ForgetMissingEndpoints()
	}
	for _, e := range before {
		if !slices.Contains(paths, e.Path) {
			p.metrics.DeleteEndpoint(e.Path)
		}
	}
}
