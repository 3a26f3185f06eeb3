package sim

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"warmroute/sim/engine"
)

// endReason is why a sequence ended.
type endReason uint8

const (
	running endReason = iota
	stopped
	lengthLimit
	aborted       // by the engine
	engineFailed  // the engine died; its server reports an error
	processKilled // the connection is reset
)

func (r endReason) String() string {
	return [...]string{"", "stop", "length", "abort", "error", ""}[r]
}

// sequence is one choice of an HTTP request while it is with the engine.
type sequence struct {
	engine.Request
	output            // complete
	index         int // among the choices of its HTTP request
	model         string
	bytesPerToken int       // of text
	naturalEnd    endReason // unless it is ended before
	seen          int       // tokens published; used by runEngine only
	abortAfter    int       // tokens after which the engine aborts it; 0: never

	// progress is the number of generated tokens, shifted by 8, and the endReason:
	// one word, so that a reader never sees an end without its last token. What the
	// engine wrote into Request before is visible with it.
	progress atomic.Uint64
	wake     chan<- struct{} // capacity 1, shared by the choices of a request
}

// loadProgress returns the published progress.
func (q *sequence) loadProgress() (tokens int, end endReason) {
	p := q.progress.Load()
	return int(p >> 8), endReason(p)
}

// publishProgress stores the progress and wakes the request's goroutine.
func (q *sequence) publishProgress(tokens int, end endReason) {
	q.progress.Store(uint64(tokens)<<8 | uint64(end))
	select {
	case q.wake <- struct{}{}:
	default: // a wake-up is pending
	}
}

// publishEnd publishes an end that the engine did not cause.
func (q *sequence) publishEnd(reason endReason) {
	tokens, _ := q.loadProgress()
	q.publishProgress(tokens, reason)
}

var errDraining = errors.New("cannot schedule new futures after shutdown")

// submitAll adds all sequences to the engine, or none if it fails. The fault AbortEach
// ends them instead, or later.
func (s *Server) submitAll(sequences []*sequence) error {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	if s.faults.isActive(Drain) {
		return errDraining
	}
	if f, ok := s.faults.matchAndCount(true, AbortEach); ok {
		if f.Chunks == 0 {
			for _, q := range sequences {
				s.counters.success[aborted]++
				q.publishEnd(aborted)
			}
			return nil
		}
		for _, q := range sequences {
			q.abortAfter = f.Chunks
		}
	}
	now := time.Since(s.startedAt)
	for i, q := range sequences {
		if err := s.engine.Add(&q.Request, now); err != nil {
			for _, added := range sequences[:i] {
				s.engine.Abort(&added.Request)
			}
			return err
		}
	}
	s.live = append(s.live, sequences...)
	select {
	case s.submitted <- struct{}{}:
	default:
	}
	return nil
}

// abortUnfinished removes the sequences of a client that disconnected from the engine.
func (s *Server) abortUnfinished(sequences []*sequence) {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	for _, q := range sequences {
		if i := slices.Index(s.live, q); i >= 0 {
			s.engine.Abort(&q.Request)
			s.live = slices.Delete(s.live, i, i+1)
			s.counters.success[aborted]++
		}
	}
}

// runEngine takes one step of the engine after the other until ctx is done: it waits
// for each step's end in wall time and publishes its outputs. A step that was late
// does not delay the next one, so that lost time is caught up, but not that of a
// freeze.
func (s *Server) runEngine(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var at time.Duration // end of the last step
	epoch := 0
	for ctx.Err() == nil {
		s.engineMu.Lock()
		if s.epoch != epoch {
			epoch, at = s.epoch, time.Since(s.startedAt)
		}
		began := s.startedAt
		if s.engine.Idle() {
			s.engineMu.Unlock()
			select {
			case <-s.submitted:
			case <-ctx.Done():
				return
			}
			at = max(at, time.Since(began))
			continue
		}
		step := s.engine.Step(at)
		s.engineMu.Unlock()

		if wait := time.Until(began.Add(step.End)); wait > 0 {
			timer.Reset(wait)
			select {
			case <-timer.C:
			case <-ctx.Done():
				return
			}
		}
		at = step.End
		if s.awaitThaw(ctx) {
			at = max(at, time.Since(began))
		}
		s.engineMu.Lock()
		if s.epoch == epoch {
			s.publishStep(step)
		}
		s.engineMu.Unlock()
	}
}

// awaitThaw waits while the fault Freeze is active, and reports whether it was.
func (s *Server) awaitThaw(ctx context.Context) (wasFrozen bool) {
	froze := false
	for ; s.faults.isActive(Freeze) && ctx.Err() == nil; froze = true {
		select {
		case <-s.thawed:
		case <-ctx.Done():
		}
	}
	return froze
}

// wakeFrozenEngine wakes runEngine if it waits for the end of a freeze.
func (s *Server) wakeFrozenEngine() {
	select {
	case s.thawed <- struct{}{}:
	default:
	}
}

// publishStep counts a step and publishes its outputs to the sequences.
func (s *Server) publishStep(step engine.StepResult) {
	s.counters.countStep(step)
	kept := s.live[:0]
	for _, q := range s.live {
		n := q.Generated(s.engine)
		if n == q.seen {
			kept = append(kept, q)
			continue
		}
		q.seen = n
		if q.abortAfter > 0 && n >= q.abortAfter && n < q.Answer {
			s.engine.Abort(&q.Request)
			s.counters.success[aborted]++
			q.publishProgress(n, aborted)
			continue
		}
		if n < q.Answer {
			q.publishProgress(n, running)
			kept = append(kept, q)
			continue
		}
		s.counters.success[q.naturalEnd]++
		q.publishProgress(n, q.naturalEnd)
	}
	clear(s.live[len(kept):])
	s.live = kept
}
