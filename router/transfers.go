package router

import (
	"maps"
	"time"

	"warmroute/backends"
	"warmroute/router/decide"
)

const (
	// minTransferFailures is how many transfers of KV between two replicas have to fail in a row before they are avoided.
	minTransferFailures = 3
	// The time for which a pair is avoided is minAvoidTimeout at first, and twice as long after each failure of the
	// first request that is split between them again.
	minAvoidTimeout = 30 * time.Second
	maxAvoidTimeout = 5 * time.Minute
	// maxFailingPairs bounds the pairs that are remembered. Others are not avoided.
	maxFailingPairs = 1024
)

// transfers are the pairs of replicas whose last transfer of KV has failed. The zero value is ready for use.
type transfers struct {
	failures map[decide.Pair]int // in a row
	avoided  map[decide.Pair]time.Time
}

// avoidedPair is a call of Options.OnPairAvoided.
type avoidedPair struct {
	pair     decide.Pair
	failures int
	duration time.Duration
}

// recordFailure records that a transfer has failed, and returns for how long the pair is avoided now; 0: it is not, or was
// before.
func (t *transfers) recordFailure(p decide.Pair, now time.Time) (failures int, avoid time.Duration) {
	if now.Before(t.avoided[p]) { // of a request that was sent before
		return 0, 0
	}
	if _, known := t.failures[p]; !known && len(t.failures) >= maxFailingPairs {
		return 0, 0
	}
	if t.failures == nil {
		t.failures, t.avoided = map[decide.Pair]int{}, map[decide.Pair]time.Time{}
	}
	t.failures[p]++
	failures = t.failures[p]
	if failures < minTransferFailures {
		return failures, 0
	}
	avoid = minAvoidTimeout
	for range min(failures-minTransferFailures, 10) {
		avoid = min(2*avoid, maxAvoidTimeout)
	}
	t.avoided[p] = now.Add(avoid)
	return failures, avoid
}

// recordSuccess forgets the failures of a pair.
func (t *transfers) recordSuccess(p decide.Pair) {
	delete(t.failures, p)
	delete(t.avoided, p)
}

// removeBackend forgets the pairs of a backend.
func (t *transfers) removeBackend(b *backends.Backend) {
	has := func(p decide.Pair) bool { return p.Prefill == b || p.Decode == b }
	maps.DeleteFunc(t.failures, func(p decide.Pair, _ int) bool { return has(p) })
	maps.DeleteFunc(t.avoided, func(p decide.Pair, _ time.Time) bool { return has(p) })
}

// RecordTransfer records how a decode request has ended whose KV cache the replica reads from the one that has done the prefill:
// pairs of replicas whose transfers keep failing are avoided for a while.
func (r *Router) RecordTransfer(prefill, decode *backends.Backend, failed bool) {
	r.withLock(func() {
		f, p := &r.fleet, decide.Pair{Prefill: prefill, Decode: decode}
		switch {
		case !f.has(prefill) || !f.has(decode):
		case !failed:
			f.transfers.recordSuccess(p)
		default:
			if failures, avoid := f.transfers.recordFailure(p, r.now()); avoid > 0 {
				r.callbacks.avoided = append(r.callbacks.avoided, avoidedPair{p, failures, avoid})
			}
		}
	})
}
