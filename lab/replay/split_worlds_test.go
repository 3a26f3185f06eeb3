//go:build worlds

package replay

import (
	"math"
	"testing"
)

const (
	splitWorldsSeed = 30
	splitWorlds     = 5
	splitSeeds      = 5 // of each world: by the seed alone the ratio of an overloaded one is between 0.65 and 1.14
	prefillShare    = 4 // one replica in so many is for prefill
	// maxSplitRatio is how many times the E2E of always and of never splitting that of the cost may be, of the better one:
	// in the geometric mean of one world's seeds, and of all worlds.
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
		if s.Backends < prefillShare || s.Backends > 4*prefillShare || s.ModelOf != nil || s.Devices != nil || s.Ranks > 1 ||
			s.NonStreaming == 1 {
			continue // the figures need one model, hardware of each replica's own, and streams
		}
		played++
		s.Policy, s.Queue = "prefix", worldQueue()
		s.Prefills = s.Backends / prefillShare
		s.Decodes = s.Backends - s.Prefills
		logRatios := 0.0
		for s.Seed = 1; s.Seed <= splitSeeds; s.Seed++ {
			always, never, cost := playSplit(t, s, SplitAlways), playSplit(t, s, SplitNever), playSplit(t, s, SplitByCost)
			ratio := cost.E2EMean / min(always.E2EMean, never.E2EMean)
			logRatios += math.Log(ratio)
			t.Logf("world %d, seed %d: %.0f %% split, E2E %.3f s, %.3f of the better of always and never",
				number, s.Seed, 100*cost.SplitShare, cost.E2EMean, ratio)
			if cost.Lost > min(always.Lost, never.Lost) {
				t.Errorf("seed %d of %s\n%d requests lost by cost, %d always, %d never", s.Seed, w, cost.Lost, always.Lost, never.Lost)
			}
		}
		if ratio := math.Exp(logRatios / splitSeeds); ratio > maxSplitRatio {
			t.Errorf("%s\nE2E by cost is %.3f of the better of always and never", w, ratio)
		}
		sum += logRatios / splitSeeds
	}
	if mean := math.Exp(sum / splitWorlds); mean > maxMeanSplitRatio {
		t.Errorf("E2E is %.3f of the better of always and never on average", mean)
	}
}

func playSplit(t *testing.T, s Scenario, split Split) Summary {
	t.Helper()
	s.Split = split
	result, err := s.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return result
}
