package decide

import (
	"math"
	"testing"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/estimate"
	"warmroute/router/ledger"
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
			req.Media, req.MediaItems = true, []prompt.Media{{Kind: prompt.Image, Counts: prompt.MediaCounts{prompt.Image: 1}}}
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
		req.MaxPromptTokens = tc.model
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

// knownLinks are Links of a prompt whose blocks are numbered from 1.
type knownLinks map[prompt.Block]int

func (l knownLinks) KVTokens(b prompt.Block) (int, bool) {
	tokens, known := l[b]
	return tokens, known
}

// TestUncachedTokens has a prompt of ten blocks. Where blocks are linked to KV blocks, the first six
// are known to have 300 tokens, of which 288 are in whole KV blocks.
func TestUncachedTokens(t *testing.T) {
	linked := LinkedPrefix{Blocks: 6, Bytes: 6 * blockBytes, Tokens: 300, KVTokens: 288}
	const linkedPrompt = 300 + 4*blockTokens
	for _, tc := range []struct {
		name    string
		linked  LinkedPrefix
		matched int
		want    float64
	}{
		{"nothing held", LinkedPrefix{}, 0, 10 * blockTokens},
		{"a part", LinkedPrefix{}, 4, 6 * blockTokens},
		{"all of it", LinkedPrefix{}, 10, estimate.MinUncachedTokens},
		{"linked, nothing held", linked, 0, linkedPrompt},
		{"linked, as far as the link", linked, 6, linkedPrompt - 288},
		{"linked, beyond it", linked, 8, linkedPrompt - 300 - 2*blockTokens},
		{"linked, up to a block that is linked too", linked, 2, linkedPrompt - 96},
		{"linked, up to one that is not", linked, 3, linkedPrompt - 150},
	} {
		f, all := newFleet(t, 1)
		f.Links = knownLinks{2: 96, 6: 288}
		q := newQuery(all, 10)
		q.Linked, q.Matched[0] = tc.linked, tc.matched
		if got := f.UncachedTokens(q, 0); math.Abs(got-tc.want) > 1e-9 {
			t.Errorf("%s: %v tokens, want %v", tc.name, got, tc.want)
		}
	}
}

func TestRequiredKVTokens(t *testing.T) {
	f, all := newFleet(t, 1)
	q := newQuery(all, 10)
	q.Matched[0] = 8
	if got := f.requiredKVTokens(q, 0); got != 10*blockTokens {
		t.Errorf("blocks that no request uses: %v tokens, want all of the prompt's", got)
	}
	e := ledger.Entry{Prediction: estimate.Prediction{Sequences: 1, Uncached: 6 * blockTokens}}
	f.Ledger.Begin(&e, ledger.Prompt{Blocks: q.Blocks[:6], Bytes: 6 * blockBytes, BytesPerToken: 4}, true, f.Now)
	if got := f.requiredKVTokens(q, 0); got != 4*blockTokens {
		t.Errorf("another request uses six blocks: %v tokens, want those of four", got)
	}
	q.Matched[0] = 2 // of the same blocks, as far as is known
	if got := f.requiredKVTokens(q, 0); got != 8*blockTokens {
		t.Errorf("two of them matched: %v tokens, want those of eight blocks", got)
	}
}

func TestUnindexedMediaTokens(t *testing.T) {
	f, all := newFleet(t, 1)
	q := newQuery(all, 20)
	if got := f.UnindexedMediaTokens(q, 0); got != 0 {
		t.Errorf("without media: %d tokens", got)
	}
	q.MediaItems = []prompt.Media{{Offset: 0, Kind: prompt.Image, Counts: prompt.MediaCounts{prompt.Image: 1}}}
	q.Sizes.MediaTokens[prompt.Image] = 3000
	if got := f.UnindexedMediaTokens(q, 0); got != 3000-prompt.MediaBytes/4 {
		t.Errorf("an image of 3,000 tokens in 4,000 bytes: %d tokens beyond those of its blocks", got)
	}
	e := ledger.Entry{Prediction: estimate.Prediction{Sequences: 1, Uncached: 1000}}
	f.Ledger.Begin(&e, ledger.Prompt{Blocks: q.Blocks[:18], Bytes: 18 * blockBytes, BytesPerToken: 4}, true, f.Now)
	q.Matched[0] = 18
	if got := f.UnindexedMediaTokens(q, 0); got != 0 {
		t.Errorf("another request uses the image: %d tokens", got)
	}
}

func TestKVWait(t *testing.T) {
	for _, tc := range []struct {
		name     string
		capacity int
		used     float64
		claimed  float64
		want     float64 // tokens that have to become free
	}{
		{"unknown capacity", 0, 5000, 0, 0},
		{"it fits", 10_000, fullKVUsage*10_000 - 10*blockTokens, 0, 0},
		{"it does not fit", 10_000, fullKVUsage*10_000 - 10*blockTokens + 100, 0, 100},
		{"with what is claimed", 10_000, fullKVUsage*10_000 - 10*blockTokens, 100, 100},
		{"full", 10_000, 10_000, 0, 10*blockTokens + 500},
	} {
		f, all := newFleet(t, 1)
		b := &f.Backends[0]
		b.Capacity, b.UsedKVTokens, b.Claimed.KV = tc.capacity, tc.used, tc.claimed
		want := 0.0
		if tc.capacity > 0 {
			want = tc.want / float64(tc.capacity) * f.Estimates.OutputTokens(0) / b.DecodeRate
		}
		if got := f.kvWait(newQuery(all, 10), b); math.Abs(got-want) > 1e-9 {
			t.Errorf("%s: %v s, want %v", tc.name, got, want)
		}
	}
}

func TestIsStoredLookup(t *testing.T) {
	for _, tc := range []struct{ stored, noEngine, want bool }{{true, true, true}, {true, false, false}, {false, true, false}} {
		req := Request{Stored: tc.stored, NoEngine: tc.noEngine, Backends: []*backends.Backend{{}}}
		if got := req.IsStoredLookup(); got != tc.want {
			t.Errorf("stored %v, no engine %v: got %v", tc.stored, tc.noEngine, got)
		}
	}
}
