package loadgen

import (
	"math/rand/v2"
	"time"

	"warmroute/lab/replay"
)

// Message is one message of a chat.
type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// Turn is one chat request.
type Turn struct {
	Think        time.Duration // from the previous response, or the session's start, to this turn
	Messages     []Message
	OutputTokens int  // the request asks the replica for exactly this length
	Greedy       bool // asks for the most likely output, which is the same each time
	// OpenAIOnly leaves out vLLM's extensions of OpenAI's API: the output may then
	// end before OutputTokens.
	OpenAIOnly bool
}

// Range is an interval to draw from, both ends included.
type Range struct{ Min, Max int }

func (r Range) draw(from *rand.Rand) int { return r.Min + from.IntN(r.Max-r.Min+1) }

// Chats is a closed loop of multi-turn conversations over shared system
// prompts: each turn sends the whole conversation again, including the real
// outputs of earlier turns. All lengths are in tokens. Safe for concurrent use
// while no field changes.
type Chats struct {
	Seed     uint64
	Nonce    string // begins every prompt, so that runs with different nonces share no prefix
	Sessions int    // conversations in all; 0: no end

	Concurrency int // conversations open at once

	SystemPrompts int     // number of them
	SystemTokens  int     // length of each
	Zipf          float64 // how often the k-th is chosen: 1/k^Zipf

	Turns        Range
	UserTokens   Range         // a user's message
	OutputTokens Range         // asked of the replica
	Think        time.Duration // mean pause before a user's next message, exponential
}

// NewSession returns the i-th conversation, from 0. It depends on the seed, i and
// the outputs alone.
func (c *Chats) NewSession(i int) *Session {
	draw := rand.New(rand.NewPCG(c.Seed, uint64(i)))
	system := replay.NewZipf(c.SystemPrompts, c.Zipf).Draw(draw)
	s := &Session{
		chats: c,
		id:    uint64(i),
		draw:  draw,
		left:  c.Turns.draw(draw),
		messages: []Message{{
			Role:    "system",
			Content: seededText(c.Nonce+"system", uint64(system), c.SystemTokens),
		}},
	}
	if i < c.Concurrency {
		// Stagger the first ones: the queue of a simultaneous start would
		// outlast a short run.
		s.start = time.Duration(i) * c.Think / time.Duration(c.Concurrency)
	}
	return s
}

// Session is one conversation. Not safe for concurrent use.
type Session struct {
	chats    *Chats
	id       uint64
	draw     *rand.Rand
	left     int // turns
	turn     uint64
	start    time.Duration
	messages []Message
}

// Next takes the output of the previous turn, "" at first, and returns the next
// turn; ok is false when the conversation is over. The turn's Messages are valid
// until the next call.
func (s *Session) Next(previousOutput string) (turn Turn, ok bool) {
	if s.left == 0 {
		return Turn{}, false
	}
	s.left--
	think := s.start
	if s.turn > 0 {
		s.messages = append(s.messages, Message{"assistant", previousOutput})
		// Cut at four times the mean: a longer pause would last to the end
		// of a short run.
		think = time.Duration(min(s.draw.ExpFloat64(), 4) * float64(s.chats.Think))
	}
	user := seededText("", s.id<<16|s.turn, s.chats.UserTokens.draw(s.draw))
	s.messages = append(s.messages, Message{"user", user})
	s.turn++
	return Turn{
		Think:        think,
		Messages:     s.messages,
		OutputTokens: s.chats.OutputTokens.draw(s.draw),
	}, true
}
