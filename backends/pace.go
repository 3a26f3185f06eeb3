package backends

import (
	"context"
	"math/rand/v2"
	"time"
)

// jitter spreads d by a tenth to both sides, so that many backends, or many
// routers, don't ask in step.
func jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.9 + 0.2*rand.Float64()))
}

// rest waits for d and reports whether ctx lasted.
func rest(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
