package proxy

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"warmroute/router"
)

// keptDecisions is how many of the last decisions operators see.
const keptDecisions = 64

// PastDecision is where a request was sent, and why.
type PastDecision struct {
	Number    uint64 // counts all of them, from 1
	At        time.Time
	Handle    string // of the request
	RequestID string
	Model     string
	Backend   string
	Reason    string // as in the response's header

	MatchedTokens, PromptTokens int
	AheadTokens                 int           // uncached ones sent to the backend before, and not yet computed
	Held                        time.Duration // that the request waited
	Attempt                     int           // from 1
}

// decisionRing keeps the last decisions.
type decisionRing struct {
	mu    sync.Mutex
	all   uint64
	slots [keptDecisions]decided
}

// decided is what is noted of a decision while its request waits to be sent.
type decided struct {
	at                      time.Time
	number                  uint64 // of the request
	id, model, name, reason string
	matched, prompt, ahead  int
	held                    time.Duration
	attempt                 int
}

func (r *decisionRing) add(x *exchange, d *router.Decision) {
	at, ahead := d.Sent()
	r.mu.Lock()
	r.slots[r.all%keptDecisions] = decided{
		at, x.presence.number, x.id, x.outcome.Model, d.Backend.Name, d.Reason, d.MatchedTokens, d.PromptTokens, ahead, x.held, x.attempts,
	}
	r.all++
	r.mu.Unlock()
}

// Decisions lists the last decisions, newest first.
func (l *Live) Decisions() []PastDecision {
	r := &l.decisions
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []PastDecision
	for n := r.all; n > 0 && n+keptDecisions > r.all; n-- {
		d := &r.slots[(n-1)%keptDecisions]
		out = append(out, PastDecision{
			Number: n, At: d.at, Handle: handle(d.number), RequestID: d.id, Model: d.model, Backend: d.name, Reason: d.reason,
			MatchedTokens: d.matched, PromptTokens: d.prompt, AheadTokens: d.ahead, Held: d.held, Attempt: d.attempt,
		})
	}
	return out
}

// Sentence says why the backend was chosen.
func (d *PastDecision) Sentence() string {
	var s strings.Builder
	switch d.Reason {
	case router.ReasonPrefix:
		s.WriteString("holds the most of the prompt")
	case router.ReasonSpill:
		s.WriteString("another holds more of the prompt, but has too much to do")
	case router.ReasonCold:
		s.WriteString("no backend holds any of the prompt; this one has the least to do")
	case router.ReasonLoad:
		s.WriteString("there is no prompt to go by; this one has the least to do")
	case router.ReasonOnly:
		s.WriteString("no other backend could take it")
	default:
		s.WriteString("policy " + d.Reason)
	}
	if d.AheadTokens > 0 {
		fmt.Fprintf(&s, ", behind %d uncached tokens sent before", d.AheadTokens)
	}
	if d.Held > 0 {
		fmt.Fprintf(&s, "; held for %v", d.Held.Round(time.Millisecond))
	}
	if d.Attempt > 1 {
		fmt.Fprintf(&s, "; attempt %d", d.Attempt)
	}
	return s.String()
}
