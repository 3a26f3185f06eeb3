package proxy

import (
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router"
)

// holdsForAMinute is a hold queue that nobody is turned away from.
var holdsForAMinute = router.QueueSettings{Requests: 1000, Timeout: time.Minute}

// mortal is a replica that ends, listener and all, when it is told to.
type mortal struct{ replica }

func newMortal(script func(m *mortal, s *session)) *mortal {
	m := &mortal{}
	m.script = func(s *session) { script(m, s) }
	return m
}

// die is kill -9.
func (m *mortal) die() {
	m.listener.Close()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.conns {
		c.(*net.TCPConn).SetLinger(0)
		c.Close()
	}
}

// checked makes Suspect a check that finds dead replicas.
func checked(f **fleet) func(*Options) {
	return func(o *Options) {
		o.Suspect = func(b *backends.Backend) {
			c, err := net.Dial("tcp", b.URL.Host)
			if err != nil {
				b.SetState(backends.Down)
			} else {
				c.Close()
			}
			(*f).router.BackendChanged(b)
		}
	}
}

func serveChecked(t *testing.T, replicas ...*replica) (f *fleet) {
	f = serveHolding(t, holdsForAMinute, checked(&f), replicas...)
	return f
}

func dies(m *mortal, s *session) {
	if _, ok := s.request(); ok {
		m.die()
	}
}

// engineDies is what vLLM does when its engine is killed: it says so, and exits.
func engineDies(m *mortal, s *session) {
	if r, ok := s.request(); ok {
		if strings.Contains(r.body, `"stream":true`) {
			s.say(streamed(dead, doneLine))
		} else {
			s.say(answered("500 Internal Server Error", `{"error":{"message":"EngineCore encountered an issue","code":500}}`))
		}
		time.Sleep(20 * time.Millisecond) // the answer is on its way before the process ends
		m.die()
	}
}

func TestARequestThatKillsReplicasKillsTwoAtMost(t *testing.T) {
	for name, script := range map[string]func(*mortal, *session){"reset": dies, "engine": engineDies} {
		for _, body := range []string{askWhole, askStream} {
			t.Run(fmt.Sprint(name, " ", body == askStream), func(t *testing.T) {
				a, b := newMortal(script), newMortal(script)
				c := &replica{script: always(answered("200 OK", whole))}
				f := serveChecked(t, &a.replica, &b.replica, c)
				resp, _ := f.post("/v1/chat/completions", body, "X-Request-Id", "killer-7")
				if resp.StatusCode < 500 || len(c.requests()) != 0 {
					t.Errorf("got %d, and the third replica saw %d requests", resp.StatusCode, len(c.requests()))
				}
				if len(a.requests()) != 1 || len(b.requests()) != 1 {
					t.Errorf("the others saw %d and %d", len(a.requests()), len(b.requests()))
				}
				if log := f.log.String(); !strings.Contains(log, "level=WARN msg=\"request was on two replicas that failed and died") || !strings.Contains(log, "request_id=killer-7") {
					t.Errorf("the log does not say so: %s", log)
				}
			})
		}
	}
}

// What looks like a killer and is none: the request is answered.
func TestRequestsOutlastRestartsOfSeveralReplicas(t *testing.T) {
	good := always(answered("200 OK", whole))
	t.Run("two fail and stay alive", func(t *testing.T) {
		f := serveChecked(t, &replica{script: once()}, &replica{script: once()}, &replica{script: good})
		if _, got := f.post("/v1/chat/completions", askWhole); got != whole {
			t.Errorf("got %q", got)
		}
	})
	t.Run("the second one alone dies", func(t *testing.T) {
		b := newMortal(dies)
		f := serveChecked(t, &replica{script: once()}, &b.replica, &replica{script: good})
		if _, got := f.post("/v1/chat/completions", askWhole); got != whole {
			t.Errorf("got %q", got)
		}
	})
	t.Run("in good order", func(t *testing.T) {
		stops := func(m *mortal, s *session) {
			if _, ok := s.request(); ok {
				s.say(answered("500 Internal Server Error", `{"error":{"message":"cannot schedule new futures after shutdown"}}`))
				time.Sleep(20 * time.Millisecond)
				m.die()
			}
		}
		a, b := newMortal(stops), newMortal(stops)
		f := serveChecked(t, &a.replica, &b.replica, &replica{script: good})
		if _, got := f.post("/v1/chat/completions", askWhole); got != whole {
			t.Errorf("got %q", got)
		}
	})
	t.Run("all at once", func(t *testing.T) {
		a, b := newMortal(dies), newMortal(dies)
		c := newMortal(func(m *mortal, s *session) {})
		f := serveChecked(t, &a.replica, &b.replica, &c.replica)
		c.die()
		done := f.background(askWhole)
		f.waits(1)
		time.Sleep(2 * verdict) // or one of them looks as well as it would be if the request had killed the others
		f.revive(t, 2, good)
		if got := <-done; got.body != whole {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("as many as there are attempts", func(t *testing.T) {
		a, b := newMortal(dies), newMortal(dies)
		var f *fleet
		f = serveHolding(t, holdsForAMinute, func(o *Options) { checked(&f)(o); o.Attempts = 2 }, &a.replica, &b.replica)
		done := f.background(askWhole)
		f.waits(1)
		time.Sleep(2 * verdict)
		f.revive(t, 1, good)
		if got := <-done; got.body != whole {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("the only one", func(t *testing.T) {
		a := newMortal(dies)
		f := serveChecked(t, &a.replica)
		done := f.background(askWhole)
		f.waits(1)
		f.revive(t, 0, good)
		if got := <-done; got.body != whole {
			t.Errorf("got %+v", got)
		}
	})
}

// revive starts a replica where a dead one was.
func (f *fleet) revive(t *testing.T, slot int, script func(*session)) {
	back := &replica{script: script}
	back.startAt(t, f.backends[slot].URL.Host)
	t.Cleanup(back.stop)
	f.backends[slot].SetState(backends.Ready)
	f.router.BackendChanged(f.backends[slot])
}

func TestTheRetryBudgetHoldsWhenTheWholeFleetFails(t *testing.T) {
	for _, answer := range []string{
		answered("503 Service Unavailable", `{"error":{"message":"no","code":503}}`),
		answered("500 Internal Server Error", `{"error":{"message":"no","code":500}}`),
	} {
		t.Run(answer[9:12], func(t *testing.T) {
			const requests = 300
			replicas := []*replica{{script: always(answer)}, {script: always(answer)}, {script: always(answer)}}
			f := serveHolding(t, holdsForAMinute, nil, replicas...)
			f.client.Transport.(*http.Transport).MaxIdleConnsPerHost = requests
			begun := time.Now()
			var all sync.WaitGroup
			for i := range requests {
				all.Go(func() {
					if resp, _, err := f.try("/v1/chat/completions", asked(fmt.Sprint(i), false)); err != nil || resp.StatusCode < 500 {
						t.Errorf("request %d: %v, %v", i, resp, err)
					}
				})
			}
			all.Wait()
			saw := 0
			for _, r := range replicas {
				saw += len(r.requests())
			}
			// 10 a second, and those of the second that is not over.
			most := requests + requests/5 + 10*(2+int(time.Since(begun)/time.Second))
			if saw < requests || saw > most {
				t.Errorf("the replicas saw %d requests, want %d to %d", saw, requests, most)
			}
			f.settled()
			if strings.Contains(f.exposition(), `warmroute_retry_waits_total{end="given_up"} 0`) {
				t.Error("nobody waited for the budget in vain")
			}
		})
	}
}

func TestABudgetOfNothingAllowsNothing(t *testing.T) {
	for name, c := range map[string]struct {
		hold   router.QueueSettings
		script func(*session)
		status int
	}{
		"nothing is held":  {router.QueueSettings{}, once(), http.StatusBadGateway},
		"held":             {holdsForAMinute, once(), http.StatusBadGateway},
		"held, with a 503": {holdsForAMinute, always(answered("503 Service Unavailable", "full")), http.StatusServiceUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			other := &replica{script: always(answered("200 OK", whole))}
			f := serveHolding(t, c.hold, func(o *Options) { o.RetryShare, o.RetryPerSecond = 0, 0 }, &replica{script: c.script}, other)
			begun := time.Now()
			if resp, _ := f.post("/v1/chat/completions", askWhole); resp.StatusCode != c.status || len(other.requests()) != 0 {
				t.Errorf("got %d, and the other replica saw %d requests", resp.StatusCode, len(other.requests()))
			}
			if waited := time.Since(begun); waited > failsafe {
				t.Errorf("answered after %v", waited)
			}
			f.counts(`warmroute_retry_waits_total{end="given_up"} 0`)
		})
	}
}

func TestARefusedConnectionTakesNothingOffTheBudget(t *testing.T) {
	gone := &replica{}
	f := serve(t, func(o *Options) { o.RetryShare, o.RetryPerSecond = 0, 0 }, gone, &replica{script: always(answered("200 OK", whole))})
	gone.listener.Close()
	if resp, got := f.post("/v1/chat/completions", askWhole); got != whole {
		t.Errorf("got %d %q", resp.StatusCode, got)
	}
}

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
			if l.places.Add(-1) < 0 {
				l.places.Add(1)
				s.say(answered("503 Service Unavailable", `{"error":{"message":"The server is overloaded","code":503}}`))
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

func TestARequestThatAFullQueueRefusesGetsThePlaceThatFallsFree(t *testing.T) {
	for _, n := range []int{1, 2} {
		t.Run(fmt.Sprint(n, " replicas"), func(t *testing.T) {
			var full []*limited
			var replicas []*replica
			for range n {
				l := newLimited(1)
				full, replicas = append(full, l), append(replicas, &l.replica)
			}
			f := serveHolding(t, holdsForAMinute, nil, replicas...)
			var all []<-chan answer
			for i := range 2 * n {
				all = append(all, f.background(asked(fmt.Sprint(i), false)))
				if i < n {
					eventually(t, "it has its place", func() bool { return f.inFlight() == i+1 })
				}
			}
			f.waits(n) // the others, which were refused everywhere
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

func TestAFleetThatAnswers503IsAskedOnceMore(t *testing.T) {
	r := &replica{script: always(answered("503 Service Unavailable", `{"error":{"message":"queue full"}}`))}
	f := serveHolding(t, holdsForAMinute, nil, r)
	resp, got := f.post("/v1/chat/completions", askWhole)
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") != "1" || !strings.Contains(got, "queue full") {
		t.Errorf("got %d, Retry-After %q, %s", resp.StatusCode, resp.Header.Get("Retry-After"), got)
	}
	if n := len(r.requests()); n != 2 {
		t.Errorf("the replica saw %d requests, want 2", n)
	}
}

// An engine that is dead or stops shows by its checks. What it said then was not
// about the request.
func TestA503OfAReplicaThatGoesDownIsHeldUntilItIsBack(t *testing.T) {
	r := newMortal(func(_ *mortal, s *session) { always(answered("503 Service Unavailable", "dead"))(s) })
	var once sync.Once
	f := serveHolding(t, holdsForAMinute, func(o *Options) {
		o.Suspect = func(b *backends.Backend) { once.Do(func() { b.SetState(backends.Down) }) }
	}, &r.replica)
	done := f.background(askWhole)
	eventually(t, "it was refused", func() bool { return len(r.requests()) == 1 })
	f.waits(1)
	r.die()
	f.revive(t, 0, always(answered("200 OK", whole)))
	if a := <-done; a.body != whole {
		t.Errorf("got %+v", a)
	}
}
