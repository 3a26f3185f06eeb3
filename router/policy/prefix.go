package policy

import (
	"math"
	"time"
)

// Constants of the cost, found by simulation; see docs/routing.md, "The cost".
const (
	theta        = 0.25 // what a prefill does to each decode that it stalls
	thetaCap     = 4    // … of which more than this many tokens a token cannot come
	delta        = 0.64 // what a decoding neighbour costs this answer, and it them, in tokens of prefill per token
	kappaScale   = 0.5
	kappaCap     = 16
	pressureTime = 20 * time.Second // over which W is averaged
)

// Prefix sends a request where it costs the fleet least, in tokens of prefill:
//
//	cost = W + u·(1 + κ + min(θ·n, 4)) + δ·L̂·n
//
// W is the queue that the request waits in, u what it has to compute there
// itself, n·u how many decodes that stalls, and L̂·n how the answer and its
// neighbours slow each other down. κ makes hits count for more as queues grow:
// under pressure a token computed twice delays everyone behind it.
//
// Where backends differ in speed, the time until the first token, W + u, is
// stretched by how much slower than the others one is. What the request costs
// those beside it and behind it is not: stretched as well, it fills the faster
// backends long before the slower ones have enough to do. The operator's weight
// divides the whole.
type Prefix struct {
	// SLO is the time to a first token that is to be met; 0: none. Of the backends
	// predicted to meet it the one that holds the most of the prompt is taken,
	// which leaves the idle ones to requests that nobody holds anything of.
	SLO time.Duration

	pressure float64 // mean W of the candidates, averaged over pressureTime
	last     time.Time
}

// Choose returns the cheapest candidate. Among equals it is the one that
// rendezvous hashing of the prompt's first block prefers, so that two routers
// send the same cold prompt to the same backend.
func (p *Prefix) Choose(r *Request, candidates []Candidate) int {
	rate := meanRate(candidates)
	pressure := p.pressureAt(r.Now, candidates, rate)
	if r.Trace == nil {
		p.pressure, p.last = pressure, r.Now
	}
	kappa := kappaOf(pressure, r.MeanUncachedTokens)
	best, lowest := 0, math.Inf(1)
	held := -1.0 // tokens that best holds, when it meets the SLO
	for i := range candidates {
		c := &candidates[i]
		terms := termsOf(c, stretch(c, rate), r.MeanAnswerTokens, kappa)
		cost := terms.sum() / c.Weight
		if r.Trace != nil {
			r.Trace.cost(cost, kappa, terms)
		}
		if p.SLO > 0 {
			if got := p.heldInTime(c); got != held {
				if got > held {
					best, lowest, held = i, cost, got
				}
				continue
			}
		}
		if cost < lowest || cost == lowest && rendezvous(r.FirstBlock(), c.NameHash) > rendezvous(r.FirstBlock(), candidates[best].NameHash) {
			best, lowest = i, cost
		}
	}
	return best
}

// heldInTime is how much of the prompt a candidate holds that is predicted to
// meet the SLO; -1 for others.
func (p *Prefix) heldInTime(c *Candidate) float64 {
	if (c.QueuedTokens+c.AdapterTokens+c.UncachedTokens)/c.PrefillRate > p.SLO.Seconds() {
		return -1
	}
	return c.MatchedTokens
}

// Terms are what a cost is made of, in tokens of prefill, before the operator's
// weight divides them.
type Terms struct {
	First  float64 // until the first token: W, an adapter's loading and u, stretched
	Others float64 // what u costs those who come behind it, and the decodes that it stalls
	Beside float64 // what the answer and those beside it cost each other
}

func (t Terms) sum() float64 { return t.First + t.Others + t.Beside }

func termsOf(c *Candidate, stretch, answer, kappa float64) Terms {
	return Terms{
		First:  stretch * (c.QueuedTokens + c.AdapterTokens + c.UncachedTokens),
		Others: c.UncachedTokens * (kappa + min(theta*c.InFlight, thetaCap)),
		Beside: delta * answer * c.InFlight,
	}
}

// meanRate is the speed that the cost's tokens are of.
func meanRate(candidates []Candidate) float64 {
	sum := 0.0
	for i := range candidates {
		sum += candidates[i].PrefillRate
	}
	return sum / float64(len(candidates))
}

// stretch is how much longer than elsewhere a token takes on c.
func stretch(c *Candidate, rate float64) float64 { return rate / c.PrefillRate }

func kappaOf(pressure, meanUncached float64) float64 {
	if meanUncached == 0 {
		return 0
	}
	return min(kappaCap, kappaScale*pressure/meanUncached)
}

// pressureAt is the candidates' mean W, averaged over pressureTime.
func (p *Prefix) pressureAt(now time.Time, candidates []Candidate, rate float64) float64 {
	mean := 0.0
	for i := range candidates {
		mean += candidates[i].QueuedTokens * stretch(&candidates[i], rate)
	}
	mean /= float64(len(candidates))
	if p.last.IsZero() {
		return mean
	}
	elapsed := now.Sub(p.last)
	return p.pressure + (1-math.Exp(-elapsed.Seconds()/pressureTime.Seconds()))*(mean-p.pressure)
}

// rendezvous ranks a backend for a key: highest wins. The mixer is the
// finalizer of SplitMix64.
func rendezvous(key, name uint64) uint64 {
	x := key ^ name
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
