package replay

import (
	"warmroute/backends"
	"warmroute/sim/engine"
)

// change does what the scenario says happens to a backend.
func (r *run) change(c Change) {
	p := r.fleet[c.Backend]
	switch c.What {
	case Join:
		p.left = false
		r.back(c.Backend)
	case Leave:
		p.left = true
		p.backend.SetState(backends.Draining)
		if len(p.flights) == 0 {
			p.gone()
		}
	case Restart:
		// A reset connection is a suspicion that the readiness checks confirm at once.
		p.gone()
		p.epoch++
		p.running = false
		p.step = engine.StepResult{}
		p.engine = engine.New(p.config)
		p.started = r.now + c.Away
		r.cut(p)
		r.agenda.plan(event{at: r.now + c.Away, kind: returns, place: c.Backend, epoch: p.epoch})
	case Freeze:
		p.frozen = r.now + c.Away
	}
}

// gone makes a replica answer nobody any more.
func (p *replica) gone() {
	p.away = true
	p.backend.SetState(backends.Down)
}

// back makes a backend serve, from now on or again.
func (r *run) back(place int) {
	p := r.fleet[place]
	p.away = false
	p.backend.SetState(backends.Ready)
	r.router.BackendChanged(p.backend)
}

// scrape asks a replica for its metrics, as the Poller does.
func (r *run) scrape(place int) {
	p := r.fleet[place]
	wait := r.poll
	if p.away {
		const untilStale = 3
		if p.misses++; p.misses == untilStale {
			p.backend.SetLoad(nil)
		}
	} else {
		p.misses = 0
		l := p.scrape(instant(r.now), r.told)
		r.agenda.plan(event{at: r.now + r.PollLag, kind: loaded, place: place, epoch: p.epoch, load: l})
		if l.Waiting > 0 || int64(l.Running) > l.OwnInFlight {
			wait = min(wait, fastPoll)
		}
	}
	r.agenda.plan(event{at: r.now + r.PollLag + r.spread(wait), kind: polled, place: place})
}

// observe gives a poll's answer to the router.
func (r *run) observe(place int, l *backends.Load) {
	p := r.fleet[place]
	p.backend.SetLoad(l)
	if p.seenStart != 0 && p.seenStart != l.StartTime {
		r.router.ForgetCache(p.backend)
	}
	p.seenStart = l.StartTime
	r.router.ObserveLoad(p.backend, l)
}

// intrude sends a request of a foreign client straight to a replica.
func (r *run) intrude(place int) {
	f := &r.Foreign[place]
	if f.Until > 0 && r.now > f.Until {
		return
	}
	target := f.Backends[r.chance.IntN(len(f.Backends))]
	if p := r.fleet[target]; !p.away {
		q := &engine.Request{Prompt: f.Prompt, Answer: f.Answer}
		// One too long for the cache is refused, and its client's affair.
		if p.engine.Add(q, r.now) == nil {
			r.wake(target, p)
		}
	}
	r.agenda.plan(event{at: r.now + gap(r.chance, f.Rate), kind: intrudes, place: place})
}
