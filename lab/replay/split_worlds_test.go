//go:build worlds

package replay

import (
	"math"
	"testing"
)

const (
	splitWorldsSeed = 30
	splitWorlds     = 5
	prefillShare    = 4 // one replica in so many is for prefill
	// maxSplitRatio is how many times the E2E of always and of never splitting that of the cost may be, of the better one:
	// in one world, and in the geometric mean.
	maxSplitRatio, maxMeanSplitRatio = 1.05, 1
)

// TestSplitWorlds plays drawn worlds in which a quarter of the replicas is for prefill and the others are for decode. Whether
// a request is split, the cost decides no worse than a fixed choice.
func TestSplitWorlds(t *testing.T) {
	played, sum := 0, 0.0
	for number := 1; played < splitWorlds; number++ {
		w, err := DrawWorld(splitWorldsSeed, number, nil)
		if err != nil {
			t.Fatal(err)
		}
		s := w.Scenario
		if s.Backends < prefillShare || s.Backends > 4*prefillShare || s.ModelOf != nil || s.Devices != nil || s.Ranks > 1 || s.NonStreaming == 1 {
			continue // the figures need one model, hardware of each replica's own, and streams
		}
		played++
		s.Policy, s.Queue, s.Seed = "prefix", worldQueue(), 1
		s.Prefills = s.Backends / prefillShare
		s.Decodes = s.Backends - s.Prefills
		play := func(split Split) Summary {
			s.Split = split
			result, err := s.Run(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return result
		}
		always, never, cost := play(SplitAlways), play(SplitNever), play(SplitByCost)
		ratio := cost.E2EMean / min(always.E2EMean, never.E2EMean)
		sum += math.Log(ratio)
		t.Logf("world %d: %.0f %% split, E2E %.3f of the better of always and never", number, 100*cost.SplitShare, ratio)
		if ratio > maxSplitRatio || cost.Lost > min(always.Lost, never.Lost) {
			t.Errorf("%s\nE2E %.3f s by cost, %.3f always, %.3f never; lost %d, %d, %d",
				w, cost.E2EMean, always.E2EMean, never.E2EMean, cost.Lost, always.Lost, never.Lost)
		}
	}
	if mean := math.Exp(sum / splitWorlds); mean > maxMeanSplitRatio {
		t.Errorf("E2E is %.3f of the better of always and never on average", mean)
	}
}
