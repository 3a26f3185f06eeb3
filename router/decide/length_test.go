package decide

import (
	"slices"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/estimate"
)

func TestIsTooLong(t *testing.T) {
	const limit = 100 // tokens; at six bytes each, 600 bytes of text
	learnMedia := func(f *Fleet) {
		p := estimate.Prediction{Bytes: prompt.MediaBytes, Media: prompt.MediaCounts{prompt.Image: 1}}
		for range 20 {
			f.Estimates.LearnFromCompletion(0, &p, estimate.Usage{PromptTokens: 120}, estimate.CacheInfo{Alignment: 1})
		}
	}
	learnBoth := func(f *Fleet) { learnTextLength(f); learnMedia(f) }
	withImage := func(textBlocks int) func(*Request) {
		return func(req *Request) {
			req.Media, req.MediaItems = true, []prompt.MediaPosition{{Kind: prompt.Image, Counts: prompt.MediaCounts{prompt.Image: 1}}}
			req.Blocks = make([]prompt.Block, textBlocks+(prompt.MediaBytes+blockBytes-1)/blockBytes)
		}
	}
	for _, tc := range []struct {
		name     string
		blocks   int
		capacity int // of the cache
		model    int // limit of the model
		change   func(*Request)
		learn    func(*Fleet)
		want     bool
	}{
		{"no limit is known", 10_000, 0, 0, nil, learnTextLength, false},
		{"fits the cache", 2, limit, 0, nil, learnTextLength, false},
		{"beyond the cache", 3, limit, 0, nil, learnTextLength, true},
		{"fits the model", 2, 0, limit, nil, learnTextLength, false},
		{"beyond the model", 3, 0, limit, nil, learnTextLength, true},
		{"beyond the cache, not the model", 3, limit, 10 * limit, nil, learnTextLength, true},
		{"beyond the model, not the cache", 3, 10 * limit, limit, nil, learnTextLength, true},
		{"no text was seen: at most 32 bytes a token", 12, limit, 0, nil, nil, false},
		{"no text was seen: beyond that", 13, limit, 0, nil, nil, true},
		{"token ids", 2, limit, 0, func(req *Request) { req.TextClass = prompt.TokenIDs }, nil, true},
		{"fitting token ids", 1, limit, 0, func(req *Request) { req.TextClass = prompt.TokenIDs }, nil, false},
		{"no blocks", 0, limit, 0, func(req *Request) { req.Bytes = 1 << 20 }, learnTextLength, false},
		{"many sequences", 2, limit, 0, func(req *Request) { req.Sequences, req.Bytes = 8, 8*req.Bytes }, learnTextLength, false},
		{"media of which nothing is known", 100, limit, 0, func(req *Request) { req.Media = true }, learnTextLength, false},
		{"an image, whose tokens are not known", 0, limit, 0, withImage(100), learnTextLength, false},
		{"an image, half of whose tokens leave room", 0, 2 * limit, 0, withImage(1), learnBoth, false},
		{"an image, half of whose tokens leave too little", 0, 2 * limit, 0, withImage(3), learnBoth, true},
	} {
		f, all := newFleet(t, 1)
		if tc.learn != nil {
			tc.learn(f)
		}
		req := newQuery(all, tc.blocks).Request
		req.ContextLengths = contextLengths(t, tc.model)
		if tc.change != nil {
			tc.change(req)
		}
		f.Backends[0].Capacity = tc.capacity
		if got := f.IsTooLong(req, &f.Backends[0]); got != tc.want {
			t.Errorf("%s: too long %v, want %v", tc.name, got, tc.want)
		}
	}
}

func TestIsTooLongForAll(t *testing.T) {
	f, all := newFleet(t, 2)
	learnTextLength(f)
	req := newQuery(all, 10).Request
	f.Backends[0].Capacity, f.Backends[1].Capacity = 100, 10_000
	if f.IsTooLongForAll(req) {
		t.Error("too long for all, although it fits one")
	}
	if f.Backends[1].Capacity = 100; !f.IsTooLongForAll(req) {
		t.Error("it fits none, and is not too long for all")
	}
	if f.Backends[1].Backend = nil; f.IsTooLongForAll(req) {
		t.Error("too long for all, although one is not known")
	}
}

// TestContextLengthFilters has a short and a long backend, and prompts of 64 tokens a block.
func TestContextLengthFilters(t *testing.T) {
	const short, long = "context_length", "context_length_near"
	for _, tc := range []struct {
		name    string
		lengths [2]int
		blocks  int
		change  func(*Fleet, *Query)
		want    [2]string // the filters of the backends
	}{
		{"it fits both", [2]int{4000, 64_000}, 10, nil, [2]string{}},
		{"with its margin it may not fit", [2]int{4000, 64_000}, 50, nil, [2]string{long}},
		{"of one that may not fit, the known tokens are certain", [2]int{4000, 64_000}, 50, func(_ *Fleet, q *Query) {
			q.Linked = LinkedPrefix{Blocks: 50, Bytes: 50 * blockBytes, Tokens: 3200, KVTokens: 3200}
		}, [2]string{}},
		{"with the maximum of its output", [2]int{4000, 64_000}, 10, func(_ *Fleet, q *Query) { q.MaxOutputTokens = 3500 }, [2]string{long}},
		{"an output that alone is too long", [2]int{4000, 64_000}, 0, func(_ *Fleet, q *Query) { q.MaxOutputTokens = 4001 }, [2]string{long}},
		{"with a usual output", [2]int{4000, 64_000}, 48, nil, [2]string{long}},
		{"certainly too long", [2]int{4000, 64_000}, 100, nil, [2]string{short}},
		{"certainly too long for both", [2]int{4000, 5000}, 200, nil, [2]string{"prompt_too_long", "prompt_too_long"}},
		{"the longer is full", [2]int{4000, 64_000}, 100, func(f *Fleet, _ *Query) {
			f.Backends[1].MaxInFlight, f.Backends[1].KnownInFlight = 1, 1
		}, [2]string{short, "max_in_flight"}},
		{"the longer is down", [2]int{4000, 64_000}, 100, func(f *Fleet, _ *Query) {
			f.Backends[1].State = backends.Down
		}, [2]string{short, "unready"}},
		{"the longer was tried", [2]int{4000, 64_000}, 100, func(f *Fleet, q *Query) { q.Tried = q.Backends[1:] }, [2]string{short, "tried"}},
		{"the longer lacks the endpoint", [2]int{4000, 64_000}, 100, func(f *Fleet, q *Query) {
			f.Backends[1].Missing, q.Endpoint = 1<<3, 3
		}, [2]string{"prompt_too_long", "endpoint_missing"}},
		{"the longer is to be removed", [2]int{4000, 64_000}, 100, func(f *Fleet, _ *Query) {
			f.Backends[1].Retiring = true
		}, [2]string{"prompt_too_long"}},
		{"one does not say", [2]int{4000, 0}, 100, nil, [2]string{short}},
		{"none says", [2]int{0, 0}, 1000, nil, [2]string{}},
		{"truncated", [2]int{4000, 64_000}, 100, func(_ *Fleet, q *Query) { q.Truncates = true }, [2]string{}},
		{"refused by the shorter", [2]int{4000, 64_000}, 1, func(_ *Fleet, q *Query) { q.RefusedLength = 4000 }, [2]string{short}},
		{"refused by a shorter one than both", [2]int{4000, 64_000}, 1, func(_ *Fleet, q *Query) { q.RefusedLength = 2000 }, [2]string{long}},
		{"token ids are exact", [2]int{4000, 64_000}, 58, func(_ *Fleet, q *Query) { q.TextClass = prompt.TokenIDs }, [2]string{}},
		{"little is known of its text", [2]int{4000, 64_000}, 30, func(_ *Fleet, q *Query) { q.Model = "another" }, [2]string{long}},
		{"embeddings", [2]int{4000, 64_000}, 60, func(_ *Fleet, q *Query) { q.NonGenerative = true }, [2]string{}},
		{"a list of prompts", [2]int{4000, 64_000}, 10, func(_ *Fleet, q *Query) { q.Sequences, q.Bytes = 8, 8*q.Bytes }, [2]string{}},
		{"an image of which nothing is known", [2]int{4000, 64_000}, 20, func(_ *Fleet, q *Query) {
			q.Media, q.MediaItems = true, []prompt.MediaPosition{{Kind: prompt.Image, Counts: prompt.MediaCounts{prompt.Image: 1}}}
			q.Sizes.MediaTokens[prompt.Image] = 2000
		}, [2]string{long}},
	} {
		f, all := newFleet(t, 2)
		learnTextLength(f)
		q := newQuery(all, tc.blocks)
		q.ContextLengths = contextLengths(t, tc.lengths[:]...)
		if tc.change != nil {
			tc.change(f, q)
		}
		for slot := range all {
			got := ""
			if filter := f.findFilter(q, &f.Backends[slot]); filter != nil {
				got = filter.name
			}
			if got != tc.want[slot] {
				t.Errorf("%s: filter %q on the backend with %d tokens, want %q", tc.name, got, tc.lengths[slot], tc.want[slot])
			}
		}
		if isShort, fitting := tc.want[0] == short, f.FittingBackends(q.Request); isShort == slices.Contains(fitting, all[0]) ||
			!slices.Contains(fitting, all[1]) {
			t.Errorf("%s: %d backends fit", tc.name, len(fitting))
		}
	}
}

// TestWaitingForLongerBackend checks that a request waits for the only backend with a context that is long enough.
func TestWaitingForLongerBackend(t *testing.T) {
	f, all := newFleet(t, 2)
	learnTextLength(f)
	q := newQuery(all, 100)
	q.ContextLengths = contextLengths(t, 4000, 64_000)
	f.Backends[1].State = backends.Down
	var c Candidates
	if err := f.Filter(q, &c); err != ErrNoneReady {
		t.Errorf("%v, and candidates %v", err, c.backends)
	}
	if !f.NoneReady(q.Request, nil) || !f.HasUntriedBackend(q.Request, all[:1]) {
		t.Error("one is ready, or it is not worth waiting")
	}
	if f.HasUntriedBackend(q.Request, all[1:]) {
		t.Error("it waits for a backend whose context is too short")
	}
}

// TestContextLengthsOfSplitRequests has replicas for prefill with a shorter context than that of the replica for decode, or a longer one.
func TestContextLengthsOfSplitRequests(t *testing.T) {
	for _, tc := range []struct {
		name            string
		prefill, decode int
		output          int
		waits           bool // disaggregation.fallback: queue
		want            string
	}{
		{"both are long enough", 64_000, 128_000, 100, false, SplitDone},
		{"one token of output is enough for prefill", 64_000, 128_000, 60_000, false, SplitDone},
		{"too short for prefill", 4000, 128_000, 100, false, SplitNoPrefill},
		{"prefill may be too short", 15_000, 128_000, 100, false, SplitNoPrefill},
		{"nothing to wait for", 15_000, 128_000, 100, true, SplitNoPrefill},
		{"too short for decode", 64_000, 4000, 100, false, SplitNoDecode},
	} {
		f, all := newFleet(t, 2)
		learnTextLength(f)
		f.HasPrefillReplica = true
		setKVForms(f)
		f.Disaggregation = DisaggregationSettings{Lease: 30 * time.Second, MinUncachedTokens: 1, Queue: tc.waits}
		f.Backends[0].Role, f.Backends[1].Role = backends.RolePrefill, backends.RoleDecode
		q := newQuery(all, 200) // 12,800 tokens
		q.Splittable, q.MaxOutputTokens, q.ContextLengths = true, tc.output, contextLengths(t, tc.prefill, tc.decode)
		var c Candidates
		if err := f.Filter(q, &c); err != nil {
			t.Errorf("%s: %v", tc.name, err)
			continue
		}
		if s := f.DecideSplit(q, f.choice(&c, 0)); s.Result != tc.want {
			t.Errorf("%s: %q, want %q", tc.name, s.Result, tc.want)
		}
	}
}
