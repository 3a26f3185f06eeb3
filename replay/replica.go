package replay

import (
	"cmp"
	"fmt"
	"net/url"
	"time"

	"warmroute/backends"
	"warmroute/sim/engine"
)

// replica is a simulated engine and the router's record of it.
type replica struct {
	backend *backends.Backend
	config  engine.Config
	engine  *engine.Engine

	running bool              // a step is under way
	step    engine.StepResult // that one
	flights []*flight         // sent here and not ended, in no order
	epoch   int               // counts restarts
	started time.Duration     // when the process was
	away    bool              // not there yet, gone, or restarting
	left    bool              // and has not joined again: no restart brings it back

	frozen time.Duration // until then no step ends

	seenStart float64 // start time that the last poll told
	misses    int     // polls in a row without an answer
}

// newFleet makes the replicas, each Ready.
func newFleet(s *Scenario, requests *Requests) []*replica {
	configs := make([]engine.Config, s.Backends)
	for i := range configs {
		c := s.Engine
		c.BlockSize = requests.BlockTokens
		c.KVTokens = cmp.Or(s.KVTokens, requests.KVTokens, defaultKVTokens)
		c.HiddenEvictions = s.Evictions
		if i < len(s.Speeds) {
			c.Speed = s.Speeds[i]
		}
		configs[i] = c
	}
	fleet := make([]*replica, s.Backends)
	for i := range fleet {
		b := backends.New(fmt.Sprintf("b%d", i), &url.URL{}, "", nil)
		b.Slot = i
		b.SetState(backends.Ready)
		fleet[i] = &replica{backend: b, config: configs[i]}
	}
	if s.Policy == Pooled {
		for i, e := range engine.NewPooled(configs...) {
			fleet[i].engine = e
		}
		return fleet
	}
	for _, p := range fleet {
		p.engine = engine.New(p.config)
	}
	return fleet
}

// scrape is what the replica's /metrics would say. told is the size of the KV
// cache that it reports, over the true one.
func (p *replica) scrape(now time.Time, told float64) *backends.Load {
	st := p.engine.Stats()
	size := p.config.KVTokens / p.config.BlockSize * p.config.BlockSize
	return &backends.Load{
		Running: st.Running, Waiting: st.Waiting, QueuesKnown: true,
		WaitingForCapacity: st.Waiting,
		KVCacheUsage:       st.KVUsage, KVKnown: true,
		CacheTokens:      int(told * float64(size)),
		BlockSize:        p.config.BlockSize,
		HitAlignment:     p.config.BlockSize,
		PrefixCachingOff: p.config.NoPrefixCache,
		PrefixQueries:    float64(st.PrefixQueries), PrefixHits: float64(st.PrefixHits), PrefixKnown: true,
		PromptTokens: float64(st.PromptTokens), GenerationTokens: float64(st.GenerationTokens), TokensKnown: true,
		StepTokens:  st.LargestStep(),
		StartTime:   epoch + p.started.Seconds(),
		OwnInFlight: p.backend.InFlight.Load(),
		ScrapedAt:   now,
	}
}

// remove takes f out of the list of those that are under way.
func (p *replica) remove(f *flight) {
	last := len(p.flights) - 1
	p.flights[f.at] = p.flights[last]
	p.flights[f.at].at = f.at
	p.flights[last] = nil
	p.flights = p.flights[:last]
}

// progress tells the router that a piece of an answer has passed, where it can
// see one. It keeps account by backend, so one of them is as good as all.
func (p *replica) progress() {
	for _, f := range p.flights {
		if f.started && f.asked.Streams && f.decision != nil {
			f.decision.RecordOutput()
			return
		}
	}
}
