package apikey

import (
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// sharing says how the limits of keys are shared with other proxies. The zero value is that of a
// proxy that is alone. It is safe for concurrent use.
type sharing struct {
	proxies atomic.Int64 // this one included; 0: 1
	// unconnected is set while the proxies cannot tell each other what they charge: each assumes
	// that the others charge as much as it does.
	unconnected atomic.Bool
}

// concurrencyShare returns this proxy's part of a number of concurrent requests, at least 1.
func (s *sharing) concurrencyShare(concurrency int) int64 {
	n := max(1, s.proxies.Load())
	return (int64(concurrency) + n - 1) / n
}

// chargeFactor returns by how much this proxy multiplies what it charges.
func (s *sharing) chargeFactor() int {
	if !s.unconnected.Load() {
		return 1
	}
	return int(max(1, s.proxies.Load()))
}

// scaleCharge returns chargeFactor times n, but no more than the bucket can hold.
func (s *sharing) scaleCharge(n int, bucket *rate.Limiter) int {
	return min(n*s.chargeFactor(), bucket.Burst())
}

// charges are what was charged to a key and not yet reported to other proxies.
type charges struct{ requests, tokens atomic.Int64 }

// addUnreported counts what is charged here, for the other proxies. While they cannot be told they assume
// it, so it is not reported later.
func (a *Account) addUnreported(requests, tokens int) {
	if a.sharing.proxies.Load() == 0 || a.sharing.unconnected.Load() {
		return
	}
	a.usage.unreported.requests.Add(int64(requests))
	a.usage.unreported.tokens.Add(int64(tokens))
}

// Charge is what one proxy has charged to a key.
type Charge struct {
	Name             string // of the key
	Requests, Tokens int64  // Tokens is negative where too many were charged before
}

// SetProxies says how many proxies share the limits: each has its part of the concurrent requests.
// They tell each other what they charge to rates, by TakeCharges and ApplyCharge, as long as they
// are connected.
func (s *Set) SetProxies(n int, connected bool) {
	s.sharing.proxies.Store(int64(n))
	s.sharing.unconnected.Store(!connected)
}

// TakeCharges returns what was charged to keys with rates since the last call, for the other
// proxies.
func (s *Set) TakeCharges() (list []Charge) {
	for _, a := range s.valid.Load().accounts {
		c := Charge{a.Name, a.usage.unreported.requests.Swap(0), a.usage.unreported.tokens.Swap(0)}
		if c.Requests != 0 || c.Tokens != 0 {
			list = append(list, c)
		}
	}
	return list
}

// ApplyCharge charges a key with what another proxy has charged to it. Unknown keys are ignored.
func (s *Set) ApplyCharge(c Charge) {
	a := s.FindName(c.Name)
	if a == nil {
		return
	}
	now := time.Now()
	applyCharge(a.requests, now, c.Requests)
	applyCharge(a.tokens, now, c.Tokens)
}

// applyCharge charges n to a bucket, which may be nil, but never more than ten times what it holds:
// no proxy charges as much in the time between two reports.
func applyCharge(l *rate.Limiter, now time.Time, n int64) {
	const maxBursts = 10
	if l == nil || l.Burst() == 0 {
		return
	}
	most := maxBursts * int64(l.Burst())
	charge(l, now, int(max(-most, min(n, most))))
}
