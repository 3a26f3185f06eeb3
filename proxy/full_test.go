package proxy

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router"
	"warmroute/router/responseindex"
)

const fullBody = `{"error":{"message":"The server is overloaded","type":"ServiceUnavailableError","param":null,"code":503}}`

// limited answers when it may, has a place for so many, and refuses the others.
type limited struct {
	replica
	places atomic.Int64
	next   chan struct{}
	taken  atomic.Int64 // places, in all
}

func newLimited(places int64) *limited {
	l := &limited{next: make(chan struct{})}
	l.places.Store(places)
	l.script = func(s *session) {
		for {
			if _, ok := s.request(); !ok {
				return
			}
			if !l.takePlace() {
				s.say(answered("503 Service Unavailable", fullBody))
				continue
			}
			l.taken.Add(1)
			select {
			case <-l.next:
			case <-l.over:
				return
			}
			l.places.Add(1)
			s.say(answered("200 OK", whole))
		}
	}
	return l
}

// takePlace never counts a place that it does not take, since another request may be about to take the last one.
func (l *limited) takePlace() bool {
	for {
		n := l.places.Load()
		if n <= 0 {
			return false
		}
		if l.places.CompareAndSwap(n, n-1) {
			return true
		}
	}
}

func TestRetryWhenSlotFrees(t *testing.T) {
	for _, n := range []int{1, 2} {
		t.Run(fmt.Sprint(n, " replicas"), func(t *testing.T) {
			var full []*limited
			var replicas []*replica
			for range n {
				l := newLimited(1)
				full, replicas = append(full, l), append(replicas, &l.replica)
			}
			f := serveWithQueue(t, queueForAMinute, nil, replicas...)
			var all []<-chan answer
			for i := range 2 * n {
				all = append(all, f.background(asked(fmt.Sprint(i), false)))
				if i < n {
					eventually(t, "it has its place", func() bool { return f.inFlight() == i+1 })
				}
			}
			f.awaitQueued(n) // the others, which were refused everywhere
			taken := func() (sum int64) {
				for _, l := range full {
					sum += l.taken.Load()
				}
				return sum
			}
			for i, l := range full {
				l.next <- struct{}{}
				eventually(t, "a waiting request took the place", func() bool { return taken() == int64(n+i+1) && f.inFlight() == n })
			}
			for _, l := range full {
				close(l.next)
			}
			for i, done := range all {
				if a := <-done; a.body != whole {
					t.Errorf("request %d got %+v", i, a)
				}
			}
			for _, l := range full {
				if n := len(l.requests()); n > 2*len(full)+2 {
					t.Errorf("a replica saw %d requests", n)
				}
			}
		})
	}
}

// TestFullReplicas sends many times more requests than replicas take, at once and while others wait: all are served, and
// next to none is sent to be refused.
func TestFullReplicas(t *testing.T) {
	const slots, atOnce, later = 4, 40, 40
	for _, n := range []int{1, 2} {
		t.Run(fmt.Sprint(n, " replicas"), func(t *testing.T) {
			t.Parallel()
			var full []*limited
			var replicas []*replica
			for range n {
				l := newLimited(slots)
				full, replicas = append(full, l), append(replicas, &l.replica)
			}
			f := serveWithQueue(t, queueForAMinute, nil, replicas...)
			var all []<-chan answer
			send := func() { all = append(all, f.background(asked(fmt.Sprint(len(all)), len(all)%2 == 0))) }
			taken := func() (sum int) {
				for _, l := range full {
					sum += int(l.taken.Load())
				}
				return sum
			}
			for range slots*n + 1 { // the last one finds the limits
				send()
				eventually(t, "it is sent, or waits", func() bool { return taken()+f.router.CountWaiting() == len(all) })
			}
			for range atOnce {
				send()
			}
			f.awaitQueued(len(all) - slots*n)
			for range later {
				send()
				full[len(all)%n].next <- struct{}{}
			}
			for _, l := range full {
				close(l.next)
			}
			for i, done := range all {
				if a := <-done; a.status != http.StatusOK {
					t.Errorf("request %d got %d %s", i, a.status, a.body)
				}
			}
			attempts := 0
			for _, l := range full {
				attempts += len(l.requests())
			}
			if most := len(all) + len(all)/10; attempts > most {
				t.Errorf("%d attempts for %d requests, want at most %d", attempts, len(all), most)
			}
		})
	}
}

// TestReplicaAlwaysFull expects that a replica which refuses everything, with nothing in flight there, is asked now and
// then only, and that clients get its error when they may not wait any more.
func TestReplicaAlwaysFull(t *testing.T) {
	const clients = 20
	for name, c := range map[string]struct {
		hold     router.QueueSettings
		attempts int // at most
	}{
		"queue":    {router.QueueSettings{Requests: 1000, NoneReadyTimeout: time.Minute, BusyTimeout: 1500 * time.Millisecond}, clients + 5},
		"no queue": {router.QueueSettings{}, clients},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := &replica{script: always(answered("503 Service Unavailable", fullBody))}
			f := serveWithQueue(t, c.hold, nil, r)
			var all []<-chan answer
			for i := range clients {
				all = append(all, f.background(asked(fmt.Sprint(i), i%2 == 0)))
			}
			refused := 0
			for i, done := range all {
				a := <-done
				if a.body == fullBody && a.status == http.StatusServiceUnavailable {
					refused++
				}
				if a.status != http.StatusServiceUnavailable && a.status != http.StatusTooManyRequests || a.header.Get("Retry-After") == "" {
					t.Errorf("request %d got %d, Retry-After %q, %s", i, a.status, a.header.Get("Retry-After"), a.body)
				}
			}
			if n := len(r.requests()); refused == 0 || n < refused || n > c.attempts {
				t.Errorf("%d requests got the replica's error, and it saw %d", refused, n)
			}
		})
	}
}

// TestRefusalOfOneRequest expects that a request which a replica always refuses keeps no others from it.
func TestRefusalOfOneRequest(t *testing.T) {
	t.Parallel()
	r := &replica{script: func(s *session) {
		for {
			q, ok := s.request()
			switch {
			case !ok:
				return
			case strings.Contains(q.body, "cursed"):
				s.say(answered("503 Service Unavailable", fullBody))
			default:
				s.say(answered("200 OK", whole))
			}
		}
	}}
	f := serveWithQueue(t, queueForAMinute, nil, r)
	leave := f.leaving(asked("cursed", false))
	f.awaitQueued(1)
	for i := range 10 {
		if resp, got := f.post("/v1/chat/completions", asked(fmt.Sprint(i), false)); got != whole {
			t.Errorf("got %d %s", resp.StatusCode, got)
		}
	}
	leave()
	f.awaitIdle()
	cursed := 0
	for _, q := range r.requests() {
		if strings.Contains(q.body, "cursed") {
			cursed++
		}
	}
	if n := len(r.requests()); cursed > 6 || n-cursed != 10 {
		t.Errorf("%d requests, %d of them the one that is always refused", n, cursed)
	}
}

// TestRefusedPinnedRequest expects that a request for a stored response waits for the replica that holds it.
func TestRefusedPinnedRequest(t *testing.T) {
	t.Parallel()
	holder := newLimited(1)
	other := &replica{script: always(answered("200 OK", whole))}
	index := responseindex.New(responseindex.Settings{MaxEntries: 1, TTL: time.Hour}, time.Now, nil)
	f := serveWithQueue(t, queueForAMinute, func(o *Options) { o.Responses = index }, &holder.replica, other)
	index.Add("resp_1", responseindex.Entry{Backend: backends.NormalizeURL(f.backends[0].URL)})
	first := f.background(askWhole)
	eventually(t, "it is sent", func() bool { return holder.taken.Load() == 1 })
	waiting := make(chan string, 1)
	go func() {
		_, got, _ := f.try("/v1/responses", continuing("resp_1"))
		waiting <- got
	}()
	f.awaitQueued(1)
	close(holder.next)
	if a, got := <-first, <-waiting; a.body != whole || got != whole {
		t.Errorf("got %+v and %s", a, got)
	}
	if n := len(holder.requests()); n != 3 || len(other.requests()) != 0 {
		t.Errorf("the holder saw %d requests, want 3; the other replica %d", n, len(other.requests()))
	}
}

// TestRefusedWithoutEngine expects that a request which no engine works on does not wait for one.
func TestRefusedWithoutEngine(t *testing.T) {
	t.Parallel()
	full := &replica{script: always(answered("503 Service Unavailable", fullBody))}
	free := &replica{script: always(answered("200 OK", `{"count":3,"max_model_len":8,"tokens":[1,2,3]}`))}
	f := serveWithQueue(t, queueForAMinute, nil, full, free)
	for range 2 {
		if resp, got := f.post("/tokenize", `{"model":"m","prompt":"one two"}`); resp.StatusCode != http.StatusOK {
			t.Errorf("got %d %s", resp.StatusCode, got)
		}
	}
	f.backends[1].SetState(backends.Down)
	if resp, got := f.post("/tokenize", `{"model":"m","prompt":"one two"}`); resp.StatusCode != http.StatusServiceUnavailable ||
		got != fullBody {
		t.Errorf("got %d %s", resp.StatusCode, got)
	}
}
