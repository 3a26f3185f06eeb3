package estimate

import (
	"math"
	"testing"
	"time"

	"warmroute/backends"
)

func TestLearnFetch(t *testing.T) {
	const perToken, tokens = 1.0 / 50_000, 20_000
	f := newTestEstimates(3)
	for slot, model := range []string{"m", "m", "other"} {
		f.SetModel(slot, model)
	}
	now := time.Unix(1000, 0)
	m := *f.Step(0)
	sample := func(fetch float64) *StepSample {
		s := StepSample{Steps: 1, Tokens: 500, Attended: 500 * tokens, Prompt: tokens + 500}
		s.Seconds = 2*m.Base + m.PrefillSecondsOf(s.Tokens, s.Attended) + m.PromptToken*s.Prompt + fetch
		return &s
	}
	for range 2 {
		f.LearnFetch(0, sample(perToken*tokens), tokens, now)
	}
	if got := f.FetchSeconds(0); got != 0 {
		t.Errorf("after two samples: %v s for a token, want none yet", got)
	}
	f.LearnFetch(0, sample(perToken*tokens), tokens, now)
	f.LearnFetch(0, sample(60), tokens, now) // it waited for something else
	f.LearnFetch(0, sample(60), 100, now)    // too short to tell
	if got := f.FetchSeconds(0); math.Abs(got/perToken-1) > 0.01 {
		t.Errorf("%v s for a token, want %v", got, perToken)
	}
	if got, want := f.FetchSeconds(1), f.FetchSeconds(0); got != want {
		t.Errorf("another backend of the model: %v s for a token, want %v", got, want)
	}
	if got := f.FetchSeconds(2); got != 0 {
		t.Errorf("a backend of another model: %v s for a token", got)
	}
	for range fetchSamples {
		f.LearnFetch(0, sample(60), tokens, now)
	}
	if got, want := f.FetchSeconds(0), maxFetchPrefills/f.regressionOf(0).rate; got != want {
		t.Errorf("slow fetches: %v s for a token, want the bound %v", got, want)
	}
	for i := range fetchSamples/2 + 1 {
		if got := f.FetchSeconds(0); got == 0 {
			t.Errorf("forgotten after %d timeouts", i)
		}
		f.FadeFetches(0, now.Add(fetchTimeout))
		now = now.Add(fetchTimeout + 1)
		f.FadeFetches(0, now)
	}
	if got := f.FetchSeconds(0); got != 0 {
		t.Errorf("no sample for long: %v s for a token", got)
	}
}

func TestOffloads(t *testing.T) {
	f := newTestEstimates(1)
	for _, tc := range []struct {
		name     string
		load     backends.Load
		disabled bool
		want     bool
	}{
		{"not reported", backends.Load{CacheTokens: 10_000}, false, false},
		{"none yet", backends.Load{CacheTokens: 10_000, HostHitsKnown: true}, false, false},
		{"hits elsewhere", backends.Load{CacheTokens: 10_000, HostHitsKnown: true, HostHits: 1}, false, true},
		{"learning disabled", backends.Load{CacheTokens: 10_000, HostHitsKnown: true, HostHits: 1}, true, false},
	} {
		f.ObserveLoad(0, &tc.load, 0, CacheInfo{Alignment: 1})
		f.SetLearningDisabled(tc.disabled)
		if got := f.Offloads(0); got != tc.want {
			t.Errorf("%s: %v", tc.name, got)
		}
	}
}
