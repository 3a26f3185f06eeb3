package apikey

import (
	"math"
	"time"

	"golang.org/x/time/rate"
)

// mostTokens is more than any prompt or answer has: a replica that reports
// nonsense must not keep a key out for good.
const mostTokens = 1 << 22

// perMinute is a bucket that holds a minute's worth and is full at first. before,
// if there is one, goes on with what it holds.
func perMinute(n int, before *rate.Limiter) *rate.Limiter {
	limit := rate.Limit(float64(n) / 60)
	switch {
	case n == 0:
		return nil
	case before == nil:
		return rate.NewLimiter(limit, n)
	}
	now := time.Now()
	before.SetLimitAt(now, limit)
	before.SetBurstAt(now, n)
	return before
}

// charge takes n from a bucket, which may owe them afterwards; a negative n gives
// back, and what does not fit is lost.
func charge(l *rate.Limiter, now time.Time, n int) {
	for n != 0 {
		part := min(n, l.Burst()) // what is above it would be refused
		l.ReserveN(now, part)
		n -= part
	}
}

// untilRoom is how long it takes until a bucket holds n.
func untilRoom(l *rate.Limiter, now time.Time, n int) time.Duration {
	missing := float64(n) - l.TokensAt(now)
	return time.Duration(math.Ceil(max(missing, 0) / float64(l.Limit()) * float64(time.Second)))
}

// Rate is where one of a key's rates stands.
type Rate struct {
	Limit     int           // a minute; 0: no bound
	Remaining int           // now
	Reset     time.Duration // until all of it is there again
}

// Rates tells where the key stands.
func (h *Holder) Rates() (requests, tokens Rate) {
	now := time.Now()
	return standing(h.requests, now), standing(h.tokens, now)
}

func standing(l *rate.Limiter, now time.Time) Rate {
	if l == nil {
		return Rate{}
	}
	burst := l.Burst()
	return Rate{Limit: burst, Remaining: max(int(l.TokensAt(now)), 0), Reset: untilRoom(l, now, burst)}
}
