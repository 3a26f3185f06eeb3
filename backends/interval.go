package backends

import (
	"cmp"
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"
)

// setting is a value that can change while it is used. Safe for concurrent use;
// the zero setting holds the zero value.
type setting[T any] struct {
	mu      sync.Mutex
	value   T
	changed Event
}

// get returns the value, and a channel that is closed when it changes.
func (s *setting[T]) get() (value T, changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.value, s.changed.Next()
}

func (s *setting[T]) set(value T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.value = value
	s.changed.Notify()
}

// While polls show only what is expected, the interval between them grows up to these factors.
const (
	maxPollFactor     = 5 // without requests of ours in flight
	maxBusyPollFactor = 2 // with some: a stalled replica is found by its polls only

	maxGrownInterval = 5 * time.Second // unless the setting is longer
)

// MaxPollInterval returns the longest time between two polls of a backend that has a
// /metrics, where the setting is interval.
func MaxPollInterval(interval time.Duration) time.Duration {
	return max(interval, min(maxPollFactor*interval, maxGrownInterval))
}

// MinWaitingKVUsage is the share of its KV cache in use from which requests that wait in a
// replica are taken to wait for room there. Below it they wait for their turn in a step.
const MinWaitingKVUsage = 0.8

// NextInterval returns the time from the end of a poll to the next, where last was the time
// before it, or 0 at first. A poll costs the replica milliseconds of its event loop, so one
// that shows only what is expected doubles the interval, and any other resets it. FastInterval
// is for what ends at any time and no account of ours shows: requests of other clients, and
// requests that wait for room in the KV cache. l is nil if the poll failed.
func (s PollSettings) NextInterval(last time.Duration, l *Load, expected bool) time.Duration {
	interval := cmp.Or(s.Interval, defaultPollInterval)
	switch {
	case l == nil:
		return interval
	case l.QueuesKnown && int64(l.Running+l.Waiting) > l.OwnInFlight,
		l.WaitingForCapacity > 0 && (!l.KVKnown || l.KVCacheUsage >= MinWaitingKVUsage):
		return cmp.Or(s.FastInterval, defaultFastInterval)
	case !expected:
		return interval
	}
	longest := MaxPollInterval(interval)
	if l.OwnInFlight > 0 {
		longest = min(longest, maxBusyPollFactor*interval)
	}
	return max(interval, min(2*last, longest))
}

// backendLogger returns a logger of what concerns b; without one it is silent.
func backendLogger(log *slog.Logger, b *Backend) *slog.Logger {
	return cmp.Or(log, slog.New(slog.DiscardHandler)).With("backend", b.Name)
}

// jitter spreads d by a tenth to both sides, so that many backends, or many
// proxies, are not polled in step.
func jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.9 + 0.2*rand.Float64()))
}

// sleep waits for d, until changed is closed, until something is received from requested, or
// until ctx is done. It reports whether it was requested to end.
func sleep(ctx context.Context, d time.Duration, requested, changed <-chan struct{}) (wasRequested bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-changed:
	case <-ctx.Done():
	case <-requested:
		return true
	}
	return false
}
