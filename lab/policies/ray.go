package policies

import (
	"cmp"
	"math/rand/v2"
	"time"

	"warmroute/router/policy"
)

// rayCharactersPerToken converts the characters that Ray counts, without a tokenizer.
const rayCharactersPerToken = 4

// rayAffinity is Ray Serve's PrefixCacheAffinityRouter. When one backend has more
// than abs requests in flight above another, or there is no text, it is power of
// two choices. Otherwise the longest match is chosen if that reaches the
// threshold, else the smallest tree. Its trees are not bounded unless eviction is
// configured; ours are, by maxTableBlocks.
type rayAffinity struct {
	*prefixTable
	rng                               *rand.Rand
	match                             matchThreshold
	abs                               float64
	evictionThreshold, evictionTarget float64 // tokens of one backend; a threshold of 0: nothing is evicted
	evictionInterval                  time.Duration
	eviction                          timer
}

// newRay returns the policy with the defaults of Ray, which evicts nothing unless told to, and then every 10 s, down to
// 360,000 of 400,000 characters.
func newRay(o options) policy.Policy {
	threshold := float64(o.EvictionThreshold)
	return &rayAffinity{
		prefixTable: newPrefixTable(o.maxBlocks, tailFirst), rng: o.Rand,
		match: newMatchThreshold(o.Settings, 0.1), abs: orDefault(o.ImbalanceAbs, 10),
		evictionThreshold: threshold / rayCharactersPerToken,
		evictionTarget:    orDefault(float64(o.EvictionTarget), 9*threshold/10) / rayCharactersPerToken,
		evictionInterval:  cmp.Or(o.EvictionInterval, 10*time.Second),
	}
}

func (p *rayAffinity) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	if least, most := loadRange(candidates); most-least > p.abs || len(r.Blocks) == 0 {
		return powerOfTwo{p.rng}.Choose(r, candidates)
	}
	if chosen, blocks := pickLongestMatch(r, p.countPrefixMatches(r.Blocks, candidates), p.rng); p.match.isReached(r, blocks) {
		return chosen
	}
	return p.pickFewestBlocks(r, candidates, p.rng)
}

// RecordSent implements Recorder. It evicts when that is due.
func (p *rayAffinity) RecordSent(r *policy.Request, c *policy.Candidate) {
	p.prefixTable.RecordSent(r, c)
	if p.evictionThreshold > 0 && p.eviction.restartIfExpired(r.Now, p.evictionInterval) {
		p.evict(toBlocks(r, p.evictionThreshold), toBlocks(r, p.evictionTarget))
	}
}

// evict evicts the least recently used blocks of each backend that has more than threshold, until it has target or
// less. As Ray does, it evicts all that were last used at the same time, such as the whole of a prompt.
func (p *rayAffinity) evict(threshold, target int) {
	for _, part := range p.parts {
		if part.lru == nil || part.lru.Len() <= threshold {
			continue
		}
		for part.lru.Len() > target {
			_, used, _ := part.lru.GetOldest()
			evictUnusedSince(part.lru, time.Unix(0, used+1))
		}
	}
}
