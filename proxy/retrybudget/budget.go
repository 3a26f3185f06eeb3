// Package retrybudget bounds the retries of all requests together.
package retrybudget

import (
	"slices"
	"sync"
	"time"
)

const (
	slotDuration   = 100 * time.Millisecond
	slots          = 100 // the window: the last 10 s
	slotsPerSecond = 10
)

// Budget bounds what a failing fleet is asked on top of what its clients ask: retries are at most a share of the requests of
// the last 10 s, or a few a second. Those beyond it wait in their order. Safe for concurrent use; the zero value is ready.
type Budget struct {
	mu           sync.Mutex
	currentSlot  int64 // number of the newest, since 1970
	requests     [slots]int
	retries      [slots]int
	requestCount int // sum of requests
	retryCount   int // sum of retries

	waiting []*Wait
	timer   *time.Timer // runs at the next slot, in which a retry may leave the window; nil: nobody waits
}

// Wait is a request's turn among those that wait for the budget.
type Wait struct {
	Granted   chan struct{} // closed when the retry is allowed
	grantedIn int64         // slot in which it was counted; 0: not granted
	share     float64
	perSecond int
}

// CountRequest counts a request of a client, and grants the retries that it makes possible.
func (b *Budget) CountRequest() {
	b.mu.Lock()
	defer b.mu.Unlock()
	at := b.advanceWindow(time.Now())
	b.requests[at]++
	b.requestCount++
	if len(b.waiting) > 0 {
		b.grantWaiting()
	}
}

// advanceWindow drops what is too old, and returns the index of the slot of now. mu is held.
func (b *Budget) advanceWindow(now time.Time) (slotIndex int) {
	slot := now.UnixNano() / int64(slotDuration)
	for ; b.currentSlot < slot; b.currentSlot++ {
		if slot-b.currentSlot > slots {
			b.currentSlot = slot - slots
		}
		at := (b.currentSlot + 1) % slots
		b.requestCount -= b.requests[at]
		b.retryCount -= b.retries[at]
		b.requests[at], b.retries[at] = 0, 0
	}
	return int(b.currentSlot % slots)
}

// TryAcquire counts a retry if the budget allows it and nobody waits.
func (b *Budget) TryAcquire(share float64, perSecond int) (ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.waiting) == 0 && b.tryAcquireLocked(share, perSecond)
}

// tryAcquireLocked counts a retry if the budget allows it. mu is held.
func (b *Budget) tryAcquireLocked(share float64, perSecond int) (ok bool) {
	at := b.advanceWindow(time.Now())
	lately := 0
	for i := range slotsPerSecond {
		lately += b.retries[(at-i+slots)%slots]
	}
	if lately >= perSecond && float64(b.retryCount+1) > share*float64(b.requestCount) {
		return false
	}
	b.retries[at]++
	b.retryCount++
	return true
}

// AddWait begins to wait for a retry. RemoveWait must follow.
func (b *Budget) AddWait(share float64, perSecond int) *Wait {
	b.mu.Lock()
	defer b.mu.Unlock()
	w := &Wait{Granted: make(chan struct{}), share: share, perSecond: perSecond}
	b.waiting = append(b.waiting, w)
	b.grantWaiting()
	return w
}

// RemoveWait ends a wait. A granted retry that is not used goes back to the budget.
func (b *Budget) RemoveWait(w *Wait, used bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if w.grantedIn != 0 {
		if !used {
			b.refund(w.grantedIn)
			b.grantWaiting()
		}
		return
	}
	if at := slices.Index(b.waiting, w); at >= 0 {
		b.waiting = slices.Delete(b.waiting, at, at+1)
		b.grantWaiting()
	}
}

// refund takes back a retry that was counted in slot, if that is still in the window.
func (b *Budget) refund(slot int64) {
	b.advanceWindow(time.Now())
	if b.currentSlot-slot < slots {
		b.retries[slot%slots]--
		b.retryCount--
	}
}

// grantWaiting allows those that wait as many retries as there are, and ensures that it is called when there may be more.
func (b *Budget) grantWaiting() {
	for len(b.waiting) > 0 && b.tryAcquireLocked(b.waiting[0].share, b.waiting[0].perSecond) {
		b.waiting[0].grantedIn = b.currentSlot
		close(b.waiting[0].Granted)
		b.waiting = slices.Delete(b.waiting, 0, 1)
	}
	if b.timer != nil {
		b.timer.Stop()
		b.timer = nil
	}
	if len(b.waiting) == 0 || b.retryCount == 0 {
		return // the next request calls it
	}
	nextSlot := time.Unix(0, (b.currentSlot+1)*int64(slotDuration))
	b.timer = time.AfterFunc(time.Until(nextSlot), func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.grantWaiting()
	})
}
