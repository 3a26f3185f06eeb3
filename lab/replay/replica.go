package replay

import (
	"cmp"
	"fmt"
	"net/url"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/kvevents"
	"warmroute/lab/sim/engine"
)

// replica is a simulated server and the router's record of it.
type replica struct {
	backend  *backends.Backend
	config   engine.Config // of each rank
	ranks    []rank
	balancer *engine.Balancer

	follower *kvevents.Follower // nil: the router does not read its KV events
	requests []*request         // in flight, in no order
	epoch    int                // number of restarts
	started  time.Duration      // of the process
	down     bool               // not joined yet, removed or restarting
	removed  bool               // has left and not joined again: a restart does not bring it back

	frozenUntil   time.Duration  // no step ends before
	lastStartTime float64        // of the last poll
	misses        int            // failed polls in a row
	polled        *backends.Load // by the last poll that was completed
	pollAt        time.Duration  // the next poll; another event of one is void
	pollInterval  time.Duration  // until it, without jitter; 0: that of the settings
}

// rank is one of the engines of a replica.
type rank struct {
	engine   *engine.Engine
	stepping bool              // a step is scheduled
	step     engine.StepResult // of the current step
	since    time.Duration     // the beginning of that step
	device   deviceShare
}

// newFleet returns the replicas of a scenario, all Ready.
func newFleet(s *Scenario, requests *Requests) []*replica {
	fleet := make([]*replica, s.Backends)
	ranks := max(1, s.Ranks)
	var all []engine.Config // of each rank of each replica
	var host *engine.HostTier
	if s.SharedHost {
		host = engine.NewHostTier(s.Backends * ranks * s.Engine.HostKVTokens / requests.BlockTokens)
	}
	for i := range fleet {
		c := s.engineConfig(requests)
		c.SharedHost = host
		c.Seed += uint64(i)
		if i < len(s.Speeds) {
			c.Speed = s.Speeds[i]
		}
		all = append(all, slices.Repeat([]engine.Config{c}, ranks)...)
		b := backends.New(fmt.Sprintf("b%d", i), &url.URL{}, "", nil)
		b.Slot = i
		b.SetOptions(backends.Options{Device: s.deviceName(i), Role: s.role(i)})
		b.SetVersion("simulated")
		b.SetState(backends.Ready)
		fleet[i] = &replica{backend: b, config: c}
	}
	if s.Policy == Pooled {
		engines := engine.NewWithSharedCache(all...)
		for i, p := range fleet {
			p.setEngines(engines[i*ranks : (i+1)*ranks])
		}
		return fleet
	}
	for _, p := range fleet {
		p.startEngines(ranks)
	}
	return fleet
}

// engineConfig returns the configuration of each rank of a replica of speed 1.
func (s *Scenario) engineConfig(requests *Requests) engine.Config {
	c := s.Engine
	c.BlockSize = requests.BlockTokens
	c.KVTokens = cmp.Or(s.KVTokens, requests.KVTokens, defaultKVTokens)
	c.HiddenEvictions, c.KVEvents = s.Evictions, s.KVEvents
	return c.WithDefaults()
}

// startEngines gives p so many new engines.
func (p *replica) startEngines(ranks int) {
	engines := make([]*engine.Engine, ranks)
	for i := range engines {
		engines[i] = engine.New(p.config)
	}
	p.setEngines(engines)
}

func (p *replica) setEngines(engines []*engine.Engine) {
	p.ranks = make([]rank, len(engines))
	for i, e := range engines {
		p.ranks[i].engine = e
	}
	p.balancer = engine.NewBalancer(engines)
}

// reportedLoad returns what the replica's /metrics would report. cacheSizeFactor is the
// reported size of the KV cache over the true one.
func (p *replica) reportedLoad(now time.Time, cacheSizeFactor float64) *backends.Load {
	var st engine.Stats // as the proxy adds up the engines' metrics
	usage := 0.0        // mean
	for i := range p.ranks {
		of := p.ranks[i].engine.Stats()
		st.Add(of)
		usage += of.KVUsage / float64(len(p.ranks))
	}
	size := len(p.ranks) * p.config.ReportedKVTokens(maxModelLen)
	pool := 0
	if p.config.Groups.IsHybrid() {
		pool = len(p.ranks) * p.config.KVTokens
	}
	return &backends.Load{
		KeepsCheckpoints: p.config.Groups.IsHybrid(), AlignsStates: p.config.Groups.States > 0, PoolTokens: int(cacheSizeFactor * float64(pool)),
		Running: st.Running, Waiting: st.Waiting, QueuesKnown: true,
		WaitingForCapacity: st.Waiting,
		KVCacheUsage:       usage, KVKnown: true,
		Engines:          len(p.ranks),
		CacheTokens:      int(cacheSizeFactor * float64(size)),
		TransfersKV:      true,
		BlockSize:        p.config.BlockSize,
		HitAlignment:     p.config.BlockSize,
		PrefixCachingOff: p.config.NoPrefixCache,
		PrefixQueries:    float64(st.PrefixQueries), PrefixHits: float64(st.PrefixHits + st.HostHits), PrefixKnown: true,
		HostHits: float64(st.HostHits), HostHitsKnown: true,
		PromptTokens: float64(st.PromptTokens), GenerationTokens: float64(st.GenerationTokens), TokensKnown: true,
		Gaps: float64(st.Gaps), GapSeconds: st.GapSeconds,
		StartTime:   startUnix + p.started.Seconds(),
		OwnInFlight: p.backend.InFlight.Load(),
		PolledAt:    now,
	}
}

// removeRequest removes f from requests. It does not abort it in the engine.
func (p *replica) removeRequest(f *request) {
	last := len(p.requests) - 1
	p.requests[f.listIndex] = p.requests[last]
	p.requests[f.listIndex].listIndex = f.listIndex
	p.requests[last] = nil
	p.requests = p.requests[:last]
}

// reportProgressToRouter reports output to the router if a proxy would see any. The router
// counts by backend, so one request is enough.
func (p *replica) reportProgressToRouter() {
	for _, f := range p.requests {
		if f.started && f.routed.Streams && f.decision != nil {
			f.decision.RecordOutput()
			return
		}
	}
}

// applyChange applies a change of the scenario.
func (r *run) applyChange(c Change) {
	p := r.fleet[c.Backend]
	switch c.Kind {
	case Join:
		p.removed = false
		r.setReady(c.Backend)
	case Leave:
		p.removed = true
		p.backend.SetState(backends.Draining)
		if len(p.requests) == 0 {
			p.setDown()
		}
	case Restart:
		p.setDown()
		p.epoch++
		p.startEngines(len(p.ranks))
		if r.sharing != nil {
			r.shareDevice(c.Backend)
		}
		p.restartKVEvents()
		p.started = r.now + c.Away
		r.abortAndRetryRequests(p)
		r.events.push(event{at: r.now + c.Away, kind: eventRestarted, index: c.Backend, epoch: p.epoch})
	case Freeze:
		p.frozenUntil = r.now + c.Away
	}
}

// setDown makes a replica refuse requests.
func (p *replica) setDown() {
	p.down = true
	p.backend.SetState(backends.Down)
}

// setReady makes a backend serve.
func (r *run) setReady(index int) {
	p := r.fleet[index]
	p.down = false
	p.backend.SetState(backends.Ready)
	r.router.BackendStateChanged(p.backend)
}

// firstRank returns the index of the first backend of the server that a backend is a part of: it is polled for all.
func (r *run) firstRank(index int) int { return index - index%r.routedRanks }

// pollReplica polls a server by its first backend, as backends.Poller does, and schedules the next poll.
func (r *run) pollReplica(index int) {
	p := r.fleet[index]
	if !p.down {
		for i := index; i < index+r.routedRanks; i++ {
			p = r.fleet[i]
			p.misses = 0
			l := p.reportedLoad(wallTime(r.now), r.reportedFactor)
			r.events.push(event{at: r.now + r.PollLag, kind: eventLoad, index: i, epoch: p.epoch, load: l})
		}
		return
	}
	const maxMissedPolls = 3
	if p.misses++; p.misses == maxMissedPolls {
		p.backend.SetLoad(nil)
	}
	r.scheduleNextPoll(index, false)
}

// deliverPolledLoad passes the result of a poll to the router, which forgets the cache of a
// replica that was restarted.
func (r *run) deliverPolledLoad(index int, l *backends.Load) {
	p := r.fleet[index]
	if r.HostHitsUnknown {
		l.HostHits, l.HostHitsKnown = 0, false
	}
	p.backend.SetLoad(l)
	if p.lastStartTime != 0 && p.lastStartTime != l.StartTime {
		r.router.ForgetCache(p.backend)
	}
	p.lastStartTime = l.StartTime
	r.router.ObserveLoad(p.backend, l)
}

// scheduleNextPoll schedules the poll after one of a server by its first backend that was completed, or failed.
func (r *run) scheduleNextPoll(index int, completed bool) {
	settings := backends.PollSettings{Interval: r.pollEvery, FastInterval: min(r.pollEvery, fastPoll)}
	p := r.fleet[index]
	interval := settings.NextInterval(p.pollInterval, nil, false)
	for i := index; completed && i < index+r.routedRanks; i++ {
		part := r.fleet[i]
		needed := settings.NextInterval(p.pollInterval, part.polled, r.router.IsLoadExpected(part.backend))
		if i == index || needed < interval {
			interval = needed
		}
	}
	p.pollInterval = interval
	r.schedulePoll(index, r.now+r.jitter(interval))
}

// schedulePoll schedules a replica's next poll, instead of one that was scheduled.
func (r *run) schedulePoll(index int, at time.Duration) {
	p := r.fleet[index]
	p.pollAt = at
	r.events.push(event{at: at, kind: eventPoll, index: index})
}

// requestPoll does what backends.Backend.RequestPoll does. It is for a replica that has just
// been sent its only request in flight.
func (r *run) requestPoll(index int) {
	index = r.firstRank(index)
	p := r.fleet[index]
	p.pollInterval = 0
	if at := r.now + r.jitter(r.pollEvery); at < p.pollAt {
		r.schedulePoll(index, at)
	}
}

// sendExternalRequest sends a request of an external client straight to a replica,
// and schedules the client's next one.
func (r *run) sendExternalRequest(client int) {
	f := &r.External[client]
	if f.Until > 0 && r.now > f.Until {
		return
	}
	target := f.Backends[r.random.IntN(len(f.Backends))]
	if p := r.fleet[target]; !p.down {
		q := &engine.Request{Prompt: f.Prompt, Output: f.Output}
		// One too long for the cache is refused.
		rank := p.balancer.Choose(r.now)
		if p.ranks[rank].engine.Add(q, r.now) == nil {
			r.startSteppingIfIdle(target, rank)
		}
	}
	r.events.push(event{at: r.now + drawInterval(r.random, f.Rate), kind: eventExternal, index: client})
}
