package replay

import (
	"errors"
	"math/rand/v2"
	"time"
)

// generatedBlock is how many tokens a block of a generated workload stands for:
// as many as in Mooncake's traces, so that figures compare.
const generatedBlock = 512

// Agentic is a closed loop of agents' sessions: every turn sends the whole
// context again, over prompts that all sessions, and then those of a group,
// begin with. Lengths, pauses and shares are those of recorded coding agents.
type Agentic struct {
	Concurrency int // sessions open at once
	Sessions    int // in all; 0: 300, and where more than 100 are open at once 400, or all of these
}

const (
	agenticShared = 62      // blocks that all sessions begin with
	agenticGroup  = 20      // blocks after them that a group's sessions share
	agenticGroups = 100     // chosen by Zipf 0.6
	agenticTurn   = 50_000  // tokens of a user's turn at most
	agenticAnswer = 10_000  // tokens of an answer at most
	agenticMost   = 200_000 // tokens of context at most

	agenticApart = 700 * time.Millisecond // between the first sessions' starts
	agenticNext  = 500 * time.Millisecond // from one session's end to the next one's start
)

// agenticSession is one session. Its lengths depend on the seed and its number alone.
type agenticSession struct {
	number int
	group  int
	turns  []agenticStep
	done   int // turns that were made
	blocks chain
}

// agenticStep is one turn of a session.
type agenticStep struct {
	pause          time.Duration // since the answer before
	prompt, answer int           // tokens, the whole context in prompt
}

// Requests makes all sessions' lengths at once.
func (w Agentic) Requests(_ int, seed uint64) (*Requests, error) {
	if w.Concurrency < 1 {
		return nil, errors.New("an agentic workload needs at least one session at a time")
	}
	sessions := make([]*agenticSession, w.sessions())
	r := &Requests{BlockTokens: generatedBlock}
	groups := NewZipf(agenticGroups, 0.6)
	for i := range sessions {
		sessions[i] = newAgenticSession(i, rand.New(rand.NewPCG(seed, uint64(i))), groups)
		r.Total += len(sessions[i].turns)
	}
	next := min(w.Concurrency, len(sessions))
	for i, s := range sessions[:next] {
		r.Open = append(r.Open, s.next(time.Duration(i)*agenticApart))
	}
	r.Next = func(ended *Job, now time.Duration) *Job {
		s := ended.session
		if s.done < len(s.turns) {
			return s.next(now + s.turns[s.done].pause)
		}
		if next == len(sessions) {
			return nil
		}
		next++
		return sessions[next-1].next(now + agenticNext)
	}
	return r, nil
}

func (w Agentic) sessions() int {
	switch {
	case w.Sessions > 0:
		return w.Sessions
	case w.Concurrency > 100:
		return max(400, w.Concurrency)
	}
	return 300
}

func newAgenticSession(number int, draw *rand.Rand, groups Zipf) *agenticSession {
	s := &agenticSession{number: number, group: groups.Draw(draw)}
	context := (agenticShared + agenticGroup) * generatedBlock
	mu, sigma := 8.517, 1.482
	pause := time.Duration(0)
	for {
		said := tokens(lognormal(draw, mu, sigma), agenticTurn)
		answer := tokens(lognormal(draw, 6.685, 0.668), agenticAnswer)
		if context+said+answer > agenticMost {
			return s // its context is full
		}
		s.turns = append(s.turns, agenticStep{pause, context + said, answer})
		context += said + answer
		if draw.Float64() < 0.05*(1+1.5*float64(context)/agenticMost) {
			return s
		}
		mu, sigma = 8.294, 0.9005
		pause = agenticPause(draw)
	}
}

func agenticPause(draw *rand.Rand) time.Duration {
	ms := lognormal(draw, 7.601, 1.354)
	if draw.Float64() >= 0.7 {
		ms = lognormal(draw, 9.616, 1.177)
	}
	return time.Duration(ms * float64(time.Millisecond))
}

// next makes the session's next turn, of which there must be one.
func (s *agenticSession) next(at time.Duration) *Job {
	t := s.turns[s.done]
	s.done++
	for len(s.blocks.cache) < (t.prompt+t.answer)/generatedBlock {
		switch n := len(s.blocks.cache); {
		case n < agenticShared:
			s.blocks.add(0)
		case n < agenticShared+agenticGroup:
			s.blocks.add(1 + uint64(s.group))
		default:
			s.blocks.add(1 + agenticGroups + uint64(s.number))
		}
	}
	j := s.blocks.job(at, t.prompt, t.answer, generatedBlock)
	j.session = s
	j.Session = mix(uint64(s.number))
	j.Head = j.Session
	return j
}
