package backends

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"
)

// jitter spreads d by a tenth to both sides, so that many backends, or many
// routers, don't ask in step.
func jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.9 + 0.2*rand.Float64()))
}

// changing is a value that may change under those who use it. Safe for
// concurrent use; the zero changing holds the zero value.
type changing[T any] struct {
	mu      sync.Mutex
	value   T
	changed chan struct{} // closed by the next set
}

// get returns the value, and what tells that it is another.
func (c *changing[T]) get() (T, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.changed == nil {
		c.changed = make(chan struct{})
	}
	return c.value, c.changed
}

func (c *changing[T]) set(value T) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.value = value
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}

// restUnlessChanged waits for d, or until changed, and reports whether ctx lasted.
func restUnlessChanged(ctx context.Context, d time.Duration, changed <-chan struct{}) bool {
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

// rest waits for d and reports whether ctx lasted.
func rest(ctx context.Context, d time.Duration) bool { return restUnlessChanged(ctx, d, nil) }
