package decide

import (
	"math"
	"testing"

	"warmroute/backends"
	"warmroute/router/health"
	"warmroute/router/policy"
)

// explain explains a request for which every backend has headroom, and the choice of a policy.
func explain(f *Fleet, q *Query, by policy.Policy) (e *Explanation, blockedReason string) {
	e = f.Explain(q, func(int) bool { return true })
	var c Candidates
	if err := f.Filter(q, &c); err != nil {
		e.Refused = err.Error()
	} else {
		blockedReason = f.ExplainChoice(e, q, &c, by)
	}
	return e, blockedReason
}

func TestExplain(t *testing.T) {
	f, all := newFleet(t, 4)
	f.Backends[1].State = backends.Down
	f.Shared = true
	f.Backends[2].KnownInFlight, f.Backends[2].Pending, f.Backends[2].QueuedTokens, f.Backends[2].QueuedSeconds = 1, 1, 20_000, 2.5
	f.Backends[2].Load = &backends.Load{KVKnown: true, KVCacheUsage: 0.5}
	q := newQuery(all[:3], 10)
	q.Matched = []int{5, 0, 10, 0}
	q.CatalogID, q.Bytes = "m", q.Bytes+3
	e, blocked := explain(f, q, &policy.Prefix{})
	if e.Model != "m" || e.Blocks != 10 || e.PromptTokens != 641 || e.BlockBytes != blockBytes || e.Policy != "prefix" {
		t.Errorf("the request is explained as %+v", e)
	}
	if e.Choice != "b0" || e.Reason != ReasonMatchedBusy || blocked != "" {
		t.Errorf("chose %q for %q, blocked by %q", e.Choice, e.Reason, blocked)
	}
	b := e.Backends
	if len(b) != 4 || !b[0].Candidate || b[1].Candidate || !b[2].Candidate || b[3].Candidate {
		t.Fatalf("candidates of %+v", b)
	}
	if b[0].MatchedTokens != 320 || b[0].UncachedTokens != 320.75 || b[0].KVUsage != -1 || b[0].Queued != "" || b[0].TTFTSeconds != 0.091 {
		t.Errorf("b0: got %+v", b[0])
	}
	for i := range b { // the columns follow from each other
		if sum := b[i].WaitSeconds + b[i].UncachedTokens/b[i].PrefillRate + b[i].StepSeconds; math.Abs(sum-b[i].TTFTSeconds) > 0.0021 ||
			b[i].StepSeconds == 0 {
			t.Errorf("%s: a TTFT of %v s, and a sum of %v s of %+v", b[i].Name, b[i].TTFTSeconds, sum, b[i])
		}
	}
	if b[1].Filter != "unready" || b[1].WhyNot != "is not ready" || b[1].Score != nil {
		t.Errorf("b1: got %+v", b[1])
	}
	if b[2].KVUsage != 0.5 || b[2].Queued != BlockedByPrefill.String() || b[2].QueuedTokens != 20_000 {
		t.Errorf("b2: got %+v", b[2])
	}
	if b[0].Score == nil || b[2].Score == nil || *b[2].Score <= *b[0].Score {
		t.Fatalf("scores %v and %v", b[0].Score, b[2].Score)
	}
	if b[3].Filter != "model" || b[3].WhyNot != notServed {
		t.Errorf("b3: got %+v", b[3])
	}
	sum := 0.0
	for _, term := range b[2].Terms {
		sum += term.Seconds
	}
	if difference := sum - *b[2].Score; difference > 0.01 || difference < -0.01 {
		t.Errorf("the terms of b2 add up to %v, its score is %v", sum, *b[2].Score)
	}
}

func TestExplainFilter(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(f *Fleet, b *Backend, q *Query)
		want   string
	}{
		{"preferred", func(*Fleet, *Backend, *Query) {}, ""},
		{"a filter", func(_ *Fleet, b *Backend, _ *Query) { b.Breaker = health.BreakerOpen }, "breaker_open"},
		{"another model", func(_ *Fleet, _ *Backend, q *Query) { q.Backends = nil }, "model"},
		{"another model, and down", func(_ *Fleet, b *Backend, q *Query) { b.State, q.Backends = backends.Down, nil }, "model"},
		{"the stored response of another", func(_ *Fleet, _ *Backend, q *Query) { q.Backends, q.Stored = nil, true }, "stored"},
		{"a low-priority request", func(f *Fleet, _ *Backend, q *Query) { f.LimitsLowPriority, q.Priority = true, 1 }, "headroom"},
		{"a low-priority request, filtered", func(f *Fleet, b *Backend, q *Query) {
			f.LimitsLowPriority, q.Priority, b.Stalled = true, 1, true
		}, "stalled"},
	} {
		f, all := newFleet(t, 1)
		q := newQuery(all, 4)
		tc.change(f, &f.Backends[0], q)
		if got, description := f.explainFilter(q, &f.Backends[0], func(int) bool { return false }); got != tc.want || description == "" {
			t.Errorf("%s: filter %q, %q; want %q", tc.name, got, description, tc.want)
		}
	}
}

// scored returns a candidate with a score.
func scored(name string, score, ttft float64) BackendExplanation {
	return BackendExplanation{Name: name, Candidate: true, Score: &score, TTFTSeconds: ttft}
}

func TestDescribe(t *testing.T) {
	filtered := func(names ...string) (list []BackendExplanation) {
		for _, n := range names {
			list = append(list, BackendExplanation{Name: n, WhyNot: "is not ready"})
		}
		return list
	}
	cost := func(b BackendExplanation, matched, queued, inFlight float64) BackendExplanation {
		b.MatchedTokens, b.QueuedTokens, b.InFlight, b.Terms = matched, queued, inFlight, []policy.Term{{Name: "queue"}}
		return b
	}
	offloaded := func(b BackendExplanation, tokens float64) BackendExplanation {
		b.Offloaded = tokens
		return b
	}
	for _, tc := range []struct {
		name string
		e    Explanation
		want string
	}{
		{
			"refused",
			Explanation{Refused: "no backend is ready", Backends: append(filtered("a"), BackendExplanation{Name: "b", WhyNot: notServed})},
			"No backend can accept it now: a is not ready. It would be refused: no backend is ready.",
		},
		{
			"queued without a candidate",
			Explanation{Queued: "no backend is ready", Backends: filtered("a", "b", "c", "d", "e", "f")},
			"No backend can accept it now: a is not ready, b is not ready, c is not ready, d is not ready, and 2 more. " +
				"It would wait in the admission queue: no backend is ready.",
		},
		{
			"nothing serves the model",
			Explanation{Refused: "no backend is ready"},
			"No backend can accept it now. It would be refused: no backend is ready.",
		},
		{
			"stored",
			Explanation{Choice: "a", Reason: ReasonStored, Backends: []BackendExplanation{scored("a", 0, 0)}},
			"a holds the stored response to which the request refers.",
		},
		{
			"the only one",
			Explanation{Choice: "a", Reason: ReasonOnly, PromptTokens: 2112, Backends: append(filtered("b"), cost(scored("a", 0, 0), 1984, 0, 0))},
			"a is the only candidate, and holds 1,984 of 2,112 prompt tokens: b is not ready.",
		},
		{
			"the only one, queued",
			Explanation{Choice: "a", Reason: ReasonOnly, Queued: "its prefill queue is full", Backends: []BackendExplanation{scored("a", 0, 0)}},
			"a is the only candidate, and holds nothing of its prompt. " +
				"It would wait in the admission queue, most likely for a: its prefill queue is full.",
		},
		{
			"what is not on the GPU",
			Explanation{Choice: "a", Reason: ReasonPrefix, PromptTokens: 2112, Backends: []BackendExplanation{
				cost(offloaded(scored("a", 100, 0.016), 1500), 1984, 0, 1), cost(offloaded(scored("b", 300, 0.2), 64), 64, 700, 2),
			}},
			"a holds 1,984 of 2,112 prompt tokens (1,500 of these not on its GPU) and responds soonest: 0.02 s against 0.20 s on b, " +
				"which has 700 tokens to compute before it and 2 in flight and holds 64 (64 of these not on its GPU).",
		},
		{
			"the longest match responds soonest",
			Explanation{Choice: "a", Reason: ReasonPrefix, PromptTokens: 2112, Backends: []BackendExplanation{
				cost(scored("b", 500, 0.264), 0, 0, 0), cost(scored("a", 100, 0.016), 1984, 0, 1), cost(scored("c", 300, 0.2), 64, 700, 2),
			}},
			"a holds 1,984 of 2,112 prompt tokens and responds soonest: 0.02 s against 0.20 s on c, " +
				"which has 700 tokens to compute before it and 2 in flight and holds 64.",
		},
		{
			"the lowest cost",
			Explanation{Choice: "a", Reason: ReasonNoMatch, PromptTokens: 2112, Backends: []BackendExplanation{
				cost(scored("a", 1, 12), 0, 0, 0), cost(scored("b", 2.004, 0.005), 0, 0, 3),
			}},
			"No candidate holds any of its 2,112 prompt tokens, and a has the lowest cost: " +
				"1.00 s against 2.00 s on b, which has 3 in flight and holds nothing.",
		},
		{
			"match busy, within the SLO",
			Explanation{Choice: "a", Reason: ReasonMatchedBusy, PromptTokens: 100, Backends: []BackendExplanation{
				cost(scored("a", 900, 12), 10, 0, 0), cost(scored("b", 500, 11), 90, 800, 1),
			}},
			"b holds more, 90 of 100 prompt tokens, but has 800 tokens to compute before it and 1 in flight; a holds 10 of 100 prompt tokens " +
				"and has the longest match of those expected to meet slo.ttft, with a TTFT of 12 s.",
		},
		{
			"a tie by conversation, no prompt",
			Explanation{Choice: "a", Reason: ReasonLoad, hasConversation: true, Backends: []BackendExplanation{
				cost(scored("a", 16, 0.002), 0, 0, 0), cost(scored("b", 16, 0.002), 0, 0, 0),
			}},
			"The request has no prompt to match, and a costs the same as b, but is preferred by a hash of the conversation and the backend's name.",
		},
		{
			"a tie by prompt, a short prompt",
			Explanation{Choice: "a", Reason: ReasonLoad, PromptTokens: 2, BlockBytes: 256, Backends: []BackendExplanation{
				cost(scored("a", 16, 0.002), 0, 0, 0), cost(scored("b", 16, 0.002), 0, 0, 0),
			}},
			"The prompt is shorter than a block of 256 bytes, so nothing of it is matched, and a costs the same as b, " +
				"but is preferred by a hash of the prompt and the backend's name.",
		},
		{
			"another policy",
			Explanation{Policy: "p", Choice: "a", Reason: "p", ScoreIs: "load", Backends: []BackendExplanation{
				scored("a", 1, 0), scored("c", 3, 0), scored("b", 2.5, 0),
			}},
			"Policy p picks a by load: 1 against 2.5 on b.",
		},
		{
			"another policy, the highest wins",
			Explanation{Policy: "p", Choice: "a", Reason: "p", ScoreIs: "match", HighestWins: true, Backends: []BackendExplanation{
				scored("a", 4, 0), scored("b", 2.5, 0), scored("c", 3, 0),
			}},
			"Policy p picks a by match: 4 against 3 on c.",
		},
		{
			"another policy, a tie",
			Explanation{Policy: "p", Choice: "a", Reason: "p", ScoreIs: "load", Backends: []BackendExplanation{
				scored("a", 1, 0), scored("b", 1, 0),
			}},
			"Policy p picks a by load: 1, the same as b; the tie is broken at random or by another criterion.",
		},
		{
			"another policy, without scores",
			Explanation{Policy: "p", Choice: "a", Reason: "p", ScoreIs: "chance", Backends: []BackendExplanation{
				{Name: "a", Candidate: true}, {Name: "b", Candidate: true},
			}},
			"Policy p picks a by chance.",
		},
		{
			"another policy, a score of one",
			Explanation{Policy: "p", Choice: "a", Reason: "p", ScoreIs: "load", Backends: []BackendExplanation{
				scored("a", 1, 0), {Name: "b", Candidate: true},
			}},
			"Policy p picks a by load: 1.",
		},
	} {
		if got := tc.e.Describe(); got != tc.want {
			t.Errorf("%s: got  %s\nwant %s", tc.name, got, tc.want)
		}
	}
}

func TestGroupDigits(t *testing.T) {
	for n, want := range map[int]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567", -1000: "-1,000", -999: "-999"} {
		if got := groupDigits(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}
