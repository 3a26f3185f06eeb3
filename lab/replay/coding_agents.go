package replay

import (
	"cmp"
	"errors"
	"math/rand/v2"
	"slices"
	"time"
)

// CodingAgents is conversations of coding agents with long contexts, as an open or a closed loop. Its distributions are
// those of 265 conversations with 7,894 requests in 125 recorded sessions of Claude Code, published as
// callanjfox/kv-cache-tester (Apache-2.0); subagents, and a session after its context was summarized, are conversations
// of their own.
//
//	first prompt          log-normal, median 43,600 tokens, sigma 0.82
//	shared with a group   28 blocks of 512 tokens, the tools and the system prompt; 108 groups of 265 conversations
//	turns                 1 in 17 %, otherwise log-normal, median 24, sigma 0.98
//	growth of the prompt  log-normal, median 771 tokens for each turn, sigma 1.13
//	output                log-normal, median 267 tokens, sigma 0.91
//	time between turns    120 s and more in 9 %, otherwise log-normal, median 17.4 s, sigma 0.73
type CodingAgents struct {
	Conversations int
	Concurrency   int           // conversations open at once; 0: an open loop
	BeginWithin   time.Duration // of an open loop: their beginnings are spread evenly over it, at random
	MaxTurns      int           // of a conversation; 0: as recorded, 120
}

const (
	agentsHeadBlocks  = 28
	agentsSingleTurn  = 0.17
	agentsLongPause   = 0.09
	agentsMaxPause    = 2 * time.Minute
	minAgentsPrompt   = (agentsHeadBlocks + 1) * generatedBlockTokens
	maxAgentsFirst    = 180_000
	maxAgentsGrowth   = 60_000
	agentsGroupsOfAll = 108.0 / 265
	agentsZipf        = 0.4
)

// Requests generates all conversations.
func (w CodingAgents) Requests(_ int, seed uint64) (*Requests, error) {
	if w.Conversations < 1 {
		return nil, errors.New("coding agents workload: conversations are below 1")
	}
	groups := NewZipf(max(1, int(agentsGroupsOfAll*float64(w.Conversations))), agentsZipf)
	conversations := make([]*agenticSession, w.Conversations)
	begins := rand.New(rand.NewPCG(seed, 6))
	r := &Requests{BlockTokens: generatedBlockTokens}
	for i := range conversations {
		s := w.newConversation(i, rand.New(rand.NewPCG(seed, uint64(i))), groups)
		conversations[i] = s
		r.Total += len(s.turns)
		if w.Concurrency > 0 {
			continue
		}
		at := time.Duration(begins.Float64() * float64(w.BeginWithin))
		for range s.turns {
			at += s.turns[s.done].pause
			r.Open = append(r.Open, s.nextJob(at))
		}
	}
	if w.Concurrency > 0 {
		playSessions(r, conversations, w.Concurrency, agenticStartInterval)
	}
	slices.SortStableFunc(r.Open, func(a, b *Job) int { return cmp.Compare(a.At, b.At) })
	return r, nil
}

func (w CodingAgents) newConversation(number int, draw *rand.Rand, groups Zipf) *agenticSession {
	s := &agenticSession{number: number, head: sessionHead{grouped: agentsHeadBlocks, group: groups.Draw(draw), groups: len(groups)}}
	turns := 1
	if draw.Float64() >= agentsSingleTurn {
		turns = roundTokens(drawLognormal(draw, 3.179, 0.977), cmp.Or(w.MaxTurns, 120))
	}
	size, pause := max(minAgentsPrompt, roundTokens(drawLognormal(draw, 10.682, 0.824), maxAgentsFirst)), time.Duration(0)
	for len(s.turns) < turns && size <= maxAgenticContext {
		s.turns = append(s.turns, agenticStep{pause, size, roundTokens(drawLognormal(draw, 5.586, 0.905), maxAgenticOutput)})
		size += roundTokens(drawLognormal(draw, 6.647, 1.130), maxAgentsGrowth)
		pause = agentsMaxPause
		if draw.Float64() >= agentsLongPause {
			pause = min(agentsMaxPause, time.Duration(drawLognormal(draw, 2.855, 0.729)*float64(time.Second)))
		}
	}
	return s
}
