package replay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"warmroute/lab/policies"
	"warmroute/lab/sim/engine"
	"warmroute/router"
	"warmroute/router/policy"
)

// Pooled is the name of a reference that no real fleet can reach: all replicas share
// one cache of the fleet's size, and each request goes on arrival to the replica
// with the fewest tokens left to prefill.
const Pooled = "pooled"

// Scenario is one run in virtual time: a fleet of simulated replicas, a workload, a
// policy, and deviations from the ideal, which give it its many fields. The router
// is the real one with a virtual clock. The same scenario gives the same Summary, to
// the last digit.
type Scenario struct {
	Backends int
	KVTokens int // of each rank; 0: the workload's, else 1,536,000
	Ranks    int // data-parallel engines of each replica, behind one port, each with a cache of KVTokens; 0 is 1
	// RankRouting makes each rank a backend of the router; else the replica chooses the rank.
	RankRouting bool
	// Lockstep makes the ranks of a replica begin and end their steps together, as those of a mixture of experts do: one
	// without work waits for the others.
	Lockstep bool
	Engine   engine.Config // of each rank; KVTokens, the block size and Speed are set otherwise
	Speeds   []float64     // of the replicas; further ones have 1
	ModelOf  []int         // the model that each replica serves; nil: each serves all
	// Devices has the number of each replica's hardware: those with the same one share it. nil: each has its own.
	Devices        []int
	DevicesUnknown bool // the router is not told of Devices
	// Prefills replicas are for prefill, the first ones, and Decodes for decode, those after them; others do both.
	Prefills, Decodes int
	Split             Split

	Policy   string // one of policies.All().Names(), or Pooled
	Settings policy.Settings
	Queue    router.QueueSettings
	SLO      SLO

	PollInterval time.Duration // 0: that of the policy's origin if it has one, else 1 s
	PollLag      time.Duration // age of a poll's figures when the router gets them

	NonStreaming       float64 // share of requests that are not streamed
	NoUsage            bool    // responses have no usage
	IndexFactor        float64 // the replicas report this multiple of their KV cache's size; 0 is 1
	NamesConversations bool    // requests name their sessions; otherwise only under policies that need them
	BytesPerToken      float64 // of the text, on average; 0 is 4
	TextSpread         float64 // share by which bytes per token vary between prompts: 0.25 is 3 to 5 around 4
	NoLearning         bool    // the router trusts the reported cache sizes
	HostHitsUnknown    bool    // the replicas do not report which hits were in host memory
	SharedHost         bool    // the caches in host memory are one, which all replicas share
	KVEvents           bool    // the router reads the replicas' KV events
	Bypass             float64 // share of the sessions whose requests another client sends to replicas at random, past the router
	Evictions          float64 // further blocks that each allocated block evicts, invisible to the router

	CountRecomputed bool // count the tokens that are computed again

	Changes  []Change
	External []ExternalLoad
	Workload Workload
	Seed     uint64

	routedRanks int // of each server, that are Backends: one after another; 0 is 1

	// Progress, which may be nil, is called now and then with the number of requests
	// that have ended and of all.
	Progress func(done, total int)
}

// SLO is the target of requests for the time to first token. Low-priority requests have none.
type SLO struct {
	TTFT    time.Duration // 0: none
	Share   float64       // of the requests that have it, drawn at random; 0 is 1
	Refuse  bool          // the router refuses those that it predicts to miss it
	Unknown bool          // the router is not told of it; misses are counted all the same
}

// Change is an event in the life of one backend.
type Change struct {
	At      time.Duration
	Backend int // its index in the fleet, from 0
	Kind    ChangeKind
	Away    time.Duration // of Restart and Freeze: until the replica serves again
}

// ChangeKind is a kind of Change.
type ChangeKind int

const (
	// Join makes a backend ready. If it is the backend's first change, it was absent before.
	Join ChangeKind = iota
	// Leave drains a backend until it joins again, also one that is restarting.
	Leave
	// Restart loses a replica's cache and its requests, which are retried elsewhere.
	Restart
	// Freeze makes a replica accept requests and output nothing for a while.
	Freeze
)

// ExternalLoad is a client that bypasses the router. Its requests share no prefix.
type ExternalLoad struct {
	Backends       []int   // one of them, at random, gets each request
	Rate           float64 // requests per second, at random times
	Prompt, Output int     // tokens
	From, Until    time.Duration
}

const (
	defaultKVTokens = 1_536_000
	maxModelLen     = 131_072 // tokens, for which hybrid models report the size of their KV cache
	defaultPoll     = time.Second
	// fastPoll is backends.PollSettings.FastInterval.
	fastPoll = 250 * time.Millisecond
)

func (s *Scenario) bytesPerToken() float64 { return cmp.Or(s.BytesPerToken, CharsPerToken) }

func (s *Scenario) pollInterval() time.Duration {
	def, _ := policies.All().Lookup(s.Policy) // there is none for Pooled
	return cmp.Or(s.PollInterval, def.PollInterval, defaultPoll)
}

// namesConversations reports whether requests name their sessions.
func (s *Scenario) namesConversations() bool {
	def, _ := policies.All().Lookup(s.Policy) // there is none for Pooled
	return s.NamesConversations || def.NeedsConversation
}

// Run runs the scenario to its end or until ctx has ended.
func (s *Scenario) Run(ctx context.Context) (Summary, error) {
	if err := s.validate(); err != nil {
		return Summary{}, err
	}
	requests, err := s.Workload.Requests(s.Backends, s.Seed)
	if err != nil {
		return Summary{}, fmt.Errorf("workload: %w", err)
	}
	if err := s.engineConfig(requests).ValidateGroups(); err != nil {
		return Summary{}, err
	}
	if s.RankRouting {
		s = s.divideByRanks()
	}
	r, err := newRun(s, requests)
	if err != nil {
		return Summary{}, err
	}
	if err := r.processEvents(ctx); err != nil {
		return Summary{}, err
	}
	return r.summary(), nil
}

// divideByRanks returns the scenario with a backend for each rank of each replica.
func (s *Scenario) divideByRanks() *Scenario {
	divided := *s
	divided.Prefills, divided.Decodes = s.Prefills*max(1, s.Ranks), s.Decodes*max(1, s.Ranks)
	divided.Backends, divided.Ranks, divided.routedRanks, divided.Speeds, divided.ModelOf = s.Backends*max(1, s.Ranks), 1, max(1, s.Ranks),
		nil, nil
	for i := range divided.Backends {
		replica := i / max(1, s.Ranks)
		if replica < len(s.Speeds) {
			divided.Speeds = append(divided.Speeds, s.Speeds[replica])
		}
		if s.ModelOf != nil {
			divided.ModelOf = append(divided.ModelOf, s.ModelOf[replica])
		}
	}
	return &divided
}

func (s *Scenario) validate() error {
	switch {
	case s.Backends < 1:
		return fmt.Errorf("a fleet needs at least one backend, not %d", s.Backends)
	case s.Ranks < 0:
		return fmt.Errorf("%d ranks in a replica: give it at least one", s.Ranks)
	case s.ModelOf != nil && len(s.ModelOf) != s.Backends:
		return fmt.Errorf("%d models for %d backends; name one for each", len(s.ModelOf), s.Backends)
	case len(s.Speeds) > s.Backends:
		return fmt.Errorf("%d speeds for %d backends; name one for each at most", len(s.Speeds), s.Backends)
	case s.Workload == nil:
		return errors.New("scenario without a workload")
	case (s.RankRouting || s.Lockstep) && (s.Policy == Pooled || len(s.Changes)+len(s.External) > 0):
		return errors.New("ranks that are routed or step together allow neither changes, external clients nor policy pooled")
	case s.SharedHost && (s.KVEvents || s.Engine.HostKVTokens == 0):
		return errors.New("a shared cache in host memory needs a size, and allows no KV events")
	case s.Policy == Pooled && len(s.Changes)+len(s.External) > 0:
		return errors.New("policy pooled allows neither changes nor external clients")
	}
	if err := cmp.Or(s.validateQuantities(), s.validateDevices(), s.validateRoles()); err != nil {
		return err
	}
	for i, v := range s.Speeds {
		if !(v > 0 && v <= 1000) {
			return fmt.Errorf("speed %g of backend %d is not above 0 and at most 1,000", v, i)
		}
	}
	for _, c := range s.Changes {
		if c.Backend < 0 || c.Backend >= s.Backends {
			return fmt.Errorf("change of backend %d, where the last one is %d", c.Backend, s.Backends-1)
		}
	}
	for _, f := range s.External {
		if f.Rate <= 0 || f.Prompt < 1 || f.Output < 1 || len(f.Backends) == 0 {
			return errors.New("an external client needs backends, a rate, and prompt and output tokens")
		}
		for _, b := range f.Backends {
			if b < 0 || b >= s.Backends {
				return fmt.Errorf("external client of backend %d, where the last one is %d", b, s.Backends-1)
			}
		}
	}
	return nil
}

// validateQuantities checks the numbers that would make a run endless or invalid.
func (s *Scenario) validateQuantities() error {
	switch {
	case !(s.IndexFactor >= 0 && s.IndexFactor <= 1000):
		return fmt.Errorf("index factor %g is not between 0 and 1,000", s.IndexFactor)
	case !(s.Evictions >= 0 && s.Evictions <= 1000):
		return fmt.Errorf("evictions %g are not between 0 and 1,000", s.Evictions)
	case !(s.BytesPerToken >= 0 && s.BytesPerToken <= 32):
		return fmt.Errorf("%g bytes per token are not between 0 and 32", s.BytesPerToken)
	case !(s.TextSpread >= 0 && s.TextSpread < 1):
		return fmt.Errorf("text spread %g is not at least 0 and below 1", s.TextSpread)
	case s.PollInterval != 0 && s.PollInterval < time.Millisecond:
		return fmt.Errorf("poll interval %v is below 1ms", s.PollInterval)
	case s.PollLag < 0:
		return fmt.Errorf("poll lag %v is negative", s.PollLag)
	}
	return s.Engine.ValidateShares()
}
