package replay

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// slowBackends plays a scenario in which backend 1 is 15 times slower for 25 s, after three minutes. It returns the backends that
// are reported as slow before that, and those that are until half a minute after it.
func slowBackends(t *testing.T, s *Scenario) (before, after []int) {
	t.Helper()
	const backend, factor, slowFrom, slowUntil, end = 1, 15, 3 * time.Minute, 3*time.Minute + 25*time.Second, 4 * time.Minute
	requests, err := s.Workload.Requests(s.Backends, 1)
	if err != nil {
		t.Fatal(err)
	}
	r, err := newRun(s, requests)
	if err != nil {
		t.Fatal(err)
	}
	for r.now < end {
		if r.ended == requests.Total {
			t.Fatalf("all requests have ended after %v", r.now)
		}
		reported, speed := &before, s.Speeds[backend]
		if r.now >= slowFrom {
			reported = &after
			if r.now < slowUntil {
				speed /= factor
			}
		}
		r.fleet[backend].ranks[0].engine.SetSpeed(speed)
		r.processEvent()
		for i, p := range r.fleet {
			if !slices.Contains(*reported, i) && r.router.Status(p.backend).Slowdown > 0 {
				*reported = append(*reported, i)
			}
		}
	}
	return before, after
}

// A replica that becomes 15 times slower is reported, and no other one is, whether prompts take most of the time or outputs, and
// whether all replicas are equally fast or not.
func TestSlowBackendReported(t *testing.T) {
	t.Parallel()
	workloads := map[string]Workload{
		"long prompts": Documents{Load: 1, For: 5 * time.Minute},
		"short chats":  spread{requests: 12_000, maxPrompt: 1000, maxOutput: 500},
	}
	for name, workload := range workloads {
		for _, load := range []float64{0.4, 0.9} {
			for _, speeds := range [][]float64{{1, 1, 1, 1}, {1, 1, 0.5, 0.3}} {
				s := Scenario{Backends: len(speeds), Policy: "prefix", Speeds: speeds, Seed: 1}
				s.Workload = drawnWorkload{base: workload, load: load, models: 1, scenario: s}
				t.Run(fmt.Sprintf("%s, load %v, speeds %v", name, load, speeds), func(t *testing.T) {
					t.Parallel()
					before, after := slowBackends(t, &s)
					if len(before) > 0 || !slices.Equal(after, []int{1}) {
						t.Errorf("backends %v are reported before backend 1 is slow, and %v then", before, after)
					}
				})
			}
		}
	}
}
