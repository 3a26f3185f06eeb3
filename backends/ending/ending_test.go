package ending_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"warmroute/backends/ending"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var errEnd = errors.New("the end")

type key struct{}

// wrapped is a context that holds one, as users of the package have it.
type wrapped struct{ ending.Context }

func begin(parent context.Context) *ending.Context {
	c := new(ending.Context)
	c.Begin(parent)
	return c
}

func done(c context.Context) bool {
	select {
	case <-c.Done():
		return true
	default:
		return false
	}
}

func TestContextEndsOnce(t *testing.T) {
	c := begin(context.Background())
	if c.Err() != nil || c.Cause() != nil || ending.Cause(c) != nil || done(c) {
		t.Error("has ended before its end")
	}
	c.End(errEnd)
	c.End(errors.New("too late"))
	if c.Err() != context.Canceled || c.Cause() != errEnd || ending.Cause(c) != errEnd || !done(c) {
		t.Errorf("got %v, cause %v, done %v", c.Err(), c.Cause(), done(c))
	}
}

func TestDoneIsTheSameBeforeAndAfterTheEnd(t *testing.T) {
	c := begin(context.Background())
	before := c.Done()
	c.End(errEnd)
	if c.Done() != before || !done(c) {
		t.Error("Done has changed")
	}
	late := begin(context.Background())
	late.End(errEnd)
	if !done(late) {
		t.Error("asked for after the end, Done is open")
	}
}

func TestBegun(t *testing.T) {
	var c ending.Context
	if c.Begun() {
		t.Error("begun before Begin")
	}
	if c.Begin(context.Background()); !c.Begun() {
		t.Error("not begun after Begin")
	}
}

func TestValuesAndDeadlineAreTheParents(t *testing.T) {
	until := time.Now().Add(time.Hour)
	parent, cancel := context.WithDeadline(context.WithValue(context.Background(), key{}, "v"), until)
	defer cancel()
	c := begin(parent)
	if c.Value(key{}) != "v" {
		t.Error("the value is missing")
	}
	if at, ok := c.Deadline(); !ok || !at.Equal(until) {
		t.Errorf("got deadline %v, %v", at, ok)
	}
}

func TestParentsEndIsSeenByErrAndCauseAlone(t *testing.T) {
	parent, cancel := context.WithCancelCause(context.Background())
	c := begin(parent)
	cancel(errEnd)
	if c.Err() != context.Canceled || c.Cause() != errEnd || ending.Cause(c) != errEnd {
		t.Errorf("got %v, cause %v", c.Err(), c.Cause())
	}
	if done(c) {
		t.Error("Done before End")
	}
	late := errors.New("late")
	c.End(late)
	if !done(c) || c.Cause() != late {
		t.Errorf("done %v, cause %v", done(c), c.Cause())
	}
}

func TestParentsErrIsKept(t *testing.T) {
	parent, cancel := context.WithDeadline(context.Background(), time.Unix(1, 0))
	defer cancel()
	if c := begin(parent); c.Err() != context.DeadlineExceeded || c.Cause() != context.DeadlineExceeded {
		t.Errorf("got %v, cause %v", c.Err(), c.Cause())
	}
}

func TestCausePassesThroughContextsOfContexts(t *testing.T) {
	outer := begin(context.Background())
	inner := begin(outer)
	outer.End(errEnd)
	if inner.Err() != context.Canceled || ending.Cause(inner) != errEnd {
		t.Errorf("got %v, cause %v", inner.Err(), ending.Cause(inner))
	}
}

// after calls ending.AfterFunc and context.AfterFunc alike.
func after(t *testing.T, f func(t *testing.T, after func(context.Context, func()) func() bool)) {
	for name, after := range map[string]func(context.Context, func()) func() bool{
		"ending": ending.AfterFunc, "context": context.AfterFunc,
	} {
		t.Run(name, func(t *testing.T) { synctest.Test(t, func(t *testing.T) { f(t, after) }) })
	}
}

func TestAfterFuncIsCalledOnceAtTheEnd(t *testing.T) {
	after(t, func(t *testing.T, after func(context.Context, func()) func() bool) {
		w := new(wrapped)
		w.Begin(context.Background())
		calls := [3]int{}
		var stops [3]func() bool
		for i := range calls {
			stops[i] = after(w, func() { calls[i]++ })
		}
		synctest.Wait()
		if calls != [3]int{} {
			t.Fatalf("called before the end: %v", calls)
		}
		if !stops[1]() || stops[1]() {
			t.Error("the first stop stops, the second does not")
		}
		w.End(errEnd)
		w.End(errEnd)
		synctest.Wait()
		if calls != [3]int{1, 0, 1} {
			t.Errorf("got calls %v", calls)
		}
		for i, stop := range stops {
			if stop() {
				t.Errorf("%d was stopped after the end", i)
			}
		}
		stop := after(w, func() { calls[1]++ })
		synctest.Wait()
		if calls[1] != 1 || stop() {
			t.Error("after the end it is called at once")
		}
	})
}

// What is called may ask the context whatever it likes.
func TestAfterFuncMayUseItsContext(t *testing.T) {
	after(t, func(t *testing.T, after func(context.Context, func()) func() bool) {
		c := begin(context.Background())
		var stop func() bool
		var seen error
		stop = after(c, func() {
			stop()
			c.End(errors.New("again"))
			after(c, func() {})
			seen = c.Cause()
		})
		c.End(errEnd)
		synctest.Wait()
		if seen != errEnd {
			t.Errorf("got cause %v", seen)
		}
	})
}

func TestChildrenOfPackageContextEndWithIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := new(wrapped)
		c.Begin(context.WithValue(t.Context(), key{}, "v"))
		cancelled, cancel := context.WithCancel(c)
		defer cancel()
		timed, cancelTimed := context.WithTimeout(c, time.Hour)
		defer cancelTimed()
		grandchild, cancelGrandchild := context.WithCancelCause(context.WithValue(cancelled, key{}, "w"))
		defer cancelGrandchild(nil)
		children := map[string]context.Context{"cancelled": cancelled, "timed": timed, "grandchild": grandchild}
		synctest.Wait()
		for name, child := range children {
			if child.Err() != nil || done(child) {
				t.Errorf("%s has ended before its parent", name)
			}
		}
		c.End(errEnd)
		synctest.Wait()
		for name, child := range children {
			if child.Err() != context.Canceled || !done(child) || child.Value(key{}) == nil {
				t.Errorf("%s: %v, done %v, value %v", name, child.Err(), done(child), child.Value(key{}))
			}
		}
		late, cancelLate := context.WithCancel(c)
		defer cancelLate()
		if !done(late) || late.Err() != context.Canceled {
			t.Error("a child of one that has ended has not")
		}
	})
}

// Children that end first let go of it.
func TestChildrenThatEndAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := begin(context.Background())
		for range 1000 {
			child, cancel := context.WithTimeout(c, time.Second)
			cancel()
			if c.Err() != nil || child.Err() != context.Canceled {
				t.Fatal("the child's end is not the parent's")
			}
		}
		child, cancel := context.WithTimeout(c, time.Second)
		defer cancel()
		time.Sleep(2 * time.Second)
		if child.Err() != context.DeadlineExceeded || c.Err() != nil {
			t.Errorf("child %v, parent %v", child.Err(), c.Err())
		}
	})
}

func TestOthersAreLeftToPackageContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		called, stopped := false, false
		ending.AfterFunc(ctx, func() { called = true })
		stop := ending.AfterFunc(ctx, func() { stopped = true })
		if !stop() {
			t.Error("it was not stopped")
		}
		cancel(errEnd)
		synctest.Wait()
		if !called || stopped || ending.Cause(ctx) != errEnd {
			t.Errorf("called %v, stopped %v, cause %v", called, stopped, ending.Cause(ctx))
		}
	})
}

// Everything at once, for the race detector: whoever is called is called once, and
// not after a stop that has succeeded.
func TestConcurrentUse(t *testing.T) {
	for range 200 {
		c := begin(context.Background())
		var all sync.WaitGroup
		var mu sync.Mutex
		calls, owed := 0, 0
		for i := range 8 {
			all.Go(func() {
				called := make(chan struct{})
				stop := ending.AfterFunc(c, func() {
					mu.Lock()
					calls++
					mu.Unlock()
					close(called)
				})
				if i%2 == 0 && stop() {
					return
				}
				<-called
				mu.Lock()
				owed++
				mu.Unlock()
			})
			all.Go(func() { <-c.Done(); _, _ = c.Err(), c.Cause() })
		}
		all.Go(func() { c.End(errEnd) })
		all.Wait()
		if calls != owed {
			t.Fatalf("%d calls, %d owed", calls, owed)
		}
	}
}
