package replay

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
)

// RunAll runs scenarios in parallel, one per core, and returns their summaries in
// order, without timelines. progress, which may be nil, is called now and then with
// the share of the work that is done; calls do not overlap. The first failure ends
// the others.
func RunAll(ctx context.Context, scenarios []Scenario, progress func(share float64)) ([]Summary, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	progressOf := sharedProgress{done: make([]float64, len(scenarios)), report: progress}
	results, failures := make([]Summary, len(scenarios)), make([]error, len(scenarios))
	next := make(chan int)
	var workers sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(scenarios)) {
		workers.Go(func() {
			for i := range next {
				s := scenarios[i]
				s.Progress = func(done, total int) { progressOf.setAndReport(i, float64(done)/float64(max(total, 1))) }
				results[i], failures[i] = s.Run(ctx)
				results[i].Timeline = nil // large, and many
				if failures[i] != nil {
					failures[i] = fmt.Errorf("%s: %w", s.Policy, failures[i])
					cancel()
				}
				progressOf.setAndReport(i, 1)
			}
		})
	}
feed:
	for i := range scenarios {
		select {
		case next <- i:
		case <-ctx.Done():
			break feed
		}
	}
	close(next)
	workers.Wait()
	// Scenarios that another's failure ended have no error of their own.
	for _, err := range failures {
		if err != nil && !errors.Is(err, context.Canceled) {
			return nil, err
		}
	}
	return results, ctx.Err()
}

// sharedProgress is the mean progress of several runs. Safe for concurrent use.
type sharedProgress struct {
	mu     sync.Mutex
	done   []float64 // share of each run
	sum    float64
	report func(share float64)
}

// setAndReport sets the share of a run that is done, and reports the mean of all.
func (p *sharedProgress) setAndReport(run int, share float64) {
	if p.report == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sum += share - p.done[run]
	p.done[run] = share
	p.report(p.sum / float64(len(p.done)))
}
