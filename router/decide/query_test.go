package decide

import (
	"math"
	"testing"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/estimate"
	"warmroute/router/ledger"
)

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
	q.MediaItems = []prompt.MediaPosition{{Offset: 0, Kind: prompt.Image, Counts: prompt.MediaCounts{prompt.Image: 1}}}
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
