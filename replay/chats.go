package replay

import (
	"math/rand/v2"
	"time"
)

// Range is an interval to draw from, both ends included.
type Range struct{ Min, Max int }

func (r Range) draw(from *rand.Rand) int { return r.Min + from.IntN(r.Max-r.Min+1) }

// Chats is a closed loop of multi-turn conversations over shared system
// prompts: each turn sends the whole conversation again, the real answers to
// the earlier turns included. All lengths are in tokens. Safe for concurrent
// use while no field changes.
type Chats struct {
	Seed     uint64
	Nonce    string // every prompt begins with it: two of one length make different prompts of the same length
	Sessions int    // conversations in all; 0: no end
	AtATime  int    // of them open at once

	SystemPrompts int     // how many there are
	SystemTokens  int     // length of each
	Zipf          float64 // how often the k-th is chosen: 1/k^Zipf

	Turns        Range
	UserTokens   Range         // a user's message
	AnswerTokens Range         // asked of the replica
	Think        time.Duration // mean pause before a user's next message, exponential
}

// Session returns the i-th conversation, from 0. It depends on the seed, on i
// and on the answers it is given, on nothing else.
func (c *Chats) Session(i int) *Session {
	draw := rand.New(rand.NewPCG(c.Seed, uint64(i)))
	system := newRanks(c.SystemPrompts, c.Zipf).draw(draw)
	s := &Session{
		chats: c,
		id:    uint64(i),
		draw:  draw,
		left:  c.Turns.draw(draw),
		messages: []Message{{
			Role:    "system",
			Content: text(c.Nonce+"system", uint64(system), c.SystemTokens),
		}},
	}
	if i < c.AtATime {
		// The first ones start one by one: users do not come all in one
		// instant, and the queue of such a start would outlast a short run.
		s.start = time.Duration(i) * c.Think / time.Duration(c.AtATime)
	}
	return s
}

// Session is one conversation. Not safe for concurrent use.
type Session struct {
	chats    *Chats
	id       uint64
	draw     *rand.Rand
	left     int // turns to come
	turn     uint64
	start    time.Duration
	messages []Message
}

// Next takes the answer to the turn before, "" at first, and returns the turn
// to send, or false when the conversation is over. The turn's Messages stay
// valid until the next call.
func (s *Session) Next(answer string) (Turn, bool) {
	if s.left == 0 {
		return Turn{}, false
	}
	s.left--
	think := s.start
	if s.turn > 0 {
		s.messages = append(s.messages, Message{"assistant", answer})
		// Cut at four times the mean: one user who went for lunch would
		// hold a place of a short run to its end.
		think = time.Duration(min(s.draw.ExpFloat64(), 4) * float64(s.chats.Think))
	}
	user := text("", s.id<<16|s.turn, s.chats.UserTokens.draw(s.draw))
	s.messages = append(s.messages, Message{"user", user})
	s.turn++
	return Turn{
		Think:        think,
		Messages:     s.messages,
		AnswerTokens: s.chats.AnswerTokens.draw(s.draw),
	}, true
}
