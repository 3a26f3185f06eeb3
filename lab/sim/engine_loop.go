package sim

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"warmroute/lab/sim/engine"
)

// endReason is why a sequence ended.
type endReason uint8

const (
	running endReason = iota
	stopped
	lengthLimit
	aborted        // by the engine
	engineFailed   // the engine died; its server reports an error
	transferFailed // its server reports an error, too
	processKilled  // the connection is reset
)

func (r endReason) String() string {
	return [...]string{"", "stop", "length", "abort", "error", "error", ""}[r]
}

// rank is one of the engines of a server, with its requests. Server.engineMu guards it, but
// for the channels.
type rank struct {
	engine    *engine.Engine
	live      []*sequence // submitted and not ended
	counters  *counters
	publisher *kvEventPublisher // nil: none

	// work wakes runEngine when there may be a step to take.
	work chan struct{}
	// thawed wakes it when a freeze may have ended.
	thawed chan struct{}
}

// sequence is one choice of an HTTP request while it is with the engine.
type sequence struct {
	engine.Request
	output              // complete
	rank          *rank // set by submitAll
	index         int   // among the choices of its HTTP request
	model         string
	bytesPerToken int       // of text
	naturalEnd    endReason // unless it is ended before
	kvEvents      kvEventContext
	seen          int // tokens published; used by runEngine only
	abortAfter    int // tokens after which the engine aborts it; 0: never

	transferParams transferParams
	transferID     string             // of a prefill request, in the side channel
	promptHash     uint64             // of a prefill or decode request
	transferBegun  chan time.Duration // gets the end of a decode request's transfer when it begins

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

// isEngineDead reports whether q ended with its engine.
func (q *sequence) isEngineDead() bool {
	_, end := q.loadProgress()
	return end == engineFailed || end == processKilled
}

// reportedCachedTokens returns cached_tokens of the usage. In that of a decode request vLLM has the figure of the prefill
// request, also without a connector.
func (q *sequence) reportedCachedTokens() int {
	if q.transferParams.hasCachedTokens {
		return min(q.transferParams.cachedTokens, q.Prompt)
	}
	return q.Cached + q.Transferred
}

// publishEnd publishes an end that the engine did not cause.
func (q *sequence) publishEnd(reason endReason) {
	tokens, _ := q.loadProgress()
	q.publishProgress(tokens, reason)
}

var errDraining = errors.New("cannot schedule new futures after shutdown")

// anyRank lets the server choose the engine.
const anyRank = -1

// submitAll adds all sequences to an engine, each to the one that the server chooses or all
// to that of pinned. It adds none if it fails. The fault AbortEach ends them instead, or
// later.
func (s *Server) submitAll(sequences []*sequence, pinned int) error {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	if s.faults.isActive(Drain) {
		return errDraining
	}
	if f, ok := s.faults.matchAndCount(true, QueueFull); ok && s.countLiveLocked() >= f.Limit {
		return errQueueFull
	}
	if f, ok := s.faults.matchAndCount(true, AbortEach); ok {
		if f.Chunks == 0 {
			for _, q := range sequences {
				q.rank = s.ranks[0]
				q.rank.counters.success[aborted]++
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
		index := pinned
		if pinned == anyRank {
			index = s.balancer.Choose(now)
		}
		q.rank = s.ranks[index]
		if err := q.rank.engine.Add(&q.Request, now); err != nil {
			for _, added := range sequences[:i] {
				added.rank.engine.Abort(&added.Request)
			}
			return err
		}
	}
	s.addPrefillRequests(sequences)
	for _, q := range sequences {
		q.rank.live = append(q.rank.live, q)
		q.rank.wakeEngine()
	}
	return nil
}

// countLiveLocked returns how many sequences the engines have not finished. It requires engineMu.
func (s *Server) countLiveLocked() (n int) {
	for _, r := range s.ranks {
		n += len(r.live)
	}
	return n
}

// wakeEngine wakes runEngine if it waits for work.
func (k *rank) wakeEngine() {
	select {
	case k.work <- struct{}{}:
	default:
	}
}

// abortUnfinished removes the sequences of a client that disconnected from the engines.
func (s *Server) abortUnfinished(sequences []*sequence) {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	for _, q := range sequences {
		if i := slices.Index(q.rank.live, q); i >= 0 {
			q.rank.engine.Abort(&q.Request)
			q.rank.live = slices.Delete(q.rank.live, i, i+1)
			q.rank.counters.success[aborted]++
		}
	}
}

// runEngine takes one step of an engine after the other until ctx is done: it waits
// for each step's end in wall time and publishes its outputs. A step that was late
// does not delay the next one, so that lost time is caught up, but not that of a
// freeze.
func (s *Server) runEngine(ctx context.Context, k *rank) {
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
		if k.engine.Idle() || s.pause.stopsEngines() {
			s.engineMu.Unlock()
			select {
			case <-k.work:
			case <-ctx.Done():
				return
			}
			at = max(at, time.Since(began))
			continue
		}
		k.engine.SetSpeed(s.speed / float64(s.cfg.GPU.countComputing()+1))
		step := k.engine.Step(at)
		s.engineMu.Unlock()
		s.cfg.GPU.startStep(&step)

		if wait := time.Until(began.Add(step.End)); wait > 0 {
			timer.Reset(wait)
			select {
			case <-timer.C:
			case <-ctx.Done():
				s.cfg.GPU.endStep(&step)
				return
			}
		}
		s.cfg.GPU.endStep(&step)
		at = step.End
		if s.awaitThaw(ctx, k) {
			at = max(at, time.Since(began))
		}
		s.engineMu.Lock()
		if s.epoch == epoch {
			if k.publisher != nil {
				k.publisher.publish(step.KVEvents, s.cfg.Engine.BlockSize)
			}
			k.publishStep(step)
		}
		s.engineMu.Unlock()
	}
}

// awaitThaw waits while the fault Freeze is active, and reports whether it was.
func (s *Server) awaitThaw(ctx context.Context, k *rank) (wasFrozen bool) {
	froze := false
	for ; s.faults.isActive(Freeze) && ctx.Err() == nil; froze = true {
		select {
		case <-k.thawed:
		case <-ctx.Done():
		}
	}
	return froze
}

// wakeFrozenEngines wakes each runEngine that waits for the end of a freeze.
func (s *Server) wakeFrozenEngines() {
	for _, k := range s.ranks {
		select {
		case k.thawed <- struct{}{}:
		default:
		}
	}
}

// publishStep counts a step and publishes its outputs to the sequences.
func (k *rank) publishStep(step engine.StepResult) {
	k.counters.countStep(step)
	for _, r := range step.Transferring {
		r.Owner.(*sequence).transferBegun <- r.TransferEnd
	}
	for _, r := range step.First {
		if r.Corrupt {
			r.Owner.(*sequence).garble()
		}
	}
	kept := k.live[:0]
	for _, q := range k.live {
		n := q.Generated(k.engine)
		if n == q.seen {
			kept = append(kept, q)
			continue
		}
		q.seen = n
		if q.abortAfter > 0 && n >= q.abortAfter && n < q.Output {
			k.engine.Abort(&q.Request)
			k.counters.success[aborted]++
			q.publishProgress(n, aborted)
			continue
		}
		if n < q.Output {
			q.publishProgress(n, running)
			kept = append(kept, q)
			continue
		}
		k.counters.success[q.naturalEnd]++
		q.publishProgress(n, q.naturalEnd)
	}
	clear(k.live[len(kept):])
	k.live = kept
}
