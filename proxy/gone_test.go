package proxy

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router"
)

// leaving sends a request whose client leaves when it is told to.
func (f *fleet) leaving(body string) (leave func()) {
	ctx, cancel := context.WithCancel(f.t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		if resp, err := f.client.Do(req); err == nil {
			resp.Body.Close()
			f.t.Errorf("was answered: %d", resp.StatusCode)
		}
	}()
	return func() {
		cancel()
		<-gone
	}
}

func TestAClientThatLeavesWhileItsRequestWaitsToBeTriedAgain(t *testing.T) {
	full := always(answered("503 Service Unavailable", "full"))
	fails := always(answered("500 Internal Server Error", `{"error":{"message":"it hurts"}}`))
	for name, c := range map[string]struct {
		script func(*session)
		change func(*Options)
		seen   int // requests on each of both replicas
	}{
		"for the budget":      {once(), func(o *Options) { o.RetryShare, o.RetryPerSecond = 0.001, 0 }, 0},
		"for a place":         {full, nil, 1},
		"for what checks say": {fails, nil, 1},
	} {
		t.Run(name, func(t *testing.T) {
			b := &replica{script: c.script}
			f := serveHolding(t, holdsForAMinute, c.change, &replica{script: c.script}, b)
			leave := f.leaving(askWhole)
			eventually(t, "it waits", func() bool { return f.router.WaitingRequests() == 1 && len(b.requests()) == c.seen })
			leave()
			f.counts(`warmroute_aborts_total{phase="held"} 1`)
			f.settled()
			if e := f.exposition(); strings.Contains(e, `code="5`) || !strings.Contains(e, `code="499"`) {
				t.Error("a client that left is counted as the replica's error")
			}
			if len(b.requests()) != c.seen {
				t.Errorf("the second replica saw %d requests, want %d", len(b.requests()), c.seen)
			}
		})
	}
}

// What waits to be tried again counts among those that are held.
func TestRetriesThatWaitAreBoundedAsTheHoldQueueIs(t *testing.T) {
	for name, hold := range map[string]router.QueueSettings{
		"number": {Requests: 2, Timeout: time.Minute},
		"bytes":  {Requests: 100, Bytes: 3 * int64(len(askWhole)+len(question)), Timeout: time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			const requests = 8
			f := serveHolding(t, hold, func(o *Options) { o.RetryShare, o.RetryPerSecond = 0.001, 0 },
				&replica{script: once()}, &replica{script: once()})
			all := make(chan int, requests)
			var leave []func()
			for i := range requests {
				ctx, cancel := context.WithCancel(t.Context())
				leave = append(leave, cancel)
				req, _ := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(asked(fmt.Sprint(i), false)))
				go func() {
					resp, err := f.client.Do(req)
					if err != nil {
						all <- 499
						return
					}
					resp.Body.Close()
					all <- resp.StatusCode
				}()
			}
			eventually(t, "those that may not wait are answered", func() bool { return len(all)+f.router.WaitingRequests() == requests && len(all) > 0 })
			held := f.router.WaitingRequests()
			if held == 0 || held > 4 {
				t.Errorf("%d wait", held)
			}
			f.counts(fmt.Sprint("warmroute_hold_requests{class=\"normal\"} ", held))
			for range requests - held {
				if code := <-all; code != http.StatusTooManyRequests {
					t.Errorf("got %d, want a 429", code)
				}
			}
			for _, cancel := range leave {
				cancel()
			}
			for range held {
				<-all
			}
			f.waits(0)
		})
	}
}

func TestFailedAttemptsAreWarnedOfOnceASecond(t *testing.T) {
	var w warnings
	a, b := &backends.Backend{Name: "a"}, &backends.Backend{Name: "b", Slot: 1}
	now := time.Now()
	for _, c := range []struct {
		of    *backends.Backend
		after time.Duration
		due   bool
		left  int
	}{
		{a, 0, true, 0}, {a, time.Millisecond, false, 0}, {a, time.Millisecond, false, 0}, {b, 0, true, 0},
		{a, warningGap, true, 2}, {a, warningGap, true, 0},
		{&backends.Backend{Name: "next in the slot of a"}, 0, true, 0},
	} {
		now = now.Add(c.after)
		if due, left := w.due(c.of, now); due != c.due || left != c.left {
			t.Errorf("%s after %v: %v, %d left out; want %v, %d", c.of.Name, c.after, due, left, c.due, c.left)
		}
	}
}

// The last allowed attempt has nothing to wait for.
func TestTheLastAttemptAsksForNoVerdict(t *testing.T) {
	dies := func(s *session) { s.request(); s.reset() }
	suspected := make(chan string, 100)
	f := serveHolding(t, holdsForAMinute, func(o *Options) {
		o.Attempts = 2
		o.Suspect = suspects(suspected)
	}, &replica{script: dies}, &replica{script: dies}, &replica{script: dies})
	if resp, _ := f.post("/v1/chat/completions", askWhole); resp.StatusCode != http.StatusBadGateway {
		t.Errorf("got %d", resp.StatusCode)
	}
	if n := len(suspected); n != 2 {
		t.Errorf("%d suspicions, want one for each attempt", n)
	}
}

// An only replica that is stopped in good order, and comes back: in between its
// requests wait.
func TestRequestsOutlastTheOrderlyRestartOfTheOnlyReplica(t *testing.T) {
	good := always(answered("200 OK", whole))
	for name, says := range map[string]string{
		"abort":   answered("200 OK", wholeAbort),
		"drains":  answered("500 Internal Server Error", `{"error":{"message":"cannot schedule new futures after shutdown","code":500}}`),
		"dies":    answered("500 Internal Server Error", `{"error":{"message":"EngineCore encountered an issue","code":500}}`),
		"refuses": answered("503 Service Unavailable", `{"error":{"message":"shutting down","code":503}}`),
	} {
		t.Run(name, func(t *testing.T) {
			a := newMortal(func(_ *mortal, s *session) { always(says)(s) })
			f := serveChecked(t, &a.replica)
			var all []<-chan answer
			for i := range 5 {
				all = append(all, f.background(asked(fmt.Sprint(i), false)))
			}
			f.waits(len(all)) // none is answered while its checks pass
			a.die()
			eventually(t, "it is down", func() bool {
				f.proxy.suspect(f.backends[0])
				return f.backends[0].State() == backends.Down
			})
			time.Sleep(retryPatience) // longer than words are kept back for
			f.waits(len(all))
			f.revive(t, 0, good)
			for i, done := range all {
				if got := <-done; got.body != whole {
					t.Errorf("request %d got %+v", i, got)
				}
			}
			if name == "drains" && len(a.requests()) > len(all)+int(failsafe/time.Second) {
				t.Errorf("a replica that drains was asked %d times", len(a.requests()))
			}
		})
	}
}

// A replica that says the like and stays is no replica that stops.
func TestAnAbortOfAReplicaThatStaysIsAnswered(t *testing.T) {
	f := serveChecked(t, &replica{script: always(answered("200 OK", wholeAbort))})
	begun := time.Now()
	if resp, _ := f.post("/v1/chat/completions", askWhole); resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("got %d", resp.StatusCode)
	}
	if waited := time.Since(begun); waited > failsafe {
		t.Errorf("answered after %v", waited)
	}
}
