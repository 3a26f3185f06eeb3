package main

import (
	"context"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"testing"
	"time"
)

func TestGCPercent(t *testing.T) {
	for live, want := range map[uint64]int{
		0: mostGCPercent, 3 << 20: mostGCPercent, 16 << 20: 400, 32 << 20: 200, 64 << 20: 100, 1 << 40: 100,
	} {
		if got := gcPercent(live); got != want {
			t.Errorf("%d bytes in use: %d %%, want %d", live, got, want)
		}
	}
}

func TestTheCollectorsPaceFollowsTheHeapAndIsGivenBack(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	t.Setenv("GOGC", "")
	t.Setenv("GOMEMLIMIT", "")
	pace := func(want func(uint64) bool) {
		t.Helper()
		percent := []metrics.Sample{{Name: "/gc/gogc:percent"}}
		for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
			metrics.Read(percent)
			if want(percent[0].Value.Uint64()) {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("the pace is %d %%", percent[0].Value.Uint64())
			}
		}
	}
	usual := func(percent uint64) bool { return percent == 100 }
	tend := func() (stop func()) {
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { tendHeap(ctx) })
		pace(func(percent uint64) bool { return percent > 100 })
		return func() { cancel(); running.Wait() }
	}
	stop := tend()
	stop()
	pace(usual)

	large := make([]byte, 256<<20)
	stop = tend()
	for range 2 { // the second has marked what the first was in the midst of
		runtime.GC()
	}
	pace(usual)
	stop()
	runtime.KeepAlive(large)
}
