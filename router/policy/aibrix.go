package policy

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// Bounds of AIBrix's table, which all backends share: blocks of 16 tokens.
const (
	aibrixTableTokens = 200_000 * 16
	aibrixLife        = 20 * time.Minute
)

// aibrix is AIBrix's prefix-cache. When one backend has more than abs requests
// in flight above another, only the least loaded stay candidates. Of these the
// one that holds the most of the prompt, in whole percents, with the fewest in
// flight among equals, gets it, passing over those above the mean plus one
// standard deviation.
type aibrix struct {
	rng   *rand.Rand
	abs   float64
	table *trie
	most  int

	places []int // scratch
}

func newAIBrix(o options) Policy {
	return &aibrix{rng: o.rng, abs: or(o.ImbalanceAbs, 8), table: newTrie(o.maxBlocks, losesHeads), most: o.maxBlocks}
}

func (p *aibrix) Choose(r *Request, candidates []Candidate) int {
	if r.Trace == nil {
		p.table.ages.Resize(min(p.most, r.blocksIn(aibrixTableTokens)))
	}
	expire(p.table.ages, r.Now.Add(-aibrixLife))
	chosen := p.choose(r, candidates)
	if r.Trace == nil {
		p.table.add(candidates[chosen].Slot, r.Blocks, r.Now)
	}
	return chosen
}

// Forget implements Forgetful.
func (p *aibrix) Forget(slot int) { p.table.Forget(slot) }

func (p *aibrix) choose(r *Request, candidates []Candidate) int {
	most, least := extremes(candidates)
	p.places = p.places[:0]
	for i := range candidates {
		if most-least <= p.abs || candidates[i].Requests == least {
			p.places = append(p.places, i)
		}
	}
	depths := p.table.leading(r.Blocks, candidates)
	bound := p.meanAndDeviation(candidates)
	r.tell("leading blocks of the prompt that it was sent before, of those not too busy", true, len(candidates), func(i int) float64 {
		if candidates[i].Requests > bound || !slices.Contains(p.places, i) {
			return math.Inf(-1)
		}
		return float64(depths[i])
	})
	// One at least is not above the mean, so none is chosen that is above bound.
	chosen := lowest(len(p.places), p.rng, func(k int) float64 {
		i := p.places[k]
		if candidates[i].Requests > bound {
			return math.Inf(1)
		}
		percent := 100 * depths[i] / max(1, len(r.Blocks))
		// The percentage first; the requests in flight decide within it.
		n := candidates[i].Requests
		return -float64(percent) + n/(n+1)
	})
	return p.places[chosen]
}

// meanAndDeviation is the mean of the requests in flight of places plus their
// standard deviation.
func (p *aibrix) meanAndDeviation(candidates []Candidate) float64 {
	sum, squares := 0.0, 0.0
	for _, i := range p.places {
		n := candidates[i].Requests
		sum, squares = sum+n, squares+n*n
	}
	mean := sum / float64(len(p.places))
	return mean + math.Sqrt(max(0, squares/float64(len(p.places))-mean*mean))
}
