// Package backends knows the vLLM servers the router may use: which there are,
// whether they are ready, which models they list, and what their /metrics say.
// It records no metrics of ours and knows no HTTP handler.
package backends

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"sync/atomic"
	"time"

	"warmroute/backends/transport"
)

// State says whether a backend may take traffic.
type State int32

const (
	Down     State = iota // fails its checks, or was not checked yet
	Ready                 // /health is 200 and /v1/models lists a model
	Draining              // finishes what it has, takes nothing new
)

func (s State) String() string {
	return [...]string{"down", "ready", "draining"}[s]
}

// Backend is our record of one vLLM server. InFlight is ours and instant; Load
// is vLLM's word, up to a poll old. Safe for concurrent use.
type Backend struct {
	Name string
	URL  *url.URL // scheme, host and an optional path prefix without a trailing slash

	// Slot is this backend's place in its Registry, for as long as it is there. The
	// index and the router keep what they know of a backend under it. Slots are
	// used again: what was left of a backend is told by the Backend, never by its Slot.
	Slot int

	// InFlight counts sequences that we sent and that have not ended; Instant the
	// requests that no engine works on.
	InFlight, Instant atomic.Int64

	// Aborted counts the responses that its engine aborted.
	Aborted atomic.Int64

	// TellsCached is set once an answer said how much of its prompt came from the
	// cache. From then on an answer that leaves it out means none did.
	TellsCached atomic.Bool

	standing atomic.Int32 // bits: see below
	status   statusRecord
	terms    atomic.Pointer[Terms]
	load     atomic.Pointer[Load]
	models   atomic.Pointer[[]Model]
	instance atomic.Pointer[string]

	// Set by the registry, before anything runs; nil on a backend without one.
	suspected chan struct{} // holds one: several suspicions are one check
	relisted  func()        // the catalog is built anew
	changed   *Event        // of the state
}

// Terms are what may change of a backend while requests run. Never modified
// once a Backend has them.
type Terms struct {
	APIKey string // sent to the replica as "Authorization: Bearer"; empty: none

	MaxInFlight int     // sequences of ours on it at most; 0: no bound
	Weight      float64 // divides the cost of sending it something; 0 is 1

	// Transport carries requests to this replica. Probe carries the poller's and
	// the readiness checks': apart, so that a Transport with no connection left
	// does not make a busy replica look dead. New makes them the same.
	Transport http.RoundTripper
	Probe     http.RoundTripper
}

// plainTerms are those of a backend that was given none.
var plainTerms = new(Terms)

// New makes a backend that is Down until it was checked. An empty name becomes
// DefaultName; u comes from ParseURL.
func New(name string, u *url.URL, apiKey string, transport http.RoundTripper) *Backend {
	if name == "" {
		name = DefaultName(u)
	}
	b := &Backend{Name: name, URL: u}
	b.status.since = time.Now()
	b.SetTerms(Terms{APIKey: apiKey, Transport: transport, Probe: transport})
	return b
}

// Terms returns what holds now. Callers must not change it.
func (b *Backend) Terms() *Terms {
	if t := b.terms.Load(); t != nil {
		return t
	}
	return plainTerms
}

// SetTerms gives b other terms. A request that was sent goes on under those of
// its sending.
func (b *Backend) SetTerms(t Terms) { b.terms.Store(&t) }

// What a backend's state is made of. The checks and the operator each have bits
// of their own, so neither can undo, in whatever order they come, what the other
// has said.
const (
	healthy  = 1 << iota // by the last check
	drained              // by the operator's word
	retiring             // no longer in the configuration
)

// State reports whether the backend may take traffic.
func (b *Backend) State() State {
	switch s := b.standing.Load(); {
	case s == healthy:
		return Ready
	case s&(drained|retiring) != 0:
		return Draining
	}
	return Down
}

// SetState is for tests and simulations, which have no readiness checks.
func (b *Backend) SetState(s State) {
	b.status.mu.Lock()
	defer b.status.mu.Unlock()
	before := b.State()
	b.standing.Store([...]int32{Down: 0, Ready: healthy, Draining: healthy | drained}[s])
	b.status.checked = true
	b.status.stateWas(before, b)
}

// Drain lets the backend finish what it has and take nothing new, until Undrain.
func (b *Backend) Drain() { b.mark(drained, true) }

// Undrain ends a Drain. The backend is what its last check found, and is checked
// again at once. A Retire stands.
func (b *Backend) Undrain() { b.mark(drained, false) }

// Drained reports whether the operator's Drain stands.
func (b *Backend) Drained() bool { return b.standing.Load()&drained != 0 }

// Retire is Drain by the configuration, which no longer has the backend; Undrain
// does not end it. Its name and address are free for another.
func (b *Backend) Retire() { b.mark(retiring, true) }

// Restore ends a Retire: the configuration has the backend again.
func (b *Backend) Restore() { b.mark(retiring, false) }

// Retiring reports whether a Retire stands.
func (b *Backend) Retiring() bool { return b.standing.Load()&retiring != 0 }

func (b *Backend) mark(bit int32, on bool) {
	b.set(bit, on)
	b.suspect() // so that the change is told, and what comes back is looked at
}

// set reports whether the bit was another before.
func (b *Backend) set(bit int32, on bool) bool {
	b.status.mu.Lock()
	defer b.status.mu.Unlock()
	before := b.State()
	defer b.status.stateWas(before, b)
	if on {
		return b.standing.Or(bit)&bit == 0
	}
	return b.standing.And(^bit)&bit != 0
}

// Idle reports whether nothing of ours is in flight there.
func (b *Backend) Idle() bool { return b.InFlight.Load() == 0 && b.Instant.Load() == 0 }

// suspect asks for a check soon.
func (b *Backend) suspect() {
	select {
	case b.suspected <- struct{}{}:
	default: // there is one to come, or nobody who checks
	}
}

// Load returns the last good scrape, or nil while the load is unknown: before
// the first scrape, after three missed ones in a row, and without a /metrics.
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

// SetModels is for the readiness checks, and for tests that have none. The
// registry's catalog has the change when it returns.
func (b *Backend) SetModels(m []Model) {
	b.models.Store(&m)
	if b.relisted != nil {
		b.relisted()
	}
}

// InstanceHeader names the proxies that a request has passed, each by a random id.
// In the response to a health check that has it, it names the proxy that
// answers.
const InstanceHeader = "X-Warmroute-Instance"

// Instance returns the id of the proxy that answered the last health check; empty:
// it was no proxy of this kind.
func (b *Backend) Instance() string {
	if id := b.instance.Load(); id != nil {
		return *id
	}
	return ""
}

// get asks the replica for a path below its prefix, without following redirects,
// as the proxy with that instance id, if it is not empty. The caller closes the
// body; ctx ends the reading of it too.
func (b *Backend) get(ctx context.Context, path, accept, instance string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, b.URL.JoinPath(path).String(), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", accept)
	// Said outright, or net/http's transport asks for gzip, and a replica would
	// spend its event loop's time on it.
	req.Header.Set("Accept-Encoding", "identity")
	if instance != "" {
		req.Header[InstanceHeader] = []string{instance}
	}
	terms := b.Terms()
	if terms.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+terms.APIKey)
	}
	res, err := terms.Probe.RoundTrip(req)
	if stale := (*transport.StaleError)(nil); errors.As(err, &stale) {
		req.Close = true // on a connection of its own
		res, err = terms.Probe.RoundTrip(req)
	}
	return res, err
}

// Model is one card of a replica's /v1/models.
type Model struct {
	ID     string
	Root   string // what the engine loaded: the same for every alias of a model
	Parent string // the base model's ID when this is a LoRA adapter, else empty
	Card   []byte // the card's JSON as the replica wrote it, every field kept

	MaxTokens int // max_model_len: prompt and answer together; 0: not said

	lasting string // the card without what vLLM makes up for each answer; see parseModels
}

// Load is one scrape of a replica's /metrics, engines of a data-parallel server
// taken together. Never modified once published. A Known flag that is false
// means that the replica did not say: never read its value as 0.
type Load struct {
	Running, Waiting int
	QueuesKnown      bool // Running and Waiting were there

	WaitingForCapacity int // part of Waiting that means overload; all of Waiting on versions that don't tell

	KVCacheUsage float64 // 0 to 1, despite the "_perc" in vLLM's name
	KVKnown      bool

	// CacheTokens is the KV cache's size in tokens, summed over engines; 0 when unknown.
	CacheTokens int
	BlockSize   int // tokens; 0 when unknown
	// HitAlignment is what a hit is a multiple of, in tokens: cache_hit_alignment_tokens
	// where the replica says it (hybrid models), else BlockSize; 0 when unknown.
	HitAlignment int
	// PrefixCachingOff is true only when the replica says that it caches no prefixes.
	PrefixCachingOff bool

	PrefixQueries, PrefixHits float64 // counters, in tokens
	PrefixKnown               bool

	PromptTokens, GenerationTokens float64 // counters; they move while the engine makes progress
	TokensKnown                    bool    // both were there

	Asleep      bool      // engine_sleep_state says anything but awake
	AsleepSince time.Time // when the first scrape in a row that says so was sent

	RunningAdapters []string // LoRA adapters with running requests, by the newest vllm:lora_requests_info
	MaxAdapters     int      // that can have running requests at once; 0 when unknown

	// StepTokens is the highest filled bucket of vllm:iteration_tokens_total:
	// about the scheduler's token budget for a step; 0 when unknown.
	StepTokens int

	StartTime float64 // process_start_time_seconds; 0 when absent

	OwnInFlight int64     // our InFlight before or after the scrape, whichever was more
	ScrapedAt   time.Time // when it was sent
}
