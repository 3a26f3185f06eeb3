package replay

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/router"
	"warmroute/sim/engine"
)

const (
	// epoch is when every run begins, in seconds since 1970. Any time would do but
	// the zero one, which means "never" in places.
	epoch = 1_800_000_000
	// indexBytes is room for any fleet that fits into memory beside its index.
	indexBytes = 8 << 30
)

// instant is the wall clock's word for a time of the run.
func instant(at time.Duration) time.Time { return time.Unix(epoch, 0).Add(at) }

// run is a scenario being played, in one goroutine.
type run struct {
	*Scenario
	told     float64 // IndexFactor
	poll     time.Duration
	requests *Requests
	router   *router.Router // nil under Pooled
	fleet    []*replica
	all      []*backends.Backend
	chance   *rand.Rand // for all that is left to it here

	now    time.Duration
	agenda agenda
	opened int  // of requests.Open that have arrived, or are planned
	ticked bool // a tick is planned

	delivered []delivery // by the router, not yet acted on
	flown     int        // flights so far
	ended     int        // requests that have ended, whichever way
	last      time.Duration
	measured  measures
}

// delivery is what the router answered to a flight.
type delivery struct {
	flight   *flight
	decision *router.Decision
	err      error
}

func newRun(s *Scenario, requests *Requests) (*run, error) {
	r := &run{
		Scenario: s,
		told:     cmp.Or(s.IndexFactor, 1),
		poll:     s.pollInterval(),
		requests: requests,
		fleet:    newFleet(s, requests),
		chance:   rand.New(rand.NewPCG(s.Seed, 1)),
		measured: measures{timeline: newTimeline(s.Backends)},
	}
	for _, p := range r.fleet {
		r.all = append(r.all, p.backend)
	}
	if s.Policy != Pooled {
		var err error
		r.router, err = router.New(router.Options{
			Backends: r.all, Policy: s.Policy, PolicySettings: s.Settings, Queue: s.Hold, SLO: s.SLO,
			BlockBytes: requests.BlockTokens * CharsPerToken, IndexMaxBytes: indexBytes, IndexMargin: 1, NoLearning: s.NoLearning,
			PollInterval: r.poll,
			Now:          func() time.Time { return instant(r.now) },
			Rand:         rand.New(rand.NewPCG(s.Seed, 2)),
		})
		if err != nil {
			return nil, err
		}
	}
	r.planAll()
	return r, nil
}

// planAll plans the first event of everything that goes on by itself.
func (r *run) planAll() {
	r.planOpen()
	joining := make([]bool, len(r.fleet))
	for i, c := range r.Changes {
		r.agenda.plan(event{at: c.At, kind: changes, place: i})
		first := !slices.ContainsFunc(r.Changes, func(o Change) bool { return o.Backend == c.Backend && o.At < c.At })
		joining[c.Backend] = joining[c.Backend] || c.What == Join && first
	}
	for i, p := range r.fleet {
		if joining[i] {
			p.away = true
			p.backend.SetState(backends.Down)
		}
		if r.router != nil {
			// The first answer comes before the first request, as it does where the
			// proxy is ready when its first polls are over.
			r.observe(i, p.scrape(instant(0), r.told))
			r.agenda.plan(event{at: r.spread(r.poll), kind: polled, place: i})
		}
	}
	for i, f := range r.Foreign {
		r.agenda.plan(event{at: f.From + gap(r.chance, f.Rate), kind: intrudes, place: i})
	}
}

// planOpen plans the next arrival of an open loop, so that the agenda stays short.
func (r *run) planOpen() {
	if r.opened < len(r.requests.Open) {
		j := r.requests.Open[r.opened]
		r.opened++
		r.agenda.plan(event{at: j.At, kind: arrives, job: j, place: open})
	}
}

// open is the place of an arrival that another of the open loop follows.
const open = -1

// spread varies d by a tenth, as the Poller does.
func (r *run) spread(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.9 + 0.2*r.chance.Float64()))
}

// play handles events until all requests have ended.
func (r *run) play(ctx context.Context) error {
	for n := 0; r.ended < r.requests.Total; n++ {
		if n%1024 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		e := r.agenda.next()
		r.now = e.at
		r.handle(&e)
		r.act()
		if r.router != nil && !r.ticked && r.router.WaitingRequests() > 0 {
			r.ticked = true
			r.agenda.plan(event{at: r.now + router.TickInterval, kind: ticks})
		}
	}
	if r.Progress != nil {
		r.Progress(r.ended, r.requests.Total)
	}
	return nil
}

func (r *run) handle(e *event) {
	switch e.kind {
	case arrives:
		if e.place == open {
			r.planOpen()
		}
		r.arrive(e.job)
	case steps:
		if p := r.fleet[e.place]; e.epoch == p.epoch {
			r.stepEnds(e.place, p)
		}
	case polled:
		r.scrape(e.place)
	case loaded:
		if e.epoch == r.fleet[e.place].epoch {
			r.observe(e.place, e.load)
		}
	case ticks:
		r.ticked = false
		r.router.Tick()
	case changes:
		r.change(r.Changes[e.place])
	case returns:
		if p := r.fleet[e.place]; e.epoch == p.epoch && !p.left {
			r.back(e.place)
		}
	case intrudes:
		r.intrude(e.place)
	}
}

// stepEnds hands out what a replica's step brought, and begins the next one.
func (r *run) stepEnds(place int, p *replica) {
	if r.now < p.frozen {
		r.agenda.plan(event{at: p.frozen, kind: steps, place: place, epoch: p.epoch})
		return
	}
	step := p.step
	p.step = engine.StepResult{}
	r.measured.timeline.worked(place, r.now, step.Prefilled)
	if step.Decoded > 0 {
		p.progress()
	}
	for _, q := range step.First {
		if f, ok := q.Owner.(*flight); ok {
			r.firstToken(f)
		}
	}
	for _, q := range step.Finished {
		if f, ok := q.Owner.(*flight); ok {
			r.finish(f)
		}
	}
	// What the router lets go now can still be in this replica's next step.
	r.act()
	if p.engine.Idle() {
		p.running = false
		return
	}
	r.begin(place, p)
}

// begin starts a replica's next step.
func (r *run) begin(place int, p *replica) {
	p.running = true
	p.step = p.engine.Step(r.now)
	r.agenda.plan(event{at: p.step.End, kind: steps, place: place, epoch: p.epoch})
}

// wake plans the first step of a replica that rested, behind all that comes at
// this instant.
func (r *run) wake(place int, p *replica) {
	if !p.running {
		p.running = true
		r.agenda.plan(event{at: r.now, kind: steps, place: place, epoch: p.epoch})
	}
}
