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

// WaitUntil calls reached at every interval until it returns true or ctx is done.
func WaitUntil(ctx context.Context, interval time.Duration, reached func() bool) {
	ticks := time.NewTicker(interval)
	defer ticks.Stop()
	for !reached() {
		select {
		case <-ticks.C:
		case <-ctx.Done():
			return
		}
	}
}
