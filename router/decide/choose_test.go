package decide

import (
	"math"
	"testing"

	"warmroute/backends"
	"warmroute/router/estimate"
	"warmroute/router/policy"
)

func TestReason(t *testing.T) {
	for _, tc := range []struct {
		name    string
		serving int // backends
		blocks  int
		matched []int // blocks, by slot
		chosen  int
		change  func(*Fleet, *Query)
		want    string
	}{
		{"the longest match", 3, 10, []int{2, 8, 0}, 1, nil, ReasonPrefix},
		{"one of two longest matches", 3, 10, []int{8, 8, 0}, 1, nil, ReasonPrefix},
		{"a shorter match", 3, 10, []int{2, 8, 0}, 0, nil, ReasonMatchedBusy},
		{"no match", 3, 10, []int{2, 8, 0}, 2, nil, ReasonMatchedBusy},
		{"none holds any", 3, 10, []int{0, 0, 0}, 1, nil, ReasonNoMatch},
		{"no blocks", 3, 0, []int{0, 0, 0}, 1, nil, ReasonLoad},
		{"the only one", 1, 10, []int{8}, 0, nil, ReasonOnly},
		{"the only one, without blocks", 1, 0, []int{0}, 0, nil, ReasonOnly},
		{"the only one left", 2, 10, []int{0, 8}, 0, func(f *Fleet, _ *Query) { f.Backends[1].State = backends.Down }, ReasonOnly},
		{"the stored response", 1, 10, []int{8}, 0, func(_ *Fleet, q *Query) { q.Stored = true }, ReasonStored},
		{"another policy", 3, 10, []int{2, 8, 0}, 1, func(f *Fleet, _ *Query) {
			f.Policy.Name, f.Policy.ReportsMatchReason = "least-load", false
		}, "least-load"},
		{"the stored response, another policy", 1, 10, []int{8}, 0, func(f *Fleet, q *Query) {
			f.Policy.ReportsMatchReason, q.Stored = false, true
		}, ReasonStored},
	} {
		f, all := newFleet(t, tc.serving)
		q := newQuery(all, tc.blocks)
		copy(q.Matched, tc.matched)
		if tc.change != nil {
			tc.change(f, q)
		}
		var c Candidates
		if err := f.Filter(q, &c); err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		if got := f.Reason(q, &c, f.choice(&c, tc.chosen)); got != tc.want {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
	}
}

// lastCandidate is a policy that chooses the last candidate.
type lastCandidate struct{ seen *policy.Request }

func (p *lastCandidate) Choose(r *policy.Request, candidates []policy.Candidate) int {
	p.seen = r
	return len(candidates) - 1
}

func TestChoose(t *testing.T) {
	f, all := newFleet(t, 3)
	q := newQuery(all, 10)
	q.Conversation, q.PromptKey, q.Client, q.Tried = 5, 6, 7, all[2:]
	var c Candidates
	if err := f.Filter(q, &c); err != nil {
		t.Fatal(err)
	}
	rule := &lastCandidate{}
	choice := f.Choose(q, &c, rule, nil)
	if choice.Backend.Backend != all[1] || choice.Candidate.Slot != 1 {
		t.Errorf("chose %s", choice.Backend.Backend.Name)
	}
	want := policy.Request{
		Now: testTime, BlockTokens: blockTokens, PromptTokens: 10 * blockTokens, PromptKey: 6, Conversation: 5, Client: 7, Retry: true,
		MeanOutputTokens: f.Estimates.OutputTokens(0),
	}
	got := *rule.seen
	if len(got.Blocks) != 10 || rule.seen != c.PolicyRequest() {
		t.Errorf("the policy saw %d blocks", len(got.Blocks))
	}
	got.Blocks = nil
	if !equalRequests(got, want) {
		t.Errorf("the policy saw %+v, want %+v", got, want)
	}

	q.MaxOutputTokens = 7
	if f.Choose(q, &c, rule, nil); rule.seen.MeanOutputTokens != 7 {
		t.Errorf("%v output tokens are expected, where the client allows 7", rule.seen.MeanOutputTokens)
	}
}

// equalRequests compares requests without blocks.
func equalRequests(a, b policy.Request) bool {
	return a.Now.Equal(b.Now) && a.BlockTokens == b.BlockTokens && a.PromptTokens == b.PromptTokens && a.PromptKey == b.PromptKey &&
		a.Turn == b.Turn && a.Retry == b.Retry && a.Conversation == b.Conversation && a.Client == b.Client &&
		a.MeanOutputTokens == b.MeanOutputTokens &&
		a.MeanUncachedTokens == b.MeanUncachedTokens && a.Waiting == b.Waiting && a.Trace == b.Trace
}

func TestFillCandidate(t *testing.T) {
	f, all := newFleet(t, 1)
	b := &f.Backends[0]
	b.NameHash, b.Weight, b.Device, b.KnownInFlight, b.ExternalRequests, b.ExternalTokens = 99, 2, 4, 3, 1.5, 100
	b.MissingHits = 0.25
	b.QueuedSeconds, b.Requests, b.UnstartedTokens, b.UnstartedAttention = 0.5, 4, 500, 600
	b.OwnKVTokens, b.ContextTokens = 700, 900
	b.Capacity, b.UsedKVTokens = 12_000, 12_000
	b.Load = &backends.Load{Engines: 3, Waiting: 2, KVCacheUsage: 0.5, CacheTokens: 12_000, RunningAdapters: []string{"other"}}
	q := newQuery(all, 10)
	q.Matched[0], q.Adapter = 8, "sql"
	var got policy.Candidate
	f.fillCandidate(&got, q, b)
	steps := f.Estimates.Step(0)
	want := policy.Candidate{
		NameHash: 99, Weight: 2, Device: 4, MatchedTokens: 8 * blockTokens, UncachedTokens: 2 * blockTokens,
		PrefillSeconds: steps.PrefillSeconds(8*blockTokens, 2*blockTokens),
		StepSeconds: (1+2.*blockTokens/estimate.StepTokens)*steps.DecodeSeconds(4.5/3, (900+1.5*10*blockTokens)/3) +
			f.Estimates.RequestSeconds(0, 10*blockTokens),
		QueuedSeconds: 0.5/3 + 100./prefillRate, AdapterSeconds: f.Ledger.AdapterCost(0, "sql", b.Load), InFlight: 3 + 1.5,
		KVWaitSeconds: f.kvWait(q, b), ContextTokens: 900 + 1.5*10*blockTokens, KVTokens: 700, Engines: 3, Step: steps, PrefillRate: prefillRate,
		Requests: 2, UnstartedTokens: 250, UnstartedAttention: 300,
		Waiting: 2, KVUsage: 0.5, CacheTokens: 12_000, EngineCacheTokens: 4000,
	}
	if got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if want.AdapterSeconds == 0 || want.KVWaitSeconds == 0 {
		t.Errorf("an adapter costs %v, and waiting for room %v", want.AdapterSeconds, want.KVWaitSeconds)
	}
	b.Load.Engines = 1
	if f.fillCandidate(&got, q, b); got.MatchedTokens != 0.75*8*blockTokens {
		t.Errorf("of 512 tokens, of which a quarter was missing lately, %v match, want 384", got.MatchedTokens)
	}

	f.Policy.NeedsKVWait, b.Load, b.MissingHits = false, nil, 0
	q.Matched[0], q.Adapter = 10, ""
	f.fillCandidate(&got, q, b)
	if got.MatchedTokens != 10*blockTokens || got.UncachedTokens != 16 {
		t.Errorf("of a prompt that it holds, %v tokens match and %v do not, want 640 and 16", got.MatchedTokens, got.UncachedTokens)
	}
	if got.AdapterSeconds != 0 || got.KVWaitSeconds != 0 || got.Waiting != 0 || got.KVUsage != 0 ||
		got.CacheTokens != 0 || got.EngineCacheTokens != 0 {
		t.Errorf("what is unknown, or needed by no rule, is filled in: %+v", got)
	}
}

func TestLeastPrefill(t *testing.T) {
	medianRate := estimate.New(256, 1).MedianPrefillRate() // while nothing is known
	known, _ := newFleet(t, 1)
	holder := known.Estimates.Step(0).PrefillSeconds(6*blockTokens, 4*blockTokens)
	others := known.Estimates.Step(0).PrefillSeconds(0, 10*blockTokens)
	down := func(b *Backend) { b.State = backends.Down }
	full := func(b *Backend) { b.MaxInFlight, b.KnownInFlight = 1, 1 }
	ready := func(*Backend) {}
	for _, tc := range []struct {
		name   string
		change [3]func(*Backend)
		want   Prefill
	}{
		{"three candidates", [3]func(*Backend){ready, ready, ready}, Prefill{4 * blockTokens, 14_000, holder}},
		{"one is down", [3]func(*Backend){ready, ready, down}, Prefill{4 * blockTokens, 12_000, holder}},
		{"one will work on it as well", [3]func(*Backend){ready, ready, full}, Prefill{4 * blockTokens, 14_000, holder}},
		{"the holder is down", [3]func(*Backend){ready, down, ready}, Prefill{10 * blockTokens, 10_000, others}},
		{"none", [3]func(*Backend){down, down, down}, Prefill{10 * blockTokens, medianRate, 10 * blockTokens / medianRate}},
		{"none but a full one", [3]func(*Backend){down, down, full}, Prefill{10 * blockTokens, 2000, others}},
		{"the holder is full, and the others are down", [3]func(*Backend){down, full, down}, Prefill{4 * blockTokens, 4000, holder}},
	} {
		f, all := newFleet(t, 3)
		for slot, rate := range []float64{8000, 4000, 2000} {
			f.Backends[slot].PrefillRate = rate
			tc.change[slot](&f.Backends[slot])
		}
		q := newQuery(all, 10)
		q.Matched[1] = 6
		var c Candidates
		_ = f.Filter(q, &c) // it may find none
		if got := f.LeastPrefill(q, &c); got != tc.want {
			t.Errorf("%s: got %+v, want %+v", tc.name, got, tc.want)
		}
	}
}

// TestOffloadedTokens has a prompt of ten blocks, the first four of which were used again later.
func TestOffloadedTokens(t *testing.T) {
	for _, tc := range []struct {
		name            string
		offloadedBefore uint64
		missing         float64
		tokens          float64 // offloaded
	}{
		{"no other cache than the GPU's", 0, 0, 0},
		{"all on the GPU", 1, 0, 0},
		{"the last six blocks elsewhere", 3, 0, 6 * blockTokens},
		{"of these, some are missing", 3, 0.1, 5 * blockTokens},
		{"all elsewhere", 5, 0, 10 * blockTokens},
	} {
		f, all := newFleet(t, 1)
		q := newQuery(all, 10)
		f.Ledger.IndexPrompt(0, q.Blocks)
		f.Ledger.IndexPrompt(0, q.Blocks[:4])
		q.Matched[0] = 10
		b := &f.Backends[0]
		b.Offloading, b.QueuedFetchTokens, b.MissingHits = Offloading{Before: tc.offloadedBefore, FetchSeconds: 0.001}, 50, tc.missing
		var c policy.Candidate
		f.fillCandidate(&c, q, b)
		seconds := 0.0
		if tc.tokens > 0 {
			seconds = 0.001 * (50 + tc.tokens)
		}
		if math.Abs(c.OffloadedTokens-tc.tokens) > 1e-9 || math.Abs(c.FetchSeconds-seconds) > 1e-9 || math.Abs(c.WaitSeconds()-seconds) > 1e-9 {
			t.Errorf("%s: %v tokens, %v s to fetch them, %v s before its prefill; want %v, %v",
				tc.name, c.OffloadedTokens, c.FetchSeconds, c.WaitSeconds(), tc.tokens, seconds)
		}
	}
}

// TestSharedStore has a prompt of ten blocks, of which one backend holds two and another one eight.
func TestSharedStore(t *testing.T) {
	for _, tc := range []struct {
		share              float64
		matched, offloaded float64
	}{
		{0, 2 * blockTokens, 0},
		{0.5, 5 * blockTokens, 3 * blockTokens},
		{1, 8 * blockTokens, 6 * blockTokens},
	} {
		f, all := newFleet(t, 2)
		q := newQuery(all, 10)
		q.Matched[0], q.Matched[1] = 2, 8
		for slot := range f.Backends {
			f.Backends[slot].Offloading = Offloading{FetchSeconds: 0.001, StoreShare: tc.share}
		}
		var c, longest policy.Candidate
		f.fillCandidate(&c, q, &f.Backends[0])
		f.fillCandidate(&longest, q, &f.Backends[1])
		if c.MatchedTokens != tc.matched || c.OffloadedTokens != tc.offloaded || math.Abs(c.FetchSeconds-0.001*tc.offloaded) > 1e-9 {
			t.Errorf("a share of %v: %v tokens matched, %v of them offloaded, which take %v s",
				tc.share, c.MatchedTokens, c.OffloadedTokens, c.FetchSeconds)
		}
		if longest.MatchedTokens != 8*blockTokens || longest.OffloadedTokens != 0 {
			t.Errorf("a share of %v: the one that holds eight blocks has %v tokens, %v of them offloaded",
				tc.share, longest.MatchedTokens, longest.OffloadedTokens)
		}
	}
}
