package backends

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestNextInterval(t *testing.T) {
	const s, ms = time.Second, time.Millisecond
	defaults := PollSettings{}
	idle := &Load{QueuesKnown: true}
	busy := &Load{QueuesKnown: true, Running: 5, OwnInFlight: 5}
	external := &Load{QueuesKnown: true, Running: 6, OwnInFlight: 5}
	waiting := func(usage float64) *Load {
		return &Load{QueuesKnown: true, Running: 3, Waiting: 2, WaitingForCapacity: 2, OwnInFlight: 5, KVKnown: true, KVCacheUsage: usage}
	}
	for _, c := range []struct {
		name     string
		settings PollSettings
		last     time.Duration
		load     *Load // nil: the poll failed
		expected bool
		want     time.Duration
	}{
		{"first poll", defaults, 0, idle, true, s},
		{"second poll", defaults, s, idle, true, 2 * s},
		{"idle for long", defaults, 4 * s, idle, true, 5 * s},
		{"idle for longer", defaults, 5 * s, idle, true, 5 * s},
		{"own requests", defaults, 2 * s, busy, true, 2 * s},
		{"own requests after idling", defaults, 5 * s, busy, true, 2 * s},
		{"not expected", defaults, 5 * s, busy, false, s},
		{"external load", defaults, 5 * s, external, false, 250 * ms},
		{"after external load", defaults, 250 * ms, busy, true, s},
		{"own requests waiting", defaults, 5 * s, waiting(0.7), false, s},
		{"own requests waiting for room", defaults, 5 * s, waiting(0.8), false, 250 * ms},
		{"own requests waiting, usage unknown", defaults, 5 * s, &Load{QueuesKnown: true, Waiting: 5, WaitingForCapacity: 5, OwnInFlight: 5},
			false, 250 * ms},
		{"queues unknown", defaults, 5 * s, &Load{}, false, s},
		{"failed", defaults, 5 * s, nil, false, s},
		{"short interval", PollSettings{Interval: 100 * ms}, 400 * ms, idle, true, 500 * ms},
		{"long interval", PollSettings{Interval: 3 * s}, 3 * s, idle, true, 5 * s},
		{"longer than the maximum", PollSettings{Interval: time.Minute}, time.Minute, idle, true, time.Minute},
		{"the same with own requests", PollSettings{Interval: time.Minute}, time.Minute, busy, true, time.Minute},
	} {
		if got := c.settings.NextInterval(c.last, c.load, c.expected); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestPollBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var failing, expected atomic.Bool
		var polls, running atomic.Int32
		expected.Store(true)
		b := virtual(t, func(*http.Request) (*http.Response, error) {
			polls.Add(1)
			if failing.Load() {
				return nil, errors.New("connection refused")
			}
			return respond(200, vllmMetrics(1, 1, int(running.Load()), 0))
		})
		p := Poller{IsExpected: func(*Backend) bool { return expected.Load() }}
		ctx, cancel := context.WithCancel(t.Context())
		var watching sync.WaitGroup
		watching.Go(func() { p.Watch(ctx, b) })
		perMinute := func(name string, low, high int32) {
			t.Helper()
			time.Sleep(30 * time.Second) // the interval settles
			before := polls.Load()
			time.Sleep(time.Minute)
			if n := polls.Load() - before; n < low || n > high {
				t.Errorf("%s: %d polls in a minute, want %d to %d", name, n, low, high)
			}
		}
		perMinute("idle", 10, 14)

		for before := polls.Load(); polls.Load() == before; {
			time.Sleep(10 * time.Millisecond)
		}
		time.Sleep(2 * time.Second) // the next poll is in 2.5 s at least
		before := polls.Load()
		b.RequestPoll()
		for _, c := range []struct {
			after time.Duration
			want  int32
		}{{800 * time.Millisecond, 0}, {400 * time.Millisecond, 1}, {time.Second, 2}} {
			time.Sleep(c.after)
			if n := polls.Load() - before; n != c.want {
				t.Errorf("%d polls, want %d, when a request was sent to an idle backend", n, c.want)
			}
		}
		perMinute("idle again", 10, 14)

		b.InFlight.Store(1)
		running.Store(1)
		perMinute("own requests", 27, 34)
		expected.Store(false)
		perMinute("not expected", 54, 68)
		expected.Store(true)
		failing.Store(true)
		perMinute("failing", 54, 68)

		cancel()
		watching.Wait()
	})
}

func TestPollRequestsAreOnePoll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var polls atomic.Int32
		b := virtual(t, func(*http.Request) (*http.Response, error) {
			polls.Add(1)
			return respond(200, vllmMetrics(1, 1, 0, 0))
		})
		p := Poller{IsExpected: func(*Backend) bool { return true }}
		ctx, cancel := context.WithCancel(t.Context())
		var watching sync.WaitGroup
		watching.Go(func() { p.Watch(ctx, b) })
		for range 600 { // requests begin ten times a second
			time.Sleep(100 * time.Millisecond)
			b.RequestPoll()
		}
		if n := polls.Load(); n < 54 || n > 68 {
			t.Errorf("%d polls in a minute, want 54 to 68", n)
		}
		cancel()
		watching.Wait()
	})
}
