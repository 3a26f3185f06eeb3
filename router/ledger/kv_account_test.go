package ledger

import (
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router/estimate"
)

func TestOutputGrowthIsBounded(t *testing.T) {
	const mean = 250
	for name, c := range map[string]struct {
		sequences int64
		most      int
		want      float64
	}{
		"no maximum":               {1, 0, maxMeanOutputs * mean},
		"two sequences":            {2, 0, 2 * maxMeanOutputs * mean},
		"a low maximum":            {1, 16, 16},
		"a maximum of many tokens": {1, 1 << 20, maxMeanOutputs * mean},
	} {
		k := newKVAccount()
		e := &Entry{Streams: true, MaxOutputTokens: c.most, Prediction: estimate.Prediction{Sequences: c.sequences}}
		k.startOutputGrowth(e, mean, time.Minute)
		e.prefilled = true
		if got := k.outputTokensInFlight(time.Minute); got != 0 {
			t.Errorf("%s: %.0f tokens at the beginning", name, got)
		}
		if got, want := k.outputTokensInFlight(time.Minute+100*time.Millisecond), 0.1*DefaultDecodeRate*float64(c.sequences); got != want {
			t.Errorf("%s: grown to %.0f tokens in 0.1 s, want %.0f", name, got, want)
		}
		if got := k.outputTokensInFlight(time.Hour); got != c.want {
			t.Errorf("%s: grown to %.0f tokens in an hour, want %.0f", name, got, c.want)
		}
		k.recordEnd(e, &Outcome{End: ClientDisconnected}, time.Hour)
		if got := k.outputTokensInFlight(time.Hour); got != 0 || k.sequences != 0 || k.began != 0 || k.maxOutput != 0 {
			t.Errorf("%s: %.0f tokens left at the end: %+v", name, got, k)
		}
	}
}

// Only the output of a complete stream tells how fast an engine decodes.
func TestDecodeRateLearning(t *testing.T) {
	for _, c := range []struct {
		name    string
		streams bool
		outcome Outcome
		elapsed time.Duration
		learns  bool
	}{
		{"complete", true, Outcome{End: Completed, OutputTokens: 100}, time.Second, true},
		{"one token", true, Outcome{End: Completed, OutputTokens: 1}, time.Second, false},
		{"no time", true, Outcome{End: Completed, OutputTokens: 100}, 0, false},
		{"truncated", true, Outcome{End: Truncated, OutputTokens: 100}, time.Second, false},
		{"not streamed", false, Outcome{End: Completed, OutputTokens: 100}, time.Second, false},
	} {
		k := newKVAccount()
		e := &Entry{Streams: c.streams, Prediction: estimate.Prediction{Sequences: 2}}
		k.startOutputGrowth(e, 250, 0)
		e.prefilled = true
		k.recordEnd(e, &c.outcome, c.elapsed)
		if learned := k.decodeRate.Value != DefaultDecodeRate; learned != c.learns {
			t.Errorf("%s: the decode rate is %.1f", c.name, k.decodeRate.Value)
		}
		if c.learns && k.decodeRate.Value >= 50 {
			t.Errorf("%s: the decode rate is %.1f, more than the 50 tokens a second of each sequence", c.name, k.decodeRate.Value)
		}
	}
}

func TestObservedKVUse(t *testing.T) {
	for _, c := range []struct {
		name        string
		load        backends.Load
		own, unseen float64
		external    float64
		nearlyFull  bool
	}{
		{"nothing known", backends.Load{}, 1000, 0, 0, true},
		{"size unknown", backends.Load{KVKnown: true, KVCacheUsage: 0.5}, 1000, 0, 0, false},
		{"as our own account", backends.Load{KVKnown: true, CacheTokens: 10_000, KVCacheUsage: 0.1}, 1000, 0, 0, false},
		{"of other clients", backends.Load{KVKnown: true, CacheTokens: 10_000, KVCacheUsage: 0.4}, 1000, 0, 3000, false},
		{"less than our own, all running", backends.Load{KVKnown: true, CacheTokens: 10_000, QueuesKnown: true, Running: 2, OwnInFlight: 2}, 1000,
			0, 0, false},
		{"half of ours has finished", backends.Load{KVKnown: true, CacheTokens: 10_000, QueuesKnown: true, Running: 1, OwnInFlight: 2}, 1000, 0,
			-500, false},
		{"all of ours has finished but what is unseen", backends.Load{KVKnown: true, CacheTokens: 10_000, QueuesKnown: true, OwnInFlight: 2},
			1000, 300, -700, false},
		{"full", backends.Load{KVKnown: true, CacheTokens: 10_000, KVCacheUsage: 1}, 10_000, 0, 0, true},
	} {
		k := newKVAccount()
		k.observe(&c.load, c.own, c.unseen)
		if k.external != c.external || k.nearlyFull != c.nearlyFull || k.capacity != c.load.CacheTokens {
			t.Errorf("%s: %+v, want %.0f external tokens, nearly full %v", c.name, k, c.external, c.nearlyFull)
		}
	}
}

func TestIsExpectedLoad(t *testing.T) {
	expected := func() backends.Load {
		return backends.Load{
			QueuesKnown: true, Running: 8, Waiting: 2, OwnInFlight: 10, CacheTokens: 10_000, KVKnown: true, KVCacheUsage: 0.4, TokensKnown: true,
		}
	}
	for name, c := range map[string]struct {
		change func(l *backends.Load)
		own    float64 // KV tokens
		unseen float64
		want   bool
	}{
		"what is ours": {func(*backends.Load) {}, 4000, 0, true},
		"idle": {func(l *backends.Load) {
			*l = backends.Load{QueuesKnown: true, CacheTokens: 10_000, KVKnown: true}
		}, 0, 0, true},
		"one of another client":              {func(l *backends.Load) { l.Running++ }, 4000, 0, false},
		"one of another client, idle for us": {func(l *backends.Load) { *l = backends.Load{QueuesKnown: true, Running: 1} }, 0, 0, false},
		"two of ours being tokenized":        {func(l *backends.Load) { l.Waiting = 0 }, 4000, 0, true},
		"three of ours finished":             {func(l *backends.Load) { l.Running, l.Waiting = 7, 0 }, 4000, 0, false},
		"a tenth of many":                    {func(l *backends.Load) { l.Running, l.Waiting, l.OwnInFlight = 90, 0, 100 }, 4000, 0, true},
		"more than a tenth of many":          {func(l *backends.Load) { l.Running, l.Waiting, l.OwnInFlight = 89, 0, 100 }, 4000, 0, false},
		"waiting for room":                   {func(l *backends.Load) { l.WaitingForCapacity = 2 }, 4000, 0, false},
		"more KV cache than ours":            {func(*backends.Load) {}, 2900, 0, false},
		"little more KV cache than ours":     {func(*backends.Load) {}, 3100, 0, true},
		"less KV cache than ours":            {func(*backends.Load) {}, 5100, 0, false},
		"less, but prompts are to come":      {func(*backends.Load) {}, 5100, 1000, true},
		"almost no room left":                {func(l *backends.Load) { l.KVCacheUsage = 0.8 }, 8000, 0, false},
		"KV cache unknown":                   {func(l *backends.Load) { l.KVKnown = false }, 9000, 0, true},
		"size of the KV cache unknown":       {func(l *backends.Load) { l.CacheTokens = 0 }, 9000, 0, true},
		"queues unknown":                     {func(l *backends.Load) { l.QueuesKnown = false }, 4000, 0, false},
		"asleep":                             {func(l *backends.Load) { *l = backends.Load{QueuesKnown: true, Asleep: true} }, 0, 0, false},
	} {
		l := expected()
		c.change(&l)
		if got := isExpectedLoad(&l, c.own, c.unseen); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// What a poll showed of other clients counts until three that should have followed are
// missing, also where they were to follow later.
func TestPollAgeWithBackoff(t *testing.T) {
	for name, c := range map[string]struct {
		usage    float64
		expected bool
		recent   time.Duration
	}{
		"not expected": {0.5, false, 3 * time.Second},
		"expected":     {0.05, true, 15 * time.Second},
	} {
		f := newFleet(1)
		load := f.poll(0, backends.Load{QueuesKnown: true, KVKnown: true, CacheTokens: 10_000, KVCacheUsage: c.usage, WaitingForCapacity: 1})
		load.WaitingForCapacity = 0
		f.RecordLoadExpected(0, load, true, f.now)
		if got := f.IsLoadExpected(0); got != c.expected {
			t.Errorf("%s: expected is %v", name, got)
		}
		for _, wait := range []time.Duration{c.recent, time.Millisecond} {
			f.now = f.now.Add(wait)
			figures := f.Figures(0, f.now)
			if recent := wait == c.recent; (figures.UsedKVTokens > 0) != recent || figures.HasWaiting != recent {
				t.Errorf("%s: %.0f tokens in use and waiting is %v after %v", name, figures.UsedKVTokens, figures.HasWaiting, f.now.Sub(f.start))
			}
		}
	}
}
