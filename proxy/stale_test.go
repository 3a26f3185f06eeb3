package proxy

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/router"
)

// staleOnce closes the first connection on its second request, as a server does
// whose idle timer runs out at that moment, and answers everything else.
func staleOnce(s *session) {
	for n := 1; ; n++ {
		if _, ok := s.request(); !ok || n == 2 && s.n == 1 {
			return
		}
		s.say(answered("200 OK", whole))
	}
}

// staleTimeout has the backends reached by transports with that StaleTimeout: a busy
// machine may take longer than the default to notice the end of a connection.
func (f *fleet) staleTimeout(d time.Duration) {
	for _, b := range f.backends {
		tr := transport.New(transport.Options{URL: b.URL, IdleTimeout: 2 * time.Second, StaleTimeout: d})
		f.t.Cleanup(tr.CloseIdleConnections)
		b.SetTerms(backends.Terms{Transport: tr, Probe: tr})
	}
}

// warm leaves an idle connection to each replica.
func (f *fleet) warm() {
	f.t.Helper()
	for _, b := range f.backends {
		for _, other := range f.backends {
			other.SetState(backends.Down)
		}
		b.SetState(backends.Ready)
		if resp, _ := f.post("/v1/chat/completions", askWhole); resp.StatusCode != http.StatusOK {
			f.t.Fatalf("%s: status %d", b.Name, resp.StatusCode)
		}
	}
	for _, b := range f.backends {
		b.SetState(backends.Ready)
	}
	f.settled()
}

// breakAtOnce has one failure open a backend's breaker.
func breakAtOnce(t *testing.T, f *fleet) {
	t.Helper()
	breaker := router.BreakerSettings{Failures: 1, Open: time.Hour}
	if err := f.router.Configure(router.Options{Policy: "prefix", PollInterval: time.Hour, Breaker: breaker}); err != nil {
		t.Fatal(err)
	}
}

func TestRetryAfterStaleConnection(t *testing.T) {
	stale := &replica{script: staleOnce}
	other := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, nil, stale, other)
	f.staleTimeout(failsafe)
	breakAtOnce(t, f)
	f.post("/v1/chat/completions", askWhole)
	resp, answer := f.post("/v1/chat/completions", askWhole)
	if answer != whole || resp.Header.Get("X-Warmroute-Attempts") != "2" || resp.Header.Get("X-Warmroute-Backend") != "r0" {
		t.Errorf("got %q from %s after %s attempts", answer, resp.Header.Get("X-Warmroute-Backend"), resp.Header.Get("X-Warmroute-Attempts"))
	}
	if len(other.requests()) != 0 {
		t.Error("another backend was asked")
	}
	f.counts(`warmroute_retries_total{reason="stale_connection"} 1`)
	if state, opens := f.router.Breaker(f.backends[0]); state != router.BreakerClosed || opens != 0 {
		t.Errorf("the breaker is %v after %d opens", state, opens)
	}
	if log := f.log.String(); strings.Contains(log, "level=WARN") {
		t.Errorf("logged as a warning: %s", log)
	}
}

// What a replica has worked on for a while is not sent to it again.
func TestResetAtWorkIsAFailedAttempt(t *testing.T) {
	for name, end := range map[string]func(*session){
		"reset":  (*session).reset,
		"closed": func(s *session) { s.Conn.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			var replicas []*replica
			for range 4 {
				replicas = append(replicas, &replica{script: func(s *session) {
					if _, ok := s.request(); !ok {
						return
					}
					s.say(answered("200 OK", whole))
					if _, ok := s.request(); ok {
						time.Sleep(300 * time.Millisecond) // the engine's work
						end(s)
					}
				}})
			}
			f := serve(t, nil, replicas...)
			f.warm()
			resp, _ := f.post("/v1/chat/completions", askWhole)
			if resp.StatusCode != http.StatusBadGateway || resp.Header.Get("X-Warmroute-Attempts") != "3" {
				t.Errorf("got %d after %s attempts", resp.StatusCode, resp.Header.Get("X-Warmroute-Attempts"))
			}
			for i, r := range replicas {
				if got, want := len(r.requests())-1, min(1, max(0, 3-i)); got != want {
					t.Errorf("replica %d was sent the request %d times, want %d", i, got, want)
				}
			}
			f.counts(`warmroute_retries_total{reason="broken"} 2`)
			f.counts(`warmroute_retries_total{reason="stale_connection"} 0`)
		})
	}
}

func TestStaleConnectionIsNotRetriedWithoutBudget(t *testing.T) {
	for name, change := range map[string]func(*Options){
		"no budget":   func(o *Options) { o.RetryShare, o.RetryPerSecond = 0, 0 },
		"one attempt": func(o *Options) { o.Attempts = 1 },
	} {
		t.Run(name, func(t *testing.T) {
			stale, other := &replica{script: staleOnce}, &replica{script: always(answered("200 OK", whole))}
			f := serve(t, change, stale, other)
			f.staleTimeout(failsafe)
			f.post("/v1/chat/completions", askWhole)
			resp, answer := f.post("/v1/chat/completions", askWhole)
			if resp.StatusCode != http.StatusBadGateway || resp.Header.Get("X-Warmroute-Attempts") != "1" {
				t.Errorf("got %d %s after %s attempts", resp.StatusCode, answer, resp.Header.Get("X-Warmroute-Attempts"))
			}
			if len(stale.requests()) != 2 || len(other.requests()) != 0 {
				t.Errorf("sent %d times, and to the other backend %d times", len(stale.requests())-1, len(other.requests()))
			}
		})
	}
}

// A replica that closes all its idle connections at once, when requests are on
// their way on each: none is lost, and none is sent more than twice.
func TestManyStaleConnections(t *testing.T) {
	const requests = 20
	first := make(chan struct{})
	var warm sync.WaitGroup
	warm.Add(requests)
	r := &replica{script: func(s *session) {
		for n := 1; ; n++ {
			if _, ok := s.request(); !ok || n == 2 && s.n <= requests {
				return
			}
			if s.n <= requests {
				warm.Done()
				<-first
			}
			s.say(answered("200 OK", whole))
		}
	}}
	f := serveHolding(t, holdsForAMinute, nil, r)
	f.staleTimeout(failsafe)
	f.client.Transport.(*http.Transport).MaxIdleConnsPerHost = requests
	var all []<-chan answer
	for i := range requests {
		all = append(all, f.background(asked(fmt.Sprint(i), false)))
	}
	warm.Wait()
	close(first)
	for _, done := range all {
		<-done
	}
	f.settled()
	all = all[:0]
	for i := range requests {
		all = append(all, f.background(asked(fmt.Sprint(i), false)))
	}
	for i, done := range all {
		if a := <-done; a.body != whole {
			t.Errorf("request %d got %+v", i, a)
		}
	}
	if n := len(r.requests()); n > 3*requests {
		t.Errorf("the replica saw %d requests, want %d at most", n, 3*requests)
	}
}

// A replica that dies of a request at once cannot be told from one that closed an
// idle connection, until it refuses the next one.
func TestRequestThatKillsReplicasOnReusedConnections(t *testing.T) {
	script := func(m *mortal, s *session) {
		for {
			if _, ok := s.request(); !ok {
				return
			}
			if len(m.requests()) > 1 {
				m.die()
				return
			}
			s.say(answered("200 OK", whole))
		}
	}
	a, b := newMortal(script), newMortal(script)
	c := &replica{script: always(answered("200 OK", whole))}
	f := serveChecked(t, &a.replica, &b.replica, c)
	f.staleTimeout(failsafe)
	f.warm()
	resp, _ := f.post("/v1/chat/completions", askWhole)
	if resp.StatusCode < 500 || len(c.requests()) != 1 {
		t.Errorf("got %d, and the third replica saw the request %d times", resp.StatusCode, len(c.requests())-1)
	}
	if log := f.log.String(); !strings.Contains(log, "request was on two replicas that failed and died") {
		t.Errorf("the log does not say so: %s", log)
	}
}
