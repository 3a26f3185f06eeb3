package clock

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestSleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		start := time.Now()
		for _, want := range []bool{true, false, false} { // the context ends during the second
			if passed := Sleep(ctx, 2*time.Second); passed != want {
				t.Errorf("after %v: passed %v, want %v", time.Since(start), passed, want)
			}
		}
		if took := time.Since(start); took != 3*time.Second {
			t.Errorf("took %v, want 3s", took)
		}
	})
}
