package replay

import (
	"cmp"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"warmroute/prompt"
)

// AgentTurns is sessions of people with agents. Sessions begin at random, whatever the fleet does, and each call of a session
// follows the response to the one before. A person's message begins a turn of several calls, each with the result of the tool
// that the call before asked for; after the last one the person pauses. With several agents, the first one, which gives the
// tasks, and one of the others take turns, as in Magentic-One: each has a system prompt of its own, followed by all that was
// said in the session.
//
// The distributions of calls, pauses and tools are those of 4,265 sessions of Claude Code and Codex, published as
// uw-syfi/TraceLab (CC BY 4.0), those of the growth and the output are of CodingAgents:
//
//	calls of a turn    log-normal, mean 7.8, median 3, sigma 1.45
//	time of a tool     log-normal, median 0.3 s, sigma 2.97, at most 2 minutes
//	a person's pause   log-normal, median 84 s, sigma 2.1, at most 5 minutes
//	turns              geometric, mean 3: of sessions that last for days, 9.2
type AgentTurns struct {
	Sessions    int
	BeginWithin time.Duration // their beginnings are spread evenly over it, at random
	Agents      int           // of each session
}

const (
	turnsMeanTurns  = 3
	turnsMaxCalls   = 100 // of a turn
	turnsMaxTool    = 2 * time.Minute
	turnsMaxPause   = 5 * time.Minute
	turnsApps       = 8  // whose sessions have the same agents
	turnsMinSystem  = 2  // blocks of the system prompt and the tools of one of several agents
	turnsMaxSystem  = 16 // the same
	turnsSoleSystem = agentsHeadBlocks
)

// turnsSession is a session of AgentTurns. It depends on the seed and its number alone.
type turnsSession struct {
	number, app int
	calls       []agentCall
	done        int     // calls sent
	prompts     []chain // of each agent
}

// agentCall is a call of a session.
type agentCall struct {
	agent          int
	isFirstOfTurn  bool
	pause          time.Duration // since the previous response
	prompt, output int           // tokens; prompt is the whole context
}

// Requests returns the first calls of all sessions, and the other calls by Next.
func (w AgentTurns) Requests(_ int, seed uint64) (*Requests, error) {
	if w.Sessions < 1 || w.Agents < 1 {
		return nil, errors.New("agent turns workload: sessions or agents are below 1")
	}
	begins := rand.New(rand.NewPCG(seed, 7))
	r := &Requests{BlockTokens: generatedBlockTokens, Sessions: w.Sessions}
	for i := range w.Sessions {
		s := w.newSession(i, rand.New(rand.NewPCG(seed, uint64(i))))
		r.Total += len(s.calls)
		r.Open = append(r.Open, s.nextJob(time.Duration(begins.Float64()*float64(w.BeginWithin))))
	}
	slices.SortStableFunc(r.Open, func(a, b *Job) int { return cmp.Compare(a.At, b.At) })
	r.Next = func(ended *Job, now time.Duration) *Job {
		if pause, ok := ended.session.pauseBeforeNext(); ok {
			return ended.session.nextJob(now + pause)
		}
		return nil
	}
	return r, nil
}

func (w AgentTurns) newSession(number int, draw *rand.Rand) *turnsSession {
	s := &turnsSession{number: number, app: draw.IntN(turnsApps), prompts: make([]chain, w.Agents)}
	said := roundTokens(drawLognormal(draw, 7.6, 1.2), maxAgenticTurn) // in the session; its first message is long
	for {
		calls := roundTokens(drawLognormal(draw, 1.065, 1.45), turnsMaxCalls)
		for k := range calls {
			c := agentCall{isFirstOfTurn: k == 0, output: roundTokens(drawLognormal(draw, 5.586, 0.905), maxAgenticOutput)}
			if w.Agents > 1 && k%2 == 1 {
				c.agent = 1 + draw.IntN(w.Agents-1)
			}
			c.prompt = s.systemBlocks(c.agent)*generatedBlockTokens + said
			if c.prompt+c.output > maxAgenticContext {
				return s
			}
			switch {
			case k > 0:
				c.pause = drawPause(draw, -1.204, 2.97, turnsMaxTool)
			case len(s.calls) > 0:
				c.pause = drawPause(draw, 4.431, 2.1, turnsMaxPause)
			}
			s.calls = append(s.calls, c)
			said += c.output + roundTokens(drawLognormal(draw, 6.647, 1.130), maxAgentsGrowth)
		}
		if draw.Float64() < 1.0/turnsMeanTurns {
			return s
		}
	}
}

// drawPause draws from a log-normal distribution of seconds.
func drawPause(draw *rand.Rand, mu, sigma float64, longest time.Duration) time.Duration {
	return time.Duration(min(drawLognormal(draw, mu, sigma), longest.Seconds()) * float64(time.Second))
}

// agentID returns a number for an agent's system prompt, which is the same in all sessions of an app.
func (s *turnsSession) agentID(agent int) uint64 {
	return uint64(s.app*len(s.prompts) + agent)
}

// systemBlocks returns the length of an agent's system prompt with its tools.
func (s *turnsSession) systemBlocks(agent int) int {
	if len(s.prompts) == 1 {
		return turnsSoleSystem
	}
	return turnsMinSystem + int(mixBits(s.agentID(agent))%(turnsMaxSystem-turnsMinSystem+1))
}

func (s *turnsSession) pauseBeforeNext() (pause time.Duration, ok bool) {
	if s.done == len(s.calls) {
		return 0, false
	}
	return s.calls[s.done].pause, true
}

func (s *turnsSession) nextJob(at time.Duration) *Job {
	c := s.calls[s.done]
	s.done++
	blocks, turn := &s.prompts[c.agent], prompt.TurnLater
	if len(blocks.cache) == 0 {
		turn = prompt.TurnFirst
	}
	for len(blocks.cache) < (c.prompt+c.output)/generatedBlockTokens {
		if len(blocks.cache) < s.systemBlocks(c.agent) {
			blocks.add(s.agentID(c.agent))
		} else {
			blocks.add(uint64(turnsApps*len(s.prompts)) + uint64(s.number))
		}
	}
	j := blocks.newJob(at, c.prompt, c.output, generatedBlockTokens)
	j.session, j.Turn = s, turn
	j.Conversation = mixBits(uint64(s.number))
	j.PromptKey = j.Conversation // all agents are given the person's first message
	return j
}
