package backends

import (
	"context"
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

// jitter spreads d by a tenth to both sides, so that many backends, or many
// proxies, are not polled in step.
func jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.9 + 0.2*rand.Float64()))
}

// sleepOrChanged waits for d or until changed is closed. It returns false when
// ctx ended first.
func sleepOrChanged(ctx context.Context, d time.Duration, changed <-chan struct{}) (notCanceled bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-changed:
		return true
	case <-ctx.Done():
		return false
	}
}
