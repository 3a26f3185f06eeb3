package estimate

import (
	"cmp"
	"slices"
	"time"
)

const (
	fetchSamples     = 5    // of which the median is used; those not seen yet are 0
	minFetchedTokens = 1024 // of a sample
	// maxFetchPrefills is how many times a token's prefill its fetch is taken to last at most. A replica fetches what it finds,
	// even if that takes longer than to compute it. Without a bound it would be sent no such prompt again, from which to learn
	// that fetches have become faster.
	maxFetchPrefills = 4
	// fetchTimeout is after which time without a sample one of 0 is added: after three, fetches are free until they were learned again.
	fetchTimeout = 30 * time.Minute
)

// fetchTimes is what was learned of how long a replica takes to fetch blocks that its GPU has evicted, from host memory, a disk or
// a store.
type fetchTimes struct {
	recent [fetchSamples]float64 // seconds per token; a ring
	next   int                   // of recent
	median float64
	at     time.Time // of the last sample
}

// add adds a sample.
func (t *fetchTimes) add(secondsPerToken float64, now time.Time) {
	t.at = now
	t.recent[t.next] = secondsPerToken
	t.next = (t.next + 1) % len(t.recent)
	sorted := t.recent
	slices.Sort(sorted[:])
	t.median = sorted[len(sorted)/2]
}

// Offloads reports whether a backend has fetched blocks that were not on its GPU, as far as is known.
func (f *Estimates) Offloads(slot int) bool { return f.backends[slot].offloads && !f.disabled }

// DeviceBlocks returns how many blocks of the index fit the GPU's part of a backend's cache.
func (f *Estimates) DeviceBlocks(slot int) (blocks int) { return f.cacheBlocks(slot, 1/f.margin) }

// FetchSeconds returns how long a backend takes to fetch a token that is not on its GPU: as long as others of its model, if that was
// not learned, and 0 if neither was.
func (f *Estimates) FetchSeconds(slot int) (secondsPerToken float64) {
	if f.disabled {
		return 0
	}
	b := &f.backends[slot]
	return min(cmp.Or(b.fetches.median, b.steps.group.fetches.median), maxFetchPrefills/f.regressionOf(slot).rate)
}

// FadeFetches forgets one sample of a backend's fetches, if the last one was long ago.
func (f *Estimates) FadeFetches(slot int, now time.Time) {
	b := &f.backends[slot]
	for _, t := range []*fetchTimes{&b.fetches, &b.steps.group.fetches} {
		if t.median > 0 && now.Sub(t.at) > fetchTimeout {
			t.add(0, now)
		}
	}
}

// LearnFetch learns from the time to the first token of a request that had nothing before it how long its replica took to fetch so
// many tokens: what is left of it without the steps and the network.
func (f *Estimates) LearnFetch(slot int, s *StepSample, tokens float64, now time.Time) {
	x, share, ok := s.relativeTerms()
	if f.disabled || !ok || tokens < minFetchedTokens {
		return
	}
	b, perToken := &f.backends[slot], max(0, s.Seconds*f.regressionOf(slot).residual(&x, share))/tokens
	b.fetches.add(perToken, now)
	b.steps.group.fetches.add(perToken, now)
}
