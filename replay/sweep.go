package replay

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
)

// RunAll runs scenarios side by side, on as many cores as there are, and
// returns what each gave, in their order. progress, which may be nil, is told
// now and then what share of the work is done; calls do not overlap. The first
// failure ends the others. The timelines are left out.
func RunAll(ctx context.Context, scenarios []Scenario, progress func(share float64)) ([]Summary, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	watch := sharedProgress{done: make([]float64, len(scenarios)), report: progress}
	results, failures := make([]Summary, len(scenarios)), make([]error, len(scenarios))
	next := make(chan int)
	var workers sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(scenarios)) {
		workers.Go(func() {
			for i := range next {
				s := scenarios[i]
				s.Progress = func(done, total int) { watch.add(i, float64(done)/float64(max(total, 1))) }
				results[i], failures[i] = s.Run(ctx)
				results[i].Timeline = nil // large, and many
				if failures[i] != nil {
					failures[i] = fmt.Errorf("%s: %w", s.Policy, failures[i])
					cancel()
				}
				watch.add(i, 1)
			}
		})
	}
feeding:
	for i := range scenarios {
		select {
		case next <- i:
		case <-ctx.Done():
			break feeding
		}
	}
	close(next)
	workers.Wait()
	// Those that were ended by another's failure say nothing of their own.
	for _, err := range failures {
		if err != nil && !errors.Is(err, context.Canceled) {
			return nil, err
		}
	}
	return results, ctx.Err()
}

// sharedProgress adds up what each of several runs has done.
type sharedProgress struct {
	mu     sync.Mutex
	done   []float64 // share of each run
	sum    float64
	report func(share float64)
}

func (p *sharedProgress) add(run int, share float64) {
	if p.report == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sum += share - p.done[run]
	p.done[run] = share
	p.report(p.sum / float64(len(p.done)))
}

// Spread is how far the runs lie apart that a Summary is the mean of.
type Spread struct {
	HitRatio Extremes `json:"hit_ratio"`
	TTFTMean Extremes `json:"ttft_mean_s"`
	TTFTP99  Extremes `json:"ttft_p99_s"`
	E2EMean  Extremes `json:"e2e_mean_s"`
}

// Extremes are the least and the greatest of some figures.
type Extremes struct {
	Min float64 `json:"min"`
	Max float64 `json:"max"`
}

// Mean is the mean of runs that differ by their seed alone, of which there is
// at least one. Counts are means too, but for those of failures, which add up.
func Mean(runs []Summary) Summary {
	if len(runs) == 1 {
		return runs[0]
	}
	m := Summary{Policy: runs[0].Policy, Errors: make(map[string]int)}
	n := float64(len(runs))
	var requests, spills, promptTokens, completionTokens float64
	for _, r := range runs {
		sums, figures := m.figures(), r.figures()
		for k := range sums {
			*sums[k] += *figures[k] / n
		}
		requests += float64(r.Requests) / n
		spills += float64(r.Spills) / n
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
	m.Requests, m.Spills = int(requests+0.5), int(spills+0.5)
	m.PromptTokens, m.CompletionTokens = int(promptTokens+0.5), int(completionTokens+0.5)
	m.Spread = &Spread{
		HitRatio: extremes(runs, func(s Summary) float64 { return s.HitRatio }),
		TTFTMean: extremes(runs, func(s Summary) float64 { return s.TTFTMean }),
		TTFTP99:  extremes(runs, func(s Summary) float64 { return s.TTFTP99 }),
		E2EMean:  extremes(runs, func(s Summary) float64 { return s.E2EMean }),
	}
	return m
}

// figures are those of which the mean is the mean.
func (s *Summary) figures() []*float64 {
	return []*float64{
		&s.HitRatio, &s.TTFTMean, &s.TTFTP50, &s.TTFTP90, &s.TTFTP99, &s.TPOTMean, &s.ITLMean, &s.E2EMean, &s.E2EP99,
		&s.WorkMaxOverMean, &s.InFlightMaxOverMean, &s.Throughput,
		&s.PredictedHitRatio, &s.HoldMean, &s.JoinedShare,
	}
}

func extremes(runs []Summary, of func(Summary) float64) Extremes {
	e := Extremes{Min: of(runs[0]), Max: of(runs[0])}
	for _, r := range runs {
		e.Min, e.Max = min(e.Min, of(r)), max(e.Max, of(r))
	}
	return e
}
