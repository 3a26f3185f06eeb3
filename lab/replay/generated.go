package replay

import (
	"cmp"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"warmroute/prompt"
)

// generatedBlockTokens is the block size of generated workloads: that of Mooncake's
// traces, so that figures compare.
const generatedBlockTokens = 512

// Agentic is a closed loop of agents' sessions: every turn sends the whole context
// again, which begins with a prompt that all sessions share and one of a group.
// Lengths, pauses and shares are those of recorded coding agents.
type Agentic struct {
	Concurrency int // sessions open at once
	Sessions    int // in all; 0: 300, and where more than 100 are open at once 400, or all of these
}

const (
	agenticShared     = 62     // blocks that all sessions begin with
	agenticGroup      = 20     // blocks after them that a group's sessions share
	agenticGroups     = 100    // chosen by Zipf 0.6
	maxAgenticTurn    = 50_000 // tokens
	maxAgenticOutput  = 10_000
	maxAgenticContext = 200_000

	agenticStartInterval = 700 * time.Millisecond // between the first sessions
)

// agenticSession is one session. It depends on the seed and its number alone.
type agenticSession struct {
	number int
	head   sessionHead
	turns  []agenticStep
	done   int // turns sent
	blocks chain
}

// sessionHead is what sessions have in common: all begin with the same blocks, and those of a
// group with the same ones after them.
type sessionHead struct {
	shared, grouped int // blocks
	group, groups   int // which group, of how many
}

func (h *sessionHead) blocks() int { return h.shared + h.grouped }

// agenticStep is one turn of a session.
type agenticStep struct {
	pause          time.Duration // since the previous response
	prompt, output int           // tokens; prompt is the whole context
}

// Requests generates all sessions.
func (w Agentic) Requests(_ int, seed uint64) (*Requests, error) {
	if w.Concurrency < 1 {
		return nil, errors.New("agentic workload: concurrency is below 1")
	}
	sessions := make([]*agenticSession, w.sessionCount())
	r := &Requests{BlockTokens: generatedBlockTokens}
	groups := NewZipf(agenticGroups, 0.6)
	for i := range sessions {
		sessions[i] = newAgenticSession(i, rand.New(rand.NewPCG(seed, uint64(i))), groups)
		r.Total += len(sessions[i].turns)
	}
	playSessions(r, sessions, w.Concurrency, agenticStartInterval)
	return r, nil
}

func (w Agentic) sessionCount() int {
	switch {
	case w.Sessions > 0:
		return w.Sessions
	case w.Concurrency > 100:
		return max(400, w.Concurrency)
	}
	return 300
}

func newAgenticSession(number int, draw *rand.Rand, groups Zipf) *agenticSession {
	s := &agenticSession{number: number, head: sessionHead{agenticShared, agenticGroup, groups.Draw(draw), agenticGroups}}
	context := s.head.blocks() * generatedBlockTokens
	mu, sigma := 8.517, 1.482
	pause := time.Duration(0)
	for {
		said := roundTokens(drawLognormal(draw, mu, sigma), maxAgenticTurn)
		output := roundTokens(drawLognormal(draw, 6.685, 0.668), maxAgenticOutput)
		if context+said+output > maxAgenticContext {
			return s
		}
		s.turns = append(s.turns, agenticStep{pause, context + said, output})
		context += said + output
		if draw.Float64() < 0.05*(1+1.5*float64(context)/maxAgenticContext) {
			return s
		}
		mu, sigma = 8.294, 0.9005
		pause = drawAgenticPause(draw)
	}
}

func drawAgenticPause(draw *rand.Rand) time.Duration {
	ms := drawLognormal(draw, 7.601, 1.354)
	if draw.Float64() >= 0.7 {
		ms = drawLognormal(draw, 9.616, 1.177)
	}
	return time.Duration(ms * float64(time.Millisecond))
}

func (s *agenticSession) pauseBeforeNext() (pause time.Duration, ok bool) {
	if s.done == len(s.turns) {
		return 0, false
	}
	return s.turns[s.done].pause, true
}

func (s *agenticSession) nextJob(at time.Duration) *Job {
	t := s.turns[s.done]
	s.done++
	for len(s.blocks.cache) < (t.prompt+t.output)/generatedBlockTokens {
		switch n := len(s.blocks.cache); {
		case n < s.head.shared:
			s.blocks.add(0)
		case n < s.head.blocks():
			s.blocks.add(1 + uint64(s.head.group))
		default:
			s.blocks.add(1 + uint64(s.head.groups) + uint64(s.number))
		}
	}
	j := s.blocks.newJob(at, t.prompt, t.output, generatedBlockTokens)
	j.session = s
	j.Turn = prompt.TurnLater
	if s.done == 1 {
		j.Turn = prompt.TurnFirst
	}
	j.Conversation = mixBits(uint64(s.number))
	j.PromptKey = j.Conversation
	return j
}

// Conversations is a closed loop of sessions: rollouts of reinforcement learning, or clients
// that stay for the whole run. The sessions of a group begin with the same prompt.
type Conversations struct {
	Sessions, Groups int
	Concurrency      int           // sessions open at once; 0: all
	PromptTokens     int           // of a group's prompt
	MeanTurns        float64       // geometric
	Said, Output     float64       // median tokens of a turn, lognormal
	OutputSigma      float64       // 1: a long tail
	Pause            time.Duration // between a response and the next turn, mean
}

// Rollouts returns 600 sessions of reinforcement learning in groups of eight, a few of
// which take much longer than the others.
func Rollouts() Conversations {
	return Conversations{Sessions: 600, Groups: 75, PromptTokens: 2560, MeanTurns: 4, Said: 300, Output: 500, OutputSigma: 1,
		Pause: 500 * time.Millisecond}
}

// Requests generates all sessions.
func (w Conversations) Requests(_ int, seed uint64) (*Requests, error) {
	if w.Sessions < 1 || w.Groups < 1 || w.PromptTokens < 1 || w.MeanTurns < 1 {
		return nil, errors.New("conversations workload: sessions, groups, prompt or turns are below 1")
	}
	sessions := make([]*agenticSession, w.Sessions)
	r := &Requests{BlockTokens: generatedBlockTokens}
	for i := range sessions {
		sessions[i] = w.newSession(i, rand.New(rand.NewPCG(seed, uint64(i))))
		r.Total += len(sessions[i].turns)
	}
	playSessions(r, sessions, cmp.Or(w.Concurrency, w.Sessions), time.Millisecond)
	return r, nil
}

func (w Conversations) newSession(number int, draw *rand.Rand) *agenticSession {
	s := &agenticSession{number: number, head: sessionHead{grouped: w.PromptTokens / generatedBlockTokens, group: number % w.Groups,
		groups: w.Groups}}
	context, pause := w.PromptTokens, time.Duration(0)
	for {
		said := roundTokens(w.Said*drawLognormal(draw, 0, 0.7), maxAgenticTurn)
		output := roundTokens(w.Output*drawLognormal(draw, 0, w.OutputSigma), maxAgenticOutput)
		s.turns = append(s.turns, agenticStep{pause, context + said, output})
		context += said + output
		if draw.Float64() < 1/w.MeanTurns || context > maxAgenticContext {
			return s
		}
		pause = drawInterval(draw, 1/max(w.Pause.Seconds(), 1e-3))
	}
}

// Documents is an open loop of questions about long documents: the first about each
// arrives at random, a few further ones after pauses.
type Documents struct {
	Load float64       // prompt tokens over what the fleet could prefill without a cache
	For  time.Duration // within which documents appear; 0: 10 minutes
}

const (
	documentTokens   = 20_000
	documentQuestion = 100              // tokens
	documentOutput   = 200              // tokens, median; lognormal with a sigma of 0.5
	documentPause    = 30 * time.Second // between two questions, mean

	minDocumentQuestions, maxDocumentQuestions = 2, 6 // uniform
)

// Requests generates the documents and their questions.
func (w Documents) Requests(backends int, seed uint64) (*Requests, error) {
	if w.Load <= 0 {
		return nil, errors.New("documents workload: load is not above 0")
	}
	const size, asked = documentTokens + documentQuestion, (minDocumentQuestions + maxDocumentQuestions) / 2.0
	rate := w.Load * float64(backends) * nominalRate / (size * asked)
	draw := rand.New(rand.NewPCG(seed, 4))
	r := &Requests{BlockTokens: generatedBlockTokens}
	last := cmp.Or(w.For, 10*time.Minute)
	for at, document := time.Duration(0), uint64(1); at < last; at, document = at+drawInterval(draw, rate), document+1 {
		times := minDocumentQuestions + draw.IntN(maxDocumentQuestions-minDocumentQuestions+1)
		for asked, k := at, 0; k < times; k++ {
			r.Open = append(r.Open, newDocumentJob(asked, document, uint64(len(r.Open)), draw))
			asked += drawInterval(draw, 1/documentPause.Seconds())
		}
	}
	slices.SortStableFunc(r.Open, func(a, b *Job) int { return cmp.Compare(a.At, b.At) })
	r.Total = len(r.Open)
	return r, nil
}

func newDocumentJob(at time.Duration, document, number uint64, draw *rand.Rand) *Job {
	const size = documentTokens + documentQuestion
	output := roundTokens(documentOutput*drawLognormal(draw, 0, 0.5), maxOutputTokens)
	var c chain
	for len(c.cache) < documentTokens/generatedBlockTokens {
		c.add(document)
	}
	for len(c.cache) < (size+output)/generatedBlockTokens {
		c.add(mixBits(number))
	}
	j := c.newJob(at, size, output, generatedBlockTokens)
	j.PromptKey = mixBits(document)
	j.Conversation = j.PromptKey
	j.Turn = prompt.TurnFirst
	return j
}

// SharedPrompts is an open loop of requests that each begin with one of a few
// prompts and arrive at random, at a constant rate.
type SharedPrompts struct {
	Prompts      int // number of prompts
	PromptTokens int // length of each
	Zipf         float64
	OwnTokens    int           // of each request, after its prompt
	Output       float64       // median tokens, lognormal with a sigma of 0.5
	Rate         float64       // requests per second; 0: from Load
	Load         float64       // prompt tokens over what the fleet could prefill without a cache
	For          time.Duration // from the first arrival to the last
	KVTokens     int           // of each replica; 0: the scenario's
}

// HotPrompts returns a workload of one or a few short prompts with long outputs, which a
// policy that uses only the prefix sends to one backend.
func HotPrompts(prompts int, requestsPerSecond float64) SharedPrompts {
	return SharedPrompts{
		Prompts: prompts, PromptTokens: 2048, Zipf: 0.8, OwnTokens: 40,
		Output: 300, Rate: requestsPerSecond, For: 5 * time.Minute,
	}
}

// ChatsOnSmallCaches returns a workload of many chat prompts on small caches, under a load
// that no fleet could serve without a cache.
func ChatsOnSmallCaches() SharedPrompts {
	return SharedPrompts{
		Prompts: 200, PromptTokens: 1536, Zipf: 1, OwnTokens: 200,
		Output: 250, Load: 1.5, For: 5 * time.Minute, KVTokens: 153_600,
	}
}

// LoadOn returns the load of the workload on this many backends.
func (w SharedPrompts) LoadOn(backends int) float64 {
	if w.Rate == 0 {
		return w.Load
	}
	return w.Rate * float64(w.PromptTokens+w.OwnTokens) / (float64(backends) * nominalRate)
}

// Requests generates the arrivals.
func (w SharedPrompts) Requests(backends int, seed uint64) (*Requests, error) {
	size := w.PromptTokens + w.OwnTokens
	if w.Prompts < 1 || w.PromptTokens < 1 || size < 1 || w.For <= 0 {
		return nil, errors.New("shared prompts workload: number of prompts, their length or duration is not above 0")
	}
	rate := w.Rate
	if rate == 0 {
		rate = w.Load * float64(backends) * nominalRate / float64(size)
	}
	if rate <= 0 {
		return nil, errors.New("shared prompts workload: neither rate nor load is above 0")
	}
	draw := rand.New(rand.NewPCG(seed, 3))
	which := NewZipf(w.Prompts, w.Zipf)
	r := &Requests{BlockTokens: generatedBlockTokens, KVTokens: w.KVTokens}
	for at := time.Duration(0); at < w.For; at += drawInterval(draw, rate) {
		r.Open = append(r.Open, w.newJob(at, uint64(len(r.Open)), uint64(which.Draw(draw)), draw))
	}
	r.Total = len(r.Open)
	return r, nil
}

func (w SharedPrompts) newJob(at time.Duration, number, promptIndex uint64, draw *rand.Rand) *Job {
	size := w.PromptTokens + w.OwnTokens
	output := roundTokens(w.Output*drawLognormal(draw, 0, 0.5), maxOutputTokens)
	var c chain
	for len(c.cache) < w.PromptTokens/generatedBlockTokens {
		c.add(promptIndex)
	}
	for len(c.cache) < (size+output)/generatedBlockTokens {
		c.add(uint64(w.Prompts) + number)
	}
	j := c.newJob(at, size, output, generatedBlockTokens)
	j.PromptKey = mixBits(promptIndex)
	j.Conversation = j.PromptKey
	j.Turn = prompt.TurnFirst
	return j
}

// drawInterval draws the time between two arrivals of a Poisson process.
func drawInterval(draw *rand.Rand, rate float64) time.Duration {
	return time.Duration(draw.ExpFloat64() / rate * float64(time.Second))
}
