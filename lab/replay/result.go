package replay

import (
	"fmt"
	"io"
	"slices"
	"sync"
	"text/tabwriter"
	"time"

	"warmroute/router"
)

// Result is the outcome of one request. Durations are in the replicas' time.
type Result struct {
	// Err is the cause of failure, "" for a complete response. It is one of few
	// constant texts, so that failures can be counted by cause.
	Err        string
	Detail     string        // the error's own text
	RetryAfter time.Duration // of a response other than 200; 0: none

	Sent time.Time     // when the request was due, of one over HTTP
	TTFT time.Duration // from when the request was due to its first content
	E2E  time.Duration // to the end of the response
	ITL  time.Duration // mean gap between chunks with content; 0 with fewer than two

	Gaps  []time.Duration // between chunks with content; none of a request in virtual time
	Split bool            // one replica did the prefill and another one the decode

	PromptTokens, CachedTokens, CompletionTokens int // as usage says
	// CachedKnown reports whether usage had the cached tokens: some servers never do,
	// others omit them when there are none.
	CachedKnown  bool
	InvalidUsage bool // usage was impossible, like more cached than prompt tokens, and was ignored
}

// tpot returns the time per output token after the first; 0 with fewer than two.
func (r Result) tpot() time.Duration {
	if r.CompletionTokens < 2 {
		return 0
	}
	return (r.E2E - r.TTFT) / time.Duration(r.CompletionTokens-1)
}

// Summary has a policy's figures over a run: the JSON object that replay prints,
// hence its many fields. Times and ratios are of complete responses; the other
// requests are counted in Errors by cause.
type Summary struct {
	Policy       string  `json:"policy"`
	Requests     int     `json:"requests"` // with a complete response
	HitRatio     float64 `json:"hit_ratio"`
	HitKnown     bool    `json:"-"` // a response had its cached tokens; else HitRatio is 0
	InvalidUsage int     `json:"-"` // responses with an impossible usage, which was ignored

	TTFTMean float64 `json:"ttft_mean_s"`
	TTFTP50  float64 `json:"ttft_p50_s"`
	TTFTP90  float64 `json:"ttft_p90_s"`
	TTFTP99  float64 `json:"ttft_p99_s"`
	// TTFTLongest is the mean over the tenth of the requests with the longest prompts.
	TTFTLongest float64 `json:"ttft_longest_s"`
	TPOTMean    float64 `json:"tpot_mean_s"`
	ITLMean     float64 `json:"itl_mean_s"`
	E2EMean     float64 `json:"e2e_mean_s"`
	E2EP99      float64 `json:"e2e_p99_s"`
	// The most loaded backend over the mean, by prompt tokens prefilled and by
	// time-weighted mean in flight; 0: unknown.
	WorkMaxOverMean     float64 `json:"work_max_over_mean,omitzero"`
	InFlightMaxOverMean float64 `json:"in_flight_max_over_mean,omitzero"`
	// Throughput is complete responses per second.
	Throughput float64        `json:"throughput_rps"`
	Lost       int            `json:"lost"` // the sum of Errors
	Errors     map[string]int `json:"errors,omitempty"`

	ITLP99     float64 `json:"itl_p99_s,omitzero"`   // of the gaps of all outputs, also of requests that were lost
	SplitShare float64 `json:"split_share,omitzero"` // of the requests
	HasRoles   bool    `json:"-"`                    // replicas are for prefill and for decode

	// Known in virtual time only:
	PredictedHitRatio float64 `json:"predicted_hit_ratio,omitzero"`
	// mean difference of predicted and cached tokens, as a share of the mean prompt
	PredictionError float64     `json:"prediction_error,omitzero"`
	QueueTimeMean   float64     `json:"queue_mean_s,omitzero"` // from arrival to the attempt that was served
	MatchedBusy     int         `json:"matched_busy,omitzero"`
	NewBackendShare float64     `json:"joined_share,omitzero"`
	KVTransferMean  float64     `json:"kv_transfer_mean_s,omitzero"` // from the end of the prefill request to the first token
	Timeline        *Timeline   `json:"-"`
	Recomputed      *Recomputed `json:"recomputed,omitempty"` // if it was counted

	// Known of a closed loop in virtual time only:
	WallTime float64 `json:"wall_s,omitzero"` // from the first request to the last response
	// sum of a conversation's end-to-end latencies, without its pauses, on average
	ConversationTime float64 `json:"conversation_mean_s,omitzero"`

	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`

	// LowPriority has the figures of requests with a priority above 0, of one run in virtual
	// time; all other fields are of the other requests. nil: there were none.
	LowPriority *Summary `json:"low_priority,omitempty"`

	// SLO has the figures of requests with a target for the time to first token, in virtual time; nil: there were none.
	SLO *SLOFigures `json:"slo,omitempty"`

	Variation *Variation `json:"spread,omitempty"` // of the mean of several runs
}

// SLOFigures are about the requests with a target for the time to first token, and about the others of their priority. Times are of
// complete responses.
type SLOFigures struct {
	Missed         float64 `json:"missed"`  // share that was late, refused or lost otherwise
	Refused        float64 `json:"refused"` // share that was predicted to be late
	TTFTMean       float64 `json:"ttft_mean_s"`
	E2EMean        float64 `json:"e2e_mean_s"`
	OthersTTFTMean float64 `json:"others_ttft_mean_s,omitzero"`
	OthersE2EMean  float64 `json:"others_e2e_mean_s,omitzero"`
}

func (f *SLOFigures) fields() []*float64 {
	return []*float64{&f.Missed, &f.Refused, &f.TTFTMean, &f.E2EMean, &f.OthersTTFTMean, &f.OthersE2EMean}
}

// Tally collects results. Safe for concurrent use.
type Tally struct {
	mu      sync.Mutex
	results []Result // without Gaps
	gaps    gapHistogram
	errors  map[string]int
}

// Add adds the result of one request.
func (t *Tally) Add(r Result) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, gap := range r.Gaps {
		t.gaps.add(gap, 1)
	}
	r.Gaps = nil
	if r.Err == "" {
		t.results = append(t.results, r)
		return
	}
	if t.errors == nil {
		t.errors = make(map[string]int)
	}
	t.errors[r.Err]++
}

// Summary returns the figures of the results so far; elapsed is the length of the
// run until now, in the replicas' time.
func (t *Tally) Summary(policy string, elapsed time.Duration) Summary {
	t.mu.Lock()
	// Results never change once added and can be read without the lock.
	results := t.results[:len(t.results):len(t.results)]
	s := Summary{Policy: policy, Requests: len(results), Errors: make(map[string]int, len(t.errors)), ITLP99: t.gaps.quantile(0.99)}
	for cause, n := range t.errors {
		s.Errors[cause] = n
		s.Lost += n
	}
	t.mu.Unlock()
	if len(results) == 0 {
		return s
	}

	var ttft, e2e, tpot, itl mean
	cached, splits := 0, 0
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
		if r.Split {
			splits++
		}
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
	s.TTFTLongest = meanTTFTOfLongest(results)
	s.SplitShare = float64(splits) / float64(len(results))
	if s.PromptTokens > 0 {
		s.HitRatio = float64(cached) / float64(s.PromptTokens)
	}
	if elapsed > 0 {
		s.Throughput = float64(len(results)) / elapsed.Seconds()
	}
	return s
}

// meanTTFTOfLongest returns the mean TTFT of the tenth of the results with the longest
// prompts, in seconds.
func meanTTFTOfLongest(results []Result) float64 {
	byLength := slices.Clone(results)
	slices.SortStableFunc(byLength, func(a, b Result) int { return b.PromptTokens - a.PromptTokens })
	var m mean
	for _, r := range byLength[:(len(byLength)+9)/10] {
		m.add(r.TTFT)
	}
	return m.seconds()
}

// MaxOverMean returns the maximum over the mean: 1 when all values are equal, 0 when
// there are none or all are 0.
func MaxOverMean(values []float64) float64 {
	highest, total := 0.0, 0.0
	for _, v := range values {
		highest, total = max(highest, v), total+v
	}
	if total == 0 {
		return 0
	}
	return highest * float64(len(values)) / total
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

// quantile returns the nearest-rank percentile of a sorted, non-empty list, in seconds.
func quantile(sorted []time.Duration, percent int) float64 {
	rank := (len(sorted)*percent + 99) / 100
	return sorted[max(rank, 1)-1].Seconds()
}

// Report is the output of a tool, as JSON or as a table.
type Report struct {
	Trace    string    `json:"trace,omitempty"`
	Backends int       `json:"backends,omitempty"`
	Load     float64   `json:"load"`            // 0: closed loop, which has none
	Seeds    int       `json:"seeds,omitempty"` // runs of which each result is the mean
	Results  []Summary `json:"results"`
}

// WriteTable writes a line for each result, with times in milliseconds and, where
// known, the most loaded backend over the mean by work and by requests in flight, and the
// times of a closed loop in seconds.
func (r Report) WriteTable(w io.Writer) error {
	balance := slices.ContainsFunc(r.Results, func(s Summary) bool { return s.WorkMaxOverMean > 0 })
	roles := slices.ContainsFunc(r.Results, func(s Summary) bool { return s.HasRoles })
	targets := slices.ContainsFunc(r.Results, func(s Summary) bool { return s.SLO != nil })
	closed := slices.ContainsFunc(r.Results, func(s Summary) bool { return s.ConversationTime > 0 })
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "policy\trequests\thits\tTTFT ms\tp50\tp90\tp99\tTPOT ms\tE2E ms\treq/s\tlost\t")
	if balance {
		fmt.Fprint(t, "work\tin flight\t")
	}
	if roles {
		fmt.Fprint(t, "ITL p99\tsplit\tKV transfer\t")
	}
	if closed {
		fmt.Fprint(t, "conversation s\twall s\t")
	}
	if targets {
		fmt.Fprint(t, "missed\trefused\tothers' E2E\t")
	}
	fmt.Fprintln(t)
	for _, s := range r.Results {
		fmt.Fprintf(t, "%s\t%d\t%.3f\t%.0f\t%.0f\t%.0f\t%.0f\t%.1f\t%.0f\t%.1f\t%d\t", s.Policy, s.Requests, s.HitRatio,
			s.TTFTMean*1000, s.TTFTP50*1000, s.TTFTP90*1000, s.TTFTP99*1000,
			s.TPOTMean*1000, s.E2EMean*1000, s.Throughput, s.Lost)
		if balance {
			fmt.Fprintf(t, "%.2f\t%.2f\t", s.WorkMaxOverMean, s.InFlightMaxOverMean)
		}
		if roles {
			fmt.Fprintf(t, "%.0f\t%.2f\t%.0f\t", s.ITLP99*1000, s.SplitShare, s.KVTransferMean*1000)
		}
		if closed {
			fmt.Fprintf(t, "%.1f\t%.0f\t", s.ConversationTime, s.WallTime)
		}
		if f := s.SLO; f != nil {
			fmt.Fprintf(t, "%.3f\t%.3f\t%.0f\t", f.Missed, f.Refused, f.OthersE2EMean*1000)
		}
		fmt.Fprintln(t)
	}
	return t.Flush()
}

// Find returns the result of a policy.
func (r Report) Find(policy string) (Summary, bool) {
	for _, s := range r.Results {
		if s.Policy == policy {
			return s, true
		}
	}
	return Summary{}, false
}

// LowestOther returns the result with the lowest figure of all policies but this one
// and Pooled, on replicas without roles.
func (r Report) LowestOther(policy string, figure func(Summary) float64) (best Summary, ok bool) {
	for _, s := range r.Results {
		if s.Policy != policy && s.Policy != Pooled && !s.HasRoles && s.Requests > 0 && (!ok || figure(s) < figure(best)) {
			best, ok = s, true
		}
	}
	return best, ok
}

// Variation is the range of some figures over the runs of which a Summary is the
// mean.
type Variation struct {
	HitRatio MinMax `json:"hit_ratio"`
	TTFTMean MinMax `json:"ttft_mean_s"`
	TTFTP99  MinMax `json:"ttft_p99_s"`
	E2EMean  MinMax `json:"e2e_mean_s"`
}

// MinMax is the range of the least and the greatest of some figures.
type MinMax struct {
	Min float64 `json:"min"`
	Max float64 `json:"max"`
}

// Mean returns the mean of at least one run that differ by their seed alone. Counts
// are means too, rounded up for failures.
func Mean(runs []Summary) Summary {
	if len(runs) == 1 {
		return runs[0]
	}
	m := Summary{Policy: runs[0].Policy, HasRoles: runs[0].HasRoles, Errors: make(map[string]int)}
	n := float64(len(runs))
	var requests, matchedBusy, promptTokens, completionTokens float64
	for _, r := range runs {
		sums, figures := m.averagedFields(), r.averagedFields()
		for k := range sums {
			*sums[k] += *figures[k] / n
		}
		if r.Recomputed != nil {
			if m.Recomputed == nil {
				m.Recomputed = new(Recomputed)
			}
			sums, figures := m.Recomputed.fields(), r.Recomputed.fields()
			for k := range sums {
				*sums[k] += *figures[k] / n
			}
		}
		if r.SLO != nil {
			if m.SLO == nil {
				m.SLO = new(SLOFigures)
			}
			sums, figures := m.SLO.fields(), r.SLO.fields()
			for k := range sums {
				*sums[k] += *figures[k] / n
			}
		}
		requests += float64(r.Requests) / n
		matchedBusy += float64(r.MatchedBusy) / n
		promptTokens += float64(r.PromptTokens) / n
		completionTokens += float64(r.CompletionTokens) / n
		m.Lost += r.Lost
		for cause, count := range r.Errors {
			m.Errors[cause] += count
		}
	}
	m.Lost = (m.Lost + len(runs) - 1) / len(runs)
	for cause, count := range m.Errors {
		m.Errors[cause] = (count + len(runs) - 1) / len(runs)
	}
	m.Requests, m.MatchedBusy = int(requests+0.5), int(matchedBusy+0.5)
	m.PromptTokens, m.CompletionTokens = int(promptTokens+0.5), int(completionTokens+0.5)
	m.Variation = &Variation{
		HitRatio: minMax(runs, func(s Summary) float64 { return s.HitRatio }),
		TTFTMean: minMax(runs, func(s Summary) float64 { return s.TTFTMean }),
		TTFTP99:  minMax(runs, func(s Summary) float64 { return s.TTFTP99 }),
		E2EMean:  minMax(runs, func(s Summary) float64 { return s.E2EMean }),
	}
	return m
}

// averagedFields returns the fields that Mean averages.
func (s *Summary) averagedFields() []*float64 {
	return []*float64{
		&s.HitRatio, &s.TTFTMean, &s.TTFTP50, &s.TTFTP90, &s.TTFTP99, &s.TTFTLongest, &s.TPOTMean, &s.ITLMean, &s.E2EMean, &s.E2EP99,
		&s.WorkMaxOverMean, &s.InFlightMaxOverMean, &s.Throughput, &s.WallTime, &s.ConversationTime,
		&s.PredictedHitRatio, &s.PredictionError, &s.QueueTimeMean, &s.NewBackendShare, &s.ITLP99, &s.SplitShare, &s.KVTransferMean,
	}
}

func minMax(runs []Summary, figure func(Summary) float64) MinMax {
	e := MinMax{Min: figure(runs[0]), Max: figure(runs[0])}
	for _, r := range runs {
		e.Min, e.Max = min(e.Min, figure(r)), max(e.Max, figure(r))
	}
	return e
}

// measures are the measurements of a run in virtual time.
type measures struct {
	timeline    *Timeline
	tally       Tally
	lowPriority Tally // requests with a priority above 0, which are not in tally

	target                 time.Duration // Scenario.SLO.TTFT
	targets, withoutTarget Tally         // of requests of tally, if some have a target
	late                   int           // of targets, that missed it

	gaps            gapHistogram
	kvTransfer      mean
	queueTime       mean // time between arrival and the attempt that succeeded
	decisions       int
	matchedBusy     int
	predictedTokens int // that the router predicted as cached, of promptTokens
	promptTokens    int
	predictionError int // sum of the differences, in tokens
	comparedTokens  int // of the prompts that these are about
}

func (m *measures) recordDecision(d *router.Reservation) {
	m.decisions++
	if d.Reason == router.ReasonMatchedBusy {
		m.matchedBusy++
	}
	if d.Prefill != nil {
		m.predictedTokens += d.Prefill.MatchedTokens
	} else {
		m.predictedTokens += d.MatchedTokens
	}
	m.promptTokens += d.PromptTokens
}

func (m *measures) recordSuccess(f *request, now time.Duration) {
	j := f.job
	m.queueTime.add(f.sent - j.At)
	result := Result{
		TTFT: f.first - j.At, E2E: now - j.At,
		PromptTokens: j.Prompt, CachedTokens: f.cachedTokens(), CompletionTokens: j.Output,
		Split: f.source != nil,
	}
	result.ITL = result.tpot()
	m.predictionError += max(f.predicted-result.CachedTokens, result.CachedTokens-f.predicted)
	m.comparedTokens += j.Prompt
	m.tallyByPriority(j).Add(result)
	if f.hasTarget {
		m.targets.Add(result)
		if result.TTFT > m.target {
			m.late++
		}
	} else if j.Priority <= 0 {
		m.withoutTarget.Add(result)
	}
}

func (m *measures) recordFailure(f *request, why string) {
	m.tallyByPriority(f.job).Add(Result{Err: why})
	if f.hasTarget {
		m.targets.Add(Result{Err: why})
	}
}

// sloFigures returns the figures of the requests with a target; nil: there were none.
func (m *measures) sloFigures() *SLOFigures {
	with, without := m.targets.Summary("", 0), m.withoutTarget.Summary("", 0)
	all := float64(with.Requests + with.Lost)
	if all == 0 {
		return nil
	}
	return &SLOFigures{
		Missed: float64(m.late+with.Lost) / all, Refused: float64(with.Errors[failureLate]) / all,
		TTFTMean: with.TTFTMean, E2EMean: with.E2EMean, OthersTTFTMean: without.TTFTMean, OthersE2EMean: without.E2EMean,
	}
}

func (m *measures) tallyByPriority(j *Job) *Tally {
	if j.Priority > 0 {
		return &m.lowPriority
	}
	return &m.tally
}

func (r *run) summary() Summary {
	m := &r.measured
	s := m.tally.Summary(r.Policy, r.last)
	if b := m.lowPriority.Summary(r.Policy, r.last); b.Requests+b.Lost > 0 {
		s.LowPriority = &b
	}
	t := m.timeline
	for i := range r.fleet {
		t.addInFlight(i, r.last, 0)
	}
	s.WorkMaxOverMean = MaxOverMean(t.sumMiddle(t.Work, r.last))
	s.InFlightMaxOverMean = MaxOverMean(t.sumMiddle(t.InFlight, r.last))
	s.NewBackendShare = t.joinedWorkOverMean(r.Changes)
	s.QueueTimeMean = m.queueTime.seconds()
	if sessions := r.requests.Sessions; sessions > 0 {
		s.WallTime, s.ConversationTime = r.last.Seconds(), s.E2EMean*float64(s.Requests)/float64(sessions)
	}
	s.HasRoles, s.MatchedBusy, s.ITLP99, s.KVTransferMean = r.hasRoles(), m.matchedBusy, m.gaps.quantile(0.99), m.kvTransfer.seconds()
	if m.promptTokens > 0 {
		s.PredictedHitRatio = float64(m.predictedTokens) / float64(m.promptTokens)
	}
	if m.comparedTokens > 0 && m.decisions > 0 {
		s.PredictionError = float64(m.predictionError) / float64(m.comparedTokens)
	}
	s.Timeline = t
	s.SLO = m.sloFigures()
	if r.computed != nil {
		s.Recomputed = &r.computed.figures
	}
	return s
}
