package estimate

import (
	"testing"

	"warmroute/prompt"
)

// A prompt of 40 blocks, of 40,000 tokens, whose layouts part after 10 blocks or after 30.
func learnFromShares(f *Estimates, matchedBlocks, cachedTokens int) (changed bool) {
	p := Prediction{Model: "m", Bytes: 40 * 256, MatchedBlocks: matchedBlocks, IsText: true,
		Forks: []prompt.Fork{{Bit: prompt.SystemInPlace, Without: 0.25, WithoutMost: 0.25, With: 0.75}}}
	return f.LearnLayout(&p, Usage{PromptTokens: 40_000, CachedTokens: cachedTokens, CachedKnown: true}, CacheInfo{Alignment: 1})
}

func TestLearnLayout(t *testing.T) {
	const without, with = 10_000, 30_000
	merged := map[string]prompt.Layout{"m": prompt.DefaultLayout &^ prompt.SystemInPlace}
	for _, c := range []struct {
		name    string
		matched []int // blocks of each request
		cached  []int // tokens
		want    map[string]prompt.Layout
	}{
		{"as expected", []int{30, 30, 30}, []int{with, with, with}, nil},
		{"one other is not enough", []int{30}, []int{without}, nil},
		{"two others are", []int{30, 30}, []int{without, without}, merged},
		{"neither says nothing", []int{30, 30, 30}, []int{0, 20_000, 5_000}, nil},
		{"a new conversation says nothing", []int{10, 10, 10}, []int{without, without, without}, nil},
		{"a prompt cached beyond the fork says nothing", []int{38, 38}, []int{without, without}, nil},
		{"what was confirmed often takes as much to change", []int{30, 30, 30, 30, 30, 30, 30, 30},
			[]int{with, with, with, with, without, without, without, without}, nil},
		{"and back", []int{30, 30, 10, 10}, []int{without, without, with, with}, nil},
		{"back takes two again", []int{30, 30, 10}, []int{without, without, with}, merged},
	} {
		f := New(256, 1)
		for i := range c.matched {
			before := f.Layouts()["m"]
			if changed := learnFromShares(f, c.matched[i], c.cached[i]); changed != (f.Layouts()["m"] != before) {
				t.Errorf("%s: request %d: changed is %v", c.name, i, changed)
			}
		}
		if got := f.Layouts(); len(got) != len(c.want) || got["m"] != c.want["m"] {
			t.Errorf("%s: layouts %v, want %v", c.name, got, c.want)
		}
	}
}

func TestLearnLayoutBounds(t *testing.T) {
	f := New(256, 1)
	f.SetLearningDisabled(true)
	for range 9 {
		if learnFromShares(f, 30, 10_000) {
			t.Error("learned though learning is disabled")
		}
	}
	f.SetLearningDisabled(false)
	for n := range maxModels + 10 {
		p := Prediction{Model: string(rune('a'+n%26)) + string(rune(0x100+n)), Bytes: 2560, IsText: true,
			Forks: []prompt.Fork{{Bit: prompt.ToolsFirst}}}
		f.LearnLayout(&p, Usage{PromptTokens: 10, CachedKnown: true}, CacheInfo{Alignment: 1})
	}
	if len(f.layouts) != maxModels {
		t.Errorf("%d models have a layout, at most %d may", len(f.layouts), maxModels)
	}
}
