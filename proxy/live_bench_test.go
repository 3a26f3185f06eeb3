package proxy

import (
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/metrics"
	"warmroute/router"
)

// BenchmarkPresence is what a request pays for being seen by operators.
func BenchmarkPresence(b *testing.B) {
	p := &Proxy{present: newLive()}
	d := &router.Decision{Backend: &backends.Backend{Name: "b"}, Reason: router.ReasonPrefix}
	x := &exchange{p: p, id: "an-id", endpoint: &endpoints[0], arrived: time.Now(), settings: new(Settings)}
	x.outcome = metrics.Request{Model: "m", Code: 200, TTFT: 20 * time.Millisecond}
	b.ReportAllocs()
	for b.Loop() {
		p.present.enter(x)
		p.present.reads(&x.presence)
		p.present.hasRead(&x.presence)
		p.present.waits(x)
		p.present.sent(x, d)
		x.presence.phase.Store(int32(Answering))
		p.present.leave(&x.presence)
		p.present.pulse.ended(d.Backend, x.arrived, &x.outcome, false)
	}
}
