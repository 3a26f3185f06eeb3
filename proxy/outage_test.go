package proxy

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router"
)

func TestRequestsWaitForAReplicaToComeBack(t *testing.T) {
	good := &replica{script: always(answered("200 OK", whole))}
	f := serveHolding(t, router.QueueSettings{Requests: 10, Timeout: time.Minute}, nil, good, &replica{})
	for _, b := range f.backends {
		b.SetState(backends.Down)
	}
	var all []<-chan answer
	for i := range 5 {
		all = append(all, f.background(asked(fmt.Sprint(i), false)))
	}
	f.waits(5)
	f.backends[0].SetState(backends.Ready)
	f.router.BackendChanged(f.backends[0])
	for _, done := range all {
		if a := <-done; a.status != http.StatusOK || a.header.Get("X-Warmroute-Backend") != "r0" {
			t.Errorf("got %+v", a)
		}
	}
}

// Before the checks have found out, a dead fleet looks ready.
func TestRequestsThatWereRefusedEverywhereWaitToo(t *testing.T) {
	r := &replica{}
	f := serveHolding(t, router.QueueSettings{Requests: 10, Timeout: time.Minute}, nil, r)
	address := r.listener.Addr().String()
	r.listener.Close()
	done := f.background(askWhole)
	f.counts(`warmroute_backend_in_flight{backend="r0"} 0`)
	eventually(t, "it was tried", func() bool { return strings.Contains(f.log.String(), "reason=connect") })
	f.backends[0].SetState(backends.Down)
	f.waits(1)
	back := &replica{script: always(answered("200 OK", whole))}
	back.startAt(t, address)
	t.Cleanup(back.stop)
	f.backends[0].SetState(backends.Ready)
	f.router.BackendChanged(f.backends[0])
	if a := <-done; a.body != whole {
		t.Errorf("got %+v", a)
	}
}

// What a replica had to say is worth more than a minute of silence.
func TestAReplicasErrorIsNotHeldBackForABackendThatIsDown(t *testing.T) {
	failing := &replica{script: always(answered("500 Internal Server Error", `{"error":{"message":"it hurts"}}`))}
	good := &replica{script: always(answered("200 OK", whole))}
	f := serveHolding(t, router.QueueSettings{Requests: 10, Timeout: time.Minute}, nil, failing, good)
	f.backends[1].SetState(backends.Down)
	begun := time.Now()
	if a := <-f.background(askWhole); a.status != http.StatusInternalServerError || !strings.Contains(a.body, "it hurts") {
		t.Errorf("the other one stays down: got %+v", a)
	}
	if waited := time.Since(begun); waited < retryPatience || waited > 30*time.Second {
		t.Errorf("answered after %v, want some %v", waited, retryPatience)
	}
	done := f.background(askWhole)
	f.waits(1)
	f.backends[1].SetState(backends.Ready)
	f.router.BackendChanged(f.backends[1])
	if a := <-done; a.body != whole {
		t.Errorf("the other one is back in time: got %+v", a)
	}
}

// Refused, held, refused again: all of it is one wait.
func TestARequestIsHeldForItsTimeOnce(t *testing.T) {
	f := serve(t, func(o *Options) { o.HoldTime = time.Minute }, &replica{})
	x := &exchange{p: f.proxy, settings: f.proxy.settings.Load(), arrived: time.Now().Add(-time.Hour), whole: time.Now()}
	if x.recheckedEnough() || x.patience() != time.Minute {
		t.Error("the time of the upload counts as held")
	}
	if x.held = 50 * time.Second; x.patience() != 10*time.Second {
		t.Errorf("after 50 s it may be held for %v more, want 10 s", x.patience())
	}
	if x.whole = x.whole.Add(-time.Minute); !x.recheckedEnough() {
		t.Error("it is asked for ever")
	}
}

func TestABurstFarAboveCapacityIsAnswered(t *testing.T) {
	f := simulated(t, 2, router.QueueSettings{Requests: 1000, Bytes: 64 << 20, Timeout: time.Minute})
	long := strings.Repeat(question, 20) // some 5,000 tokens each, of 8,192 a step
	const requests = 120
	var wrong sync.Map
	var all sync.WaitGroup
	for i := range requests {
		body := fmt.Sprintf(`{"model":"m","max_tokens":20,"stream":%v,"messages":[{"role":"user","content":"%d %s"}]}`, i%2 == 0, i, long)
		all.Go(func() {
			if resp, text, err := f.try("/v1/chat/completions", body); err != nil || resp.StatusCode != http.StatusOK {
				wrong.Store(i, fmt.Sprint(err, text))
			}
		})
	}
	all.Wait()
	wrong.Range(func(i, what any) bool {
		t.Errorf("request %v: %v", i, what)
		return false
	})
	f.settled()
	if strings.Contains(f.exposition(), `warmroute_hold_ends_total{end="sent"} 0`) {
		t.Error("none was held")
	}
}
