//go:build !race

// The race detector has pools forget some of what they hold.

package httpapi

import "testing"

func TestLookupAllocatesNothing(t *testing.T) {
	mux := newTestMux()
	for _, path := range []string{"/items", "/items/a", "/models/a/b", "/none"} {
		if n := testing.AllocsPerRun(1000, func() { mux.Lookup("GET", path) }); n >= 1 { // the pool may be emptied
			t.Errorf("%s: %v allocations", path, n)
		}
	}
}
