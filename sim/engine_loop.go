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
	index      int // among the choices of its HTTP request
	model      string
	text       []byte    // of the complete answer
	naturalEnd endReason // unless it is ended before
	seen       int       // tokens published; used by runEngine only
	abortAfter int       // tokens after which the engine aborts it; 0: never

	// progress is the number of generated tokens, shifted by 8, and the endReason:
	// one word, so that a reader never sees an end without its last token. What the
	// engine wrote into Request before is visible with it.
	progress atomic.Uint64
	wake     chan<- struct{} // capacity 1, shared by the choices of a request
}

// load returns the published progress.
func (q *sequence) load() (tokens int, end endReason) {
	p := q.progress.Load()
	return int(p >> 8), endReason(p)
}

func (q *sequence) publish(tokens int, end endReason) {
	q.progress.Store(uint64(tokens)<<8 | uint64(end))
	select {
	case q.wake <- struct{}{}:
	default: // a wake-up is pending
	}
}

// finish publishes an end that the engine did not cause.
func (q *sequence) finish(reason endReason) {
	tokens, _ := q.load()
	q.publish(tokens, reason)
}

var errDraining = errors.New("cannot schedule new futures after shutdown")

// submit adds all sequences to the engine, or none.
func (s *Server) submit(sequences []*sequence) error {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	if s.faults.has(Drain) {
		return errDraining
	}
	if f, ok := s.faults.match(true, AbortEach); ok {
		if f.Chunks == 0 {
			for _, q := range sequences {
				s.counters.success[aborted]++
				q.finish(aborted)
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

// abort removes the sequences of a client that disconnected from the engine.
func (s *Server) abort(sequences []*sequence) {
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
			s.publish(step)
		}
		s.engineMu.Unlock()
	}
}

// awaitThaw waits while the fault Freeze is active, and reports whether it was.
func (s *Server) awaitThaw(ctx context.Context) bool {
	froze := false
	for ; s.faults.has(Freeze) && ctx.Err() == nil; froze = true {
		select {
		case <-s.thawed:
		case <-ctx.Done():
		}
	}
	return froze
}

// thaw wakes runEngine if it waits for the end of a freeze.
func (s *Server) thaw() {
	select {
	case s.thawed <- struct{}{}:
	default:
	}
}

// publish publishes the outputs of a step to the sequences.
func (s *Server) publish(step engine.StepResult) {
	s.counters.step(step)
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
			q.publish(n, aborted)
			continue
		}
		if n < q.Answer {
			q.publish(n, running)
			kept = append(kept, q)
			continue
		}
		s.counters.success[q.naturalEnd]++
		q.publish(n, q.naturalEnd)
	}
	clear(s.live[len(kept):])
	s.live = kept
}
