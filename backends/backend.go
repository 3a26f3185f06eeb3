// Package backends knows the vLLM servers the router may use: which there are,
// whether they are ready, which models they list, and what their /metrics say.
// It records no metrics of ours and knows no HTTP handler.
package backends

import (
	"context"
	"net/http"
	"net/url"
	"sync/atomic"
	"time"
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
	Name   string
	URL    *url.URL // scheme, host and an optional path prefix without a trailing slash
	APIKey string   // sent to the replica as "Authorization: Bearer"; empty: none

	// Slot is this backend's place in its Registry, 0 to Len-1. The index and
	// the router keep what they know of a backend under it.
	Slot int

	// By the operator's word; set before anything runs.
	MaxInFlight int     // sequences of ours on it at most; 0: no bound
	Weight      float64 // divides the cost of sending it something; 0 is 1

	// Transport carries requests to this replica. Probe carries the poller's and
	// the readiness checks': apart, so that a Transport with no connection left
	// does not make a busy replica look dead. New makes them the same.
	Transport http.RoundTripper
	Probe     http.RoundTripper

	// InFlight counts sequences that we sent and that have not ended.
	InFlight atomic.Int64

	// TellsCached is set once an answer said how much of its prompt came from the
	// cache. From then on an answer that leaves it out means none did.
	TellsCached atomic.Bool

	state  atomic.Int32
	load   atomic.Pointer[Load]
	models atomic.Pointer[[]Model]

	// Set by NewRegistry, before anything runs; nil on a backend without one.
	suspected chan struct{} // holds one: several suspicions are one check
	relisted  func()        // the catalog is built anew
}

// New makes a backend that is Down until it was checked. An empty name becomes
// DefaultName; u comes from ParseURL.
func New(name string, u *url.URL, apiKey string, transport http.RoundTripper) *Backend {
	if name == "" {
		name = DefaultName(u)
	}
	return &Backend{Name: name, URL: u, APIKey: apiKey, Transport: transport, Probe: transport}
}

// State reports whether the backend may take traffic.
func (b *Backend) State() State { return State(b.state.Load()) }

// SetState is for the readiness checks, and for tests that have none.
func (b *Backend) SetState(s State) { b.state.Store(int32(s)) }

// transition moves to Ready or Down and reports whether that was a change.
// Draining is the operator's word and stays, also when it comes at this moment.
func (b *Backend) transition(to State) bool {
	from := b.State()
	return from != Draining && from != to && b.state.CompareAndSwap(int32(from), int32(to))
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

// get asks the replica for a path below its prefix, without following
// redirects. The caller closes the body; ctx ends the reading of it too.
func (b *Backend) get(ctx context.Context, path, accept string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, b.URL.JoinPath(path).String(), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", accept)
	// Said outright, or net/http's transport asks for gzip, and a replica would
	// spend its event loop's time on it.
	req.Header.Set("Accept-Encoding", "identity")
	if b.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+b.APIKey)
	}
	return b.Probe.RoundTrip(req)
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

	Asleep bool // engine_sleep_state says anything but awake

	RunningAdapters []string // LoRA adapters with running requests, by the newest vllm:lora_requests_info
	MaxAdapters     int      // that can have running requests at once; 0 when unknown

	// StepTokens is the highest filled bucket of vllm:iteration_tokens_total:
	// about the scheduler's token budget for a step; 0 when unknown.
	StepTokens int

	StartTime float64 // process_start_time_seconds; 0 when absent

	OwnInFlight int64     // our InFlight before or after the scrape, whichever was more
	ScrapedAt   time.Time // when it was sent
}
