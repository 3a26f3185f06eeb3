// Package policy holds the rules by which a request's backend is chosen, one
// file a rule. They know neither HTTP nor the index: only numbers.
package policy

import (
	"time"

	"warmroute/router/prompt"
)

// Policy chooses among candidates. The Router calls it under its lock, so a
// policy may keep state without one of its own.
type Policy interface {
	// Choose returns a place in candidates, of which there is at least one. It
	// keeps neither slice. It remembers what it chose, unless the request has a
	// Trial.
	Choose(*Request, []Candidate) int
}

// Forgetter is a Policy that remembers backends by their Slot. Forget makes it
// forget one, so that the next backend there begins with nothing.
type Forgetter interface{ Forget(slot int) }

// Settings are the gates of the policies that have them. A zero field is the
// policy's own default, which is that of the router it comes from.
type Settings struct {
	MatchRatio     float64       // share of the prompt that a backend must hold to be chosen for it
	ImbalanceAbs   float64       // in flight: the most loaded above the least, beyond which only load counts
	ImbalanceRatio float64       // the same as a ratio; where a rule has both, both must be exceeded
	LoadFactor     float64       // in flight over the mean, up to which a backend is accepted
	SLO            time.Duration // see Prefix
}

// Request is what a policy may know of a request.
type Request struct {
	Now          time.Time
	Blocks       []prompt.Block // its prompt's full blocks, chained; none where there is nothing to go by
	BlockTokens  float64        // tokens that a block stands for, about
	PromptTokens float64        // of its prompt, about
	PromptKey    uint64         // hash of the model and the beginning of the first user message; 0: none
	Session      uint64         // hash of what names its session; 0: nothing does
	// MeanAnswerTokens is how long answers are on average, MeanUncachedTokens what earlier
	// requests had to compute where they were sent; 0 before the first one.
	MeanAnswerTokens, MeanUncachedTokens float64
	// Trace is filled, and nothing remembered, when the request is not to be sent;
	// nil when it is.
	Trace *Trace
}

// FirstBlock is the first block of the prompt; 0 when it has none.
func (r *Request) FirstBlock() uint64 {
	if len(r.Blocks) == 0 {
		return 0
	}
	return uint64(r.Blocks[0])
}

// Candidate is one backend that could take the request, in tokens of prefill.
type Candidate struct {
	Slot           int     // the backend's, by which a policy may remember it
	NameHash       uint64  // xxh3 of the backend's name
	Weight         float64 // share of the traffic by the operator's word; 1 is plain
	MatchedTokens  float64 // prompt tokens that it likely holds
	UncachedTokens float64 // u: prompt tokens that it would have to compute
	QueuedTokens   float64 // W: uncached tokens sent to it that it has yet to compute
	AdapterTokens  float64 // tokens that could be computed while it loads the adapter that is asked for
	InFlight       float64 // n: sequences on it, other clients' included
	ContextTokens  float64 // tokens of prompts, each block once, and of answers so far, of what we have on it
	// What a router that only counts knows of its own requests: how many are in
	// flight, each as one, and the uncached tokens of those that have not shown a
	// first event, with nothing taken off for the time that has passed. Both over
	// Weight: who counts more than another can carry more.
	Requests, UnstartedTokens float64
	PrefillRate               float64 // tokens of prefill a second, as learned

	// The replica's own word, a poll old; 0 while unknown.
	Running, Waiting float64
	KVUsage          float64 // 0 to 1
	CacheTokens      float64 // size of its KV cache
}
