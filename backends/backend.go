// Package backends knows the vLLM servers the router may use: which there are,
// whether they are ready, which models they list, and what their /metrics say.
// It records no metrics of ours and knows no HTTP handler.
package backends

import (
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

	// Transport carries every request to this replica: the poller's, the
	// readiness checks', and the relay's.
	Transport http.RoundTripper

	// InFlight counts sequences that we sent and that have not ended.
	InFlight atomic.Int64

	state  atomic.Int32
	load   atomic.Pointer[Load]
	models atomic.Pointer[[]Model]
}

// State reports whether the backend may take traffic.
func (b *Backend) State() State { return State(b.state.Load()) }

// SetState is for the readiness checks, and for tests that have none.
func (b *Backend) SetState(s State) { b.state.Store(int32(s)) }

// Load returns the last good scrape, or nil while there was none.
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

// SetModels is for the readiness checks, and for tests that have none.
func (b *Backend) SetModels(m []Model) { b.models.Store(&m) }

// Model is one card of a replica's /v1/models.
type Model struct {
	ID     string
	Root   string // what the engine loaded: the same for every alias of a model
	Parent string // the base model's ID when this is a LoRA adapter, else empty
	Card   []byte // the card's JSON as the replica wrote it, every field kept
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
	// PrefixCachingOff is true only when the replica says that it caches no prefixes.
	PrefixCachingOff bool

	PrefixQueries, PrefixHits float64 // counters, in tokens
	PrefixKnown               bool

	PromptTokens, GenerationTokens float64 // counters; they move while the engine makes progress

	Asleep bool // engine_sleep_state says anything but awake

	RunningAdapters []string // newest vllm:lora_requests_info

	// StepTokens is the highest filled bucket of vllm:iteration_tokens_total:
	// about the scheduler's token budget for a step; 0 when unknown.
	StepTokens int

	StartTime float64 // process_start_time_seconds; 0 when absent

	OwnInFlight int64 // our InFlight when the scrape was sent
	ScrapedAt   time.Time
}
