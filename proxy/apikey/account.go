package apikey

import (
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"warmroute/metrics"
)

// MaxTokens is more than any prompt or response has. It bounds what is charged if a replica
// reports an invalid number.
const MaxTokens = 1 << 22

// Account is a key with its usage, as configured when a request came with it. It is
// safe for concurrent use.
type Account struct {
	Key
	usage    *usage        // shared with the accounts of the key before and after a reload
	sharing  *sharing      // of the Set
	requests *rate.Limiter // nil: no limit
	tokens   *rate.Limiter // nil: no limit
	tokenize *rate.Limiter // of bytes; nil: no limit
}

type usage struct {
	inFlight   atomic.Int64
	requests   atomic.Int64
	refused    [len(limits)]atomic.Int64
	unreported charges
}

func (u *usage) snapshot(name string) metrics.KeyUsage {
	out := metrics.KeyUsage{Name: name, InFlight: u.inFlight.Load(), Requests: u.requests.Load(), Refused: map[string]int64{}}
	for i, l := range limits {
		out.Refused[string(l)] = u.refused[i].Load()
	}
	return out
}

// Limit is a kind of limit of a key.
type Limit string

// The limits of a key.
const (
	LimitRequests      Limit = "requests"
	LimitTokens        Limit = "tokens"
	LimitTokenizeBytes Limit = "tokenize_bytes"
	LimitConcurrency   Limit = "concurrency"
)

var limits = [...]Limit{LimitRequests, LimitTokens, LimitTokenizeBytes, LimitConcurrency}

// LimitError is returned for a request beyond a limit of its key.
type LimitError struct {
	Limit      Limit
	Max        int
	RetryAfter time.Duration // 0: not known
}

// Error implements error.
func (e *LimitError) Error() string { return fmt.Sprintf("limit of %d %s reached", e.Max, e.Limit) }

func newAccount(k Key, previous *Account, s *sharing) *Account {
	if previous == nil {
		previous = &Account{usage: new(usage)}
	}
	return &Account{
		Key: k, usage: previous.usage, sharing: s,
		requests: newOrUpdatedLimiter(k.RequestsPerMinute, previous.requests),
		tokens:   newOrUpdatedLimiter(k.TokensPerMinute, previous.tokens),
		tokenize: newOrUpdatedLimiter(k.tokenizeBytesLimit(), previous.tokenize),
	}
}

// recordRefusal counts a request beyond a limit, and returns the error for it.
func (a *Account) recordRefusal(limit Limit, maximum int, retryAfter time.Duration) *LimitError {
	a.usage.refused[slices.Index(limits[:], limit)].Add(1)
	return &LimitError{limit, maximum, retryAfter}
}

// Lease is a request's share of the limits of its key. The zero Lease has no key and
// no limits. It is not safe for concurrent use.
type Lease struct {
	account *Account
	charged int // tokens
}

// TryAcquire charges one request and takes one of the places for concurrent requests. It
// does not block. If the error is nil, Release must be called once.
func (a *Account) TryAcquire() (Lease, *LimitError) {
	u := a.usage
	if n := u.inFlight.Add(1); a.Concurrency > 0 && n > a.sharing.concurrencyShare(a.Concurrency) {
		u.inFlight.Add(-1)
		return Lease{}, a.recordRefusal(LimitConcurrency, a.Concurrency, 0)
	}
	if now := time.Now(); a.requests != nil {
		needed := a.sharing.scaleCharge(1, a.requests)
		if !a.requests.AllowN(now, needed) {
			u.inFlight.Add(-1)
			return Lease{}, a.recordRefusal(LimitRequests, a.RequestsPerMinute, timeUntilTokens(a.requests, now, needed))
		}
		a.addUnreported(1, 0)
	}
	u.requests.Add(1)
	return Lease{account: a}, nil
}

// ChargePrompt charges the estimated tokens of a prompt. A prompt above the tokens of a
// minute needs a full bucket and is charged whole: otherwise it could never be sent.
func (l *Lease) ChargePrompt(tokens int) *LimitError {
	if l.account == nil || l.account.tokens == nil {
		return nil
	}
	a, now := l.account, time.Now()
	tokens = min(max(tokens, 0), MaxTokens)
	// Even an empty prompt has to wait while the bucket is in debt for responses.
	needed := a.sharing.scaleCharge(max(tokens, 1), a.tokens)
	if !a.tokens.AllowN(now, needed) {
		return a.recordRefusal(LimitTokens, a.TokensPerMinute, timeUntilTokens(a.tokens, now, needed))
	}
	charge(a.tokens, now, tokens*a.sharing.chargeFactor()-needed)
	a.addUnreported(0, tokens)
	l.charged = tokens
	return nil
}

// ChargeOutput charges tokens that may be generated after the response to a request. Release charges the difference.
func (l *Lease) ChargeOutput(tokens int) {
	if l.account == nil || l.account.tokens == nil {
		return
	}
	a := l.account
	tokens = min(max(tokens, 0), MaxTokens)
	charge(a.tokens, time.Now(), tokens*a.sharing.chargeFactor())
	a.addUnreported(0, tokens)
	l.charged += tokens
}

// ChargeTokenize charges the bytes of a request that a replica only tokenizes. As with ChargePrompt, one above the bytes of a
// minute needs a full bucket. Proxies do not tell each other of these: each assumes that the others charge as much.
func (l *Lease) ChargeTokenize(bytes int) *LimitError {
	if l.account == nil || l.account.tokenize == nil || bytes <= 0 {
		return nil
	}
	a, now := l.account, time.Now()
	charged := bytes * int(max(1, a.sharing.proxies.Load()))
	needed := min(charged, a.tokenize.Burst())
	if !a.tokenize.AllowN(now, needed) {
		return a.recordRefusal(LimitTokenizeBytes, a.tokenizeBytesLimit(), timeUntilTokens(a.tokenize, now, needed))
	}
	charge(a.tokenize, now, charged-needed)
	return nil
}

// Release ends the request and charges the difference between the tokens that it used
// and those charged so far.
func (l *Lease) Release(promptTokens, completionTokens int) {
	a := l.account
	if a == nil {
		return
	}
	promptTokens, completionTokens = min(max(promptTokens, 0), MaxTokens), min(max(completionTokens, 0), MaxTokens)
	if a.tokens != nil {
		more := promptTokens + completionTokens - l.charged
		charge(a.tokens, time.Now(), more*a.sharing.chargeFactor())
		a.addUnreported(0, more)
	}
	a.usage.inFlight.Add(-1)
	*l = Lease{}
}

// Rate is the state of one of a key's rate limits.
type Rate struct {
	Limit     int // per minute; 0: no limit
	Remaining int
	Reset     time.Duration // until all of Limit remains
}

// Rates returns the state of the rate limits.
func (a *Account) Rates() (requests, tokens Rate) {
	now := time.Now()
	return rateOf(a.requests, now), rateOf(a.tokens, now)
}

func rateOf(l *rate.Limiter, now time.Time) Rate {
	if l == nil {
		return Rate{}
	}
	burst := l.Burst()
	return Rate{Limit: burst, Remaining: max(int(l.TokensAt(now)), 0), Reset: timeUntilTokens(l, now, burst)}
}

// newOrUpdatedLimiter returns a token bucket that holds perMinute, initially full, or nil if that is
// 0. A previous bucket is changed and keeps its tokens.
func newOrUpdatedLimiter(perMinute int, previous *rate.Limiter) *rate.Limiter {
	limit := rate.Limit(float64(perMinute) / 60)
	switch {
	case perMinute == 0:
		return nil
	case previous == nil:
		return rate.NewLimiter(limit, perMinute)
	}
	now := time.Now()
	previous.SetLimitAt(now, limit)
	previous.SetBurstAt(now, perMinute)
	return previous
}

// charge takes n tokens from the bucket, which may go into debt. A negative n returns tokens.
func charge(l *rate.Limiter, now time.Time, n int) {
	for n != 0 {
		part := min(n, l.Burst()) // the limiter rejects more at once
		l.ReserveN(now, part)
		n -= part
	}
}

// timeUntilTokens returns how long it takes until the bucket holds n tokens.
func timeUntilTokens(l *rate.Limiter, now time.Time, n int) time.Duration {
	missing := float64(n) - l.TokensAt(now)
	return time.Duration(math.Ceil(max(missing, 0) / float64(l.Limit()) * float64(time.Second)))
}
