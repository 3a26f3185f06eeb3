package replay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"warmroute/router"
	"warmroute/router/policy"
	"warmroute/sim/engine"
)

// Pooled is the name of the reference that no real fleet can follow: one cache
// of the fleet's size shared by all replicas, and each request sent at its
// arrival to the one with the fewest tokens left to prefill.
const Pooled = "pooled"

// Scenario is one run in virtual time: a fleet of simulated replicas, a workload
// and a policy. The router is the real one, with a clock of the run's own. The
// same scenario gives the same Summary, to the last digit.
type Scenario struct {
	Backends int
	KVTokens int           // of each replica; 0: as the workload has it, else 1,536,000
	Engine   engine.Config // of each replica, but for KVTokens, the block size and Speed
	Speeds   []float64     // of the replicas, by place; those not named have 1

	Policy   string // one of policy.Names(), or Pooled
	Settings policy.Settings
	Hold     router.QueueSettings
	SLO      time.Duration

	PollInterval time.Duration // 0: the policy's own where its home has one, else 1 s
	PollLag      time.Duration // by which a poll's numbers are old when the router sees them

	NonStreaming float64 // share of the requests whose first event the router does not see
	NoUsage      bool    // answers carry no usage
	IndexFactor  float64 // the replicas report this multiple of their KV cache's size; 0 is 1
	TextSpread   float64 // share by which the bytes of a token differ from 4 between prompts: 0.25 is 3 to 5
	NoLearning   bool    // the router takes what replicas report for the truth
	Evictions    float64 // further blocks that each block allocated evicts, unseen by anyone

	Changes  []Change
	Foreign  []Foreign
	Workload Workload
	Seed     uint64

	// Progress, which may be nil, is called now and then with the number of
	// requests that have ended and that of all.
	Progress func(done, total int)
}

// Change is something that happens to one backend of the fleet.
type Change struct {
	At      time.Duration
	Backend int // its place in the fleet, from 0
	What    WhatChanges
	Away    time.Duration // of Restart and Freeze: until the replica serves again
}

// WhatChanges is a kind of Change.
type WhatChanges int

const (
	// Join makes a backend ready. One whose first change it is was not there before.
	Join WhatChanges = iota
	// Leave lets a backend finish what it has and gives it nothing new, until it
	// joins again. One that leaves while it restarts does not come back either.
	Leave
	// Restart loses a replica's cache, and the requests it has: they are sent
	// again, elsewhere.
	Restart
	// Freeze makes a replica accept requests and put out nothing for a while.
	Freeze
)

// Foreign is a client that bypasses the router. Its requests share no prefix.
type Foreign struct {
	Backends       []int   // that it sends to, any of them at a time, by place in the fleet
	Rate           float64 // requests a second in all, at random times
	Prompt, Answer int     // tokens
	From, Until    time.Duration
}

const (
	defaultKVTokens = 1_536_000
	defaultPoll     = time.Second
	// fastPoll is how often a backend is polled that has foreign load or
	// requests waiting, as the Poller does it.
	fastPoll = 250 * time.Millisecond
)

func (s *Scenario) pollInterval() time.Duration {
	def, _ := policy.Lookup(s.Policy) // there is none for Pooled
	return cmp.Or(s.PollInterval, def.PollInterval, defaultPoll)
}

// Run plays the scenario to its end or until ctx has ended.
func (s *Scenario) Run(ctx context.Context) (Summary, error) {
	if err := s.check(); err != nil {
		return Summary{}, err
	}
	requests, err := s.Workload.Requests(s.Backends, s.Seed)
	if err != nil {
		return Summary{}, fmt.Errorf("workload: %w", err)
	}
	r, err := newRun(s, requests)
	if err != nil {
		return Summary{}, err
	}
	if err := r.play(ctx); err != nil {
		return Summary{}, err
	}
	return r.summary(), nil
}

func (s *Scenario) check() error {
	switch {
	case s.Backends < 1:
		return fmt.Errorf("a fleet needs at least one backend, not %d", s.Backends)
	case len(s.Speeds) > s.Backends:
		return fmt.Errorf("%d speeds for %d backends; name one for each at most", len(s.Speeds), s.Backends)
	case s.Workload == nil:
		return errors.New("a scenario needs a workload")
	case s.Policy == Pooled && len(s.Changes)+len(s.Foreign) > 0:
		return errors.New("the policy pooled knows neither changes nor foreign clients")
	}
	if err := s.checkQuantities(); err != nil {
		return err
	}
	for i, v := range s.Speeds {
		if !(v > 0 && v <= 1000) {
			return fmt.Errorf("speed %g of backend %d is not above 0 and at most 1,000", v, i)
		}
	}
	for _, c := range s.Changes {
		if c.Backend < 0 || c.Backend >= s.Backends {
			return fmt.Errorf("a change of backend %d, where the last one is %d", c.Backend, s.Backends-1)
		}
	}
	for _, f := range s.Foreign {
		if f.Rate <= 0 || f.Prompt < 1 || f.Answer < 1 || len(f.Backends) == 0 {
			return errors.New("a foreign client needs backends, a rate, and tokens of prompt and answer")
		}
		for _, b := range f.Backends {
			if b < 0 || b >= s.Backends {
				return fmt.Errorf("a foreign client of backend %d, where the last one is %d", b, s.Backends-1)
			}
		}
	}
	return nil
}

// checkQuantities refuses what would make a run endless, or its times no times.
func (s *Scenario) checkQuantities() error {
	switch {
	case !(s.IndexFactor >= 0 && s.IndexFactor <= 1000):
		return fmt.Errorf("an index factor of %g is not between 0 and 1,000", s.IndexFactor)
	case !(s.Evictions >= 0 && s.Evictions <= 1000):
		return fmt.Errorf("%g further evictions are not between 0 and 1,000", s.Evictions)
	case !(s.Engine.QuadraticDepth >= 0 && s.Engine.QuadraticDepth <= 1):
		return fmt.Errorf("a quadratic term of %g is not between 0 and 1", s.Engine.QuadraticDepth)
	case !(s.TextSpread >= 0 && s.TextSpread < 1):
		return fmt.Errorf("a spread of text of %g is not a share from 0 and below 1", s.TextSpread)
	case s.PollInterval != 0 && s.PollInterval < time.Millisecond:
		return fmt.Errorf("a poll every %v is more often than every millisecond", s.PollInterval)
	case s.PollLag < 0:
		return fmt.Errorf("polls cannot be seen %v before they were made", -s.PollLag)
	}
	return nil
}
