package proxy

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"warmroute/proxy/apikey"
	"warmroute/router"
)

// heldTooLong requires the answer to a request that had to wait for too long.
func heldTooLong(t *testing.T, name string, a answer) {
	t.Helper()
	if a.status != http.StatusTooManyRequests || !strings.Contains(a.body, "held_too_long") || !strings.Contains(a.body, "queue_time") {
		t.Errorf("%s: got %d %s %v", name, a.status, a.body, a.err)
	}
}

// TestKeyQueueTime holds that a key's queue_time takes the place of
// routing.hold.time, be it longer or shorter.
func TestKeyQueueTime(t *testing.T) {
	users := withKeys(keyOf("plain", nil),
		keyOf("patient", func(k *apikey.Key) { k.QueueTime = time.Hour }),
		keyOf("hasty", func(k *apikey.Key) { k.QueueTime = 50 * time.Millisecond }))
	holding := func(d time.Duration) router.QueueSettings {
		hold := oneAtATime(10)
		hold.Timeout = d
		return hold
	}
	t.Run("longer", func(t *testing.T) {
		g := newGated()
		f := serveHolding(t, holding(50*time.Millisecond), users, &g.replica)
		first := f.background(asked("first", true), bearer("plain")...)
		eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
		patient := f.background(asked("patient", false), bearer("patient")...)
		f.waits(1)
		// It comes later, so the other one has waited for longer when this one is refused.
		heldTooLong(t, "without a queue time", <-f.background(asked("plain", false), bearer("plain")...))
		f.waits(1)
		g.next <- struct{}{}
		g.next <- struct{}{}
		for _, a := range []answer{<-first, <-patient} {
			if a.status != http.StatusOK {
				t.Errorf("got %+v", a)
			}
		}
	})
	t.Run("shorter", func(t *testing.T) {
		g := newGated()
		f := serveHolding(t, holding(time.Hour), users, &g.replica)
		first := f.background(asked("first", true), bearer("plain")...)
		eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
		plain := f.background(asked("plain", false), bearer("plain")...)
		f.waits(1)
		heldTooLong(t, "with one", <-f.background(asked("hasty", false), bearer("hasty")...))
		f.waits(1)
		g.next <- struct{}{}
		g.next <- struct{}{}
		for _, a := range []answer{<-first, <-plain} {
			if a.status != http.StatusOK {
				t.Errorf("got %+v", a)
			}
		}
	})
	t.Run("for a place on a full replica", func(t *testing.T) {
		full := &replica{script: always(answered("503 Service Unavailable", `{"error":{"message":"full"}}`))}
		f := serveHolding(t, holding(time.Hour), users, full)
		f.backends[0].InFlight.Add(1) // a request that never ends, so that no place falls free
		defer f.backends[0].InFlight.Add(-1)
		if a := <-f.background(askWhole, bearer("hasty")...); a.status != http.StatusServiceUnavailable {
			t.Errorf("got %+v", a)
		}
	})
	t.Run("while connections are refused", func(t *testing.T) {
		g := newGated()
		f := serveHolding(t, holding(time.Hour), users, &g.replica)
		g.listener.Close()
		if a := <-f.background(askWhole, bearer("hasty")...); a.status != http.StatusServiceUnavailable {
			t.Errorf("got %+v", a)
		}
	})
}

// TestQueueBoundsPerPriorityClass holds that requests of one priority class that
// fill its part of the queue leave the others' to these.
func TestQueueBoundsPerPriorityClass(t *testing.T) {
	classes := []struct {
		name string
		may  int
	}{{"batch", 4}, {"normal", 2}, {"urgent", 2}}
	users := withKeys(keyOf("normal", nil),
		keyOf("urgent", func(k *apikey.Key) { k.Priority = -1 }),
		keyOf("batch", func(k *apikey.Key) { k.Priority = 10 }))
	f := func(name string, hold router.QueueSettings, text string) {
		t.Run(name, func(t *testing.T) {
			hold.Timeout, hold.StepTokens = time.Minute, 1
			g := newGated()
			f := serveHolding(t, hold, users, &g.replica)
			all := []<-chan answer{f.background(asked("first", true), bearer("normal")...)}
			eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
			for _, class := range classes {
				for i := range class.may {
					all = append(all, f.background(asked(fmt.Sprint(class.name, i, text), false), bearer(class.name)...))
					f.waits(len(all) - 1)
				}
				resp, body := f.post("/v1/chat/completions", asked(class.name+text, false), bearer(class.name)...)
				if resp.StatusCode != http.StatusTooManyRequests || !strings.Contains(body, "hold_queue_full") {
					t.Errorf("one more %s request than may wait: got %d %s", class.name, resp.StatusCode, body)
				}
			}
			for _, class := range classes {
				f.counts(fmt.Sprintf("warmroute_hold_requests{class=%q} %d", class.name, class.may))
			}
			for range all {
				g.next <- struct{}{}
			}
			for _, done := range all {
				if a := <-done; a.status != http.StatusOK {
					t.Errorf("got %+v", a)
				}
			}
		})
	}
	f("requests", router.QueueSettings{Requests: 2, BatchRequests: 4}, "")
	long := strings.Repeat("x", 20_000)
	// Of each request 32 KiB of body and 20 KB of prompt are counted.
	f("bytes", router.QueueSettings{Requests: 100, BatchRequests: 100, Bytes: 120_000, BatchBytes: 220_000}, long)
}

// TestBatchLeavesRoomForInteractiveRequests holds that batch requests leave a tenth
// of the limits on all requests together to others.
func TestBatchLeavesRoomForInteractiveRequests(t *testing.T) {
	const inBatch = 18
	f := func(name string, limits func(*Options), code string) {
		t.Run(name, func(t *testing.T) {
			g := newGated()
			hold := router.QueueSettings{Requests: 10, BatchRequests: 100, Timeout: time.Minute, StepTokens: 1}
			f := serveHolding(t, hold, limits, &g.replica)
			var all []<-chan answer
			for i := range inBatch {
				all = append(all, f.background(asked(fmt.Sprint(i), true), priorityHeader, "5"))
				eventually(t, "it is sent or waits", func() bool { return len(g.requests())+f.router.WaitingRequests() == i+1 })
			}
			resp, body := f.post("/v1/chat/completions", asked("batch", true), priorityHeader, "5")
			if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" || !strings.Contains(body, code) {
				t.Errorf("one batch request more: got %d %s", resp.StatusCode, body)
			}
			for i := range 2 {
				all = append(all, f.background(asked(fmt.Sprint("interactive", i), true)))
				eventually(t, "an interactive request is sent or waits", func() bool { return len(g.requests())+f.router.WaitingRequests() == inBatch+i+1 })
			}
			for range all {
				g.next <- struct{}{}
			}
			for _, done := range all {
				if a := <-done; a.status != http.StatusOK {
					t.Errorf("got %+v", a)
				}
			}
		})
	}
	f("in flight", func(o *Options) { o.InFlight = 20 }, "too_many_requests")
	f("bodies", func(o *Options) { o.BodyBytesTotal = 20 << smallestBuffer }, "bodies_too_large")
}

// TestBatchWaitsForHalfOfItsTimeBesideInteractiveRequests holds that a batch request
// waits beside an interactive one on the only replica, and is sent after half of the
// time for which it may wait.
func TestBatchWaitsForHalfOfItsTimeBesideInteractiveRequests(t *testing.T) {
	started, end := make(chan struct{}, 10), make(chan struct{})
	r := &replica{script: func(s *session) {
		for {
			if _, ok := s.request(); !ok {
				return
			}
			started <- struct{}{}
			select {
			case <-end:
			case <-s.replica.over:
			}
			s.say(answered("200 OK", whole))
		}
	}}
	users := withKeys(keyOf("normal", func(k *apikey.Key) { k.RouteHeaders = true }),
		keyOf("batch", func(k *apikey.Key) { k.Priority, k.QueueTime, k.RouteHeaders = 10, time.Second, true }))
	// Batch requests may hardly take any time: none but the first is sent otherwise.
	hold := router.QueueSettings{Requests: 10, BatchRequests: 10, Timeout: time.Hour, BatchSlowdown: 1e-6}
	f := serveHolding(t, hold, users, r)
	var all []<-chan answer
	for _, key := range []string{"normal", "batch", "batch", "normal"} {
		all = append(all, f.background(asked(fmt.Sprint(len(all)), false), bearer(key)...))
		if len(all) != 3 {
			<-started
		}
	}
	<-started
	close(end)
	for i, done := range all {
		a := <-done
		ms, _ := strconv.Atoi(a.header.Get("X-Warmroute-Held-Ms"))
		if a.status != http.StatusOK || i == 2 && ms < 500 {
			t.Errorf("request %d was held for %d ms: %+v", i, ms, a)
		}
	}
}
