package router

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"warmroute/backends"
)

// inBubble runs a router with the wall clock of a synctest bubble, and Run.
func inBubble(t *testing.T, hold QueueSettings, f func(t *testing.T, r *Router, fleet []*backends.Backend)) {
	synctest.Test(t, func(t *testing.T) {
		r, fleet, _ := newFleet(t, 1, "prefix", func(o *Options) { o.Queue, o.Now = hold, time.Now })
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { r.Run(ctx) })
		f(t, r, fleet)
		cancel()
		running.Wait()
	})
}

func TestPickWaitsUntilItIsSent(t *testing.T) {
	inBubble(t, QueueSettings{Requests: 10, Timeout: time.Minute}, func(t *testing.T, r *Router, fleet []*backends.Backend) {
		busy := mustPick(t, r, ask(fleet, 1, 2000))
		time.AfterFunc(3*time.Second, busy.RecordFirstEvent)
		start := time.Now()
		if d := mustPick(t, r, ask(fleet, 2, 100)); time.Since(start) != 3*time.Second || d.QueueTime != 3*time.Second {
			t.Errorf("sent after %v, and Held says %v; want 3 s", time.Since(start), d.QueueTime)
		}
	})
}

func TestRunSendsWhatTimeMadeRoomFor(t *testing.T) {
	inBubble(t, QueueSettings{Requests: 10, Timeout: time.Minute}, func(t *testing.T, r *Router, fleet []*backends.Backend) {
		for key := range 2 { // the second time after Run has rested
			busy := mustPick(t, r, ask(fleet, key, 200)) // 12,800 tokens; 7,200 a second are worked off
			start := time.Now()
			d := mustPick(t, r, ask(fleet, 10+key, 20)) // 1,280, together within half a step
			if waited := time.Since(start); waited < 1300*time.Millisecond || waited > 1500*time.Millisecond {
				t.Errorf("sent after %v, want 1.4 s", waited)
			}
			busy.RecordFirstEvent()
			d.RecordFirstEvent()
			time.Sleep(time.Minute)
		}
	})
}

func TestRunAnswersWhatWasHeldTooLong(t *testing.T) {
	inBubble(t, QueueSettings{Requests: 10, Timeout: 10 * time.Second}, func(t *testing.T, r *Router, fleet []*backends.Backend) {
		mustPick(t, r, ask(fleet, 1, 100_000))
		start := time.Now()
		_, err := r.Pick(t.Context(), ask(fleet, 2, 100))
		if waited := time.Since(start); err != ErrQueueTimeout || waited < 10*time.Second || waited > 10*time.Second+TickInterval {
			t.Errorf("got %v after %v, want ErrQueueTimeout after 10 s", err, waited)
		}
	})
}

func TestAClientThatLeavesEndsItsPick(t *testing.T) {
	inBubble(t, QueueSettings{Requests: 10, Timeout: time.Minute}, func(t *testing.T, r *Router, fleet []*backends.Backend) {
		mustPick(t, r, ask(fleet, 1, 100_000))
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		start := time.Now()
		if _, err := r.Pick(ctx, ask(fleet, 2, 100)); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != 2*time.Second {
			t.Errorf("got %v after %v", err, time.Since(start))
		}
		if n := r.WaitingRequests(); n != 0 {
			t.Errorf("%d held", n)
		}
	})
}

// Everything at once, from many goroutines: every request gets one answer, and
// nothing is left behind.
func TestHoldingFromManyGoroutines(t *testing.T) {
	r, fleet, _ := newFleet(t, 3, "prefix", func(o *Options) {
		o.Queue, o.Now = QueueSettings{Requests: 50, Bytes: 40_000, Timeout: 50 * time.Millisecond}, time.Now
	})
	ctx, cancel := context.WithCancel(t.Context())
	var around, clients sync.WaitGroup
	around.Go(func() { r.Run(ctx) })
	around.Go(func() {
		for ctx.Err() == nil {
			for _, b := range fleet {
				r.ObserveLoad(b, &backends.Load{CacheTokens: 30_000, KVKnown: true, KVCacheUsage: 0.2, ScrapedAt: time.Now()})
			}
			fleet[0].SetState(backends.Down)
			r.BackendChanged(fleet[0])
			r.ForgetCache(fleet[0])
			fleet[0].SetState(backends.Ready)
			r.BackendChanged(fleet[0])
			r.RetryAfter(0)
		}
	})
	for g := range 16 {
		clients.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 3))
			for range 300 {
				req := ask(fleet, rng.IntN(40), 1+rng.IntN(60))
				req.BodyBytes, req.Priority, req.Tenant = 1000, rng.IntN(2), rng.Uint64()
				req.Streams = rng.IntN(2) == 0
				limit, stop := context.WithTimeout(ctx, time.Duration(rng.IntN(20))*time.Millisecond)
				d, err := r.Pick(limit, req)
				stop()
				if err != nil {
					continue
				}
				if rng.IntN(2) == 0 {
					d.RecordFirstEvent()
				}
				d.Release(Outcome{End: End(rng.IntN(4)), AnswerTokens: rng.IntN(30)})
			}
		})
	}
	clients.Wait()
	cancel()
	around.Wait()
	if n := r.WaitingRequests(); n != 0 {
		t.Errorf("%d wait", n)
	}
	for i, b := range fleet {
		a, c := &r.states[i].load, &r.states[i].kv
		if n := b.InFlight.Load(); n != 0 || len(a.pending) != 0 || a.tokens != 0 {
			t.Errorf("%s: %d in flight, %d pending, %.1f tokens", b.Name, n, len(a.pending), a.tokens)
		}
		if r.index.Pinned(i) != 0 || c.unindexed != 0 || c.answering != 0 || c.began != 0 {
			t.Errorf("%s: %d blocks, %d tokens and %d answers in use", b.Name, r.index.Pinned(i), c.unindexed, c.answering)
		}
	}
}
