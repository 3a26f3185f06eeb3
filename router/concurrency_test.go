package router

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"warmroute/backends"
)

// changeStates drains, fails, wakes and puts to sleep the backends, as operators, health checks and
// polls do, until ctx is done.
func changeStates(ctx context.Context, fleet []*backends.Backend, seed uint64) {
	random := rand.New(rand.NewPCG(seed, seed))
	for ctx.Err() == nil {
		b := fleet[random.IntN(len(fleet))]
		switch random.IntN(6) {
		case 0:
			b.SetState(backends.Draining)
		case 1:
			b.SetState(backends.Down)
		case 2:
			b.SetLoad(nil)
		case 3:
			b.SetLoad(&backends.Load{Asleep: true, QueuesKnown: true, PolledAt: time.Now()})
		case 4:
			b.SetLoad(&backends.Load{Engines: 2, QueuesKnown: true, Running: 1, PolledAt: time.Now()})
		default:
			b.SetState(backends.Ready)
		}
	}
}

func TestStateChangesUnderLoad(t *testing.T) {
	const requests = 640
	r, fleet, _ := newFleet(t, 3, "prefix", withQueue, func(o *Options) {
		o.Now = time.Now
		o.Queue.NoneReadyTimeout, o.Queue.BusyTimeout = 20*time.Millisecond, 20*time.Millisecond
	})
	for _, b := range fleet {
		b.SetOptions(backends.Options{MaxInFlight: 4})
	}
	ctx, cancel := context.WithCancel(t.Context())
	var changes, senders sync.WaitGroup
	for seed := range uint64(2) {
		changes.Go(func() { changeStates(ctx, fleet, seed) })
	}
	changes.Go(func() {
		for ctx.Err() == nil {
			r.Tick()
			r.Explain(*ask(fleet, 1, 8))
			for _, b := range fleet {
				if c := r.Status(b).Condition; c.State == Asleep && c.Since.IsZero() && c.Reason == "" {
					t.Error("asleep without a reason")
				}
			}
		}
	})
	for i := range 16 {
		senders.Go(func() {
			for k := range requests / 16 {
				req := ask(fleet, i, 1+k%8)
				req.Sequences = 1 + k%3
				d, err := r.Pick(ctx, req)
				if err != nil {
					if !errors.Is(err, ErrBusy) && !errors.Is(err, ErrNoneReady) {
						t.Error(err)
					}
					continue
				}
				d.RecordFirstEvent()
				d.Release(Outcome{End: Completed, OutputTokens: 1})
			}
		})
	}
	senders.Wait()
	cancel()
	changes.Wait()
	for _, b := range fleet {
		if n := b.InFlight.Load(); n != 0 {
			t.Errorf("%s: %d in flight at the end", b.Name, n)
		}
	}
	if n := r.CountWaiting(); n != 0 {
		t.Errorf("%d queued at the end", n)
	}
}
