package retrybudget

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestRetryBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := new(Budget)
		room := func(when string, want int) {
			t.Helper()
			got := 0
			for b.TryAcquire(0.2, 10) {
				got++
			}
			if got != want {
				t.Errorf("%s: room for %d, want %d", when, got, want)
			}
		}
		room("without requests", 10)
		for range 200 {
			b.CountRequest()
		}
		room("a fifth of 200, less those made", 30)
		time.Sleep(time.Second)
		room("a second later", 10)
		time.Sleep(10 * time.Second)
		room("when all is forgotten", 10)
		time.Sleep(time.Hour)
		room("after an hour", 10)
	})
}

func TestRetryBudgetOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := new(Budget)
		for b.TryAcquire(0, 1) {
		}
		order := make(chan int, 3)
		ctx, leave := context.WithCancel(t.Context())
		for i := range 3 {
			go func() {
				mine := t.Context()
				if i == 1 {
					mine = ctx
				}
				turn := b.AddWait(0, 1)
				granted := false
				defer func() { b.RemoveWait(turn, granted) }()
				select {
				case <-turn.Granted:
					granted = true
					order <- i
				case <-mine.Done():
				}
			}()
			synctest.Wait()
		}
		leave()
		if first, second := <-order, <-order; first != 0 || second != 2 {
			t.Errorf("served %d, then %d; want 0, then 2", first, second)
		}
		synctest.Wait()
		if len(b.waiting) > 0 || b.timer != nil {
			t.Error("somebody is still in line")
		}
	})
}

// A request makes room for the retry of another.
func TestRetryBudgetGrantedByRequests(t *testing.T) {
	b := new(Budget)
	turn := b.AddWait(0.2, 0)
	defer b.RemoveWait(turn, true)
	for i := range 5 {
		select {
		case <-turn.Granted:
			t.Fatalf("granted after %d requests", i)
		default:
		}
		b.CountRequest()
	}
	<-turn.Granted
}

// A grant whose request ends at the same moment goes to the next.
func TestRetryBudgetUnusedGrant(t *testing.T) {
	b := new(Budget)
	unused, next := b.AddWait(0, 1), b.AddWait(0, 1)
	<-unused.Granted
	b.RemoveWait(unused, false)
	select {
	case <-next.Granted:
	default:
		t.Error("the unused grant was lost")
	}
	b.RemoveWait(next, true)
}
