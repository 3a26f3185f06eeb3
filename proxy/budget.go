package proxy

import (
	"context"
	"sync"
	"time"
)

const (
	budgetSlot  = 100 * time.Millisecond
	budgetSlots = 100                   // what counts is the last 10 s
	secondSlots = 10                    // of them, the last second
	budgetLook  = 20 * time.Millisecond // between two looks of the request whose turn it is
)

// retryBudget bounds what a failing fleet is asked on top of what its clients
// ask: retries are at most a share of the requests of the last 10 s, or a few a
// second. Safe for concurrent use; the zero value has the whole budget.
type retryBudget struct {
	mu       sync.Mutex
	slot     int64 // number of the newest, since 1970
	requests [budgetSlots]int
	retries  [budgetSlots]int
	asked    int // sum of requests
	retried  int // sum of retries

	line chan struct{} // holds the one whose turn it is; channels are first come, first served
}

func newRetryBudget() *retryBudget { return &retryBudget{line: make(chan struct{}, 1)} }

// request counts a request that is sent for the first time.
func (b *retryBudget) request() {
	b.mu.Lock()
	defer b.mu.Unlock()
	at := b.turn(time.Now())
	b.requests[at]++
	b.asked++
}

// turn drops what is too old and returns the slot of now.
func (b *retryBudget) turn(now time.Time) int {
	slot := now.UnixNano() / int64(budgetSlot)
	for ; b.slot < slot; b.slot++ {
		if slot-b.slot > budgetSlots {
			b.slot = slot - budgetSlots
		}
		at := (b.slot + 1) % budgetSlots
		b.asked -= b.requests[at]
		b.retried -= b.retries[at]
		b.requests[at], b.retries[at] = 0, 0
	}
	return int(b.slot % budgetSlots)
}

// take counts a retry if there is room for it.
func (b *retryBudget) take(share float64, perSecond int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	at := b.turn(time.Now())
	lately := 0
	for i := range secondSlots {
		lately += b.retries[(at-i+budgetSlots)%budgetSlots]
	}
	if lately >= perSecond && float64(b.retried+1) > share*float64(b.asked) {
		return false
	}
	b.retries[at]++
	b.retried++
	return true
}

// await takes a retry as soon as there is room for it, in the order of those
// that wait, until ctx is done.
func (b *retryBudget) await(ctx context.Context, share float64, perSecond int) bool {
	select {
	case b.line <- struct{}{}:
		defer func() { <-b.line }()
	case <-ctx.Done():
		return false
	}
	look := time.NewTicker(budgetLook)
	defer look.Stop()
	for !b.take(share, perSecond) {
		select {
		case <-look.C:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// inLine reports whether anybody waits.
func (b *retryBudget) inLine() bool { return len(b.line) > 0 }
