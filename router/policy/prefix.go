package policy

import (
	"cmp"
	"math"
	"time"
)

// Constants of the cost, found by simulation; see docs/routing.md.
const (
	stallPerDecode = 0.25 // θ: how much a decode is delayed by a prefill beside it
	maxStall       = 4    // times the prefill, for all decodes together
	decodeCost     = 0.64 // δ: what a token of output costs each sequence beside it, in tokens of prefill
	// kvWaitCost is what a token's time of waiting for room in the KV cache costs: what waits in
	// a replica keeps everything behind it waiting.
	kvWaitCost = 4
	// evictionCost is what evicting a token that will be computed again costs.
	evictionCost     = 0.3
	kappaScale       = 2
	maxKappa         = 64
	pressureInterval = 20 * time.Second // over which W is averaged

	laterTurnsTerm = "later turns" // its name
)

// Prefix chooses the backend where the request has the lowest cost to the fleet, in tokens of
// prefill. The cost is the sum of its terms over the operator's weight:
//
//	cost = W + u·(1 + κ + min(θ·n, 4) + 0.3·ρ/(1-ρ)) + δ·L̂·n
//
// κ makes matches count for more as queues grow: under pressure, a token computed twice delays everyone behind
// it. W and u, the time to the first token, are scaled by how much slower than the mean the backend is. The
// other terms are not: if they were, the faster backends would fill up long before the slower ones.
//
// A turn of a conversation costs in addition what its later turns are expected to compute again, with those of
// the others there, because the cache has no room for all of these conversations. The first turn also costs
// what the later ones do without that: as many mean turns, beside the conversations that are under way there.
type Prefix struct {
	// SLO is the time to the first token that is to be met; 0: none. Of the backends predicted to meet it the
	// one with the longest match is chosen, which leaves idle ones to requests without a match.
	SLO time.Duration

	queued []averagedQueue // by slot
	conversationStats
}

// averagedQueue is a backend's W, averaged over pressureInterval.
type averagedQueue struct {
	tokens float64
	at     time.Time // of the last value; zero: none yet
}

// costTerms are the terms of a cost, in tokens of prefill. More than four would
// not fit into registers, and double the time of Choose.
type costTerms struct {
	queue   float64 // W, an adapter's loading and the wait for room: what comes before its prefill
	prefill float64 // u: its prefill
	delay   float64 // of those behind it, of the decodes that its prefill stalls, and by what it evicts
	decode  float64 // how much its output and those beside it slow each other down
}

// costOf returns the terms for a candidate. slowdown is the mean prefill rate over
// the candidate's, outputTokens is L̂.
func costOf(c *Candidate, slowdown, outputTokens, kappa float64) costTerms {
	return costTerms{
		queue:   slowdown * (c.QueuedTokens + c.AdapterTokens + kvWaitCost*c.KVWaitTokens),
		prefill: slowdown * c.UncachedTokens,
		delay:   c.UncachedTokens * (kappa + min(stallPerDecode*c.InFlight, maxStall) + evictionCost*c.Recomputed/(1-c.Recomputed)),
		decode:  decodeCost * outputTokens * c.InFlight,
	}
}

func (t costTerms) sum() float64 { return t.queue + t.prefill + t.delay + t.decode }

func (t costTerms) named() []Term {
	return []Term{{"queue", t.queue}, {"prefill", t.prefill}, {"delay", t.delay}, {"decode", t.decode}}
}

// Choose returns the candidate with the lowest cost. Among those of equal cost it is
// the one that rendezvous hashing of the session prefers, or without a session of the
// first block, so that two routers send the same request to the same backend.
func (p *Prefix) Choose(r *Request, candidates []Candidate) (index int) {
	rate := meanPrefillRate(candidates)
	kappa := kappaFor(p.updatePressure(r, candidates, rate), r.MeanUncachedTokens)
	tieKey := cmp.Or(r.Session, r.FirstBlock())
	future := p.expectFutureTurns(r, candidates)
	best, lowest := 0, math.Inf(1)
	matched := -1.0 // tokens, of the best one if that meets the SLO
	for i := range candidates {
		c := &candidates[i]
		terms := costOf(c, rate/c.PrefillRate, r.MeanOutputTokens, kappa)
		later := future.cost(c, rate/c.PrefillRate, kappa)
		cost := (terms.sum() + later) / c.Weight
		if r.Trace != nil {
			r.Trace.addCost(cost, kappa, terms, later)
		}
		if p.SLO > 0 {
			if m := p.matchIfWithinSLO(c); m != matched {
				if m > matched {
					best, lowest, matched = i, cost, m
				}
				continue
			}
		}
		if cost < lowest || cost == lowest && RendezvousRank(tieKey, c.NameHash) > RendezvousRank(tieKey, candidates[best].NameHash) {
			best, lowest = i, cost
		}
	}
	return best
}

// RecordSent implements Recorder.
func (p *Prefix) RecordSent(r *Request, c *Candidate) { p.countTurn(r, c) }

// addCost records the next candidate's cost and its terms, of which that of the later turns is left out if 0.
func (t *Trace) addCost(cost, kappa float64, terms costTerms, later float64) {
	t.Criterion, t.Kappa = "cost in tokens of prefill", kappa
	named := terms.named()
	if later > 0 {
		named = append(named, Term{laterTurnsTerm, later})
	}
	t.Scores, t.Terms = append(t.Scores, cost), append(t.Terms, named)
}

// TermMeaning returns what a term of the cost stands for; "" if there is none of that name.
func TermMeaning(name string) string {
	switch name {
	case "queue":
		return "what is computed before it"
	case "prefill":
		return "its uncached tokens"
	case "delay":
		return "of the requests beside and behind it"
	case "decode":
		return "its output and those beside it slow each other down"
	case laterTurnsTerm:
		return "what the next turns of its conversation are expected to compute again there"
	}
	return ""
}

// matchIfWithinSLO returns the matched tokens of a candidate that is predicted to
// meet the SLO, and -1 for others.
func (p *Prefix) matchIfWithinSLO(c *Candidate) (tokens float64) {
	if (c.QueuedTokens+c.AdapterTokens+c.KVWaitTokens+c.UncachedTokens)/c.PrefillRate > p.SLO.Seconds() {
		return -1
	}
	return c.MatchedTokens
}

func meanPrefillRate(candidates []Candidate) float64 {
	sum := 0.0
	for i := range candidates {
		sum += candidates[i].PrefillRate
	}
	return sum / float64(len(candidates))
}

func kappaFor(pressure, meanUncachedTokens float64) float64 {
	if meanUncachedTokens == 0 {
		return 0
	}
	return min(maxKappa, kappaScale*pressure/meanUncachedTokens)
}

// updatePressure returns the mean of the candidates' averaged queues, scaled by their speed.
// Unless r is a dry run, the averages are updated.
func (p *Prefix) updatePressure(r *Request, candidates []Candidate, meanRate float64) (tokens float64) {
	var last time.Time
	gain := 0.0
	for i := range candidates {
		c := &candidates[i]
		var q averagedQueue
		if c.Slot < len(p.queued) {
			q = p.queued[c.Slot]
		}
		if i == 0 || !q.at.Equal(last) { // most often all have the same
			last, gain = q.at, 1
			if !q.at.IsZero() {
				gain = 1 - math.Exp(-r.Now.Sub(q.at).Seconds()/pressureInterval.Seconds())
			}
		}
		q.tokens += gain * (c.QueuedTokens - q.tokens)
		q.at = r.Now
		tokens += q.tokens * (meanRate / c.PrefillRate)
		if r.Trace == nil {
			for len(p.queued) <= c.Slot {
				p.queued = append(p.queued, averagedQueue{})
			}
			p.queued[c.Slot] = q
		}
	}
	return tokens / float64(len(candidates))
}

// ForgetBackend implements Forgetter.
func (p *Prefix) ForgetBackend(slot int) {
	if slot < len(p.queued) {
		p.queued[slot] = averagedQueue{}
	}
	p.conversationStats.ForgetBackend(slot)
}
