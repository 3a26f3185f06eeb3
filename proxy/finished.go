package proxy

import (
	"slices"
	"sync/atomic"
	"time"

	"warmroute/proxy/accesslog"
)

// MaxFinished is how many finished requests operators see.
const MaxFinished = 10_000

// FinishedRequest is a request that has ended, without its contents and its key.
type FinishedRequest struct {
	Number uint64 // counts all of them, from 1
	accesslog.Entry
}

// finishedRequests keeps the latest requests that have ended. Neither adding nor searching waits for the other.
type finishedRequests struct {
	all   atomic.Uint64
	slots [MaxFinished]atomic.Pointer[FinishedRequest]
}

// add numbers f and keeps it. It must not be modified any more.
func (l *finishedRequests) add(f *FinishedRequest) {
	f.Number = l.all.Add(1)
	slot := &l.slots[f.Number%MaxFinished]
	for old := slot.Load(); old == nil || old.Number < f.Number; old = slot.Load() { // else f was overwritten at once
		if slot.CompareAndSwap(old, f) {
			return
		}
	}
}

// FinishedFilter says which finished requests are searched. Zero fields match all.
type FinishedFilter struct {
	ID, Key, Model       string
	Backend              string // that responded, or on which an attempt failed
	MinStatus, MaxStatus int
	SlowerThan           time.Duration // from the arrival to the end
}

func (f *FinishedFilter) matches(r *FinishedRequest) bool {
	isOf := func(wanted, value string) bool { return wanted == "" || wanted == value }
	return isOf(f.ID, r.ID) && isOf(f.Key, r.Key) && isOf(f.Model, r.Model) &&
		(isOf(f.Backend, r.Backend) || slices.ContainsFunc(r.Failures, func(a accesslog.Failure) bool { return a.Backend == f.Backend })) &&
		r.Code >= f.MinStatus && (f.MaxStatus == 0 || r.Code <= f.MaxStatus) && (f.SlowerThan == 0 || r.Times.Total > f.SlowerThan)
}

// FinishedList is the result of a search.
type FinishedList struct {
	Requests []*FinishedRequest // newest first; they must not be modified
	Found    int                // also those beyond the limit
	Finished uint64             // since the start
	Oldest   time.Time          // end of the oldest that was searched; zero: none
}

// FindFinished searches the latest MaxFinished requests that have ended. It returns up to limit of them.
func (a *Activity) FindFinished(f FinishedFilter, limit int) FinishedList {
	l := &a.finished
	out := FinishedList{Finished: l.all.Load()}
	for n := out.Finished; n > 0 && n+MaxFinished > out.Finished; n-- {
		r := l.slots[n%MaxFinished].Load()
		if r == nil || r.Number != n { // it is about to be added, or was overwritten
			continue
		}
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
