package replay

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"warmroute/backends"
	"warmroute/kvevents/wire"
	"warmroute/lab/policies"
	"warmroute/lab/sim/engine"
	"warmroute/router"
)

const (
	// startUnix is when every run begins. The zero time would mean "never" in places.
	startUnix  = 1_800_000_000
	indexBytes = 8 << 30 // large enough never to limit a run
)

// wallTime returns the time of day at a virtual time of the run.
func wallTime(at time.Duration) time.Time { return time.Unix(startUnix, 0).Add(at) }

// run is a scenario in progress, in one goroutine.
type run struct {
	*Scenario
	reportedFactor     float64 // IndexFactor
	namesConversations bool    // requests name their sessions
	pollEvery          time.Duration
	routedRanks        int // Scenario.routedRanks
	requests           *Requests
	router             *router.Router // nil under Pooled
	fleet              []*replica
	all                []*backends.Backend
	byModel            [][]*backends.Backend // nil: each serves all models
	random             *rand.Rand            // of everything but the workload and the router

	now     time.Duration
	events  eventQueue
	groups  []stepGroup // of engines that step together; nil: each steps by itself
	sharing [][]int     // for each replica the indexes of all on its device; nil: each has its own
	opened  int         // of requests.Open that have arrived or are scheduled
	ticked  bool        // a tick is scheduled

	deliveries []delivery // by the router, not applied yet
	arrivals   int        // requests so far
	ended      int        // requests that have ended, whichever way
	last       time.Duration
	measured   measures
	computed   *computedBlocks // nil: what is computed again is not counted
	kvEvents   []wire.Event    // scratch of publishKVEvents
}

func modelName(model int) string { return "model-" + strconv.Itoa(model) }

// backendsOf returns the backends that serve a model.
func (r *run) backendsOf(model int) []*backends.Backend {
	if r.byModel == nil {
		return r.all
	}
	return r.byModel[model]
}

// delivery is the router's decision for a request.
type delivery struct {
	request  *request
	decision *router.Reservation
	err      error
}

func newRun(s *Scenario, requests *Requests) (*run, error) {
	r := &run{
		Scenario:           s,
		reportedFactor:     cmp.Or(s.IndexFactor, 1),
		routedRanks:        cmp.Or(s.routedRanks, 1),
		namesConversations: s.namesConversations(),
		pollEvery:          s.pollInterval(),
		requests:           requests,
		fleet:              newFleet(s, requests),
		sharing:            groupByDevice(s.Devices),
		random:             rand.New(rand.NewPCG(s.Seed, 1)),
		measured:           measures{timeline: newTimeline(s.Backends), target: s.SLO.TTFT},
	}
	if s.CountRecomputed {
		r.computed = &computedBlocks{blocks: make(map[engine.BlockHash]*computedBlock)}
	}
	if s.Lockstep {
		r.groups = newStepGroups(r.fleet, max(1, s.Ranks)*r.routedRanks)
	}
	for _, p := range r.fleet {
		r.all = append(r.all, p.backend)
		if s.Engine.Groups.IsHybrid() { // their reported size of the cache depends on the length
			p.backend.SetModels([]backends.Model{{ID: "model", MaxTokens: maxModelLen}})
		}
	}
	for i, model := range s.ModelOf {
		for len(r.byModel) <= model {
			r.byModel = append(r.byModel, nil)
		}
		r.byModel[model] = append(r.byModel[model], r.all[i])
		r.all[i].SetModels([]backends.Model{{ID: modelName(model), MaxTokens: maxModelLen}})
	}
	if s.Policy != Pooled {
		var err error
		settings := s.Settings
		settings.AttentionCost = s.Engine.QuadraticDepth // as calibrated by an operator
		r.router, err = router.New(router.Options{
			Settings: router.Settings{
				Policy: s.Policy, PolicySettings: settings, Queue: s.Queue, PollInterval: r.pollEvery, NoLearning: s.NoLearning,
				Disaggregation: s.disaggregationSettings(),
			},
			Policies: policies.All(), Backends: r.all, BlockBytes: int(float64(requests.BlockTokens) * s.bytesPerToken()), IndexMaxBytes: indexBytes,
			IndexMargin: 1,
			Now:         func() time.Time { return wallTime(r.now) },
			Rand:        rand.NewPCG(s.Seed, 2),
		})
		if err != nil {
			return nil, err
		}
	}
	r.followKVEvents()
	r.scheduleInitialEvents()
	return r, nil
}

// scheduleInitialEvents schedules the first arrival, the changes, the first polls and the
// external load.
func (r *run) scheduleInitialEvents() {
	r.scheduleNextArrival()
	joining := make([]bool, len(r.fleet))
	for i, c := range r.Changes {
		r.events.push(event{at: c.At, kind: eventChange, index: i})
		first := !slices.ContainsFunc(r.Changes, func(o Change) bool { return o.Backend == c.Backend && o.At < c.At })
		joining[c.Backend] = joining[c.Backend] || c.Kind == Join && first
	}
	for i, p := range r.fleet {
		if joining[i] {
			p.down = true
			p.backend.SetState(backends.Down)
		}
		if r.router != nil {
			// The first poll ends before the first request, as in a proxy, which is
			// ready only then.
			r.deliverPolledLoad(i, p.reportedLoad(wallTime(0), r.reportedFactor))
			if i == r.firstRank(i) {
				r.schedulePoll(i, r.jitter(r.pollEvery))
			}
		}
	}
	for i, f := range r.External {
		r.events.push(event{at: f.From + drawInterval(r.random, f.Rate), kind: eventExternal, index: i})
	}
}

// scheduleNextArrival schedules the next arrival of an open loop: one at a time, so
// that the queue stays short.
func (r *run) scheduleNextArrival() {
	if r.opened < len(r.requests.Open) {
		j := r.requests.Open[r.opened]
		r.opened++
		r.events.push(event{at: j.At, kind: eventArrival, job: j, index: openLoop})
	}
}

// openLoop is the index of an arrival of an open loop.
const openLoop = -1

// jitter varies d by a tenth, as backends.Poller does.
func (r *run) jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.9 + 0.2*r.random.Float64()))
}

// processEvents handles events until all requests have ended or ctx has.
func (r *run) processEvents(ctx context.Context) error {
	for n := 0; r.ended < r.requests.Total; n++ {
		if n%1024 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		r.processEvent()
	}
	if r.Progress != nil {
		r.Progress(r.ended, r.requests.Total)
	}
	return nil
}

// processEvent handles the next event.
func (r *run) processEvent() {
	e := r.events.pop()
	r.now = e.at
	r.handleEvent(&e)
	r.applyDecisions()
	if r.router != nil && !r.ticked && r.router.CountWaiting() > 0 {
		r.ticked = true
		r.events.push(event{at: r.now + router.TickInterval, kind: eventTick})
	}
}

func (r *run) handleEvent(e *event) {
	switch e.kind {
	case eventArrival:
		if e.index == openLoop {
			r.scheduleNextArrival()
		}
		r.submitJob(e.job)
	case eventStepEnd:
		if p := r.fleet[e.index]; e.epoch == p.epoch && e.version == p.ranks[e.rank].device.ends {
			r.endStep(e.index, e.rank)
		}
	case eventPoll:
		if p := r.fleet[e.index]; p.pollAt == r.now {
			p.pollAt = 0
			r.pollReplica(e.index)
		}
	case eventLoad:
		if e.epoch == r.fleet[e.index].epoch {
			r.deliverPolledLoad(e.index, e.load)
		}
		r.fleet[e.index].polled = e.load
		if first := r.firstRank(e.index); e.index == first+r.routedRanks-1 {
			r.scheduleNextPoll(first, e.load != nil)
		}
	case eventTick:
		r.ticked = false
		r.router.Tick()
	case eventChange:
		r.applyChange(r.Changes[e.index])
	case eventRestarted:
		if p := r.fleet[e.index]; e.epoch == p.epoch && !p.removed {
			r.setReady(e.index)
		}
	case eventExternal:
		r.sendExternalRequest(e.index)
	case eventTransferEnd:
		if e.epoch == r.fleet[e.index].epoch {
			r.endTransfer(engineIndex{e.index, e.rank}, e.transfer)
		}
	case eventGroupStepEnd:
		r.endGroupStep(&r.groups[e.index])
	}
}

// endStep applies the outputs of a step of one of a replica's engines, and begins the next
// one.
func (r *run) endStep(index, rank int) {
	p := r.fleet[index]
	if r.now < p.frozenUntil {
		r.pushStepEnd(p.frozenUntil, index, rank)
		return
	}
	r.applyStep(index, rank)
	// Requests that the router sends now can still be in this replica's next step.
	r.applyDecisions()
	e := &p.ranks[rank]
	if e.stepping = !e.engine.Idle(); e.stepping {
		r.startStep(engineIndex{index, rank})
	}
	if r.sharing != nil {
		e.device.left, e.device.engines = e.step.End-r.now, 0
		r.shareDevice(index)
	}
	if e.stepping && (r.sharing == nil || !e.isWorking()) {
		r.pushStepEnd(e.step.End, index, rank)
	}
}

// startStep computes the next step of an engine, which begins now.
func (r *run) startStep(at engineIndex) {
	e := &r.fleet[at.replica].ranks[at.rank]
	e.step, e.since = e.engine.Step(r.now), r.now
	r.scheduleTransfers(at)
}

// applyStep applies the outputs of the current step of an engine.
func (r *run) applyStep(index, rank int) {
	p := r.fleet[index]
	e := &p.ranks[rank]
	step := e.step
	e.step = engine.StepResult{}
	r.measured.timeline.addWork(index, r.now, step.Prefilled)
	r.publishKVEvents(p, rank, step.KVEvents)
	r.measured.gaps.addStep(&step, r.now-e.since, r.now)
	if step.Decoded > 0 {
		p.reportProgressToRouter()
	}
	for _, q := range step.First {
		if f, ok := q.Owner.(*request); ok {
			r.recordFirstToken(f)
		}
	}
	for _, q := range step.Finished {
		if f, ok := q.Owner.(*request); ok {
			r.completeRequest(f)
		}
	}
}

// stepGroup is the engines of one server, if they step together.
type stepGroup struct {
	engines  []engineIndex
	stepping bool // a step is scheduled
}

// engineIndex names an engine by its replica and its rank there.
type engineIndex struct{ replica, rank int }

// newStepGroups returns the groups of a fleet in which so many engines, one after another, are one server's.
func newStepGroups(fleet []*replica, size int) (groups []stepGroup) {
	for i, p := range fleet {
		for rank := range p.ranks {
			if n := len(groups); n == 0 || len(groups[n-1].engines) == size {
				groups = append(groups, stepGroup{})
			}
			last := &groups[len(groups)-1]
			last.engines = append(last.engines, engineIndex{i, rank})
		}
	}
	return groups
}

// endGroupStep applies the outputs of a step of all engines of a group, and begins the next one, which ends with the
// longest of them.
func (r *run) endGroupStep(g *stepGroup) {
	for _, e := range g.engines {
		r.applyStep(e.replica, e.rank)
	}
	r.applyDecisions()
	var end time.Duration
	for _, at := range g.engines {
		if e := &r.fleet[at.replica].ranks[at.rank]; !e.engine.Idle() {
			r.startStep(at)
			end = max(end, e.step.End)
		}
	}
	if g.stepping = end > 0; g.stepping {
		r.events.push(event{at: end, kind: eventGroupStepEnd, index: r.groupOf(g.engines[0])})
	}
}

// groupOf returns the index of an engine's group.
func (r *run) groupOf(e engineIndex) int {
	return slices.IndexFunc(r.groups, func(g stepGroup) bool { return slices.Contains(g.engines, e) })
}

// startSteppingIfIdle schedules the first step of an idle engine, after all other events
// of this instant.
func (r *run) startSteppingIfIdle(index, rank int) {
	if r.groups != nil {
		at := r.groupOf(engineIndex{index, rank})
		if g := &r.groups[at]; !g.stepping {
			g.stepping = true
			r.events.push(event{at: r.now, kind: eventGroupStepEnd, index: at})
		}
		return
	}
	if e := &r.fleet[index].ranks[rank]; !e.stepping {
		e.stepping = true
		r.pushStepEnd(r.now, index, rank)
	}
}

// pushStepEnd schedules the end of an engine's step, instead of one that was scheduled.
func (r *run) pushStepEnd(at time.Duration, index, rank int) {
	p := r.fleet[index]
	p.ranks[rank].device.ends++
	r.events.push(event{at: at, kind: eventStepEnd, index: index, rank: rank, epoch: p.epoch, version: p.ranks[rank].device.ends})
}

// event is scheduled at a virtual time.
type event struct {
	at      time.Duration
	order   uint64 // among events of one instant: the order in which they were scheduled
	kind    kind
	index   int            // of the replica, change, external client or group of engines
	rank    int            // of the engine in the replica
	epoch   int            // of the replica; events from before its restart are ignored
	version int            // of a step's end: deviceShare.ends
	job     *Job           // that arrives
	load    *backends.Load // result of a poll

	transfer *engine.Request // of whose KV cache
}

type kind uint8

const (
	eventArrival      kind = iota // a client sends a request
	eventStepEnd                  // a step of an engine ends, or an idle engine begins
	eventPoll                     // a replica is polled
	eventLoad                     // a poll's result reaches the router
	eventTick                     // router.Tick
	eventChange                   // a backend joins, leaves or restarts
	eventRestarted                // a restarted replica serves again
	eventExternal                 // an external client sends a request
	eventGroupStepEnd             // a step of engines that step together ends, or they begin
	eventTransferEnd              // a replica has the KV cache that another one computed
)

// eventQueue holds the scheduled events in a binary heap. Unlike container/heap it
// does not allocate for each event.
type eventQueue struct {
	heap   []event
	pushed uint64
}

func (a *eventQueue) push(e event) {
	a.pushed++
	e.order = a.pushed
	a.heap = append(a.heap, e)
	for i := len(a.heap) - 1; i > 0; {
		up := (i - 1) / 2
		if !isBefore(&a.heap[i], &a.heap[up]) {
			break
		}
		a.heap[i], a.heap[up] = a.heap[up], a.heap[i]
		i = up
	}
}

// pop removes and returns the earliest event. The queue must not be empty.
func (a *eventQueue) pop() event {
	first, last := a.heap[0], len(a.heap)-1
	a.heap[0] = a.heap[last]
	a.heap[last] = event{} // do not keep its job
	a.heap = a.heap[:last]
	for i := 0; ; {
		least := i
		for down := 2*i + 1; down <= 2*i+2 && down < last; down++ {
			if isBefore(&a.heap[down], &a.heap[least]) {
				least = down
			}
		}
		if least == i {
			return first
		}
		a.heap[i], a.heap[least] = a.heap[least], a.heap[i]
		i = least
	}
}

func isBefore(a, b *event) bool {
	return a.at < b.at || a.at == b.at && a.order < b.order
}
