package proxy

import (
	"math"
	"sync"
	"time"

	"warmroute/backends"
	"warmroute/metrics"
)

const (
	// StatsInterval is the time that one point of a series stands for, and statsPoints
	// how many are kept: five minutes.
	StatsInterval = 5 * time.Second
	statsPoints   = 60
	// recentPoints is what "now" is taken to be: a step alone may hold few requests.
	recentPoints = 6

	// The buckets of TTFT grow by a quarter of an octave, from a millisecond to
	// more than two minutes.
	minTTFT       = time.Millisecond
	ttftPerOctave = 4
	ttftBuckets   = 18 * ttftPerOctave
)

// statsWindow counts the requests of the last minutes, step by step.
type statsWindow struct {
	began time.Time

	mu    sync.Mutex // guards what follows
	steps [statsPoints]statsPoint
	fleet []backendStats // by slot
}

// counts is some requests that have ended.
type counts struct {
	tick     int64 // the step since the beginning; another one's counts are void
	requests int
	failed   int // of them, with an error; a client that left is none
	prompt   int // tokens, of answered requests
	cached   int // of them, as the answer told, or as was predicted where it does not
}

type statsPoint struct {
	counts
	ttft [ttftBuckets]uint32
}

type backendStats struct {
	backend *backends.Backend // the counts are another's if the slot is
	steps   [recentPoints + 1]counts
}

func newStatsWindow() statsWindow { return statsWindow{began: time.Now()} }

// countEnded counts a request that was last sent to b; nil: to none. Whether its own answer
// told of cached tokens decides what counts: of a stream without usage nothing is
// observed, though the replica tells of others.
func (p *statsWindow) countEnded(b *backends.Backend, arrived time.Time, o *metrics.Request, cachedKnown bool) {
	tick := int64(arrived.Add(o.Duration).Sub(p.began) / StatsInterval)
	prompt, cached := 0, 0
	if o.Code == 200 {
		prompt, cached = o.PromptTokens, o.PredictedTokens
		if cachedKnown {
			cached = o.ObservedTokens
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	s := &p.steps[tick%statsPoints]
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
	for len(p.fleet) <= b.Slot {
		p.fleet = append(p.fleet, backendStats{})
	}
	of := &p.fleet[b.Slot]
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

func ttftBucket(d time.Duration) int {
	i := int(ttftPerOctave * math.Log2(float64(d)/float64(minTTFT)))
	return min(max(i, 0), ttftBuckets-1)
}

// Recent is the last half minute of some requests. A share or a time of which
// nothing is known is NaN.
type Recent struct {
	PerSecond float64 // requests that ended, sent or refused
	Failed    float64 // share of them that ended with an error; a client that left is none
	HitRatio  float64 // prompt tokens from the cache: as answers told, or as predicted where they do not
	TTFT      float64 // median in seconds; of the whole fleet only
}

// Stats is the last minutes of the fleet.
type Stats struct {
	Recent
	// The series go back from now, oldest first, in steps of StatsInterval.
	TTFT, HitRatio []float64
	Backends       map[*backends.Backend]Recent
}

// Stats sums up what has ended in the last minutes.
func (l *Activity) Stats() Stats {
	p := &l.stats
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
		out.TTFT, out.HitRatio = append(out.TTFT, s.median()), append(out.HitRatio, s.hitRatio())
		if tick >= now-recentPoints {
			recent.merge(&s.counts)
			for i, n := range s.ttft {
				recent.ttft[i] += n
			}
		}
	}
	out.Recent = Recent{float64(recent.requests) / seconds, recent.failedRatio(), recent.hitRatio(), recent.median()}
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

// median is in seconds, to about a tenth: in a bucket requests are taken to lie evenly.
func (s *statsPoint) median() float64 {
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
