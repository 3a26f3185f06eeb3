package estimate

import (
	"math"
	"testing"

	"warmroute/backends"
)

func TestLearnStore(t *testing.T) {
	for _, tc := range []struct {
		name      string
		cached    int     // of 10,000 tokens, of which the backend holds 4,096
		elsewhere float64 // that only another one holds
		hostHits  float64
		want      float64
	}{
		{"nothing of it is found", 4096, 4000, 1, 0},
		{"all of it", 8096, 4000, 1, 1},
		{"two thirds of it", 6763, 4000, 1, 0.66},
		{"a tenth of it", 4496, 4000, 1, 0},
		{"no hits but on the GPU", 8096, 4000, 0, 0},
		{"less than the error of the estimate", 5596, 1500, 1, 0},
	} {
		f := newTestEstimates(2)
		f.SetModel(0, "m")
		f.SetModel(1, "m")
		for slot := range 2 {
			f.ObserveLoad(slot, &backends.Load{HostHitsKnown: true, HostHits: tc.hostHits}, 0, CacheInfo{Alignment: 1})
		}
		for range 100 {
			p := Prediction{
				Model: "m", Bytes: 40_000, PromptTokens: 10_000, MatchedBlocks: 4 * 4096 / f.blockBytes, Elsewhere: tc.elsewhere, IsText: true,
			}
			f.LearnFromCompletion(0, &p, Usage{PromptTokens: 10_000, CachedTokens: tc.cached, CachedKnown: true}, CacheInfo{Alignment: 1})
		}
		if got := f.StoreShare(1); math.Abs(got-tc.want) > 0.15 { // of another backend of the model
			t.Errorf("%s: a share of %.2f, want %.2f", tc.name, got, tc.want)
		}
	}
}
