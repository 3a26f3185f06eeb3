package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"

	"warmroute/scripts/testbed"
)

// sample is how much of everything the proxy has, as medians of a few looks.
type sample struct {
	At          string  `json:"at"`
	RSS         float64 `json:"rss_mb"`
	Heap        float64 `json:"heap_mb"` // live after a garbage collection
	Goroutines  float64 `json:"goroutines"`
	Descriptors float64 `json:"descriptors"`
	InFlight    float64 `json:"in_flight"` // held ones included
}

const mb = 1 << 20

// look takes one sample. Its heap profile, for go tool pprof, goes to profile.
func look(ctx context.Context, p *testbed.Proxy, profile io.Writer) (sample, error) {
	// Twice: what lies in a sync.Pool outlives one collection.
	for _, out := range []io.Writer{io.Discard, profile} {
		if err := collect(ctx, p, out); err != nil {
			return sample{}, err
		}
	}
	m, err := p.Scrape(ctx)
	return sample{
		RSS:         m.Sum("process_resident_memory_bytes") / mb,
		Heap:        m.Sum("go_memstats_heap_alloc_bytes") / mb,
		Goroutines:  m.Sum("go_goroutines"),
		Descriptors: m.Sum("process_open_fds"),
		InFlight:    m.Sum("warmroute_backend_in_flight") + m.Sum("warmroute_queue_requests"),
	}, err
}

// collect makes the proxy collect its garbage and writes its heap profile.
func collect(ctx context.Context, p *testbed.Proxy, profile io.Writer) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.Admin+"/debug/pprof/heap?gc=1", nil)
	if err != nil {
		return err
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: status %d", req.URL, resp.StatusCode)
	}
	_, err = io.Copy(profile, resp.Body)
	return err
}

// median of samples, which are at least one.
func median(at string, all []sample) sample {
	of := func(field func(sample) float64) float64 {
		var values []float64
		for _, s := range all {
			values = append(values, field(s))
		}
		slices.Sort(values)
		return values[len(values)/2]
	}
	return sample{
		At:          at,
		RSS:         of(func(s sample) float64 { return s.RSS }),
		Heap:        of(func(s sample) float64 { return s.Heap }),
		Goroutines:  of(func(s sample) float64 { return s.Goroutines }),
		Descriptors: of(func(s sample) float64 { return s.Descriptors }),
		InFlight:    of(func(s sample) float64 { return s.InFlight }),
	}
}

// faults are the ways in which the proxy has grown. Under load, at the end against
// 60 %: memory by 15 % and 16 MB, counts by a quarter and 20, since what is in
// flight is a matter of chance. After the load, against before it, where chance
// has no part: 8 MB of heap for what was learned, 10 goroutines and descriptors
// for a probe under way and a connection that is still kept, nothing in flight.
func faults(idle, middle, end, after sample) (found []string) {
	f := func(what string, got, most float64) {
		if got > most {
			found = append(found, fmt.Sprintf("%s: %.1f, at most %.1f", what, got, most))
		}
	}
	f("RSS at the end, MB", end.RSS, middle.RSS*1.15+16)
	f("heap at the end, MB", end.Heap, middle.Heap*1.15+16)
	f("goroutines at the end", end.Goroutines, middle.Goroutines*1.25+20)
	f("descriptors at the end", end.Descriptors, middle.Descriptors*1.25+20)
	f("heap after the load, MB", after.Heap, idle.Heap+8)
	f("goroutines after the load", after.Goroutines, idle.Goroutines+left)
	f("descriptors after the load", after.Descriptors, idle.Descriptors+left)
	f("in flight after the load", after.InFlight, 0)
	return found
}

// left are the goroutines and descriptors that may stay for a while after the load.
const left = 10
