package apikey

import (
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// Holder is a key with the terms that were in force when a request came with it.
// Safe for concurrent use.
type Holder struct {
	Key
	account  *account
	requests *rate.Limiter // nil: no bound
	tokens   *rate.Limiter // nil: no bound
}

// account is what lasts of a key while its terms change.
type account struct {
	inFlight           atomic.Int64
	requests           atomic.Int64
	prompt, completion atomic.Int64
	refused            [len(Reasons)]atomic.Int64
}

// Reason is which of a key's bounds a request was refused for.
type Reason string

// Reasons are all that there are.
var Reasons = [...]Reason{ForRequests, ForTokens, ForConcurrency}

// The bounds of a key.
const (
	ForRequests    Reason = "requests"
	ForTokens      Reason = "tokens"
	ForConcurrency Reason = "concurrency"
)

// Refusal says which bound is reached.
type Refusal struct {
	Reason Reason
	Most   int           // the bound
	Wait   time.Duration // until there is room again; 0: not known
}

func newHolder(k Key, before *Holder) *Holder {
	h := &Holder{Key: k, account: new(account)}
	if before == nil {
		before = &Holder{account: h.account}
	}
	h.account = before.account
	h.requests = perMinute(k.RequestsPerMinute, before.requests)
	h.tokens = perMinute(k.TokensPerMinute, before.tokens)
	return h
}

func (h *Holder) refuse(reason Reason, most int, wait time.Duration) *Refusal {
	for i, r := range Reasons {
		if r == reason {
			h.account.refused[i].Add(1)
		}
	}
	return &Refusal{reason, most, wait}
}

func (a *account) use(name string) Use {
	u := Use{
		Name: name, InFlight: a.inFlight.Load(), Requests: a.requests.Load(),
		PromptTokens: a.prompt.Load(), CompletionTokens: a.completion.Load(), Refused: map[Reason]int64{},
	}
	for i, r := range Reasons {
		u.Refused[r] = a.refused[i].Load()
	}
	return u
}

// Visit is one request of a key's holder, or of nobody when zero: that one has no
// bounds. Not safe for concurrent use.
type Visit struct {
	holder  *Holder
	charged int // tokens
}

// Enter takes a place and one request of the rate. End gives the place back, and
// must be called exactly once if there was no refusal.
func (h *Holder) Enter() (Visit, *Refusal) {
	a := h.account
	if n := a.inFlight.Add(1); h.Concurrency > 0 && n > int64(h.Concurrency) {
		a.inFlight.Add(-1)
		return Visit{}, h.refuse(ForConcurrency, h.Concurrency, 0)
	}
	if now := time.Now(); h.requests != nil && !h.requests.AllowN(now, 1) {
		a.inFlight.Add(-1)
		return Visit{}, h.refuse(ForRequests, h.RequestsPerMinute, untilRoom(h.requests, now, 1))
	}
	a.requests.Add(1)
	return Visit{holder: h}, nil
}

// Charge takes the tokens of a prompt, as far as they can be told before it is
// sent. A prompt above a whole minute's tokens needs all of them, and is charged
// in full: else it would have to be refused for good.
func (v *Visit) Charge(promptTokens int) *Refusal {
	if v.holder == nil || v.holder.tokens == nil {
		return nil
	}
	h, now := v.holder, time.Now()
	promptTokens = min(max(promptTokens, 0), mostTokens)
	first := min(promptTokens, h.tokens.Burst())
	// One who is in debt for the answers before has to wait, whatever it asks for.
	if first = max(first, 1); !h.tokens.AllowN(now, first) {
		return h.refuse(ForTokens, h.TokensPerMinute, untilRoom(h.tokens, now, first))
	}
	charge(h.tokens, now, promptTokens-first)
	v.charged = promptTokens
	return nil
}

// End gives the request's place back and charges what it used in truth: the
// difference to what it was charged for. Tokens that nobody computed are 0.
func (v *Visit) End(promptTokens, completionTokens int) {
	h := v.holder
	if h == nil {
		return
	}
	promptTokens, completionTokens = min(max(promptTokens, 0), mostTokens), min(max(completionTokens, 0), mostTokens)
	if h.tokens != nil {
		charge(h.tokens, time.Now(), promptTokens+completionTokens-v.charged)
	}
	h.account.prompt.Add(int64(promptTokens))
	h.account.completion.Add(int64(completionTokens))
	h.account.inFlight.Add(-1)
	*v = Visit{}
}
