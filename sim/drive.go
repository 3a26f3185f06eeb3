package sim

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"warmroute/sim/engine"
)

// reason is why a sequence ended.
type reason uint8

const (
	running reason = iota
	stopped
	length
	aborted // by the replica, which says so
	failed  // the engine died, and its server still says so
	killed  // the process died: the connection is cut
)

func (r reason) String() string {
	return [...]string{"", "stop", "length", "abort", "error", ""}[r]
}

// sequence is one choice of one HTTP request while it is with the engine.
type sequence struct {
	engine.Request
	index   int // among the choices of its HTTP request
	model   string
	text    []byte // the whole answer, of which the client has seen what was generated
	natural reason // how it ends unless something interferes
	seen    int    // tokens published; the engine's owner only
	most    int    // tokens after which the engine aborts it; 0: it does not

	// progress is the number of generated tokens, shifted by 8, and the reason
	// once it has ended. One word, so that a reader never sees an end without
	// its last token. What the engine wrote into Request before is visible with it.
	progress atomic.Uint64
	wake     chan<- struct{} // capacity 1, shared by the choices of a request
}

func (q *sequence) load() (tokens int, why reason) {
	p := q.progress.Load()
	return int(p >> 8), reason(p)
}

func (q *sequence) publish(tokens int, why reason) {
	q.progress.Store(uint64(tokens)<<8 | uint64(why))
	select {
	case q.wake <- struct{}{}:
	default: // a wake-up is pending, and its reader will load what is newest
	}
}

// end publishes an end that the engine knows nothing of.
func (q *sequence) end(why reason) {
	tokens, _ := q.load()
	q.publish(tokens, why)
}

var errDraining = errors.New("cannot schedule new futures after shutdown")

// submit hands sequences to the engine. All of them or none are accepted.
func (s *Server) submit(sequences []*sequence) error {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	if s.faults.has(Drain) {
		return errDraining
	}
	if f, ok := s.faults.hit(true, AbortEach); ok {
		if f.Chunks == 0 {
			for _, q := range sequences {
				s.counters.success[aborted]++
				q.end(aborted)
			}
			return nil
		}
		for _, q := range sequences {
			q.most = f.Chunks
		}
	}
	now := time.Since(s.began)
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
	case s.busy <- struct{}{}:
	default:
	}
	return nil
}

// abandon takes sequences from the engine whose client has left.
func (s *Server) abandon(sequences []*sequence) {
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

// drive owns the engine's progress: it takes a step, waits until the wall clock
// reaches the step's end, and publishes what came out. A step that was late
// does not move the next one, so lost time is caught up; but not that of a
// freeze.
func (s *Server) drive(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var at time.Duration // end of the last step
	epoch := 0
	for ctx.Err() == nil {
		s.engineMu.Lock()
		if s.epoch != epoch {
			epoch, at = s.epoch, time.Since(s.began)
		}
		began := s.began
		if s.engine.Idle() {
			s.engineMu.Unlock()
			select {
			case <-s.busy:
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

// awaitThaw waits while a fault keeps the engine still, and reports whether one
// did. What the engine was at in that moment is published afterwards.
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

// thaw wakes an engine that may be waiting for the end of a freeze.
func (s *Server) thaw() {
	select {
	case s.thawed <- struct{}{}:
	default:
	}
}

// publish shows the outputs of a step to those who wait for them.
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
		if q.most > 0 && n >= q.most && n < q.Answer {
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
		s.counters.success[q.natural]++
		q.publish(n, q.natural)
	}
	clear(s.live[len(kept):])
	s.live = kept
}
