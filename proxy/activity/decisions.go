package activity

import (
	"cmp"
	"fmt"
	"sync"
	"time"

	"warmroute/router"
)

// maxDecisions is how many decisions operators see.
const maxDecisions = 64

// DecisionRecord says where a request was sent, and why.
type DecisionRecord struct {
	Number    uint64 // counts all of them, from 1
	At        time.Time
	RequestID string
	Model     string
	Backend   string
	Reason    string // as in the response's header

	MatchedTokens, PromptTokens int
	AheadTokens                 int           // uncached ones sent to the backend before, and not yet computed
	QueueTime                   time.Duration // that the request waited
	Attempt                     int           // from 1
}

// decisionRing keeps the latest decisions.
type decisionRing struct {
	mu    sync.Mutex
	all   uint64
	slots [maxDecisions]DecisionRecord
}

// add numbers d and keeps it.
func (r *decisionRing) add(d DecisionRecord) {
	r.mu.Lock()
	defer r.mu.Unlock()
	d.Number = r.all + 1
	r.slots[r.all%maxDecisions] = d
	r.all++
}

// Decisions returns the latest decisions, newest first.
func (a *Activity) Decisions() []DecisionRecord {
	r := &a.decisions
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []DecisionRecord
	for n := r.all; n > 0 && n+maxDecisions > r.all; n-- {
		out = append(out, r.slots[(n-1)%maxDecisions])
	}
	return out
}

// Explanation returns why the backend was picked, in a sentence.
func (d *DecisionRecord) Explanation() string {
	sentence := cmp.Or(map[string]string{
		router.ReasonPrefix:      "longest match",
		router.ReasonMatchedBusy: "another backend has a longer match but is too busy",
		router.ReasonNoMatch:     "no backend has a match; this one is the least busy",
		router.ReasonLoad:        "the request has no prompt, or one shorter than a block; this one is the least busy",
		router.ReasonOnly:        "no other backend could accept it",
	}[d.Reason], "policy "+d.Reason)
	if d.AheadTokens > 0 {
		sentence += fmt.Sprintf(", behind %d queued prefill tokens", d.AheadTokens)
	}
	if d.QueueTime > 0 {
		sentence += fmt.Sprintf("; queued for %v", d.QueueTime.Round(time.Millisecond))
	}
	if d.Attempt > 1 {
		sentence += fmt.Sprintf("; attempt %d", d.Attempt)
	}
	return sentence
}
