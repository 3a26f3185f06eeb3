package backends

import (
	"bytes"
	"cmp"
	"math"
	"slices"
)

// load turns what was gathered into a Load.
func (p *scrape) load() Load {
	var l Load
	if run, wait := p.totals[running], p.totals[waiting]; run.known() && wait.known() {
		l.Running, l.Waiting, l.QueuesKnown = int(run.sum), int(wait.sum), true
		l.WaitingForCapacity = l.Waiting
		if c := p.totals[waitingCapacity]; c.known() {
			l.WaitingForCapacity = int(c.sum)
		}
	}
	if usage, ok := p.firstKnown(kvUsage, gpuUsage); ok {
		l.KVCacheUsage, l.KVKnown = min(usage.max, 1), true
	}
	p.loadCache(&l)
	p.loadPrefix(&l)
	prompt, promptOK := p.firstKnown(promptTokens, promptTokensBare)
	generation, generationOK := p.firstKnown(generationTokens, generationTokensBare)
	if promptOK && generationOK {
		l.PromptTokens, l.GenerationTokens, l.TokensKnown = prompt.sum, generation.sum, true
	}
	if start := p.totals[startTime]; start.known() {
		l.StartTime = start.max
	}
	for name := range bytes.SplitSeq(p.adapters, []byte(",")) {
		if name = bytes.TrimSpace(name); len(name) > 0 {
			l.RunningAdapters = append(l.RunningAdapters, unescape(name))
		}
	}
	l.MaxAdapters = p.maxAdapters
	l.StepTokens = p.stepTokens()
	l.Asleep = p.asleep
	return l
}

// firstKnown prefers the newest of a quantity's names.
func (p *scrape) firstKnown(names ...family) (total, bool) {
	for _, f := range names {
		if p.totals[f].known() {
			return p.totals[f], true
		}
	}
	return total{}, false
}

func (p *scrape) loadCache(l *Load) {
	l.PrefixCachingOff = len(p.engines) > 0
	for _, e := range p.engines {
		l.PrefixCachingOff = l.PrefixCachingOff && e.cachingOff
		l.BlockSize = max(l.BlockSize, e.block)
		l.HitAlignment = max(l.HitAlignment, e.hitAlign)
		l.CacheTokens += e.tokens
	}
	for _, e := range p.engines {
		if e.tokens == 0 {
			l.CacheTokens = 0 // a sum without one engine would be too small
		}
	}
	if l.HitAlignment == 0 {
		l.HitAlignment = l.BlockSize
	}
}

func (p *scrape) loadPrefix(l *Load) {
	q, queriesOK := p.firstKnown(queries, queriesBare)
	h, hitsOK := p.firstKnown(hits, hitsBare)
	unit := p.unit
	if !queriesOK || !hitsOK {
		q, queriesOK = p.firstKnown(gpuQueries, gpuQueriesBare)
		h, hitsOK = p.firstKnown(gpuHits, gpuHitsBare)
		if unit = p.gpuUnit; unit == unitUnsaid {
			unit = unitBlocks // what the first versions with this name counted
		}
	}
	scale := 1.0
	if unit == unitBlocks {
		scale = float64(l.BlockSize)
	}
	if !queriesOK || !hitsOK || scale == 0 || math.IsInf(max(q.sum, h.sum)*scale, 0) {
		return
	}
	l.PrefixQueries, l.PrefixHits, l.PrefixKnown = q.sum*scale, h.sum*scale, true
}

// stepTokens returns the upper bound of the highest bucket that a step fell
// into, or the highest finite bound when a step was beyond all of them.
func (p *scrape) stepTokens() int {
	slices.SortFunc(p.buckets, func(a, b bucket) int { return cmp.Compare(a.le, b.le) })
	var below, filled, bound float64
	for _, b := range p.buckets { // counts are cumulative
		if b.le <= maxCount {
			bound = b.le
		}
		if b.count > below {
			below, filled = b.count, bound
		}
	}
	return int(max(filled, 0))
}
