package router

import (
	"fmt"
	"math"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router/prompt"
)

// usage is the outcome of an answer with usage.
func usage(prompt, cached int) Outcome {
	return Outcome{End: Served, AnswerTokens: 10, PromptTokens: prompt, CachedTokens: cached, CachedKnown: true}
}

// oldPrompts fills a backend of 1,000 blocks with prompts of 10 blocks, so that
// the first of them is about to be evicted.
func oldPrompts(t *testing.T, r *Router, fleet []*backends.Backend) {
	t.Helper()
	fleet[0].SetLoad(&backends.Load{CacheTokens: 1000 * 64 * 10 / 12, HitAlignment: 16, BlockSize: 16})
	r.Observe(fleet[0], fleet[0].Load())
	for key := range 100 {
		mustPick(t, r, ask(fleet, key, 10)).Release(usage(640, 0))
	}
}

func TestACacheSmallerThanReported(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	oldPrompts(t, r, fleet)
	for key := 99; key >= 0; key-- { // one was used ever longer ago
		cached := 0
		if key >= 50 {
			cached = 624
		}
		mustPick(t, r, ask(fleet, key, 10)).Release(usage(640, cached))
	}
	parts, _ := r.Index()
	l := r.Learned()[0]
	if l.CapacityFactor < 0.45 || l.CapacityFactor > 0.7 || parts[0].Capacity > 700 {
		t.Errorf("the factor is %.2f, the index has room for %d blocks, where 500 were found to be there", l.CapacityFactor, parts[0].Capacity)
	}
	if l.ObservedTokens != 50*624 || l.PredictedTokens < 55*624 {
		t.Errorf("%.0f tokens predicted and %.0f found", l.PredictedTokens, l.ObservedTokens)
	}
}

func TestACacheLargerThanReported(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	oldPrompts(t, r, fleet)
	for key := range 60 {
		mustPick(t, r, ask(fleet, 200+key, 10)).Release(usage(640, 0))
		mustPick(t, r, ask(fleet, key, 10)).Release(usage(640, 624)) // evicted here
	}
	if l := r.Learned()[0]; l.CapacityFactor < 1.3 {
		t.Errorf("the factor is %.2f after 60 prompts that were there still", l.CapacityFactor)
	}
}

func TestOneWrongWordMovesNothing(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	oldPrompts(t, r, fleet)
	mustPick(t, r, ask(fleet, 0, 10)).Release(usage(640, 0))
	if f := r.Learned()[0].CapacityFactor; f != 1 {
		t.Errorf("the factor is %.2f", f)
	}
}

// What was used a moment ago and is not there was not evicted for want of room:
// the replica sees another prompt than we do.
func TestAMismatchIsNoMatterOfRoom(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	oldPrompts(t, r, fleet)
	for range 100 {
		mustPick(t, r, ask(fleet, 99, 10)).Release(usage(640, 0))
	}
	if f := r.Learned()[0].CapacityFactor; f != 1 {
		t.Errorf("the factor is %.2f", f)
	}
}

func TestDamagedUsageTeachesNothing(t *testing.T) {
	for _, o := range []Outcome{
		usage(640, 641), usage(640, -1), usage(-640, 0), usage(0, 640), usage(math.MaxInt, math.MaxInt),
		usage(1, 0), usage(math.MinInt, math.MinInt), {End: Served, PromptTokens: math.MaxInt, AnswerTokens: math.MinInt},
	} {
		r, fleet, _ := newFleet(t, 1, "prefix")
		oldPrompts(t, r, fleet)
		before := r.Learned()[0]
		for key := range 40 {
			mustPick(t, r, ask(fleet, key, 10)).Release(o)
		}
		after := r.Learned()[0]
		before.AnswerTokens, after.AnswerTokens = 0, 0
		if math.Abs(after.BytesPerToken-4) > 1e-9 || after != before {
			t.Errorf("%+v: learned %+v, knew %+v", o, after, before)
		}
	}
}

func TestWithoutAWordNothingChanges(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	oldPrompts(t, r, fleet)
	before := r.Learned()[0]
	for key := range 100 {
		mustPick(t, r, ask(fleet, key, 10)).Release(Outcome{End: Served})
	}
	if after := r.Learned()[0]; after != before {
		t.Errorf("learned %+v, knew %+v", after, before)
	}
}

func TestTokensAreLearnedByModel(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	of := func(model string, key int) *Request {
		req := ask(fleet, key, 100) // 25,600 bytes
		req.Model = model
		return req
	}
	for key := range 10 {
		mustPick(t, r, of("code", key)).Release(usage(25600/3, 0))
		mustPick(t, r, of("prose", 100+key)).Release(usage(25600/5, 0))
	}
	f := func(model string, want int) {
		t.Helper()
		d := mustPick(t, r, of(model, 1000))
		if got := d.PromptTokens; math.Abs(float64(got-want)) > 0.02*float64(want) {
			t.Errorf("%q: %d tokens of prompt, want about %d", model, got, want)
		}
		d.Release(Outcome{End: Unseen})
	}
	f("code", 25600/3)
	f("prose", 25600/5)
	f("another", 25600*4/15) // as of all together
	parts, _ := r.Index()
	if want := 400_000 * 12 / 10 * 3.75 / 256; math.Abs(float64(parts[0].Capacity)-want) > 0.05*want {
		t.Errorf("room for %d blocks, want about %.0f", parts[0].Capacity, want)
	}
}

// An image's bytes here say nothing of its tokens there, those of several
// sequences are not all in what the engine counts, and what is cached of a prompt
// that has no blocks is not known.
func TestOnlyPlainPromptsTeach(t *testing.T) {
	for name, change := range map[string]func(*Request){
		"media":     func(req *Request) { req.Media = true },
		"sequences": func(req *Request) { req.Sequences = 2 },
		"no blocks": func(req *Request) { req.Blocks = nil },
	} {
		r, fleet, c := newFleet(t, 1, "prefix")
		oldPrompts(t, r, fleet)
		before := r.Learned()[0]
		for key := 99; key >= 0; key-- {
			req := ask(fleet, key, 10)
			req.Bytes = 256 * 100
			change(req)
			d := mustPick(t, r, req)
			c.advance(150 * time.Millisecond)
			d.FirstEvent()
			d.Release(usage(3000, 0))
		}
		after := r.Learned()[0]
		after.AnswerTokens = before.AnswerTokens
		if after != before {
			t.Errorf("%s: learned %+v, knew %+v", name, after, before)
		}
	}
}

// Of a prompt whose matched part has fewer tokens a byte than the rest, less is
// cached than its bytes promise.
func TestUnevenTextIsNoMiss(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	oldPrompts(t, r, fleet)
	for key := 99; key >= 0; key-- {
		longer := ask(fleet, key, 20) // half of it is held
		mustPick(t, r, longer).Release(usage(1280, 560))
	}
	if f := r.Learned()[0].CapacityFactor; f < 1 {
		t.Errorf("the factor is %.2f", f)
	}
}

func TestModelsAreBounded(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	for key := range 2 * mostModels {
		req := ask(fleet, key, 4)
		req.Model = fmt.Sprint("m", key)
		mustPick(t, r, req).Release(usage(256, 0))
	}
	if n := len(r.texts.models); n != mostModels {
		t.Errorf("%d models are kept, want %d", n, mostModels)
	}
}

func TestRepliesAreMatched(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	next := ask(fleet, 1, 16)
	first := &Request{Backends: fleet, Blocks: next.Blocks[:10], Bytes: 10 * 256, Sequences: 1, Streams: true}
	d := mustPick(t, r, first)
	d.FirstEvent()
	d.Release(Outcome{End: Served, Reply: next.Blocks[10:14]})
	if d := mustPick(t, r, next); d.MatchedBlocks != 14 {
		t.Errorf("%d blocks matched, want the prompt's 10 and the reply's 4", d.MatchedBlocks)
	}
}

func TestAReplyOfAnAnswerThatBrokeOffIsNotKept(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	next := ask(fleet, 1, 12)
	d := mustPick(t, r, &Request{Backends: fleet, Blocks: next.Blocks[:10], Bytes: 10 * 256, Sequences: 1, Streams: true})
	d.FirstEvent()
	d.Release(Outcome{End: Broken, Reply: []prompt.Block{next.Blocks[10]}})
	if d := mustPick(t, r, next); d.MatchedBlocks != 10 {
		t.Errorf("%d blocks matched, want 10", d.MatchedBlocks)
	}
}

func TestPrefillRates(t *testing.T) {
	r, fleet, c := newFleet(t, 3, "prefix")
	key := 0
	prefill := func(b *backends.Backend, tokens int, took time.Duration) {
		key++
		req := ask([]*backends.Backend{b}, key, tokens/64)
		d := mustPick(t, r, req)
		c.advance(took)
		d.FirstEvent()
		d.Release(Outcome{End: Served})
	}
	f := func(name string, want ...float64) {
		t.Helper()
		for slot, l := range r.Learned() {
			if math.Abs(l.PrefillRate-want[slot]) > 0.01*want[slot] {
				t.Errorf("%s: backend %d prefills %.0f tokens a second, want %.0f", name, slot, l.PrefillRate, want[slot])
			}
		}
	}
	for range 7 {
		prefill(fleet[0], 6400, time.Second)
	}
	f("seven samples", 8000, 8000, 8000)
	prefill(fleet[0], 6400, 100*time.Millisecond) // a wrong one
	f("one of eight is wrong: the fleet's rate is the only one known", 6400, 6400, 6400)
	for range 10 {
		prefill(fleet[1], 7040, time.Second)
		prefill(fleet[2], 3200, time.Second)
		prefill(fleet[2], 64, time.Second) // says nothing
	}
	f("those alike are taken for equal", 6400, 6400, 3200)
}

func TestAnswersAreLearnedBySequence(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	for key := range 100 {
		req := ask(fleet, key, 2)
		req.Sequences = 8
		mustPick(t, r, req).Release(Outcome{End: Served, AnswerTokens: 8 * 100})
	}
	if n := r.Learned()[0].AnswerTokens; n < 100 || n > 120 {
		t.Errorf("answers of 100 tokens, eight of each: learned %.0f", n)
	}
}

func TestAnswersLongerThanTheyCanBeTeachNothing(t *testing.T) {
	f := func(name string, maxTokens, sequences, tokens int, want bool) {
		t.Helper()
		r, fleet, c := newFleet(t, 1, "prefix")
		req := ask(fleet, 1, 2)
		req.MaxTokens, req.Sequences = maxTokens, sequences
		d := mustPick(t, r, req)
		d.FirstEvent()
		c.advance(time.Second)
		d.Release(Outcome{End: Served, AnswerTokens: tokens})
		if got := r.Learned()[0].AnswerTokens != answerTokens; got != want {
			t.Errorf("%s: length learned %v, want %v", name, got, want)
		}
		if got := r.caches[0].speed.value != decodeRate; got != want {
			t.Errorf("%s: speed learned %v, want %v", name, got, want)
		}
	}
	f("as long as asked for", 500, 1, 500, true)
	f("longer than asked for", 500, 1, 501, false)
	f("as long as asked for, by sequence", 500, 2, 1000, true)
	f("longer than asked for, by sequence", 500, 2, 1001, false)
	f("long", 0, 1, 100_000, true)
	f("longer than any", 0, 1, 1e6+1, false)
	f("longer than any, whatever was asked for", math.MaxInt, 1, math.MaxInt, false)
}

func TestOneBackendsAnswersDecideForNoOther(t *testing.T) {
	r, fleet, _ := newFleet(t, 3, "prefix")
	for key := range 100 {
		for i, tokens := range []int{100, 120, 1e6} {
			mustPick(t, r, ask(fleet[i:i+1], 3*key+i, 2)).Release(Outcome{End: Served, AnswerTokens: tokens})
		}
	}
	mustPick(t, r, ask(fleet, 1000, 2))
	if n := r.asked.AnswerTokens; n < 100 || n > 200 {
		t.Errorf("answers are taken to have %.0f tokens, where two of three backends' have about 100", n)
	}
}

// What a prefill's first event tells of speed: nothing when it was short, in
// tokens or in time, and what is cached is not computed.
func TestWhatTellsThePrefillRate(t *testing.T) {
	f := func(name string, blocks, cached int, took time.Duration, want float64) {
		t.Helper()
		r, fleet, c := newFleet(t, 1, "prefix")
		for key := range 20 {
			d := mustPick(t, r, ask(fleet, key, blocks))
			c.advance(took)
			d.FirstEvent()
			d.Release(usage(blocks*64, cached))
		}
		if got := r.Learned()[0].PrefillRate; math.Abs(got-want) > 0.01*want {
			t.Errorf("%s: %.0f tokens a second, want %.0f", name, got, want)
		}
	}
	f("a prefill that tells", 200, 0, time.Second, 12_800)
	f("few tokens", 10, 0, time.Second, prefillRate)
	f("a short time", 200, 0, 50*time.Millisecond, prefillRate)
	f("half of it cached, which nobody predicted", 400, 12_800, time.Second, 12_800)
	f("all of it but a little cached", 200, 12_736, time.Second, prefillRate)
}
