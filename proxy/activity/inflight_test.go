package activity

import (
	"context"
	"net/http"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/metrics"
	"warmroute/router"
)

// BenchmarkActivity is what a request pays for being seen by operators.
func BenchmarkActivity(b *testing.B) {
	a := New()
	d := &router.Reservation{Backend: &backends.Backend{Name: "b"}, Reason: router.ReasonPrefix}
	r := &Request{ID: "an-id", Endpoint: "/v1/chat/completions", Arrived: time.Now()}
	o := metrics.Request{Model: "m", Code: http.StatusOK, TTFT: 20 * time.Millisecond}
	_, cancel := context.WithCancelCause(b.Context())
	defer cancel(nil)
	b.ReportAllocs()
	for b.Loop() {
		a.Add(r)
		a.BeginUpload(r)
		a.EndUpload(r)
		a.BeginQueued(r, o.Model, "", cancel)
		a.RecordDecision(r, d, o.Model, 1, 0)
		r.BeginResponding()
		a.Remove(r)
		a.CountEnded(r, &o)
	}
}
