package recovery

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
)

func TestLoopRunsAgainAfterPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		runs, reports := 0, 0
		report := Reporter(func(place Place, cause any, stack []byte) {
			reports++
			if place != Poll || cause != "broken" || !strings.Contains(string(stack), "TestLoopRunsAgainAfterPanic") {
				t.Errorf("reported %v, %v, %s", place, cause, stack)
			}
		})
		report.RunLoop(t.Context(), Poll, func(context.Context) {
			if runs++; runs < 3 {
				panic("broken")
			}
		})
		if runs != 3 || reports != 2 {
			t.Errorf("%d runs, %d reports; want 3 and 2", runs, reports)
		}
	})
}

func TestLoopEndsWithContextAfterPanic(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	runs := 0
	Reporter(func(Place, any, []byte) { cancel() }).RunLoop(ctx, Poll, func(context.Context) {
		runs++
		panic("broken")
	})
	if runs != 1 {
		t.Errorf("%d runs, want 1", runs)
	}
}
