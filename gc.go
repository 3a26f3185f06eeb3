package main

import (
	"context"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

const (
	// heapRoom is what may be allocated between two collections while little is in
	// use. A proxy lives on a few megabytes and allocates several kilobytes a
	// request: left alone, the collector would run a hundred times a second under
	// load, for a seventh of the CPU time of a small request.
	heapRoom = 64 << 20
	// mostGCPercent bounds what a heap may grow to that has become large between
	// two collections.
	mostGCPercent = 400
)

// tendHeap keeps the collector's pace at heapRoom, and at the usual doubling once
// more than that is in use, until ctx is done. Who has set GOGC or GOMEMLIMIT
// knows better.
func tendHeap(ctx context.Context) {
	if os.Getenv("GOGC") != "" || os.Getenv("GOMEMLIMIT") != "" {
		return
	}
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	usual, now := debug.SetGCPercent(mostGCPercent), mostGCPercent
	defer debug.SetGCPercent(usual)
	collections := make(chan struct{}, 1)
	for {
		announceCollection(collections)
		select {
		case <-ctx.Done():
			return
		case <-collections:
		}
		metrics.Read(live)
		// Each change stops the world for a moment: small ones are not worth it.
		if want := gcPercent(live[0].Value.Uint64()); want < now*9/10 || want > now*11/10 {
			debug.SetGCPercent(want)
			now = want
		}
	}
}

// announceCollection sends once the collector has been round, which is when it
// finds an object that nobody holds.
func announceCollection(to chan<- struct{}) {
	unheld := new([64]byte)
	runtime.AddCleanup(unheld, func(to chan<- struct{}) { to <- struct{}{} }, to)
}

// gcPercent is how much, in percent of the bytes in use, may be allocated until
// the next collection.
func gcPercent(live uint64) int {
	return int(min(max(heapRoom*100/max(live, 1), 100), mostGCPercent))
}
