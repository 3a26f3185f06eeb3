package metrics

import (
	"maps"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// Latency buckets fit language models: from a hit on an idle replica to a cold
// prompt of 100,000 tokens behind a queue; from a small model's tokens to those of
// one that is stuck; from a short prompt's routing to one of a megabyte.
func newLatencies() *latencies {
	describe := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("warmroute_"+name, help, []string{"model", "backend"}, nil)
	}
	return &latencies{
		layouts: [...]*layout{
			duration: newLayout(-10, 12, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600),
			ttft:     newLayout(-10, 8, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40, 80, 120),
			itl:      newLayout(-13, 7, .001, .0025, .005, .01, .015, .02, .03, .04, .05, .075, .1, .15, .25, .5, 1, 2.5, 10),
		},
		descs: [...]*prometheus.Desc{
			duration: describe("request_duration_seconds", "Arrival of a request to the end of its answer."),
			ttft:     describe("ttft_seconds", "Arrival of a streamed request to its first content chunk written to the client."),
			itl:      describe("itl_seconds", "Gap between two chunks of a stream, as they are written to the client: about the time between tokens."),
		},
		by: map[served]*latency{},
	}
}

// What is measured for each model on each backend.
const (
	duration = iota
	ttft
	itl
	kinds
)

// latencies are the histograms by model and backend.
type latencies struct {
	layouts [kinds]*layout
	descs   [kinds]*prometheus.Desc

	mu sync.RWMutex
	by map[served]*latency
}

// served is a model on a backend.
type served struct{ model, backend string }

type latency [kinds]*Histogram

// of finds the histograms of a model on a backend, all three at once.
func (l *latencies) of(model, backend string) *latency {
	key := served{model, backend}
	l.mu.RLock()
	found := l.by[key]
	l.mu.RUnlock()
	if found != nil {
		return found
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if found = l.by[key]; found == nil {
		found = new(latency)
		for kind := range found {
			found[kind] = newHistogram(l.layouts[kind])
		}
		l.by[key] = found
	}
	return found
}

// forget drops the histograms of all that gone is true of.
func (l *latencies) forget(gone func(served) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.by, func(of served, _ *latency) bool { return gone(of) })
}

// Describe implements prometheus.Collector.
func (l *latencies) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range l.descs {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (l *latencies) Collect(ch chan<- prometheus.Metric) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for key, found := range l.by {
		for kind, h := range found {
			ch <- series{h, l.descs[kind], []string{key.model, key.backend}}
		}
	}
}

// ITL is where the gaps between the chunks of a model's streams from a backend are
// observed. To be asked for once a stream.
func (m *Metrics) ITL(model, backend string) *Histogram { return m.latency.of(model, backend)[itl] }

func newOverhead() series {
	return single("overhead_seconds", "Arrival of the whole body to the request sent on, less time held.",
		newLayout(-20, 0, 1e-5, 25e-6, 50e-6, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, .01, .025, .1))
}

func newHold() series {
	return single("hold_seconds", "Time in the hold queue of requests that were in it.",
		newLayout(-13, 7, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60))
}

func single(name, help string, l *layout) series {
	return series{newHistogram(l), prometheus.NewDesc("warmroute_"+name, help, nil, nil), nil}
}
