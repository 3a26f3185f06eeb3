package replay

import (
	"math"
	"testing"
	"time"

	"warmroute/lab/sim/engine"
)

// TestRecomputed checks that the tokens that were computed and not lost are exactly the distinct ones of all prompts, and which causes
// there are: with one cache nothing is elsewhere, with a large one nothing is evicted, and without restarts nothing is gone.
func TestRecomputed(t *testing.T) {
	workload := SharedPrompts{Prompts: 40, PromptTokens: 2000, Zipf: 0.8, OwnTokens: 100, Output: 50, Rate: 12, For: 50 * time.Second}
	requests, err := workload.Requests(4, 1)
	if err != nil {
		t.Fatal(err)
	}
	blocks, distinct := map[engine.BlockHash]bool{}, 0
	for _, j := range requests.Open {
		full := j.Prompt / requests.BlockTokens
		for _, h := range j.cache[:full] {
			if !blocks[h] {
				blocks[h] = true
				distinct += requests.BlockTokens
			}
		}
		distinct += j.Prompt - full*requests.BlockTokens
	}
	for _, tc := range []struct {
		name                     string
		policy                   string
		kvTokens                 int
		changes                  []Change
		elsewhere, evicted, gone bool
	}{
		{"large caches", "round-robin", 1_000_000, nil, true, false, false},
		{"one large cache", Pooled, 1_000_000, nil, false, false, false},
		{"small caches", "round-robin", 20_000, nil, true, true, false},
		{"a restart of the only replicas that had some", "prefix", 1_000_000, []Change{
			{At: 20 * time.Second, Backend: 0, Kind: Restart, Away: time.Second},
			{At: 20 * time.Second, Backend: 1, Kind: Restart, Away: time.Second},
			{At: 20 * time.Second, Backend: 2, Kind: Restart, Away: time.Second},
		}, true, false, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := Scenario{
				Backends: 4, Policy: tc.policy, KVTokens: tc.kvTokens, Workload: workload, Seed: 1, CountRecomputed: true, Changes: tc.changes,
			}
			result, err := s.Run(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			x := result.Recomputed
			t.Logf("%+v", *x)
			if result.Lost > 0 || math.Abs(x.Computed-x.Lost()-float64(distinct)) > 0.5 || x.Distinct != float64(distinct) {
				t.Errorf("%v tokens computed, %v of them again; the prompts have %d distinct ones", x.Computed, x.Lost(), distinct)
			}
			if want := result.HitRatio * x.Prompts; tc.changes == nil && math.Abs(x.Prompts-x.Computed-want) > 1 {
				t.Errorf("%v of %v tokens computed, %v were cached", x.Computed, x.Prompts, want)
			}
			if (x.Elsewhere > 0) != tc.elsewhere || (x.Evicted > 0) != tc.evicted || (x.Gone > 0) != tc.gone {
				t.Errorf("causes %+v", *x)
			}
		})
	}
}
