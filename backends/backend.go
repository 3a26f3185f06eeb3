// Package backends knows the vLLM servers that the router may use: which there
// are, whether they are ready, which models they list, and what their /metrics
// say. It records no metrics and contains no HTTP handler.
package backends

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"warmroute/backends/transport"
	"warmroute/backends/vllm"
)

// Model is one card of a replica's /v1/models.
type Model = vllm.Model

// Load is one scrape of a replica's /metrics.
type Load = vllm.Load

// State is whether a backend accepts requests.
type State int32

const (
	Down     State = iota // fails its checks, or was not checked yet
	Ready                 // /health is 200 and /v1/models lists a model
	Draining              // finishes its requests, gets no new ones
)

func (s State) String() string {
	return [...]string{"down", "ready", "draining"}[s]
}

// Backend is our record of one vLLM server. InFlight is our own count and always
// current; Load is the server's report, up to MaxPollInterval old. Safe for
// concurrent use.
type Backend struct {
	Name string
	URL  *url.URL // scheme, host and an optional path prefix without a trailing slash

	// Slot is this backend's index in its Registry for as long as it is there; the
	// router keeps its per-backend data under it. Slots are reused: compare
	// Backends, never Slots, to tell one backend from another.
	Slot int

	InFlight         atomic.Int64 // our sequences that have not ended
	PeerInFlight     atomic.Int64 // those of other proxies, as far as they report them
	NoEngineInFlight atomic.Int64 // our requests that no engine works on

	Aborted        atomic.Int64 // responses that its engine aborted
	WrongResponses atomic.Int64 // responses to other requests that its connections carried

	// ReportsCached is set once a response reported how much of its prompt was
	// cached. From then on a response without that figure means none was.
	ReportsCached atomic.Bool

	missing missingEndpoints

	flags    atomic.Int32 // healthy, drained, retired
	status   statusRecord
	options  atomic.Pointer[Options]
	load     atomic.Pointer[Load]
	models   atomic.Pointer[[]Model]
	instance atomic.Pointer[string]

	// Set by the registry before anything runs; nil on a backend without one.
	checkRequested chan struct{} // capacity 1: several requests are one check
	pollRequested  chan struct{} // likewise
	registry       *Registry
}

// Options are the settings of a backend that can change while requests run.
// Never modified once a Backend has them.
type Options struct {
	APIKey string // sent to the replica as "Authorization: Bearer"; empty: none

	EnginePriority bool // requests carry their priority for the engine's queue

	// KVEvents is where the replica publishes KV cache events: KVEventsAuto, KVEventsOff or a
	// ZeroMQ endpoint, with KVReplay as the endpoint of earlier events ("": none).
	KVEvents, KVReplay string

	MaxInFlight int     // of our sequences; 0: no bound
	Weight      float64 // divides the cost of sending it a request; 0 is 1

	// Transport carries requests to this replica, ProbeTransport polls and health
	// checks: separately, so that a Transport without a free connection does not
	// make a busy replica look dead. New makes them the same.
	Transport      http.RoundTripper
	ProbeTransport http.RoundTripper
}

// Values of Options.KVEvents that are not endpoints.
const (
	KVEventsAuto = "auto" // those that the replica lists, if any
	KVEventsOff  = "off"
)

var defaultOptions = new(Options)

// New returns a backend that is Down until it has been checked. An empty name
// becomes DefaultName; u comes from ParseURL.
func New(name string, u *url.URL, apiKey string, transport http.RoundTripper) *Backend {
	if name == "" {
		name = DefaultName(u)
	}
	b := &Backend{Name: name, URL: u}
	b.status.since = time.Now()
	b.SetOptions(Options{APIKey: apiKey, Transport: transport, ProbeTransport: transport})
	return b
}

// Options returns the current options, which the caller must not change.
func (b *Backend) Options() *Options {
	if o := b.options.Load(); o != nil {
		return o
	}
	return defaultOptions
}

// SetOptions replaces the options. Requests in flight keep those that they were
// sent with.
func (b *Backend) SetOptions(o Options) { b.options.Store(&o) }

// The flags that a State is made of. The checks, the operator and the
// configuration each have one, so that none can undo another's in any order.
const (
	healthy = 1 << iota // passed its last check
	drained             // by an operator
	retired             // no longer in the configuration
)

// State reports whether the backend may take traffic.
func (b *Backend) State() State {
	switch s := b.flags.Load(); {
	case s == healthy:
		return Ready
	case s&(drained|retired) != 0:
		return Draining
	}
	return Down
}

// SetState is for tests and simulations, which have no health checks.
func (b *Backend) SetState(s State) {
	b.changeFlags(func() {
		b.flags.Store([...]int32{Down: 0, Ready: healthy, Draining: healthy | drained}[s])
		b.status.checked = true
	})
}

// Drain lets the backend finish its requests and get no new ones, until Undrain.
func (b *Backend) Drain() { b.setFlagAndRequestCheck(drained, true) }

// Undrain ends a Drain. The backend's state is that of its last check, and it is
// checked again at once. It does not end a Retire.
func (b *Backend) Undrain() { b.setFlagAndRequestCheck(drained, false) }

// Drained reports whether the operator drained the backend.
func (b *Backend) Drained() bool { return b.flags.Load()&drained != 0 }

// Retire drains a backend that is no longer in the configuration. Its name and
// address are free for another.
func (b *Backend) Retire() { b.setFlagAndRequestCheck(retired, true) }

// Unretire ends a Retire: the backend is in the configuration again.
func (b *Backend) Unretire() { b.setFlagAndRequestCheck(retired, false) }

// Retiring reports whether the backend is retired.
func (b *Backend) Retiring() bool { return b.flags.Load()&retired != 0 }

// setFlagAndRequestCheck sets or clears a flag and asks for a health check.
func (b *Backend) setFlagAndRequestCheck(flag int32, on bool) {
	b.setFlag(flag, on)
	b.requestCheck() // which reports the change
}

// setFlag sets or clears a flag and reports whether it changed.
func (b *Backend) setFlag(flag int32, on bool) (changed bool) {
	b.changeFlags(func() {
		if on {
			changed = b.flags.Or(flag)&flag == 0
		} else {
			changed = b.flags.And(^flag)&flag != 0
		}
	})
	return changed
}

// changeFlags runs change, and notes and broadcasts a change of State.
func (b *Backend) changeFlags(change func()) {
	b.status.mu.Lock()
	defer b.status.mu.Unlock()
	before := b.State()
	change()
	if b.State() == before {
		return
	}
	b.status.since = time.Now()
	if b.registry != nil {
		b.registry.changed.Notify()
	}
}

// KnownInFlight returns how many sequences have not ended that this proxy or another one that
// reports them has sent.
func (b *Backend) KnownInFlight() int64 { return b.InFlight.Load() + b.PeerInFlight.Load() }

// Idle reports whether no request of this proxy is in flight there.
func (b *Backend) Idle() bool { return b.InFlight.Load() == 0 && b.NoEngineInFlight.Load() == 0 }

// requestCheck asks for a health check soon. It never blocks.
func (b *Backend) requestCheck() {
	select {
	case b.checkRequested <- struct{}{}:
	default: // a check is already requested, or there is no checker
	}
}

// RequestPoll has the backend polled after PollSettings.Interval from now at most, if its
// interval was longer because polls showed nothing new. The poll is not made at once, since
// it would delay the request that has just been sent. RequestPoll never blocks.
func (b *Backend) RequestPoll() {
	select {
	case b.pollRequested <- struct{}{}:
	default: // a poll is already pending, or there is no poller
	}
}

// Load returns the last good scrape, or nil while the load is unknown: before
// the first scrape, after maxMissedPolls in a row, and without a /metrics.
func (b *Backend) Load() *Load { return b.load.Load() }

// SetLoad is for the poller, and for tests that have none.
func (b *Backend) SetLoad(l *Load) { b.load.Store(l) }

// Models returns the cards that the replica listed last; nil before the first
// list. They stay when the backend goes down.
func (b *Backend) Models() []Model {
	if m := b.models.Load(); m != nil {
		return *m
	}
	return nil
}

// SetModels is for the health checks, and for tests that have none. The
// registry's catalog has the change when it returns.
func (b *Backend) SetModels(m []Model) {
	b.models.Store(&m)
	if b.registry != nil {
		b.registry.updateCatalog()
	}
}

// InstanceHeader names the proxies that a request has passed, each by a random
// id. In the response to a health check that has it, it names the proxy that
// responded.
const InstanceHeader = "X-Warmroute-Instance"

// ProxyInstance returns the id of the proxy that responded to the last health check;
// empty if it was not a proxy of this kind.
func (b *Backend) ProxyInstance() string {
	if id := b.instance.Load(); id != nil {
		return *id
	}
	return ""
}

// Get requests a path below the backend's URL, over the connections of polls and health
// checks, without following redirects. A non-empty proxyInstances is sent in
// InstanceHeader. The caller closes the body; ctx bounds reading it too.
func (b *Backend) Get(ctx context.Context, path, accept, proxyInstances string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, b.URL.JoinPath(path).String(), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", accept)
	// Without this net/http's transport asks for gzip, which would cost the
	// replica's event loop time.
	req.Header.Set("Accept-Encoding", "identity")
	if proxyInstances != "" {
		req.Header[InstanceHeader] = []string{proxyInstances}
	}
	options := b.Options()
	if options.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+options.APIKey)
	}
	res, err := options.ProbeTransport.RoundTrip(req)
	if stale := (*transport.StaleError)(nil); errors.As(err, &stale) {
		req.Close = true // use a new connection
		res, err = options.ProbeTransport.RoundTrip(req)
	}
	return res, err
}

// Status is a backend's State with its cause and age.
type Status struct {
	State     State
	Checked   bool      // a health check has finished
	Since     time.Time // of State; zero on a backend that New did not make
	Reason    string    // why it is not Ready; empty when it is
	NextCheck time.Time // unless something requests one sooner; zero: unknown
}

// statusRecord is what a Status has beside the State.
type statusRecord struct {
	mu         sync.Mutex // guards what follows, and changes of the flags
	since      time.Time
	checked    bool
	checkError string // of the last check; empty: it passed
	refused    bool   // the last check: nothing listens there
	nextCheck  time.Time
}

// Status returns the backend's state with its cause and age.
func (b *Backend) Status() Status {
	r := &b.status
	r.mu.Lock()
	defer r.mu.Unlock()
	s := Status{State: b.State(), Checked: r.checked, Since: r.since, NextCheck: r.nextCheck}
	switch {
	case b.Retiring():
		s.Reason = "no longer in the configuration"
	case b.Drained():
		s.Reason = "drained by an operator"
	case s.State == Ready:
		return s
	case !r.checked:
		s.Reason = "not checked yet"
		return s
	}
	if r.checkError != "" {
		if s.Reason != "" {
			s.Reason += "; its last check failed: "
		}
		s.Reason += r.checkError
	}
	return s
}

// RefusesConnections reports whether the last health check found that nothing listens:
// the replica's process is gone, with all that it had in memory.
func (b *Backend) RefusesConnections() bool {
	b.status.mu.Lock()
	defer b.status.mu.Unlock()
	return b.status.refused
}

// RecordNextCheck sets the time that Status reports. It is for the health checks, and
// for tests that have none.
func (b *Backend) RecordNextCheck(at time.Time) {
	b.status.mu.Lock()
	defer b.status.mu.Unlock()
	b.status.nextCheck = at
}

// recordCheckResult records the outcome of a health check.
func (b *Backend) recordCheckResult(err error) {
	b.status.mu.Lock()
	defer b.status.mu.Unlock()
	b.status.checked, b.status.checkError, b.status.refused = true, "", errors.Is(err, syscall.ECONNREFUSED)
	if err != nil {
		b.status.checkError = err.Error()
	}
}
