package policies

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"warmroute/router/policy"
)

// Bounds of AIBrix's table, which all backends share: blocks of 16 tokens.
const (
	maxAIBrixTokens = 200_000 * 16
	maxAIBrixAge    = 20 * time.Minute
)

// aibrix is AIBrix's prefix-cache. When one backend has more than imbalance
// requests in flight above another, only the least loaded stay candidates. Those
// above the mean plus one standard deviation are passed over. Of the others, the
// one with the longest match in whole percents is chosen, and the least loaded
// among equals.
type aibrix struct {
	*sharedTable
	rng       *rand.Rand
	imbalance float64
	maxBlocks int

	eligible []int // scratch: indexes of candidates
}

func newAIBrix(o options) policy.Policy {
	return &aibrix{
		sharedTable: newSharedTable(o.maxBlocks, headFirst), rng: o.Rand,
		imbalance: orDefault(o.ImbalanceAbs, 8), maxBlocks: o.maxBlocks,
	}
}

func (p *aibrix) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	least, most := loadRange(candidates)
	p.eligible = p.eligible[:0]
	for i := range candidates {
		if most-least <= p.imbalance || candidates[i].Requests == least {
			p.eligible = append(p.eligible, i)
		}
	}
	matched := p.countPrefixMatchesSince(r.Blocks, candidates, r.Now.Add(-maxAIBrixAge))
	bound := p.meanPlusDeviation(candidates)
	traceScores(r, "leading blocks of the prompt sent to it before, unless it is too busy", true, len(candidates), func(i int) float64 {
		if candidates[i].Requests > bound || !slices.Contains(p.eligible, i) {
			return math.Inf(-1)
		}
		return float64(matched[i])
	})
	// At least one is not above the mean, so the choice is never above the bound.
	chosen := pickLowestUntraced(len(p.eligible), p.rng, func(k int) float64 {
		i := p.eligible[k]
		n := candidates[i].Requests
		if n > bound {
			return math.Inf(1)
		}
		percent := 100 * matched[i] / max(1, len(r.Blocks))
		return -float64(percent) + n/(n+1) // the load decides within a percent
	})
	return p.eligible[chosen]
}

// RecordSent implements Recorder.
func (p *aibrix) RecordSent(r *policy.Request, c *policy.Candidate) {
	evictUnusedSince(p.lru, r.Now.Add(-maxAIBrixAge))
	p.lru.Resize(min(p.maxBlocks, toBlocks(r, maxAIBrixTokens)))
	p.sharedTable.RecordSent(r, c)
}

// meanPlusDeviation returns the mean of the eligible candidates' requests in flight
// plus one standard deviation.
func (p *aibrix) meanPlusDeviation(candidates []policy.Candidate) (requests float64) {
	sum, squares := 0.0, 0.0
	for _, i := range p.eligible {
		n := candidates[i].Requests
		sum, squares = sum+n, squares+n*n
	}
	mean := sum / float64(len(p.eligible))
	return mean + math.Sqrt(max(0, squares/float64(len(p.eligible))-mean*mean))
}
