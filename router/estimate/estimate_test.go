package estimate

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
)

func TestAverage(t *testing.T) {
	var a Average
	for range 50 {
		a.Add(10)
		a.Add(30)
	}
	if math.Abs(a.Value-20) > 1e-9 {
		t.Errorf("the mean of a hundred values is %.2f, want 20", a.Value)
	}
	for range 100 {
		a.Add(120)
	}
	if want := 120 - 100*math.Pow(0.99, 100); math.Abs(a.Value-want) > 1e-9 {
		t.Errorf("after a hundred more: %.2f, want %.2f", a.Value, want)
	}
	prior := NewAverage(250, 10)
	prior.Add(30)
	if prior.Value != 230 {
		t.Errorf("a prior worth ten values and one of 30: %.1f, want 230", prior.Value)
	}
}

func TestOldEvidenceDecays(t *testing.T) {
	c, far := newCapacity(), 1.0 // the replica's own figure
	look := func(missing float64) {
		var p predictions
		p.addPrediction(capacityBucket(far), 1000, 1000)
		c.addEvidence(&p, missing)
		c.updateLastKeptBucket()
	}
	for range 5000 {
		look(0)
	}
	held := c.factor()
	for range 1000 {
		look(1000)
	}
	if c.factor() >= held {
		t.Errorf("the factor is %.2f and was %.2f, though the last 1,000 blocks were gone", c.factor(), held)
	}
}

// A second cache in host memory, of eight times the reported size, is found and forgotten again.
func TestCapacityOfHostTier(t *testing.T) {
	c := newCapacity()
	answers := func(n int, distance float64, present bool) {
		for range n {
			var p predictions
			p.addPrediction(capacityBucket(distance), 1000, 1000)
			missing := 1000.0
			if present {
				missing = 0
			}
			c.addEvidence(&p, missing)
			c.updateLastKeptBucket()
		}
	}
	expect := func(when string, low, high float64) {
		t.Helper()
		if f := c.factor(); f < low || f > high {
			t.Errorf("%s the factor is %.2f, want %.1f to %.1f", when, f, low, high)
		}
	}
	hits := 0
	for ; c.factor() < 8 && hits < 100; hits++ {
		c.addUnexpectedHit()
		c.updateLastKeptBucket()
	}
	if expect("after hits on evicted blocks", 8, 8.1); hits > 20 {
		t.Errorf("it took %d hits", hits)
	}
	for range 100 {
		answers(1, 1+6.5*float64(hits%10)/10, true)
		answers(1, 12, false)
		hits++
	}
	expect("with misses beyond", 7, 10)
	for range 500 {
		answers(1, 7, true)
	}
	learned := c
	answers(1000, 7, false)
	expect("when such blocks have been absent for long", 0.5, 7)
	c = learned
	c.setHostTier(false)
	expect("while a new process has loaded nothing", 2, 2)
	answers(10, 1.9, true)
	c.addUnexpectedHit()
	c.updateLastKeptBucket()
	expect("after hits without loads", 2, 2)
	c.setHostTier(true)
	answers(20, 1.9, true)
	expect("when it has loaded some", 7, 10)
}

func TestRestoreRejectsImplausibleNumbers(t *testing.T) {
	fresh := func() *Estimates {
		f := New(256, 1.2)
		f.Grow(1)
		return f
	}
	good := fresh().AppendBackend(nil, 0)
	f := func(what string, number int, x float64, want bool) {
		t.Helper()
		b := bytes.Clone(good)
		binary.LittleEndian.PutUint64(b[8*number:], math.Float64bits(x))
		got := fresh()
		if got.RestoreBackend(0, b) != want || !want && !bytes.Equal(got.AppendBackend(nil, 0), good) {
			t.Errorf("%s: taken %v, want %v", what, !want, want)
		}
	}
	const lastKept = 2 * bucketCount
	f("nothing changed", lastKept, float64(reportedBucket), true)
	f("a prediction less than none", 0, -1, false)
	f("a share that is not a number", bucketCount, math.NaN(), false)
	f("without end", 3, math.Inf(1), false)
	f("beyond the last bucket", lastKept, bucketCount, false)
	f("no tokens", lastKept+2, 0, false)
	f("bytes that are no text", lastKept+1, 1e9, false)
	f("answers of nothing", lastKept+3, 0, false)
	f("answers longer than any", lastKept+3, 1e7, false)
	f("speed unknown", lastKept+5, 0, true)
	f("a step of only a part", lastKept+5, 0.005, false)
	f("a step of a minute", lastKept+5, 60, false)
}

func TestModelsAreBounded(t *testing.T) {
	f := New(256, 1.2)
	f.Grow(1)
	for key := range 2 * maxModels {
		p := Prediction{Model: fmt.Sprint("m", key), Bytes: 1024, IsText: true}
		f.LearnFromCompletion(0, &p, Usage{PromptTokens: 256, CachedKnown: true}, CacheInfo{Alignment: 1})
	}
	if n := len(f.models.byName); n != maxModels {
		t.Errorf("%d models are kept, want %d", n, maxModels)
	}
}

// Without usage the counters are of all prompts of a window, so they have to be of one class.
func TestBytesPerTokenFromCounters(t *testing.T) {
	const class, other = prompt.TextClass(3), prompt.TextClass(4)
	for _, c := range []struct {
		name    string
		model   string
		classes []prompt.TextClass
		want    float64
	}{
		{"one class", "m", []prompt.TextClass{class, class}, 3},
		{"two classes", "m", []prompt.TextClass{class, other}, 4},
		{"two classes, the other first", "m", []prompt.TextClass{other, class}, 4},
		{"a class of another model", "another", []prompt.TextClass{class, class}, 3}, // for want of its own
	} {
		f := newTestEstimates(1)
		now, queries := time.Unix(1000, 0), 0.0
		observe := func() {
			now = now.Add(time.Second)
			l := &backends.Load{PrefixKnown: true, PrefixQueries: queries, QueuesKnown: true, PolledAt: now}
			f.ObserveLoad(0, l, 0, CacheInfo{Alignment: 16})
		}
		observe()
		for range 50 {
			for _, class := range c.classes {
				p := Prediction{Model: c.model, TextClass: class, Bytes: 12_000, PromptTokens: 3000, IsText: true}
				f.RecordPrefillDone(0, &p, CacheInfo{Alignment: 16}, now)
				queries += 4000
			}
			observe()
		}
		if got := f.TokenSizes("m", class).BytesPerToken; math.Abs(got-c.want) > 0.05 {
			t.Errorf("%s: %.2f bytes per token, want %.0f", c.name, got, c.want)
		}
	}
}

func TestExceedsTokens(t *testing.T) {
	const cyrillic = prompt.TextClasses - 1 // any class that is not Latin
	type learned struct {
		class         prompt.TextClass
		bytes, tokens int
	}
	for _, c := range []struct {
		name    string
		learned []learned
		class   prompt.TextClass
		bytes   int
		want    bool
	}{
		{"nothing is known", nil, 0, 32_000, false},
		{"no tokenizer makes so few tokens", nil, 0, 32_001, true},
		{"too little is known", []learned{{0, 40_000, 10_000}}, 0, 32_000, false},
		{"within the margin", []learned{{0, 400_000, 100_000}}, 0, 6000, false},
		{"above it", []learned{{0, 400_000, 100_000}}, 0, 6100, true},
		{"others in the Latin class have fewer bytes per token", []learned{{0, 100_000, 100_000}}, 0, 6000, false},
		{"they have more", []learned{{0, 800_000, 100_000}}, 0, 11_000, false},
		{"another script", []learned{{cyrillic, 200_000, 100_000}}, cyrillic, 3100, true},
		{"another script within the margin", []learned{{cyrillic, 200_000, 100_000}}, cyrillic, 3000, false},
		{"only another class is known", []learned{{cyrillic, 200_000, 100_000}}, 0, 32_000, false},
		{"token ids", nil, prompt.TokenIDs, 4000, false},
		{"too many token ids", nil, prompt.TokenIDs, 4004, true},
	} {
		f := newTestEstimates(1)
		for _, l := range c.learned {
			p := Prediction{Model: "m", TextClass: l.class, Bytes: l.bytes, IsText: true}
			f.LearnFromCompletion(0, &p, Usage{PromptTokens: l.tokens}, CacheInfo{Alignment: 1})
		}
		if got := f.ExceedsTokens("m", c.class, c.bytes, 1000); got != c.want {
			t.Errorf("%s: %d bytes exceed 1000 tokens: %v", c.name, c.bytes, got)
		}
		if f.ExceedsTokens("another", 0, 32_000, 1000) {
			t.Errorf("%s: known of another model", c.name)
		}
	}
}

func newTestEstimates(slots int) *Estimates {
	f := New(256, 1)
	f.Grow(slots)
	return f
}

func TestMeanUncachedByModel(t *testing.T) {
	f := newTestEstimates(1)
	if got := f.MeanUncachedTokens("a"); got != 0 {
		t.Errorf("%.0f tokens before the first request", got)
	}
	f.RecordUncached("a", 100)
	f.RecordUncached("b", 500)
	for model, want := range map[string]float64{"a": 100, "b": 500, "c": 300} {
		if got := f.MeanUncachedTokens(model); got != want {
			t.Errorf("model %s: %.0f tokens, want %.0f", model, got, want)
		}
	}
}

func TestMeanOutputTokens(t *testing.T) {
	f := newTestEstimates(3)
	var list []*backends.Backend
	for slot, tokens := range []int{100, 120, MaxOutputTokens} {
		list = append(list, &backends.Backend{Slot: slot})
		for range 1000 {
			f.RecordOutputLength(slot, 2*tokens, 2)
		}
	}
	if n := f.MeanOutputTokens(list); n < 140 || n > 180 {
		t.Errorf("answers of %.0f tokens, where two of three backends' have about 100", n)
	}
}

func TestIndexBlocks(t *testing.T) {
	f := newTestEstimates(1)
	for _, c := range []struct {
		load backends.Load
		want int
	}{
		{backends.Load{}, defaultCacheTokens * 4 / 256},
		{backends.Load{CacheTokens: 64_000}, 1000},
		{backends.Load{CacheTokens: 64_000, PrefixCachingOff: true}, 0},
	} {
		f.ObserveLoad(0, &c.load, 0, CacheInfo{Alignment: 1})
		if got := f.IndexCapacity(0); got != c.want {
			t.Errorf("%d tokens, caching off %v: %d blocks, want %d", c.load.CacheTokens, c.load.PrefixCachingOff, got, c.want)
		}
	}
}
