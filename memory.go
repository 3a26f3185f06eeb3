package main

import "os"

// heapBallastBytes is what may be allocated between two garbage collections beyond the
// usual doubling of the heap. A proxy lives on a few megabytes and allocates several
// kilobytes a request: without it the collector would run a hundred times a second
// under load. GOGC would not do: what leaves a small heap enough room lets the heap
// of ten thousand streams grow to a multiple of what they need.
const heapBallastBytes = 32 << 20

// newHeapBallast returns memory that the garbage collector counts as live and that
// takes no RAM, since it is never touched; nil if the environment tunes the collector.
func newHeapBallast() []byte {
	if os.Getenv("GOGC") != "" || os.Getenv("GOMEMLIMIT") != "" {
		return nil
	}
	return make([]byte, heapBallastBytes)
}
