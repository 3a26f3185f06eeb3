package replay

import (
	"slices"
	"sync"
	"time"
)

// Result is what one request saw. Durations are in the replicas' time.
type Result struct {
	// Err is the cause of failure, "" for a complete response. It is one of few
	// constant texts, so that failures can be counted by cause.
	Err        string
	Detail     string        // the error's own text
	RetryAfter time.Duration // of a response other than 200; 0: none

	Sent time.Time     // when the request was due, of one over HTTP
	TTFT time.Duration // from when the request was due to its first content
	E2E  time.Duration // to the end of the answer
	ITL  time.Duration // mean gap between chunks with content; 0 with fewer than two

	PromptTokens, CachedTokens, CompletionTokens int // as usage says
	// CachedKnown tells whether usage said how much was cached: some servers never
	// do, others leave it out when it is nothing.
	CachedKnown  bool
	InvalidUsage bool // usage was impossible, like more cached than prompt tokens, and was ignored
}

// tpot is the time for each token after the first, or 0 without one.
func (r Result) tpot() time.Duration {
	if r.CompletionTokens < 2 {
		return 0
	}
	return (r.E2E - r.TTFT) / time.Duration(r.CompletionTokens-1)
}

// Summary is a policy's figures over a run. Times and ratios are of the
// requests answered whole; the others stand in Errors by cause.
type Summary struct {
	Policy       string  `json:"policy"`
	Requests     int     `json:"requests"` // answered whole
	HitRatio     float64 `json:"hit_ratio"`
	HitKnown     bool    `json:"-"` // an answer said how much was cached; else HitRatio is 0
	InvalidUsage int     `json:"-"` // responses with an impossible usage, which was ignored

	TTFTMean float64 `json:"ttft_mean_s"`
	TTFTP50  float64 `json:"ttft_p50_s"`
	TTFTP90  float64 `json:"ttft_p90_s"`
	TTFTP99  float64 `json:"ttft_p99_s"`
	TPOTMean float64 `json:"tpot_mean_s"`
	ITLMean  float64 `json:"itl_mean_s"`
	E2EMean  float64 `json:"e2e_mean_s"`
	E2EP99   float64 `json:"e2e_p99_s"`
	// The most loaded backend over the mean, by prompt tokens prefilled and by
	// time-weighted mean in flight. Filled by whoever sees the replicas; 0: unknown.
	WorkMaxOverMean     float64 `json:"work_max_over_mean,omitzero"`
	InFlightMaxOverMean float64 `json:"in_flight_max_over_mean,omitzero"`
	// Throughput is requests answered a second, from the tally's start.
	Throughput float64        `json:"throughput_rps"`
	Lost       int            `json:"lost"` // the sum of Errors
	Errors     map[string]int `json:"errors,omitempty"`

	// Known where the router's own code is played in virtual time.
	PredictedHitRatio float64 `json:"predicted_hit_ratio,omitzero"`
	HoldMean          float64 `json:"queue_mean_s,omitzero"` // from arrival to the attempt that was served
	Spills            int     `json:"spills,omitzero"`
	// JoinedShare is the prefill work of backends that joined, within two minutes
	// of it, over the fleet's mean in that time.
	JoinedShare float64   `json:"joined_share,omitzero"`
	Timeline    *Timeline `json:"-"`

	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`

	// Batch are the figures of the requests with a priority above 0, of one run in
	// virtual time; the others' are above. nil: there were none.
	Batch *Summary `json:"batch,omitempty"`

	Spread *Spread `json:"spread,omitempty"` // of the mean of several runs
}

// Tally collects results. Safe for concurrent use.
type Tally struct {
	mu      sync.Mutex
	results []Result
	errors  map[string]int
}

// Add adds the result of one request.
func (t *Tally) Add(r Result) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r.Err == "" {
		t.results = append(t.results, r)
		return
	}
	if t.errors == nil {
		t.errors = make(map[string]int)
	}
	t.errors[r.Err]++
}

// Summary sums up what was added so far; elapsed is the run's length until now,
// in the replicas' time.
func (t *Tally) Summary(policy string, elapsed time.Duration) Summary {
	t.mu.Lock()
	// Added results never change, so they may be read unlocked.
	results := t.results[:len(t.results):len(t.results)]
	s := Summary{Policy: policy, Requests: len(results), Errors: make(map[string]int, len(t.errors))}
	for cause, n := range t.errors {
		s.Errors[cause] = n
		s.Lost += n
	}
	t.mu.Unlock()
	if len(results) == 0 {
		return s
	}

	var ttft, e2e, tpot, itl mean
	cached := 0
	ttfts, ends := make([]time.Duration, len(results)), make([]time.Duration, len(results))
	for i, r := range results {
		ttfts[i], ends[i] = r.TTFT, r.E2E
		ttft.add(r.TTFT)
		e2e.add(r.E2E)
		if d := r.tpot(); d > 0 {
			tpot.add(d)
		}
		if r.ITL > 0 {
			itl.add(r.ITL)
		}
		cached += r.CachedTokens
		s.HitKnown = s.HitKnown || r.CachedKnown
		if r.InvalidUsage {
			s.InvalidUsage++
		}
		s.PromptTokens += r.PromptTokens
		s.CompletionTokens += r.CompletionTokens
	}
	slices.Sort(ttfts)
	slices.Sort(ends)
	s.TTFTMean, s.E2EMean, s.TPOTMean, s.ITLMean = ttft.seconds(), e2e.seconds(), tpot.seconds(), itl.seconds()
	s.TTFTP50, s.TTFTP90, s.TTFTP99 = quantile(ttfts, 50), quantile(ttfts, 90), quantile(ttfts, 99)
	s.E2EP99 = quantile(ends, 99)
	if s.PromptTokens > 0 {
		s.HitRatio = float64(cached) / float64(s.PromptTokens)
	}
	if elapsed > 0 {
		s.Throughput = float64(len(results)) / elapsed.Seconds()
	}
	return s
}

// MaxOverMean is 1 when all values are alike, and 0 for no values or nothing but zeros.
func MaxOverMean(values []float64) float64 {
	most, sum := 0.0, 0.0
	for _, v := range values {
		most, sum = max(most, v), sum+v
	}
	if sum == 0 {
		return 0
	}
	return most * float64(len(values)) / sum
}

type mean struct {
	sum time.Duration
	n   int
}

func (m *mean) add(d time.Duration) { m.sum, m.n = m.sum+d, m.n+1 }

func (m *mean) seconds() float64 {
	if m.n == 0 {
		return 0
	}
	return m.sum.Seconds() / float64(m.n)
}

// quantile is the nearest-rank percentile of a sorted, non-empty list, in seconds.
func quantile(sorted []time.Duration, percent int) float64 {
	rank := (len(sorted)*percent + 99) / 100
	return sorted[max(rank, 1)-1].Seconds()
}
