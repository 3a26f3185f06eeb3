package replay

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/router"
	"warmroute/sim/engine"
)

// flight is a request on its way, over however many attempts.
type flight struct {
	job    *Job
	number int // flights in the order of arrival
	asked  router.Request
	tried  []*backends.Backend

	// Of the attempt under way.
	decision *router.Decision // nil under Pooled
	place    int              // of the replica
	at       int              // in its list
	engine   *engine.Request
	expected int // tokens of the prompt that were in the cache when it was sent
	sent     time.Duration
	first    time.Duration // of the answer's first token
	started  bool          // that has come
}

// arrive submits a new request.
func (r *run) arrive(j *Job) {
	f := &flight{job: j, number: r.flown}
	r.flown++
	f.asked = router.Request{
		Backends: r.all, Blocks: j.Blocks, Bytes: r.textBytes(f), Sequences: 1,
		Streams:   !j.Whole && (r.NonStreaming == 0 || r.chance.Float64() >= r.NonStreaming),
		BodyBytes: j.Prompt * CharsPerToken,
		Model:     "sim", PromptKey: j.Head, Session: j.Session, Priority: j.Priority,
	}
	r.submit(f)
}

// textBytes is how long a prompt's text is. Its blocks stay those of the trace,
// so that what is shared stays so: only what the router takes for the prompt's
// length is wrong.
func (r *run) textBytes(f *flight) int {
	share := float64(mix(mix(r.Seed)+uint64(f.number))>>11) / (1 << 53)
	return int(float64(f.job.Prompt*CharsPerToken) * (1 + r.TextSpread*(2*share-1)))
}

func (r *run) submit(f *flight) {
	if r.router == nil {
		r.send(f, r.leastQueued())
		return
	}
	r.router.Submit(&f.asked, func(d *router.Decision, err error) {
		r.delivered = append(r.delivered, delivery{f, d, err})
	}, f.tried...)
}

// act does what the router has decided since the last time. It calls the
// router, so it cannot be done where the router delivers.
func (r *run) act() {
	for i := 0; i < len(r.delivered); i++ {
		d := r.delivered[i]
		if d.err != nil {
			r.fail(d.flight, cause(d.err))
			continue
		}
		d.flight.decision = d.decision
		r.measured.decided(d.decision)
		r.send(d.flight, d.decision.Backend.Slot)
	}
	clear(r.delivered)
	r.delivered = r.delivered[:0]
}

// cause names an error of the router in few words.
func cause(err error) string {
	switch {
	case errors.Is(err, router.ErrQueueFull):
		return "admission queue full"
	case errors.Is(err, router.ErrQueueTimeout):
		return "timed out in the admission queue"
	case errors.Is(err, router.ErrNoneReady):
		return "no backend ready"
	}
	return err.Error()
}

// send gives a request to a replica.
func (r *run) send(f *flight, place int) {
	p, j := r.fleet[place], f.job
	if p.away {
		r.refused(f)
		return
	}
	f.place, f.sent, f.started = place, r.now, false
	f.engine = &engine.Request{Prompt: j.Prompt, Answer: j.Answer, Blocks: j.cache, Owner: f}
	if r.router == nil {
		f.expected = p.engine.Hit(j.Prompt, j.cache)
	}
	if err := p.engine.Add(f.engine, r.now); err != nil {
		// Too long for any replica: a client's error, which is not tried again.
		f.release(router.Outcome{End: router.NotProcessed})
		r.fail(f, "too long for the KV cache")
		return
	}
	f.at = len(p.flights)
	p.flights = append(p.flights, f)
	r.measured.timeline.inFlight(place, r.now, 1)
	r.wake(place, p)
}

func (f *flight) release(o router.Outcome) {
	if f.decision != nil {
		f.decision.Release(o)
		f.decision = nil
	}
}

// refused sends a request elsewhere after a connect error.
func (r *run) refused(f *flight) {
	f.tried = append(f.tried, f.decision.Backend)
	f.release(router.Outcome{End: router.NotProcessed})
	r.submit(f)
}

// leastQueued is the replica with the fewest tokens left to prefill, and of
// those the one with the fewest requests.
func (r *run) leastQueued() int {
	best, least := 0, 0
	for i, p := range r.fleet {
		queued := 0
		for _, f := range p.flights {
			if !f.started {
				queued += f.job.Prompt - max(f.expected, f.engine.Computed())
			}
		}
		if i == 0 || cmp.Or(cmp.Compare(queued, least), cmp.Compare(len(p.flights), len(r.fleet[best].flights))) < 0 {
			best, least = i, queued
		}
	}
	return best
}

func (r *run) firstToken(f *flight) {
	f.first, f.started = r.now, true
	if f.decision != nil && f.asked.Streams {
		f.decision.RecordFirstEvent()
	}
}

func (r *run) finish(f *flight) {
	r.leave(f)
	j := f.job
	o := router.Outcome{End: router.Completed, AnswerTokens: j.Answer, Reply: j.Reply}
	if !r.NoUsage {
		o.PromptTokens, o.CachedTokens, o.CachedKnown = j.Prompt, f.engine.Cached, true
	}
	f.release(o)
	r.measured.served(f, r.now)
	r.over(f)
}

// leave takes a request off its replica, which is gone if it only finished what
// it had.
func (r *run) leave(f *flight) {
	p := r.fleet[f.place]
	p.remove(f)
	r.measured.timeline.inFlight(f.place, r.now, -1)
	if len(p.flights) == 0 && p.backend.State() == backends.Draining {
		p.gone()
	}
}

func (r *run) fail(f *flight, why string) {
	r.measured.lost(f.job, why)
	r.over(f)
}

// over counts a request as ended, and plans what its client sends next.
func (r *run) over(f *flight) {
	r.ended++
	r.last = r.now
	if r.requests.Next != nil {
		if j := r.requests.Next(f.job, r.now); j != nil {
			r.agenda.plan(event{at: j.At, kind: arrives, job: j})
		}
	}
	if r.Progress != nil && r.ended%128 == 0 {
		r.Progress(r.ended, r.requests.Total)
	}
}

// cut breaks off all that a replica has; it is sent again elsewhere.
func (r *run) cut(p *replica) {
	flights := slices.Clone(p.flights)
	slices.SortFunc(flights, func(a, b *flight) int { return cmp.Compare(a.number, b.number) })
	for _, f := range flights {
		r.leave(f)
		end := router.NotProcessed
		if f.started {
			end = router.Truncated
		}
		f.tried = append(f.tried, p.backend)
		f.release(router.Outcome{End: end})
	}
	for _, f := range flights {
		r.submit(f)
	}
}
