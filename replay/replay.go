// Package replay makes workloads and plays them: recorded traces and generated
// ones. A Scenario plays one in virtual time, on the router's own code and
// simulated engines; a Player sends one over HTTP to whatever speaks OpenAI's
// chat completions.
//
// All times in a workload and in its results are the replicas' own: a simulated
// replica that runs five times faster than the real one is played at
// Player.Speed 5, and its figures still compare with those at 1.
package replay

import "time"

// charsPerToken is how much text stands for a token, everywhere in this package.
// English comes close to it with today's tokenizers.
const charsPerToken = 4

// Message is one message of a chat.
type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// Turn is one request of a workload.
type Turn struct {
	// Think passes between the answer before, or the session's start, and this turn.
	Think    time.Duration
	Messages []Message
	// AnswerTokens is how long the answer shall be: the request asks the
	// replica for exactly so many.
	AnswerTokens int
	// Greedy asks for the likeliest answer, which is the same each time.
	Greedy bool
	// Plain leaves out what OpenAI's API does not have: the answer may then end
	// before AnswerTokens.
	Plain bool
}
