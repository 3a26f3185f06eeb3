package activity

import (
	"context"
	"math"
	"sync"
	"time"

	"warmroute/backends"
	"warmroute/metrics"
)

const (
	// StatsInterval is the time between two points of a series, of which statsPoints are kept: an hour.
	StatsInterval = 10 * time.Second
	statsPoints   = 360
	// recentSteps are averaged for Recent, and the current one: one alone may have few requests.
	recentSteps = 3
	// maxStatsModels is how many models have series. The one without requests for the longest time makes room.
	maxStatsModels = 512

	// The buckets of TTFT grow by a quarter of an octave, from a millisecond to more than two minutes.
	minTTFT       = time.Millisecond
	ttftPerOctave = 4
	ttftBuckets   = 18 * ttftPerOctave
)

// statsWindow counts the requests of the last hour, by intervals.
type statsWindow struct {
	began time.Time

	mu       sync.Mutex // guards what follows
	fleet    series
	models   map[string]*series
	backends []backendStats // by slot
}

// counts are figures of requests that have ended.
type counts struct {
	requests  int
	failed    int // with an error; a client disconnect is none
	prompt    int // tokens, of successful requests
	cached    int // of prompt, as reported, else as predicted
	elsewhere int // of prompt, computed although another backend had them cached
}

// series are the counts of the fleet or of a model.
type series struct {
	first, tick int64                      // number of the first step and of the current one
	used        int64                      // step of the last request
	steps       [recentSteps + 1]statsStep // by number
	points      [statsPoints]statsPoint    // of the steps before the current one, by number
	queued      int                        // requests, at the last sample
}

type statsStep struct {
	counts
	ttft ttftHistogram
}

// statsPoint is what is kept of a step. NaN: unknown.
type statsPoint struct {
	requests, queued         uint32
	ttft50, ttft99, hitRatio float32
}

type backendStats struct {
	backend *backends.Backend // whose counts these are
	steps   [recentSteps + 1]backendStep
}

// backendStep has the counts of a step of that number; those of another one are outdated.
type backendStep struct {
	tick int64
	counts
}

func newStatsWindow() statsWindow {
	return statsWindow{began: time.Now(), models: map[string]*series{}}
}

// tickAt returns the number of the step at a time.
func (w *statsWindow) tickAt(at time.Time) int64 { return int64(at.Sub(w.began) / StatsInterval) }

// CountEnded counts a request that has ended, for the fleet, its model and the backend to which it was last sent.
func (a *Activity) CountEnded(r *Request, o *metrics.Request) {
	a.stats.countEnded(r.backend, r.Arrived.Add(o.Duration), o)
}

// countEnded counts a request that was last sent to b; nil: to none.
func (w *statsWindow) countEnded(b *backends.Backend, ended time.Time, o *metrics.Request) {
	tick := w.tickAt(ended)
	c := counts{requests: 1}
	if o.Failed() {
		c.failed = 1
	}
	if o.Code == 200 {
		c.prompt, c.cached, c.elsewhere = o.PromptTokens, o.CachedTokens, o.ElsewhereTokens
	}
	bucket := ttftBucket(o.TTFT)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fleet.add(tick, &c, bucket)
	if o.Model != "" {
		w.ensureModelLocked(o.Model, tick).add(tick, &c, bucket)
	}
	if b == nil {
		return
	}
	for len(w.backends) <= b.Slot {
		w.backends = append(w.backends, backendStats{})
	}
	of := &w.backends[b.Slot]
	if of.backend != b {
		*of = backendStats{backend: b}
	}
	s := &of.steps[tick%int64(len(of.steps))]
	if s.tick != tick {
		*s = backendStep{tick: tick}
	}
	s.merge(&c)
}

// ensureModelLocked returns the series of a model, and makes it if necessary. w.mu is held.
func (w *statsWindow) ensureModelLocked(model string, tick int64) *series {
	if s := w.models[model]; s != nil {
		return s
	}
	if len(w.models) >= maxStatsModels {
		oldest, used := "", int64(math.MaxInt64)
		for name, s := range w.models {
			if s.used < used {
				oldest, used = name, s.used
			}
		}
		delete(w.models, oldest)
	}
	s := &series{first: tick, tick: tick, used: tick}
	w.models[model] = s
	return s
}

// add counts a request of the step tick, or of the current one if that is later. ttft is its bucket; negative: none.
func (s *series) add(tick int64, c *counts, ttft int) {
	s.endStepsBefore(tick)
	s.used = s.tick
	step := s.current()
	step.merge(c)
	if ttft >= 0 {
		step.ttft[ttft]++
	}
}

func (s *series) current() *statsStep { return &s.steps[s.tick%int64(len(s.steps))] }

// endStepsBefore makes tick the current step, unless a later one is, and the steps before it points.
func (s *series) endStepsBefore(tick int64) {
	s.tick = max(s.tick, tick-statsPoints-1) // no more steps are shown
	for ; s.tick < tick; s.tick++ {
		step := s.current()
		s.points[s.tick%statsPoints] = statsPoint{
			uint32(step.requests), uint32(s.queued), float32(step.ttft.quantile(0.5)), float32(step.ttft.quantile(0.99)), float32(step.hitRatio()),
		}
		s.steps[(s.tick+1)%int64(len(s.steps))] = statsStep{}
	}
}

func (c *counts) merge(more *counts) {
	c.requests += more.requests
	c.failed += more.failed
	c.prompt += more.prompt
	c.cached += more.cached
	c.elsewhere += more.elsewhere
}

func (c *counts) failedRatio() float64 { return float64(c.failed) / float64(c.requests) }

func (c *counts) hitRatio() float64 { return min(float64(c.cached)/float64(c.prompt), 1) }

func (c *counts) elsewhereRatio() float64 { return min(float64(c.elsewhere)/float64(c.prompt), 1) }

// ttftHistogram counts TTFTs by ttftBucket.
type ttftHistogram [ttftBuckets]uint32

// ttftBucket returns the bucket of a TTFT; -1 if it is 0, as there was none.
func ttftBucket(d time.Duration) (index int) {
	if d == 0 {
		return -1
	}
	i := int(ttftPerOctave * math.Log2(float64(d)/float64(minTTFT)))
	return min(max(i, 0), ttftBuckets-1)
}

// quantile returns a quantile of the TTFT in seconds, with an error of a tenth at most. NaN: there is none.
func (h *ttftHistogram) quantile(share float64) float64 {
	all := uint32(0)
	for _, n := range h {
		all += n
	}
	rank, below := share*float64(all), uint32(0)
	for i, n := range h {
		if n > 0 && float64(below+n) >= rank {
			within := (rank - float64(below)) / float64(n)
			return minTTFT.Seconds() * math.Exp2((float64(i)+within)/ttftPerOctave)
		}
		below += n
	}
	return math.NaN()
}

// Recent are figures of the last half minute. Unknown ones are NaN.
type Recent struct {
	PerSecond      float64 // requests that ended
	Failed         float64 // share of them that failed; a client disconnect is no failure
	HitRatio       float64 // share of prompt tokens from the cache, as reported, else as predicted
	ElsewhereRatio float64 // share of prompt tokens that another backend held, and that were computed again
	TTFT50, TTFT99 float64 // median and 99th percentile in seconds; NaN for a single backend
	Queued         int     // requests in the queue, up to StatsInterval ago; 0 for a single backend
}

// Stats are figures of the last half minute.
type Stats struct {
	Recent
	Models   map[string]Recent // of those with requests
	Backends map[*backends.Backend]Recent
}

// Stats returns figures of the requests that ended in the last half minute.
func (a *Activity) Stats() Stats {
	w := &a.stats
	since := time.Since(w.began)
	now := int64(since / StatsInterval)
	seconds := min(since, recentSteps*StatsInterval+since%StatsInterval).Seconds()
	w.mu.Lock()
	defer w.mu.Unlock()
	out := Stats{Models: map[string]Recent{}, Backends: map[*backends.Backend]Recent{}}
	out.Recent = w.fleet.recent(now, seconds)
	for model, s := range w.models {
		if r := s.recent(now, seconds); r.PerSecond > 0 || r.Queued > 0 {
			out.Models[model] = r
		}
	}
	for i := range w.backends {
		of := &w.backends[i]
		var c counts
		for _, s := range of.steps {
			if s.tick >= now-recentSteps {
				c.merge(&s.counts)
			}
		}
		if of.backend != nil {
			out.Backends[of.backend] = Recent{float64(c.requests) / seconds, c.failedRatio(), c.hitRatio(), c.elsewhereRatio(), math.NaN(),
				math.NaN(), 0}
		}
	}
	return out
}

// recent returns the figures of the last steps, which took so many seconds.
func (s *series) recent(now int64, seconds float64) Recent {
	s.endStepsBefore(now)
	var sum statsStep
	for i := range s.steps {
		step := &s.steps[i]
		sum.merge(&step.counts)
		for bucket, n := range step.ttft {
			sum.ttft[bucket] += n
		}
	}
	return Recent{float64(sum.requests) / seconds, sum.failedRatio(), sum.hitRatio(), sum.elsewhereRatio(), sum.ttft.quantile(0.5),
		sum.ttft.quantile(0.99), s.queued}
}

// History has series of points StatsInterval apart, oldest first. Unknown values are NaN, as are those before the
// start of the proxy and the first request for the model.
type History struct {
	End       time.Time // of the last interval
	PerSecond []float64 // requests that ended
	TTFT50    []float64 // median in seconds, of streams
	TTFT99    []float64
	HitRatio  []float64 // share of prompt tokens from the cache
	Queued    []float64 // requests in the queue
}

// History returns the last hour of a model, or of the fleet if the name is empty. isKnown is false for a model that had
// no request.
func (a *Activity) History(model string) (h History, isKnown bool) {
	w := &a.stats
	now := w.tickAt(time.Now())
	w.mu.Lock()
	defer w.mu.Unlock()
	s := &w.fleet
	if model != "" {
		if s = w.models[model]; s == nil {
			return History{}, false
		}
	}
	s.endStepsBefore(now)
	h.End = w.began.Add(time.Duration(now) * StatsInterval)
	for tick := now - statsPoints; tick < now; tick++ {
		perSecond, queued := math.NaN(), math.NaN()
		p := statsPoint{ttft50: float32(math.NaN()), ttft99: float32(math.NaN()), hitRatio: float32(math.NaN())}
		if tick >= s.first {
			p = s.points[tick%statsPoints]
			perSecond, queued = float64(p.requests)/StatsInterval.Seconds(), float64(p.queued)
		}
		h.PerSecond, h.Queued = append(h.PerSecond, perSecond), append(h.Queued, queued)
		h.TTFT50, h.TTFT99 = append(h.TTFT50, float64(p.ttft50)), append(h.TTFT99, float64(p.ttft99))
		h.HitRatio = append(h.HitRatio, float64(p.hitRatio))
	}
	return h, true
}

// SampleQueue records how many requests are queued, by countQueued, every StatsInterval until ctx is done.
func (a *Activity) SampleQueue(ctx context.Context, countQueued func() int) {
	ticker := time.NewTicker(StatsInterval)
	defer ticker.Stop()
	for {
		select {
		case now := <-ticker.C:
			a.stats.recordQueue(now, countQueued(), a.countQueuedByModel())
		case <-ctx.Done():
			return
		}
	}
}

// recordQueue records how many requests are queued now: in the fleet, and for each model.
func (w *statsWindow) recordQueue(now time.Time, total int, models map[string]int) {
	tick := w.tickAt(now)
	w.mu.Lock()
	defer w.mu.Unlock()
	record := func(s *series, queued int) {
		s.endStepsBefore(tick)
		s.queued = queued
	}
	record(&w.fleet, total)
	for model := range models {
		w.ensureModelLocked(model, tick).used = tick
	}
	for model, s := range w.models {
		record(s, models[model])
	}
}
