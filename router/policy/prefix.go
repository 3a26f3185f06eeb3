package policy

import (
	"cmp"
	"math"

	"warmroute/prompt"
)

// Constants of the cost; see lab/docs/design.md.
const (
	// decodeWeight is what a second that an output takes longer counts for, beside a second before its first token.
	decodeWeight = 0.5
	// outputShare is the share of an output that is generated beside another one, which may begin or end meanwhile.
	outputShare = 0.5
	// kvWaitCost is what a second of waiting for room in the KV cache costs: what waits in
	// a replica keeps everything behind it waiting.
	kvWaitCost     = 4
	maxUtilization = 0.9
	maxDelayed     = 64 // requests that each second of a prefill delays
	// quietShare is the share of its time that an engine may prefill without a cost, so that idle backends tie.
	quietShare = 0.05

	// latenessCost is the cost of each second by which the first token is predicted to miss its target, in seconds.
	latenessCost = 8

	laterTurnsTerm = "later turns" // its name
	checkpointTerm = "checkpoint"
	latenessTerm   = "late"
)

// Prefix chooses the backend where the request costs the fleet the least time, in seconds: the time to its first token,
// and by how much it delays others. Both follow from how long the steps of each backend's engine take. The cost is the
// sum of its terms over the operator's weight:
//
//	cost = W + p·(1 + b + n/2) + L·(2·d·n + c·(K + n·P))/4 + I·c0·u/(1 − u) + s
//
// W is what is prefilled before it, and p its own prefill. That delays b requests that come later, n outputs, of which a
// second counts half. Each of the L tokens of its output adds to the steps of the n outputs beside it, which add to its
// own: d seconds for each, and c for each token of its context. Prefill that comes later, which takes a share u of the time,
// interrupts I of these tokens, which take c0 each otherwise; see interruptedTokens. s is CheckpointSeconds, for models that
// keep checkpoints.
//
// A turn of a conversation costs in addition what its later turns are expected to compute again, with those of
// the others there, because the cache has no room for all of these conversations, and by how much they delay each other.
//
// A request with a target for the time to first token goes to the cheapest of the backends that are predicted to meet it. Each
// second by which it would be late on another one adds latenessCost.
type Prefix struct {
	arrivals arrivals
	conversationStats
}

// costTerms are the terms of a cost, in seconds. More than four would
// not fit into registers, and double the time of Choose.
type costTerms struct {
	queue   float64 // W, the fetch of offloaded tokens, an adapter's loading and the wait for room: what comes before its prefill
	prefill float64 // p: its prefill
	delay   float64 // of those behind it, and of the outputs that its prefill interrupts
	decode  float64 // how much its output and those beside it slow each other down, and prefill that comes later slows it down

	checkpoint float64 // what the next request with the same beginning computes again
}

// work is what a request has to share an engine's time with, on average.
type work struct {
	backends  float64 // that share it
	queued    float64 // seconds of prefill
	sequences float64
	context   float64 // tokens to which these attend
	prefill   float64 // share of the time that was spent on prefill lately
}

// deviceWork returns the work of a candidate and of those that share its device. Engines that share one have equal shares of
// it while they have prefill: one delays another by no more than the other has itself, the request included.
func deviceWork(c *Candidate, candidates []Candidate, rates *decayedRates) work {
	if c.Device == 0 {
		return work{1, c.QueuedSeconds, c.InFlight / c.Engines, c.ContextTokens / c.Engines, rates.enginePrefillShare(c)}
	}
	var w work
	for i := range candidates {
		if o := &candidates[i]; o.Device == c.Device {
			w.backends++
			w.queued += min(o.QueuedSeconds, c.QueuedSeconds+c.PrefillSeconds)
			w.sequences += o.InFlight / o.Engines
			w.context += o.ContextTokens / o.Engines
			w.prefill += rates.enginePrefillShare(o)
		}
	}
	return w
}

// costOf returns what a request with a prompt and an output of so many tokens costs on a candidate, beside its wait for
// others. Each second of its prefill delays so many later requests, on a backend of the mean speed.
func costOf(c *Candidate, w *work, promptTokens, outputTokens, delayed, meanRate float64) costTerms {
	beside := 2*c.Step.Sequence*w.sequences + c.Step.Context*(w.context+w.sequences*promptTokens)
	// A slower backend has fewer later requests.
	behind := c.Step.Rate / meanRate * delayed
	return costTerms{
		queue:   w.queued + c.FetchSeconds + c.AdapterSeconds + kvWaitCost*c.KVWaitSeconds,
		prefill: c.PrefillSeconds,
		delay:   c.PrefillSeconds * (behind + decodeWeight*w.sequences),
		decode:  decodeWeight * outputShare * outputTokens * beside,

		checkpoint: c.CheckpointSeconds,
	}
}

func (t costTerms) sum() float64 { return t.queue + t.prefill + t.delay + t.decode + t.checkpoint }

func (t costTerms) named() []Term {
	return []Term{{"queue", t.queue}, {"prefill", t.prefill}, {"delay", t.delay}, {"decode", t.decode}}
}

// Choose returns the candidate with the lowest cost. Among those of equal cost it is
// the one that rendezvous hashing of the conversation prefers, or without a conversation of the
// first block, so that two routers send the same request to the same backend.
func (p *Prefix) Choose(r *Request, candidates []Candidate) (index int) {
	rate := meanPrefillRate(candidates)
	rates := p.arrivals.ratesAt(r.Now)
	mean := rates.meanRate(candidates)
	waiting := r.Waiting / float64(len(candidates))
	delayed := func(w *work, prefill float64) float64 {
		return min(maxDelayed, waiting+w.backends*mean.requests*(w.queued+prefill/2)/(1-min(w.backends*mean.prefill, maxUtilization)))
	}
	tieKey := cmp.Or(r.Conversation, r.FirstBlock())
	future := p.expectFutureTurns(r, candidates, rate)
	interrupted, meanShare := p.interruptedTokens(r), rates.meanPrefillShare(candidates)
	shareWeight := recentShareWeight(interrupted*meanStepBaseSeconds(candidates), meanShare)
	best, lowest, bestIsLate := 0, math.Inf(1), true
	for i := range candidates {
		c := &candidates[i]
		w := deviceWork(c, candidates, &rates)
		terms := costOf(c, &w, r.PromptTokens, r.MeanOutputTokens, delayed(&w, c.PrefillSeconds), rate)
		share := w.backends * meanShare
		terms.decode += interruptionSeconds(interrupted*c.Step.Base, share+shareWeight*(w.prefill-share))
		later := future.cost(c)
		lateness := latenessCost * r.lateness(c)
		cost := (terms.sum() + later + lateness) / c.Weight
		if r.Trace != nil {
			r.Trace.addCost(cost, terms, later, lateness)
		}
		if late := lateness > 0; late != bestIsLate {
			if bestIsLate {
				best, lowest, bestIsLate = i, cost, false
			}
			continue
		}
		if cost < lowest || cost == lowest && RendezvousRank(tieKey, c.NameHash) > RendezvousRank(tieKey, candidates[best].NameHash) {
			best, lowest = i, cost
		}
	}
	return best
}

// recentShareWeight returns the weight, from 0 to 1, of an engine's own recent share of prefill in the share that is expected during
// a decode; the mean share of all engines has the rest. The decode takes that many seconds without prefill. The longer it takes, the
// lower is the weight. It is the same for all candidates: slower ones, whose decodes take longer, would seem less busy.
func recentShareWeight(decode, meanShare float64) float64 {
	return arrivalWindow / (arrivalWindow + 2*decode/(1-min(meanShare, maxUtilization)))
}

// interruptionSeconds returns by how many seconds later prefill lengthens a decode that takes that many seconds without it, on an
// engine that is expected to prefill for that share of its time.
func interruptionSeconds(decode, share float64) float64 {
	busy := min(max(0, share-quietShare), maxUtilization)
	return decode * busy / (1 - busy)
}

// meanStepBaseSeconds returns the mean of the candidates' Step.Base.
func meanStepBaseSeconds(candidates []Candidate) (mean float64) {
	for i := range candidates {
		mean += candidates[i].Step.Base
	}
	return mean / float64(len(candidates))
}

// interruptedTokens returns how many tokens of the output count as interrupted by prefill that comes later: all, unless the
// request is a turn of a conversation. Later turns follow the first one, so much of that prefill is their own. They do not
// count it, since they would leave the backend that has cached their prompts.
func (p *Prefix) interruptedTokens(r *Request) float64 {
	switch r.Turn {
	case prompt.TurnFirst:
		return r.MeanOutputTokens / (1 + p.laterTurns())
	case prompt.TurnLater:
		return 0
	}
	return r.MeanOutputTokens
}

// RecordSent implements Recorder.
func (p *Prefix) RecordSent(r *Request, c *Candidate) {
	p.arrivals.add(c.Slot, c.PrefillSeconds, r.Now)
	p.countTurn(r, c)
}

// addCost records the next candidate's cost and its terms, of which those of checkpoints, later turns and lateness are left out if 0.
func (t *Trace) addCost(cost float64, terms costTerms, later, late float64) {
	t.Criterion = "cost in seconds"
	named := terms.named()
	if terms.checkpoint > 0 {
		named = append(named, Term{checkpointTerm, terms.checkpoint})
	}
	if later > 0 {
		named = append(named, Term{laterTurnsTerm, later})
	}
	if late > 0 {
		named = append(named, Term{latenessTerm, late})
	}
	t.Scores, t.Terms = append(t.Scores, cost), append(t.Terms, named)
}

// TermMeaning returns what a term of the cost stands for; "" if there is none of that name.
func TermMeaning(name string) string {
	switch name {
	case "queue":
		return "what is computed, fetched or loaded before it"
	case "prefill":
		return "its uncached tokens"
	case "delay":
		return "of the requests beside and behind it"
	case "decode":
		return "its output and those beside it slow each other down, and prefill that comes later slows it down"
	case checkpointTerm:
		return "what the next request with the same beginning has to compute again there"
	case laterTurnsTerm:
		return "what the next turns of its conversation and of others there are expected to compute again, and how long they delay each other"
	case latenessTerm:
		return "eight for each second by which its first token comes after it is due"
	}
	return ""
}

// lateness returns by how many seconds a candidate is predicted to miss the target for the first token of the request; 0 if it meets
// the target, or there is none.
func (r *Request) lateness(c *Candidate) (seconds float64) {
	if r.DueSeconds == 0 {
		return 0
	}
	return max(0, c.TTFT()-r.DueSeconds)
}

func meanPrefillRate(candidates []Candidate) float64 {
	sum := 0.0
	for i := range candidates {
		sum += candidates[i].Step.Rate
	}
	return sum / float64(len(candidates))
}

// ForgetBackend implements Forgetter.
func (p *Prefix) ForgetBackend(slot int) {
	p.arrivals.forget(slot)
	p.conversationStats.ForgetBackend(slot)
}
