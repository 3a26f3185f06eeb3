package replay

import (
	"strings"
	"testing"

	"warmroute/lab/sim/engine"
)

// TestHybridModels runs an agentic workload on replicas of hybrid models, as if these were as fast as others: every policy hits
// less, and with a pool of blocks that is as large the replicas report a smaller cache.
func TestHybridModels(t *testing.T) {
	s := Scenario{Backends: 2, KVTokens: 200_000, Workload: Agentic{Concurrency: 6, Sessions: 12}, Policy: "prefix", Seed: 1}
	_, plain := mustPlay(t, &s)
	for name, groups := range map[string]engine.Groups{"Qwen 3.5": {States: 3}, "Gemma 3": {Windows: 5, Window: 1024}} {
		for _, events := range []bool{false, true} {
			s.Engine.Groups, s.KVEvents = groups, events
			r, figures := mustPlay(t, &s)
			if figures.HitRatio >= plain.HitRatio-0.005 || figures.HitRatio < plain.HitRatio/2 {
				t.Errorf("%s: hits %.3f, with full attention only %.3f", name, figures.HitRatio, plain.HitRatio)
			}
			if l := r.fleet[0].backend.Load(); l.CacheTokens >= 390*generatedBlockTokens || l.HitAlignment != generatedBlockTokens {
				t.Errorf("%s: the replica reports a cache of %d tokens with hits in multiples of %d", name, l.CacheTokens, l.HitAlignment)
			}
		}
	}
}

func TestHybridModelErrors(t *testing.T) {
	s := Scenario{
		Backends: 2, Workload: Agentic{Concurrency: 1, Sessions: 1}, Policy: "prefix",
		Engine: engine.Config{StepTokens: 500, Groups: engine.Groups{States: 1}},
	}
	if _, err := s.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "budget") {
		t.Errorf("steps that are smaller than a block: error %v", err)
	}
	s.Engine.StepTokens, s.Prefills, s.Decodes = 0, 1, 1
	if _, err := s.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "hybrid") {
		t.Errorf("roles: error %v", err)
	}
}
