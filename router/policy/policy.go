// Package policy has the policy that chooses a request's backend, Prefix, and what
// other policies implement. Those that warmroute is compared with are in lab/policies.
package policy

import (
	"time"

	"warmroute/prompt"
	"warmroute/router/step"
)

// Policy chooses among candidates. The Router calls it under its lock, so a
// policy may keep state without one of its own.
type Policy interface {
	// Choose returns an index into candidates, of which there is at least one. It
	// retains neither argument. A request that has to wait is chosen for again, and
	// may be sent to another candidate than the one chosen first.
	Choose(r *Request, candidates []Candidate) (index int)
}

// Recorder is a Policy that remembers what it sent where.
type Recorder interface {
	// RecordSent records that a request is sent to a candidate. It retains neither argument.
	RecordSent(r *Request, c *Candidate)
}

// Forgetter is a Policy that keeps state by slot. ForgetBackend removes the state of one
// slot, whose next backend then starts with none.
type Forgetter interface{ ForgetBackend(slot int) }

// ConversationTracker is a Policy that knows which conversations are under way.
type ConversationTracker interface {
	// LaterTurnProbability returns how likely another turn follows one.
	LaterTurnProbability() float64
}

// Settings tune the policies that read them; see Definition.Settings. Zero is the policy's own default, which is that of
// the router it comes from.
type Settings struct {
	// ClientAffinity is of session: the requests of a client's address that name no conversation go to the same backend.
	ClientAffinity bool `mapstructure:"client_affinity"`
	// MatchRatio is the share of the prompt that must match for a backend to be chosen for it, and MatchTokens how many of
	// its tokens must match as well; 0 tokens: no minimum.
	MatchRatio  float64 `mapstructure:"match_ratio" range:"0..1"`
	MatchTokens int     `mapstructure:"match_tokens" range:"0..10000000"`
	// ImbalanceAbs is the difference in requests in flight between the most and the least loaded backend, above which only
	// load counts, and ImbalanceRatio their ratio; where a policy has both, both must be exceeded.
	ImbalanceAbs   float64 `mapstructure:"imbalance_abs" range:"0..1048576"`
	ImbalanceRatio float64 `mapstructure:"imbalance_ratio" range:"0|1..1048576"`
	LoadFactor     float64 `mapstructure:"load_factor" range:"0|1..1048576"` // most requests in flight of a chosen backend, over the mean

	// Eviction of policy ray: a backend whose tree has more characters than the threshold is evicted down to the
	// target; 0: nothing is evicted.
	EvictionThreshold int           `mapstructure:"eviction_threshold" range:"0..1099511627776"`
	EvictionTarget    int           `mapstructure:"eviction_target" range:"0..1099511627776"`
	EvictionInterval  time.Duration `mapstructure:"eviction_interval" range:"0|1s.."` // between two checks

	// AttentionCost is the share by which each token before it makes a token more expensive to prefill; below 0: none does.
	AttentionCost float64 `mapstructure:"-"`
}

// Request is what policies know about a request. Counts of tokens are estimates.
type Request struct {
	Now          time.Time
	Blocks       []prompt.Block // full blocks of the prompt; none if the endpoint has no prefix to match
	BlockTokens  float64        // tokens in a block
	PromptTokens float64
	PromptKey    uint64 // hash of the model and the beginning of the first user message; 0: none
	Turn         prompt.TurnKind
	Retry        bool   // it was sent to another backend before
	Conversation uint64 // hash of the conversation's name; 0: none
	Client       uint64 // hash of the client's address; 0: unknown
	Tenant       uint64 // whose conversations have nothing in common with those of others

	DueSeconds         float64 // until its first token is due, above 0; 0: it has no target
	Waiting            float64 // requests in the admission queue
	MeanOutputTokens   float64 // L̂: mean length of outputs; 0 before the first
	MeanUncachedTokens float64 // mean uncached tokens of earlier requests, where they were sent; 0 before the first

	// Trace makes Choose a dry run, which fills it and changes nothing; nil when the request is to be sent.
	Trace *Trace
}

// FirstBlock returns the first block of the prompt, or 0.
func (r *Request) FirstBlock() uint64 {
	if len(r.Blocks) == 0 {
		return 0
	}
	return uint64(r.Blocks[0])
}

// Candidate is one backend that could take the request. Counts of tokens are estimates.
type Candidate struct {
	Slot     int     // identifies the backend until ForgetBackend
	NameHash uint64  // xxh3 of the backend's name
	Weight   float64 // by which the operator has its cost divided; 1 by default
	Device   int     // candidates with the same one share their hardware; 0: it has its own

	MatchedTokens   float64 // prompt tokens that it likely has cached
	OffloadedTokens float64 // of these, those that it likely has in host memory, on a disk or in a store only
	UncachedTokens  float64 // u: prompt tokens that it would have to compute
	PrefillSeconds  float64 // p: that these take
	// CheckpointSeconds is, for models that keep checkpoints, the prefill of what other candidates hold of the prompt and this one does
	// not, if it will be computed again: see decide.Fleet.priceCheckpoints.
	CheckpointSeconds float64
	StepSeconds       float64     // that the steps in which they are computed take beside that, and what a request takes beside its steps
	QueuedSeconds     float64     // W: that the prefills take which were sent to it before and are not over
	FetchSeconds      float64     // that it takes to fetch OffloadedTokens, after those of the requests that were sent to it before
	AdapterSeconds    float64     // that it takes to load the request's LoRA adapter
	KVWaitSeconds     float64     // that the request waits for room in its KV cache; 0 unless Definition.NeedsKVWait
	InFlight          float64     // n: sequences on it, other clients' included
	ContextTokens     float64     // K: tokens in the contexts of the sequences in flight
	KVTokens          float64     // distinct ones of these, in its KV cache
	Engines           float64     // data-parallel engines of the replica, at least 1
	Step              *step.Model // how long the steps of one engine take
	PrefillRate       float64     // prefill tokens a second, as learned

	// What a router that only counts would know of its own requests: how many are in
	// flight, and the uncached tokens of those without a first event, whatever time
	// has passed; and the AttendedTokens of these. All are divided by Weight.
	Requests, UnstartedTokens, UnstartedAttention float64

	// As the replica last reported; 0 while unknown.
	Waiting     float64
	KVUsage     float64 // 0 to 1
	CacheTokens float64 // size of its KV cache
	// EngineCacheTokens is the size of one of its data-parallel engines' caches.
	EngineCacheTokens float64
}

// AttendedTokens returns how many tokens the last uncachedTokens of a prompt attend to, all together: each
// to those before it.
func AttendedTokens(promptTokens, uncachedTokens float64) float64 {
	return uncachedTokens * max(0, promptTokens-uncachedTokens/2)
}

// WaitSeconds returns how long the request waits before its prefill begins.
func (c *Candidate) WaitSeconds() float64 {
	return c.QueuedSeconds + c.FetchSeconds + c.AdapterSeconds + c.KVWaitSeconds
}

// TTFT returns the expected time to the first token of the request, in seconds.
func (c *Candidate) TTFT() float64 { return c.WaitSeconds() + c.PrefillSeconds + c.StepSeconds }

// Trace is what a dry run of Choose reports of its choice. Chance is drawn from as ever: a caller that
// wants the next Choose to draw the same restores its source.
type Trace struct {
	Criterion   string    // what the last deciding step compares, in words
	Scores      []float64 // by candidate; nil: the policy compares none
	HighestWins bool      // else the lowest score wins
	Terms       [][]Term  // by candidate, of the policy prefix; nil for others
}

// Term is a named part of a cost.
type Term struct {
	Name    string  `json:"name"`
	Seconds float64 `json:"seconds"`
}
