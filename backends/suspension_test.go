package backends

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func TestSuspension(t *testing.T) {
	b := backendAt(t, "http://127.0.0.1:1")
	b.SetState(Ready)
	for _, s := range []Suspension{Pausing, Paused, FallingAsleep, Asleep, ResettingCache} {
		b.SetSuspension(s)
		if got := b.Status(); got.State != Draining || got.Suspension != s || got.Reason != s.String() || b.Drained() {
			t.Errorf("%v: %+v", s, got)
		}
	}
	b.Drain()
	b.SetSuspension(NotSuspended)
	if got := b.Status(); got.State != Draining || got.Reason != "being drained by an operator" {
		t.Errorf("drained: %+v", got)
	}
	b.Undrain()
	if b.State() != Ready {
		t.Errorf("in the end: %+v", b.Status())
	}
}

// TestSuspensionEndsWithSleep checks which polls and checks end a suspension.
func TestSuspensionEndsWithSleep(t *testing.T) {
	var metrics atomic.Pointer[string]
	set := func(start, awake string) {
		text := "process_start_time_seconds " + start + "\nvllm:engine_sleep_state{sleep_state=\"awake\"} " + awake + "\n"
		metrics.Store(&text)
	}
	set("1", "1")
	mux := http.NewServeMux()
	mux.Handle("/", healthyReplica(`"id":"m"`))
	mux.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, *metrics.Load()) })
	b := replicaAt(t, mux)
	p := &Poller{}
	p.SetSettings(PollSettings{Interval: 10 * time.Millisecond})
	watchUntilCleanup(t, p.Watch, b)
	awaitPolled := func(asleep bool) {
		t.Helper()
		if err := b.PollUntil(t.Context(), time.Now(), func(l *Load) bool { return l.Asleep == asleep }); err != nil {
			t.Fatal(err)
		}
	}
	awaitPolled(false)
	b.SetSuspension(Asleep)
	awaitPolled(false) // it has not noticed yet
	if b.Suspension() != Asleep {
		t.Error("a poll before the sleep has ended it")
	}
	set("1", "0")
	awaitPolled(true)
	if b.Suspension() != Asleep {
		t.Error("a poll of the sleep has ended it")
	}
	set("1", "1")
	awaitPolled(false)
	if b.Suspension() != NotSuspended {
		t.Error("awake, and still suspended")
	}
	b.SetSuspension(Paused)
	set("2", "1")
	awaitPolled(false)
	if b.Suspension() != NotSuspended {
		t.Error("restarted, and still suspended")
	}
}

func TestAwaitCheck(t *testing.T) {
	var healthy atomic.Bool
	replica := healthyReplica(`"id":"m"`)
	b := replicaAt(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !healthy.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		replica.ServeHTTP(w, r)
	}))
	c := &Checker{OnState: func(b *Backend, s State, _ string) {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.finishedLast == b.begunChecks {
			t.Errorf("AwaitCheck returns before the change to %v is reported", s)
		}
	}}
	c.SetSettings(HealthSettings{Interval: time.Hour, DownInterval: time.Hour})
	watchUntilCleanup(t, c.Watch, b)
	if err := b.AwaitCheck(t.Context()); err == nil || !strings.Contains(err.Error(), "/health returned 503") {
		t.Errorf("got %v", err)
	}
	healthy.Store(true)
	if err := b.AwaitCheck(t.Context()); err != nil || b.State() != Ready {
		t.Errorf("got %v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := b.AwaitCheck(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// TestPauseByAnotherCaller checks when a backend is suspended because its replica says that its engine is paused.
func TestPauseByAnotherCaller(t *testing.T) {
	var response atomic.Pointer[string]
	var asked atomic.Int64
	set := func(body string) { response.Store(&body) }
	set(`{"is_paused":false}`)
	mux := http.NewServeMux()
	mux.Handle("/", healthyReplica(`"id":"m"`))
	mux.HandleFunc("GET /is_paused", func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		io.WriteString(w, *response.Load())
	})
	b := replicaAt(t, mux)
	c := &Checker{}
	c.SetSettings(HealthSettings{Interval: time.Hour, DownInterval: time.Hour})
	watchUntilCleanup(t, c.Watch, b)
	check := func(when string, want Suspension) {
		t.Helper()
		if err := b.AwaitCheck(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := b.Suspension(); got != want || (b.State() == Ready) != (want == NotSuspended) {
			t.Errorf("%s: %v, %v", when, got, b.State())
		}
	}
	check("not paused", NotSuspended)
	set(`{"is_paused":true}`)
	check("paused by another caller", PausedByOther)
	check("still paused", PausedByOther)
	set(`{"is_paused":false}`)
	check("resumed", NotSuspended)
	b.SetSuspension(Paused)
	check("an operator's pause has just begun", Paused)
	set(`{"is_paused":true}`)
	check("it is seen", Paused)
	set(`{"is_paused":false}`)
	check("another caller has ended it", NotSuspended)
	b.SetSuspension(ResettingCache)
	set(`{"is_paused":true}`)
	check("another action is in effect", ResettingCache)
	b.SetSuspension(NotSuspended)
	check("it has ended", PausedByOther)
	set(`{"detail":"Not Found"}`)
	check("the replica does not say any more", NotSuspended)
	before := asked.Load()
	set(`{"is_paused":true}`)
	check("it is not asked again", NotSuspended)
	if n := asked.Load() - before; n != 0 {
		t.Errorf("asked %d times", n)
	}
}
