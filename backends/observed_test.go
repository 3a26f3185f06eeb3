package backends

import (
	"context"
	"net/http"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestMissingEndpoints(t *testing.T) {
	b, now := new(Backend), time.Unix(1000, 0)
	b.RecordMissingEndpoint(2, now)
	b.RecordMissingEndpoint(MaxEndpoints-1, now)
	for e, want := range map[Endpoint]bool{0: false, 1: false, 2: true, MaxEndpoints - 1: true} {
		if got := b.LacksEndpoint(e, now); got != want {
			t.Errorf("endpoint %d: %v", e, got)
		}
	}
	if !b.LacksEndpoint(2, now.Add(missingEndpointLifetime-1)) || b.LacksEndpoint(2, now.Add(missingEndpointLifetime)) {
		t.Error("the lifetime is another")
	}
	b.ForgetMissingEndpoints()
	if b.LacksEndpoint(2, now) {
		t.Error("not forgotten")
	}
}

// An empty 404 may be about its request, and the second one, while none succeeds, is about the endpoint.
func TestEmptyNotFound(t *testing.T) {
	b, now := new(Backend), time.Unix(1000, 0)
	for e, want := range []bool{false, true} {
		b.RecordEmptyNotFound(2, now)
		b.RecordEmptyNotFound(Endpoint(e+3), now)
		if got := b.LacksEndpoint(2, now); got != want {
			t.Errorf("after %d: missing: %v", e+1, got)
		}
	}
	if b.LacksEndpoint(3, now) || b.LacksEndpoint(4, now) {
		t.Error("another endpoint is missing")
	}
	b.ForgetMissingEndpoints()
	for e := range Endpoint(2) {
		b.RecordServedEndpoint(e)
	}
	for range 3 {
		b.RecordEmptyNotFound(1, now)
	}
	if b.LacksEndpoint(1, now) {
		t.Error("an endpoint is missing of which a request has succeeded")
	}
	b.ForgetMissingEndpoints()
	b.RecordEmptyNotFound(1, now)
	if b.LacksEndpoint(1, now) {
		t.Error("the first one of another process counts")
	}
	b.RecordEmptyNotFound(1, now)
	if !b.LacksEndpoint(1, now) {
		t.Error("what another process served counts")
	}
}

// What a replica lacks is forgotten when it may be another process.
func TestMissingEndpointsForgotten(t *testing.T) {
	for name, next := range map[string]struct {
		status int // of /health
		models string
		start  float64
		forget bool
	}{
		"nothing":            {200, `"id":"m"`, 1, false},
		"unready, then not":  {503, `"id":"m"`, 1, true},
		"another model":      {200, `"id":"n"`, 1, true},
		"another start time": {200, `"id":"m"`, 2, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var changed, restored atomic.Bool
				b := virtual(t, func(r *http.Request) (*http.Response, error) {
					status, models, start := 200, `"id":"m"`, 1.0
					if changed.Load() {
						models, start = next.models, next.start
						if !restored.Load() {
							status = next.status
						}
					}
					switch r.URL.Path {
					case "/health":
						return respond(status, "")
					case "/metrics":
						return respond(200, vllmMetrics(start, 9, 0, 0))
					}
					return respond(200, vllmModels("1", "1", models))
				})
				if _, err := NewRegistry([]*Backend{b}); err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer synctest.Wait()
				defer cancel()
				go new(Checker).Watch(ctx, b)
				go new(Poller).Watch(ctx, b)
				time.Sleep(time.Second)
				b.RecordMissingEndpoint(2, time.Now())
				changed.Store(true)
				time.Sleep(10 * time.Second)
				restored.Store(true)
				time.Sleep(10 * time.Second)
				if got := !b.LacksEndpoint(2, time.Now()); got != next.forget || b.State() != Ready {
					t.Errorf("forgotten: %v, want %v; the backend is %v", got, next.forget, b.State())
				}
			})
		})
	}
}
