package replay

import (
	"cmp"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/lab/sim/engine"
	"warmroute/router"
)

// request is a Job that was sent, over all its attempts.
type request struct {
	job    *Job
	number int // in the order of arrival
	routed router.Request
	tried  []*backends.Backend
	others bool // another client's, sent past the router

	hasTarget bool // Scenario.SLO

	// Of the current attempt:
	decision    *router.Reservation // nil under Pooled
	predicted   int                 // tokens of the prompt that the router expected to be cached
	prefill     *router.Reservation // of its prefill request, while that is under way
	source      *prefillDone        // of a split request, from its prefill request's end; nil otherwise
	index, rank int                 // of the replica and the engine
	listIndex   int                 // in replica.requests
	engine      *engine.Request
	expectedHit int            // tokens of the prompt that were cached when it was sent
	cached      cachedWhenSent // if computed tokens are counted
	counted     bool           // the computed tokens of an earlier attempt were counted
	sent        time.Duration
	first       time.Duration // of the first output token
	started     bool          // it has output
}

// submitJob submits a job as a new request.
func (r *run) submitJob(j *Job) {
	f := &request{job: j, number: r.arrivals}
	r.arrivals++
	f.routed = router.Request{
		Backends: r.backendsOf(j.Model), Blocks: j.Blocks, Bytes: r.textBytes(f), Sequences: 1,
		Streams:   !j.NotStreamed && (r.NonStreaming == 0 || r.random.Float64() >= r.NonStreaming),
		BodyBytes: int(float64(j.Prompt) * r.bytesPerToken()),
		Model:     modelName(j.Model), PromptKey: j.PromptKey, Turn: j.Turn, Priority: j.Priority,
		Splittable: r.Split != SplitNever,
	}
	if r.namesConversations {
		f.routed.Conversation = j.Conversation
	}
	if f.others = r.Bypass > 0 && r.drawShare(f) < r.Bypass; f.others {
		f.routed.Streams = false
		r.sendOrResubmit(f, r.random.IntN(len(r.fleet)))
		return
	}
	r.setTTFTTarget(f)
	r.submitRequest(f)
}

// setTTFTTarget gives a request the target of the scenario, if it is among those that have it.
func (r *run) setTTFTTarget(f *request) {
	draw := rand.New(rand.NewPCG(r.Seed, uint64(f.number))).Float64()
	if r.SLO.TTFT == 0 || f.job.Priority > 0 || draw >= cmp.Or(r.SLO.Share, 1) {
		return
	}
	f.hasTarget = true
	if !r.SLO.Unknown {
		f.routed.FirstTokenDue, f.routed.RefuseLate = wallTime(r.now+r.SLO.TTFT), r.SLO.Refuse
	}
}

// textBytes returns the length of a prompt's text, which varies with TextSpread between
// sessions, or between requests that have none. Its blocks stay those of the trace, so that
// only the router's estimate of the prompt's length is wrong.
func (r *run) textBytes(f *request) int {
	return int(float64(f.job.Prompt) * r.bytesPerToken() * (1 + r.TextSpread*(2*r.drawShare(f)-1)))
}

// drawShare returns a number from 0 to 1 that is the same for all requests of a session.
func (r *run) drawShare(f *request) float64 {
	return float64(mixBits(mixBits(r.Seed)+cmp.Or(f.job.Conversation, uint64(f.number)))>>11) / (1 << 53)
}

// submitRequest asks the router for a decision, which applyDecisions applies. Under
// Pooled it sends the request at once.
func (r *run) submitRequest(f *request) {
	if r.router == nil {
		r.sendOrResubmit(f, r.leastQueuedReplica())
		return
	}
	r.router.Submit(&f.routed, func(d *router.Reservation, err error) {
		r.deliveries = append(r.deliveries, delivery{f, d, err})
	}, f.tried...)
}

// applyDecisions sends requests where the router decided since the last call. It
// calls the router, so it cannot run in the router's callback.
func (r *run) applyDecisions() {
	for i := 0; i < len(r.deliveries); i++ {
		d := r.deliveries[i]
		switch {
		case d.err != nil && d.request.source != nil:
			r.forgetPrefill(d.request)
			r.submitRequest(d.request)
			continue
		case d.err != nil:
			r.failRequest(d.request, failureCause(d.err))
			continue
		}
		d.request.decision = d.decision
		r.measured.recordDecision(d.decision)
		r.sendDecided(d.request)
	}
	clear(r.deliveries)
	r.deliveries = r.deliveries[:0]
}

// failureLate is the cause of failure of a request that was predicted to miss its target.
const failureLate = "predicted to miss its target"

// failureCause returns a constant text for an error of the router.
func failureCause(err error) string {
	switch {
	case errors.Is(err, router.ErrQueueFull):
		return "admission queue full"
	case errors.Is(err, router.ErrBusy):
		return "timed out in the admission queue"
	case errors.Is(err, router.ErrLate):
		return failureLate
	case errors.Is(err, router.ErrNoneReady):
		return "no backend ready"
	}
	return err.Error()
}

// sendOrResubmit adds a request to a replica's engine. A replica that is down refuses
// it, and it is submitted again.
func (r *run) sendOrResubmit(f *request, index int) {
	p, j := r.fleet[index], f.job
	if p.down {
		r.resubmitElsewhere(f)
		return
	}
	f.index, f.rank, f.started = index, p.balancer.Choose(r.now), false
	f.engine = &engine.Request{Prompt: j.Prompt, Output: j.Output, Blocks: j.cache, Owner: f}
	if f.source == nil {
		f.sent = r.now
	} else {
		f.engine.RemoteTokens = j.Prompt
	}
	if f.prefill != nil {
		f.engine.Output, f.engine.PrefillRequest = 1, true
	}
	e := p.ranks[f.rank].engine
	if r.router == nil {
		f.expectedHit = e.CachedTokens(j.Prompt, j.cache)
	}
	if r.computed != nil {
		f.cached = r.lookUpCaches(f)
	}
	if err := e.Add(f.engine, r.now); err != nil {
		// Too long for any replica: the client's error, not retried.
		r.releaseSource(f)
		f.releaseDecision(router.Outcome{End: router.NotProcessed})
		r.failRequest(f, "too long for the KV cache")
		return
	}
	f.listIndex = len(p.requests)
	p.requests = append(p.requests, f)
	if len(p.requests) == 1 {
		r.requestPoll(index)
	}
	r.measured.timeline.addInFlight(index, r.now, 1)
	r.startSteppingIfIdle(index, f.rank)
}

// releaseDecision releases the reservations of a request.
func (f *request) releaseDecision(o router.Outcome) {
	if f.prefill != nil {
		f.prefill.Release(router.Outcome{End: router.NotProcessed})
		f.prefill = nil
	}
	if f.decision != nil {
		f.decision.Release(o)
		f.decision = nil
	}
}

// resubmitElsewhere retries a request on another replica after a failed connection.
func (r *run) resubmitElsewhere(f *request) {
	if f.others {
		r.failRequest(f, "the replica was down")
		return
	}
	switch {
	case f.prefill != nil:
		f.routed.Splittable = false
	case f.source != nil:
		f.routed.PrefilledOn = r.fleet[f.source.at.replica].backend
		f.tried = append(f.tried, f.decision.Backend)
	default:
		f.tried = append(f.tried, f.decision.Backend)
	}
	f.releaseDecision(router.Outcome{End: router.NotProcessed})
	r.submitRequest(f)
}

// leastQueuedReplica returns the replica with the fewest tokens left to prefill, and of
// those the one with the fewest requests.
func (r *run) leastQueuedReplica() int {
	best, least := 0, 0
	for i, p := range r.fleet {
		queued := 0
		for _, f := range p.requests {
			if !f.started {
				queued += f.job.Prompt - max(f.expectedHit, f.engine.Computed())
			}
		}
		if i == 0 || cmp.Or(cmp.Compare(queued, least), cmp.Compare(len(p.requests), len(r.fleet[best].requests))) < 0 {
			best, least = i, queued
		}
	}
	return best
}

func (r *run) recordFirstToken(f *request) {
	if r.computed != nil && f.source == nil && !f.others {
		r.recordPrefill(f)
	}
	if f.prefill != nil {
		return // it is discarded
	}
	if f.source != nil {
		r.measured.kvTransfer.add(r.now - f.source.ended)
		r.releaseSource(f) // of a prompt that the replica had: there was no transfer
	}
	f.first, f.started = r.now, true
	if f.decision != nil && f.routed.Streams {
		f.decision.RecordFirstEvent()
	}
}

func (r *run) completeRequest(f *request) {
	r.removeFromReplica(f)
	r.fleet[f.index].setDownIfDrained()
	if f.prefill != nil {
		r.endPrefillRequest(f)
		return
	}
	j := f.job
	if r.computed != nil {
		r.recordComputed(f, j.Prompt/r.requests.BlockTokens, (j.Prompt+j.Output)/r.requests.BlockTokens)
	}
	o := router.Outcome{End: router.Completed, OutputTokens: j.Output, Reply: j.Reply}
	if !r.NoUsage {
		o.PromptTokens, o.CachedTokens, o.CachedKnown = j.Prompt, f.cachedTokens(), true
	}
	f.releaseDecision(o)
	if !f.others {
		r.measured.recordSuccess(f, r.now)
	}
	r.countEndAndScheduleNext(f)
}

// removeFromReplica removes a request from its replica.
func (r *run) removeFromReplica(f *request) {
	r.fleet[f.index].removeRequest(f)
	r.measured.timeline.addInFlight(f.index, r.now, -1)
}

// setDownIfDrained sets the replica down if it was draining and has no request any more.
func (p *replica) setDownIfDrained() {
	if len(p.requests) == 0 && p.backend.State() == backends.Draining {
		p.setDown()
	}
}

func (r *run) failRequest(f *request, why string) {
	if !f.others {
		r.measured.recordFailure(f, why)
	}
	r.countEndAndScheduleNext(f)
}

// countEndAndScheduleNext counts a request as ended, and schedules its client's next
// one.
func (r *run) countEndAndScheduleNext(f *request) {
	r.ended++
	r.last = r.now
	if r.requests.Next != nil {
		if j := r.requests.Next(f.job, r.now); j != nil {
			r.events.push(event{at: j.At, kind: eventArrival, job: j})
		}
	}
	if r.Progress != nil && r.ended%128 == 0 {
		r.Progress(r.ended, r.requests.Total)
	}
}

// abortAndRetryRequests aborts all requests of a replica and retries them elsewhere.
func (r *run) abortAndRetryRequests(p *replica) {
	requests := slices.Clone(p.requests)
	slices.SortFunc(requests, func(a, b *request) int { return cmp.Compare(a.number, b.number) })
	for _, f := range requests {
		r.removeFromReplica(f)
		p.setDownIfDrained()
		end := router.NotProcessed
		if f.started {
			end = router.Truncated
		}
		if f.prefill == nil {
			f.tried = append(f.tried, p.backend)
		}
		r.forgetPrefill(f)
		f.releaseDecision(router.Outcome{End: end})
	}
	for _, f := range requests {
		if f.others {
			r.failRequest(f, "the replica was restarted")
			continue
		}
		r.submitRequest(f)
	}
}
