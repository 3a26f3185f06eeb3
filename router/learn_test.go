package router

import (
	"math"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router/prompt"
)

// usage is the outcome of an answer with usage.
func usage(prompt, cached int) Outcome {
	return Outcome{End: Completed, AnswerTokens: 10, PromptTokens: prompt, CachedTokens: cached, CachedKnown: true}
}

// oldPrompts fills a backend of 1,000 blocks with prompts of 10 blocks, so that
// the first of them is about to be evicted.
func oldPrompts(t *testing.T, r *Router, fleet []*backends.Backend) {
	t.Helper()
	fleet[0].SetLoad(&backends.Load{CacheTokens: 1000 * 64 * 10 / 12, HitAlignment: 16, BlockSize: 16})
	r.ObserveLoad(fleet[0], fleet[0].Load())
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
	parts, _ := r.IndexStats()
	l := r.Estimates()[0]
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
	if l := r.Estimates()[0]; l.CapacityFactor < 1.3 {
		t.Errorf("the factor is %.2f after 60 prompts that were there still", l.CapacityFactor)
	}
}

func TestOneWrongWordMovesNothing(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	oldPrompts(t, r, fleet)
	mustPick(t, r, ask(fleet, 0, 10)).Release(usage(640, 0))
	if f := r.Estimates()[0].CapacityFactor; f != 1 {
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
	if f := r.Estimates()[0].CapacityFactor; f != 1 {
		t.Errorf("the factor is %.2f", f)
	}
}

func TestDamagedUsageTeachesNothing(t *testing.T) {
	for _, o := range []Outcome{
		usage(640, 641), usage(640, -1), usage(-640, 0), usage(0, 640), usage(math.MaxInt, math.MaxInt),
		usage(1, 0), usage(math.MinInt, math.MinInt), {End: Completed, PromptTokens: math.MaxInt, AnswerTokens: math.MinInt},
	} {
		r, fleet, _ := newFleet(t, 1, "prefix")
		oldPrompts(t, r, fleet)
		before := r.Estimates()[0]
		for key := range 40 {
			mustPick(t, r, ask(fleet, key, 10)).Release(o)
		}
		after := r.Estimates()[0]
		before.AnswerTokens, after.AnswerTokens = 0, 0
		if math.Abs(after.BytesPerToken-4) > 1e-9 || after != before {
			t.Errorf("%+v: learned %+v, knew %+v", o, after, before)
		}
	}
}

func TestWithoutAWordNothingChanges(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	oldPrompts(t, r, fleet)
	before := r.Estimates()[0]
	for key := range 100 {
		mustPick(t, r, ask(fleet, key, 10)).Release(Outcome{End: Completed})
	}
	if after := r.Estimates()[0]; after != before {
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
		d.Release(Outcome{End: NotProcessed})
	}
	f("code", 25600/3)
	f("prose", 25600/5)
	f("another", 25600*4/15) // as of all together
	parts, _ := r.IndexStats()
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
		before := r.Estimates()[0]
		for key := 99; key >= 0; key-- {
			req := ask(fleet, key, 10)
			req.Bytes = 256 * 100
			change(req)
			d := mustPick(t, r, req)
			c.advance(150 * time.Millisecond)
			d.RecordFirstEvent()
			d.Release(usage(3000, 0))
		}
		after := r.Estimates()[0]
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
	if f := r.Estimates()[0].CapacityFactor; f < 1 {
		t.Errorf("the factor is %.2f", f)
	}
}

func TestRepliesAreMatched(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	next := ask(fleet, 1, 16)
	first := &Request{Backends: fleet, Blocks: next.Blocks[:10], Bytes: 10 * 256, Sequences: 1, Streams: true}
	d := mustPick(t, r, first)
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed, Reply: next.Blocks[10:14]})
	if d := mustPick(t, r, next); d.MatchedBlocks != 14 {
		t.Errorf("%d blocks matched, want the prompt's 10 and the reply's 4", d.MatchedBlocks)
	}
}

func TestAReplyOfAnAnswerThatBrokeOffIsNotKept(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	next := ask(fleet, 1, 12)
	d := mustPick(t, r, &Request{Backends: fleet, Blocks: next.Blocks[:10], Bytes: 10 * 256, Sequences: 1, Streams: true})
	d.RecordFirstEvent()
	d.Release(Outcome{End: Truncated, Reply: []prompt.Block{next.Blocks[10]}})
	if d := mustPick(t, r, next); d.MatchedBlocks != 10 {
		t.Errorf("%d blocks matched, want 10", d.MatchedBlocks)
	}
}
