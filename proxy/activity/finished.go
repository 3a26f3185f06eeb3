package activity

import (
	"cmp"
	"slices"
	"sync/atomic"
	"time"

	"warmroute/proxy/accesslog"
)

const (
	// MaxFinished is how many finished requests operators see, beside maxUnauthenticated.
	MaxFinished = 10_000
	// maxUnauthenticated is how many they see of those that were refused without a valid API key where keys are
	// configured. A flood of these pushes out none of the others.
	maxUnauthenticated = 500
)

// FinishedRequest is a request that has ended, without its contents and its key.
type FinishedRequest struct {
	Number uint64 // counts all of them, from 1
	accesslog.Entry
}

// finishedRequests keeps the latest requests that have ended. Neither adding nor searching waits for the other.
type finishedRequests struct {
	all             atomic.Uint64
	others          finishedRing
	unauthenticated finishedRing
}

// finishedRing has the latest requests that were added to it.
type finishedRing struct {
	added atomic.Uint64
	slots []atomic.Pointer[FinishedRequest]
}

func newFinishedRequests() finishedRequests {
	return finishedRequests{
		others:          finishedRing{slots: make([]atomic.Pointer[FinishedRequest], MaxFinished)},
		unauthenticated: finishedRing{slots: make([]atomic.Pointer[FinishedRequest], maxUnauthenticated)},
	}
}

// add numbers f and keeps it. It must not be modified any more.
func (l *finishedRequests) add(f *FinishedRequest, authenticated bool) {
	f.Number = l.all.Add(1)
	if authenticated {
		l.others.add(f)
	} else {
		l.unauthenticated.add(f)
	}
}

func (r *finishedRing) add(f *FinishedRequest) {
	slot := &r.slots[r.added.Add(1)%uint64(len(r.slots))]
	for old := slot.Load(); old == nil || old.Number < f.Number; old = slot.Load() { // else f was overwritten at once
		if slot.CompareAndSwap(old, f) {
			return
		}
	}
}

// appendAll appends the requests of the ring to list, in no order.
func (r *finishedRing) appendAll(list []*FinishedRequest) []*FinishedRequest {
	for i := range r.slots {
		if f := r.slots[i].Load(); f != nil {
			list = append(list, f)
		}
	}
	return list
}

// AddFinished keeps a request that has ended. The request must not be modified any more.
func (a *Activity) AddFinished(f *FinishedRequest, authenticated bool) {
	a.finished.add(f, authenticated)
}

// FinishedFilter says which finished requests are searched. Zero fields match all.
type FinishedFilter struct {
	ID, Key, Model       string
	Backend              string // that responded, did the prefill, or on which an attempt failed
	MinStatus, MaxStatus int
	SlowerThan           time.Duration // from the arrival to the end
	Since, Until         time.Time     // in which they have ended
}

func (f *FinishedFilter) matches(r *FinishedRequest) bool {
	isOf := func(wanted, value string) bool { return wanted == "" || wanted == value }
	isOnBackend := func(a accesslog.Failure) bool { return a.Backend == f.Backend }
	return isOf(f.ID, r.ID) && isOf(f.Key, r.Key) && isOf(f.Model, r.Model) &&
		(isOf(f.Backend, r.Backend) || isOf(f.Backend, r.PrefillBackend) || slices.ContainsFunc(r.Failures, isOnBackend)) &&
		r.Code >= f.MinStatus && (f.MaxStatus == 0 || r.Code <= f.MaxStatus) && (f.SlowerThan == 0 || r.Times.Total > f.SlowerThan) &&
		!r.At.Before(f.Since) && (f.Until.IsZero() || !r.At.After(f.Until))
}

// FinishedList is the result of a search.
type FinishedList struct {
	Requests []*FinishedRequest // newest first; they must not be modified
	Found    int                // also those beyond the limit
	Finished uint64             // since the start
	Oldest   time.Time          // end of the oldest that was searched; zero: none
}

// FindFinished searches the requests that are kept. It returns up to limit of them.
func (a *Activity) FindFinished(f FinishedFilter, limit int) FinishedList {
	l := &a.finished
	out := FinishedList{Finished: l.all.Load()}
	kept := l.unauthenticated.appendAll(l.others.appendAll(nil))
	slices.SortFunc(kept, func(a, b *FinishedRequest) int { return cmp.Compare(b.Number, a.Number) })
	for _, r := range kept {
		out.Oldest = r.At
		if !f.matches(r) {
			continue
		}
		if out.Found++; out.Found <= limit {
			out.Requests = append(out.Requests, r)
		}
	}
	return out
}
