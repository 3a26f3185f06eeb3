package backends

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var health atomic.Int32
		health.Store(200)
		b := virtual(t, func(r *http.Request) (*http.Response, error) {
			if r.URL.Path == "/health" {
				return respond(int(health.Load()), "")
			}
			return respond(200, `{"data":[{"id":"m"}]}`)
		})
		expect := func(when string, state State, checked bool, since time.Time, reason string) {
			t.Helper()
			s := b.Status()
			if s.State != state || s.Checked != checked || !s.Since.Equal(since) || s.Reason != reason {
				t.Errorf("%s: got %+v, want %v since %v, %q", when, s, state, since, reason)
			}
		}
		expect("made", Down, false, time.Now(), "not checked yet")
		time.Sleep(time.Second)
		watchUntilCleanup(t, (&Checker{}).Watch, b)
		synctest.Wait()
		ready := time.Now()
		expect("checked", Ready, true, ready, "")
		if wait := b.Status().NextCheck.Sub(ready); wait < 4*time.Second || wait > 6*time.Second {
			t.Errorf("the next check is in %v, want about 5 s", wait)
		}
		health.Store(503)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		s := b.Status()
		if lasts := time.Since(s.Since); s.State != Down || !strings.Contains(s.Reason, "/health returned 503") || lasts <= 0 ||
			lasts > 10*time.Second || time.Until(s.NextCheck) > 1100*time.Millisecond {
			t.Errorf("got %+v", s)
		}
		down := s.Since
		health.Store(500)
		time.Sleep(5 * time.Second)
		synctest.Wait()
		expect("another reason", Down, true, down, "/health returned 500")
		b.Drain()
		drained := time.Now()
		time.Sleep(time.Second)
		expect("drained as well", Draining, true, drained, "being drained by an operator; its last check failed: /health returned 500")
		health.Store(200)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		expect("drained", Draining, true, drained, "being drained by an operator")
		b.Retire()
		expect("removed", Draining, true, drained, "being removed")
		b.Unretire()
		b.Undrain()
		expect("taken back", Ready, true, time.Now(), "")
	})
}

func TestAsleepSince(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asleep atomic.Bool
		b := virtual(t, func(*http.Request) (*http.Response, error) {
			if asleep.Load() {
				return respond(200,
					"vllm:engine_sleep_state{engine=\"0\",sleep_state=\"awake\"} "+
						"0.0\nvllm:engine_sleep_state{engine=\"0\",sleep_state=\"discard_all\"} 1.0\n")
			}
			return respond(200, "vllm:num_requests_running{engine=\"0\"} 0.0\nvllm:engine_sleep_state{engine=\"0\",sleep_state=\"awake\"} 1.0\n")
		})
		watchUntilCleanup(t, (&Poller{}).Watch, b)
		time.Sleep(3500 * time.Millisecond)
		asleep.Store(true)
		began := time.Now()
		time.Sleep(10 * time.Second)
		if l := b.Load(); l == nil || !l.Asleep || l.AsleepSince.Before(began) || l.AsleepSince.Sub(began) > 2*time.Second {
			t.Errorf("got %+v", l)
		}
	})
}

func TestEvent(t *testing.T) {
	var e Event
	e.Notify() // no waiter
	first := e.Next()
	if e.Next() != first {
		t.Error("two channels for one event")
	}
	e.Notify()
	<-first
	second := e.Next()
	select {
	case <-second:
		t.Error("an event that was before is seen again")
	default:
	}
	e.Notify()
	<-second
}

func TestRegistryStateChanged(t *testing.T) {
	b := &Backend{Name: "b"}
	r, err := NewRegistry([]*Backend{b})
	if err != nil {
		t.Fatal(err)
	}
	changed := r.StateChanged()
	b.SetState(Down)
	select {
	case <-changed:
		t.Error("notified of an unchanged state")
	default:
	}
	for _, change := range []func(){func() { b.SetState(Ready) }, b.Drain, b.Undrain, b.Retire, func() { b.SetState(Down) }} {
		changed = r.StateChanged()
		change()
		<-changed
	}
}
