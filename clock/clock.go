// Package clock waits for time to pass.
package clock

import (
	"context"
	"time"
)

// Sleep blocks for d. It returns false at once when ctx ends before.
func Sleep(ctx context.Context, d time.Duration) (passed bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
