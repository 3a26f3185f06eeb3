package proxy

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestRetryBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newRetryBudget()
		room := func(when string, want int) {
			t.Helper()
			got := 0
			for b.take(0.2, 10) {
				got++
			}
			if got != want {
				t.Errorf("%s: room for %d, want %d", when, got, want)
			}
		}
		room("without requests", 10)
		for range 200 {
			b.request()
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

func TestTheRetryBudgetServesThoseThatWaitInTheirOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newRetryBudget()
		for b.take(0, 1) {
		}
		order := make(chan int, 3)
		ctx, leave := context.WithCancel(t.Context())
		for i := range 3 {
			go func() {
				mine := t.Context()
				if i == 1 {
					mine = ctx
				}
				if b.await(mine, 0, 1) {
					order <- i
				}
			}()
			synctest.Wait()
		}
		leave()
		if first, second := <-order, <-order; first != 0 || second != 2 {
			t.Errorf("served %d, then %d; want 0, then 2", first, second)
		}
		if b.inLine() {
			t.Error("somebody is still in line")
		}
	})
}
