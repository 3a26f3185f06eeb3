package replay

import (
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"warmroute/prompt"
)

// nextSessionDelay is the time from the end of a session to the beginning of the next one.
const nextSessionDelay = 500 * time.Millisecond

// session is a client of a closed loop: it sends each turn after the response to the previous one.
type session interface {
	// pauseBeforeNext returns the time from the end of a response to the next turn, or false after the last one.
	pauseBeforeNext() (pause time.Duration, ok bool)
	// nextJob returns the next turn, of which there must be one.
	nextJob(at time.Duration) *Job
}

// playSessions makes r a closed loop of sessions, of which so many are open at once. The
// first ones begin one after the other, by interval.
func playSessions[S session](r *Requests, sessions []S, concurrency int, interval time.Duration) {
	r.Sessions = len(sessions)
	next := min(concurrency, len(sessions))
	for i, s := range sessions[:next] {
		r.Open = append(r.Open, s.nextJob(time.Duration(i)*interval))
	}
	r.Next = func(ended *Job, now time.Duration) *Job {
		if pause, ok := ended.session.pauseBeforeNext(); ok {
			return ended.session.nextJob(now + pause)
		}
		if next == len(sessions) {
			return nil
		}
		next++
		return sessions[next-1].nextJob(now + nextSessionDelay)
	}
}

// ClosedLoop is the workload of a trace's sessions, each a client that sends a turn after the response to the previous
// one, after a pause. A trace does not say how long its responses took, so the pause is the time between the
// recorded timestamps of the two turns.
type ClosedLoop struct {
	Trace       *Trace // not modified
	Concurrency int    // sessions open at once
}

// Requests returns the first turns of the sessions that are open first, and the other turns by Next. The seed
// determines the order of the sessions. A request without a session is one of its own.
func (w ClosedLoop) Requests(_ int, seed uint64) (*Requests, error) {
	switch {
	case w.Concurrency < 1:
		return nil, errors.New("closed loop: concurrency is below 1")
	case w.Trace == nil || !w.Trace.HasSessions():
		return nil, errors.New("closed loop: no request of the trace names its session: add the field session, or replay the trace as an " +
			"open loop")
	}
	var sessions []*tracedSession
	bySession := map[uint64]*tracedSession{}
	for i, job := range w.Trace.newJobs(w.Trace.continuations()) {
		s := bySession[job.Conversation]
		if s == nil || w.Trace.Requests[i].Conversation == 0 {
			s = new(tracedSession)
			sessions = append(sessions, s)
			bySession[job.Conversation] = s
		}
		s.turns = append(s.turns, job)
	}
	draw := rand.New(rand.NewPCG(seed, 5))
	draw.Shuffle(len(sessions), func(i, k int) { sessions[i], sessions[k] = sessions[k], sessions[i] })
	r := &Requests{BlockTokens: w.Trace.BlockTokens, Total: len(w.Trace.Requests)}
	playSessions(r, sessions, w.Concurrency, agenticStartInterval)
	return r, nil
}

// HasSessions reports whether requests name their sessions.
func (t *Trace) HasSessions() bool {
	return slices.ContainsFunc(t.Requests, func(r TraceRequest) bool { return r.Conversation != 0 })
}

// tracedSession is a session of a trace.
type tracedSession struct {
	turns []*Job // at their recorded times
	done  int    // turns sent
}

func (s *tracedSession) pauseBeforeNext() (pause time.Duration, ok bool) {
	if s.done == len(s.turns) {
		return 0, false
	}
	return s.turns[s.done].At - s.turns[s.done-1].At, true
}

func (s *tracedSession) nextJob(at time.Duration) *Job {
	j := *s.turns[s.done]
	s.done++
	j.At, j.session = at, s
	return &j
}

// conversationPlace says which turn of which conversation a request is.
type conversationPlace struct {
	key  uint64 // the same for all turns of a conversation, like Job.PromptKey
	turn prompt.TurnKind
}

const (
	// minContinuedShare is the share of a prompt's blocks that its conversation's next turn begins with, at least.
	// Clients edit the end of what they sent before; a subagent, or a conversation that was summarized, shares less.
	minContinuedShare = 0.9
	// maxOpenConversations bounds the conversations of a session that a request may continue.
	maxOpenConversations = 8
)

// findConversations returns the place of each request of a trace in the conversations of its session: zero if it
// names none. A session has several conversations if its agent starts others, or summarizes its context.
func findConversations(requests []TraceRequest, blockTokens int) []conversationPlace {
	type conversation struct {
		key    uint64
		blocks []uint64 // full ones of its last turn
	}
	places := make([]conversationPlace, len(requests))
	open := map[uint64][]conversation{} // by session, the last one that had a turn at the end
	for i := range requests {
		q := &requests[i]
		if q.Conversation == 0 {
			continue
		}
		current := conversation{key: mixBits(mixBits(q.Conversation) + uint64(i)), blocks: q.Blocks[:q.PromptTokens/blockTokens]}
		places[i].turn = prompt.TurnFirst
		others := open[q.Conversation]
		for k, c := range slices.Backward(others) {
			if countShared(c.blocks, current.blocks) >= minContinuedShare*float64(len(c.blocks)) {
				current.key, places[i].turn = c.key, prompt.TurnLater
				others = slices.Delete(others, k, k+1)
				break
			}
		}
		places[i].key = current.key
		open[q.Conversation] = append(others[max(0, len(others)-maxOpenConversations+1):], current)
	}
	return places
}

// countShared returns with how many equal blocks two prompts begin.
func countShared(a, b []uint64) float64 {
	n := 0
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return float64(n)
}
