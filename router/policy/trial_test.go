package policy

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"warmroute/router/prompt"
)

// fork makes candidates and requests from a seed, so that two policies can be
// shown the same.
func fork(seed uint64) func(step int) (*Request, []Candidate) {
	rng := rand.New(rand.NewPCG(seed, 1))
	return func(step int) (*Request, []Candidate) {
		r := &Request{
			Now: time.Unix(1000, 0).Add(time.Duration(step) * 5 * time.Second), BlockTokens: 64,
			PromptKey: uint64(rng.IntN(5)), MeanAnswerTokens: 250, MeanUncachedTokens: 500,
		}
		for i := range 1 + rng.IntN(6) {
			r.Blocks = append(r.Blocks, prompt.Block(100*rng.IntN(3)+i+1))
		}
		r.PromptTokens = float64(len(r.Blocks)) * 64
		var all []Candidate
		for slot := range 5 {
			if rng.IntN(6) > 0 || slot == 0 {
				n := float64(rng.IntN(20))
				all = append(all, Candidate{
					Slot: slot, NameHash: uint64(slot*7919 + 13), Weight: 1, UncachedTokens: 64 + float64(rng.IntN(500)), QueuedTokens: float64(rng.IntN(9000)),
					InFlight: n, Requests: n, UnstartedTokens: 100 * n, PrefillRate: 8000, Waiting: float64(rng.IntN(4)), KVUsage: rng.Float64(),
				})
			}
		}
		return r, all
	}
}

// TestATrialTellsTheNextChoiceAndChangesNone asks one of two policies before each
// choice what it would choose: it says what is then chosen, and both choose alike
// to the end.
func TestATrialTellsTheNextChoiceAndChangesNone(t *testing.T) {
	for _, name := range Names() {
		t.Run(name, func(t *testing.T) {
			asked, plain := rand.NewPCG(3, 4), rand.NewPCG(3, 4)
			one := mustNew(t, name, Settings{}, rand.New(asked))
			other := mustNew(t, name, Settings{}, rand.New(plain))
			first, second := fork(9), fork(9)
			for step := range 300 {
				r, all := first(step)
				chance, _ := asked.MarshalBinary()
				var trial Trace
				r.Trace = &trial
				told := one.Choose(r, all)
				if err := asked.UnmarshalBinary(chance); err != nil {
					t.Fatal(err)
				}
				if trial.Criterion == "" || trial.Scores != nil && len(trial.Scores) != len(all) {
					t.Fatalf("step %d: it told %+v of %d candidates", step, trial, len(all))
				}
				r.Trace = nil
				chosen := one.Choose(r, all)
				r, all = second(step)
				if want := other.Choose(r, all); chosen != want || told != want {
					t.Fatalf("step %d: told %d, chose %d, and without being asked %d", step, told, chosen, want)
				}
			}
		})
	}
}

// TestATrialHasTheScoresThatDecided compares what was told with what was chosen,
// where nothing but the scores decides.
func TestATrialHasTheScoresThatDecided(t *testing.T) {
	for _, name := range []string{"prefix", "least-load", "weighted", "dynamo", "lmetric", "hashtrie", "llmd-guide", "cache-threshold", "cache-threshold-old"} {
		p := mustNew(t, name, Settings{}, rand.New(rand.NewPCG(1, 1)))
		next := fork(2)
		for step := range 200 {
			r, all := next(step)
			var trial Trace
			r.Trace = &trial
			chosen := p.Choose(r, all)
			best := slices.Min(trial.Scores)
			if trial.HighestWins {
				best = slices.Max(trial.Scores)
			}
			if trial.Scores[chosen] != best {
				t.Fatalf("%s: chose %d by %+v", name, chosen, trial)
			}
			r.Trace = nil
			p.Choose(r, all)
		}
	}
}
