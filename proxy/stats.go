package proxy

import (
	"math"
	"sync"
	"time"

	"warmroute/backends"
	"warmroute/metrics"
)

const (
	// StatsInterval is the time between two points of a series, of which statsPoints are kept: five minutes.
	StatsInterval = 5 * time.Second
	statsPoints   = 60
	// recentPoints are averaged for Recent: one point alone may have few requests.
	recentPoints = 6

	// The buckets of TTFT grow by a quarter of an octave, from a millisecond to more than two minutes.
	minTTFT       = time.Millisecond
	ttftPerOctave = 4
	ttftBuckets   = 18 * ttftPerOctave
)

// statsWindow counts the requests of the last minutes, by intervals.
type statsWindow struct {
	began time.Time

	mu    sync.Mutex // guards what follows
	steps [statsPoints]statsPoint
	fleet []backendStats // by slot
}

// counts are figures of requests that have ended.
type counts struct {
	tick     int64 // number of the interval; the counts of another one are outdated
	requests int
	failed   int // with an error; a client disconnect is none
	prompt   int // tokens, of successful requests
	cached   int // of them, as reported, else as predicted
}

type statsPoint struct {
	counts
	ttft [ttftBuckets]uint32
}

type backendStats struct {
	backend *backends.Backend // whose counts these are
	steps   [recentPoints + 1]counts
}

func newStatsWindow() statsWindow { return statsWindow{began: time.Now()} }

// countEndedRequest counts a request that was last sent to b; nil: to none. cachedKnown is false for a stream without usage, though
// the replica may report that of others.
func (w *statsWindow) countEndedRequest(b *backends.Backend, arrived time.Time, o *metrics.Request, cachedKnown bool) {
	tick := int64(arrived.Add(o.Duration).Sub(w.began) / StatsInterval)
	prompt, cached := 0, 0
	if o.Code == 200 {
		prompt, cached = o.PromptTokens, o.PredictedTokens
		if cachedKnown {
			cached = o.ObservedTokens
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	s := &w.steps[tick%statsPoints]
	if s.tick != tick {
		*s = statsPoint{counts: counts{tick: tick}}
	}
	failed := o.Code >= 400 && o.Code != statusClientClosed
	s.add(failed, prompt, cached)
	if o.TTFT > 0 {
		s.ttft[ttftBucket(o.TTFT)]++
	}
	if b == nil {
		return
	}
	for len(w.fleet) <= b.Slot {
		w.fleet = append(w.fleet, backendStats{})
	}
	of := &w.fleet[b.Slot]
	if of.backend != b {
		*of = backendStats{backend: b}
	}
	c := &of.steps[tick%int64(len(of.steps))]
	if c.tick != tick {
		*c = counts{tick: tick}
	}
	c.add(failed, prompt, cached)
}

func (c *counts) add(failed bool, prompt, cached int) {
	c.requests++
	if failed {
		c.failed++
	}
	c.prompt += prompt
	c.cached += cached
}

func ttftBucket(d time.Duration) (index int) {
	i := int(ttftPerOctave * math.Log2(float64(d)/float64(minTTFT)))
	return min(max(i, 0), ttftBuckets-1)
}

// Recent are figures of the last half minute. Unknown ones are NaN.
type Recent struct {
	PerSecond float64 // requests that ended
	Failed    float64 // share of them that failed; a client disconnect is no failure
	HitRatio  float64 // share of prompt tokens from the cache, as reported, else as predicted
	TTFT      float64 // median in seconds; NaN for a single backend
}

// Stats are figures of the last minutes.
type Stats struct {
	Recent
	// Series of points StatsInterval apart, oldest first.
	TTFT, HitRatio []float64
	Backends       map[*backends.Backend]Recent
}

// Stats returns figures of the requests that ended in the last minutes.
func (a *Activity) Stats() Stats {
	p := &a.stats
	since := time.Since(p.began)
	now := int64(since / StatsInterval)
	seconds := min(since, recentPoints*StatsInterval+since%StatsInterval).Seconds()
	p.mu.Lock()
	defer p.mu.Unlock()
	out := Stats{Backends: map[*backends.Backend]Recent{}}
	var recent statsPoint
	for tick := now - statsPoints + 1; tick <= now; tick++ {
		s := statsPoint{}
		if tick >= 0 && p.steps[tick%statsPoints].tick == tick {
			s = p.steps[tick%statsPoints]
		}
		out.TTFT, out.HitRatio = append(out.TTFT, s.medianTTFT()), append(out.HitRatio, s.hitRatio())
		if tick >= now-recentPoints {
			recent.merge(&s.counts)
			for i, n := range s.ttft {
				recent.ttft[i] += n
			}
		}
	}
	out.Recent = Recent{float64(recent.requests) / seconds, recent.failedRatio(), recent.hitRatio(), recent.medianTTFT()}
	for i := range p.fleet {
		of := &p.fleet[i]
		var c counts
		for _, s := range of.steps {
			if s.tick >= now-recentPoints {
				c.merge(&s)
			}
		}
		if of.backend != nil {
			out.Backends[of.backend] = Recent{float64(c.requests) / seconds, c.failedRatio(), c.hitRatio(), math.NaN()}
		}
	}
	return out
}

func (c *counts) merge(more *counts) {
	c.requests += more.requests
	c.failed += more.failed
	c.prompt += more.prompt
	c.cached += more.cached
}

func (c *counts) failedRatio() float64 { return float64(c.failed) / float64(c.requests) }

func (c *counts) hitRatio() float64 { return min(float64(c.cached)/float64(c.prompt), 1) }

// medianTTFT returns the median TTFT in seconds, with an error of a tenth at most.
func (s *statsPoint) medianTTFT() float64 {
	all := uint32(0)
	for _, n := range s.ttft {
		all += n
	}
	below := uint32(0)
	for i, n := range s.ttft {
		if n > 0 && 2*(below+n) >= all {
			within := (float64(all)/2 - float64(below)) / float64(n)
			return minTTFT.Seconds() * math.Exp2((float64(i)+within)/ttftPerOctave)
		}
		below += n
	}
	return math.NaN()
}
