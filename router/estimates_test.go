package router

import (
	"math"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/ledger"
)

// usage is the outcome of a response with usage.
func usage(prompt, cached int) Outcome {
	return Outcome{End: Completed, OutputTokens: 10, PromptTokens: prompt, CachedTokens: cached, CachedKnown: true}
}

const oldCacheTokens = 1000 * 64 * 10 / 12

// oldPrompts fills a backend of 1,000 blocks with prompts of 10 blocks, so that
// the first of them is about to be evicted.
func oldPrompts(t *testing.T, r *Router, fleet []*backends.Backend) {
	t.Helper()
	fleet[0].SetLoad(&backends.Load{CacheTokens: oldCacheTokens, HitAlignment: 16, BlockSize: 16})
	r.ObserveLoad(fleet[0], fleet[0].Load())
	for key := range 100 {
		mustPick(t, r, ask(fleet, key, 10)).Release(usage(640, 0))
	}
}

func TestCapacityBelowReported(t *testing.T) {
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
}

func TestCapacityAboveReported(t *testing.T) {
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

func TestSingleMissKeepsCapacity(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	oldPrompts(t, r, fleet)
	mustPick(t, r, ask(fleet, 0, 10)).Release(usage(640, 0))
	if f := r.Estimates()[0].CapacityFactor; f != 1 {
		t.Errorf("the factor is %.2f", f)
	}
}

// What was used a moment ago and is not there was not evicted for want of room:
// the replica sees another prompt than we do.
func TestRecentMissKeepsCapacity(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	oldPrompts(t, r, fleet)
	for range 100 {
		mustPick(t, r, ask(fleet, 99, 10)).Release(usage(640, 0))
	}
	if f := r.Estimates()[0].CapacityFactor; f != 1 {
		t.Errorf("the factor is %.2f", f)
	}
}

func TestInvalidUsage(t *testing.T) {
	for _, o := range []Outcome{
		usage(640, 641), usage(640, -1), usage(-640, 0), usage(0, 640), usage(math.MaxInt, math.MaxInt),
		usage(1, 0), usage(math.MinInt, math.MinInt), {End: Completed, PromptTokens: math.MaxInt, OutputTokens: math.MinInt},
	} {
		r, fleet, _ := newFleet(t, 1, "prefix")
		oldPrompts(t, r, fleet)
		before := r.Estimates()[0]
		for key := range 40 {
			mustPick(t, r, ask(fleet, key, 10)).Release(o)
		}
		after := r.Estimates()[0]
		before.OutputTokens, after.OutputTokens = 0, 0
		if math.Abs(after.BytesPerToken-4) > 1e-9 || after != before {
			t.Errorf("%+v: learned %+v, knew %+v", o, after, before)
		}
	}
}

func TestMissingUsage(t *testing.T) {
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

func TestBytesPerTokenByModel(t *testing.T) {
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
func TestOnlyTextPromptsAreLearnedFrom(t *testing.T) {
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
		after.OutputTokens = before.OutputTokens
		if after != before {
			t.Errorf("%s: learned %+v, knew %+v", name, after, before)
		}
	}
}

// Of a prompt whose matched part has fewer tokens a byte than the rest, less is
// cached than its bytes promise.
func TestUnevenText(t *testing.T) {
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

func TestReplyBlocks(t *testing.T) {
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

func TestTruncatedReplyIsNotIndexed(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	next := ask(fleet, 1, 12)
	d := mustPick(t, r, &Request{Backends: fleet, Blocks: next.Blocks[:10], Bytes: 10 * 256, Sequences: 1, Streams: true})
	d.RecordFirstEvent()
	d.Release(Outcome{End: Truncated, Reply: []prompt.Block{next.Blocks[10]}})
	if d := mustPick(t, r, next); d.MatchedBlocks != 10 {
		t.Errorf("%d blocks matched, want 10", d.MatchedBlocks)
	}
}

func TestOutputTokensPerSequence(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	for key := range 100 {
		req := ask(fleet, key, 2)
		req.Sequences = 8
		mustPick(t, r, req).Release(Outcome{End: Completed, OutputTokens: 8 * 100})
	}
	if n := r.Estimates()[0].OutputTokens; n < 100 || n > 120 {
		t.Errorf("outputs of 100 tokens, eight of each: learned %.0f", n)
	}
}

func TestImplausibleOutputsAreIgnored(t *testing.T) {
	f := func(name string, maxTokens, sequences, tokens int, want bool) {
		t.Helper()
		r, fleet, c := newFleet(t, 1, "prefix")
		req := ask(fleet, 1, 2)
		req.MaxOutputTokens, req.Sequences = maxTokens, sequences
		d := mustPick(t, r, req)
		d.RecordFirstEvent()
		c.advance(time.Second)
		d.Release(Outcome{End: Completed, OutputTokens: tokens})
		if got := r.Estimates()[0].OutputTokens != defaultOutputTokens; got != want {
			t.Errorf("%s: length learned %v, want %v", name, got, want)
		}
		if got := r.fleet.ledger.DecodeRate(0) != ledger.DefaultDecodeRate; got != want {
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

func TestOutputTokensAcrossBackends(t *testing.T) {
	r, fleet, _ := newFleet(t, 3, "prefix")
	for key := range 100 {
		for i, tokens := range []int{100, 120, 1e6} {
			mustPick(t, r, ask(fleet[i:i+1], 3*key+i, 2)).Release(Outcome{End: Completed, OutputTokens: tokens})
		}
	}
	seen := recordChoices(r)
	mustPick(t, r, ask(fleet, 1000, 2))
	if n := seen.request.MeanOutputTokens; n < 100 || n > 200 {
		t.Errorf("outputs are taken to have %.0f tokens, where two of three backends' have about 100", n)
	}
}

// polls plays prompts whose responses carry no usage, from the one used last to
// the one used longest ago, of which the older half is gone, and after each of
// them a poll that counter has had its way with.
func polls(t *testing.T, counter func(l *backends.Load)) BackendEstimates {
	t.Helper()
	r, fleet, c := newFleet(t, 1, "prefix")
	size := backends.Load{CacheTokens: 1000 * 64 * 10 / 12, HitAlignment: 16, BlockSize: 16, PrefixKnown: true}
	poll := func(queries, hits float64) {
		c.advance(time.Second)
		l := size
		l.PrefixQueries, l.PrefixHits, l.PolledAt = queries, hits, c.now
		counter(&l)
		fleet[0].SetLoad(&l)
		r.ObserveLoad(fleet[0], &l)
	}
	play := func(key int) {
		d := mustPick(t, r, ask(fleet, key, 10))
		c.advance(time.Second)
		d.RecordFirstEvent()
		d.Release(Outcome{End: Completed})
	}
	poll(0, 0)
	for key := range 100 {
		play(key)
	}
	queries, hits := 64_000.0, 0.0
	poll(queries, hits)
	for key := 99; key >= 0; key-- {
		play(key)
		queries += 640
		if key >= 50 {
			hits += 624
		}
		poll(queries, hits)
	}
	return r.Estimates()[0]
}

func TestCapacityFromCounters(t *testing.T) {
	l := polls(t, func(*backends.Load) {})
	if l.CapacityFactor < 0.45 || l.CapacityFactor > 0.7 {
		t.Errorf("the factor is %.2f where half of the cache is there", l.CapacityFactor)
	}
}

func TestUnusableCounters(t *testing.T) {
	turn := 0
	for name, counter := range map[string]func(l *backends.Load){
		"absent":                 func(l *backends.Load) { l.PrefixKnown = false },
		"another client's too":   func(l *backends.Load) { l.PrefixQueries *= 2 },
		"more hits than queries": func(l *backends.Load) { l.PrefixHits = 2*l.PrefixQueries + 1 },
		"running backwards":      func(l *backends.Load) { l.PrefixQueries, l.PrefixHits = 1e9-l.PrefixQueries, 1e9-l.PrefixHits },
		"absurd": func(l *backends.Load) {
			turn++
			l.PrefixQueries = math.MaxFloat64 / float64(2+turn%3)
		},
		"standing still": func(l *backends.Load) { l.PrefixQueries, l.PrefixHits = 5, 5 },
	} {
		if l := polls(t, counter); l.CapacityFactor != 1 || math.Abs(l.BytesPerToken-4) > 1e-9 {
			t.Errorf("%s: learned %+v", name, l)
		}
	}
}

// A restart between two polls: the counters are smaller, or have grown beyond
// what they were.
func TestCountersAfterRestart(t *testing.T) {
	for _, after := range []float64{10, 1e6} {
		r, fleet, c := newFleet(t, 1, "prefix")
		poll := func(queries, hits float64) {
			c.advance(time.Second)
			l := &backends.Load{PrefixKnown: true, PrefixQueries: queries, PrefixHits: hits, PolledAt: c.now}
			fleet[0].SetLoad(l)
			r.ObserveLoad(fleet[0], l)
		}
		poll(0, 0)
		d := mustPick(t, r, ask(fleet, 1, 10))
		d.RecordFirstEvent()
		d.Release(Outcome{End: Completed})
		r.ForgetCache(fleet[0])
		poll(after, after/2)
		if l := r.Estimates()[0]; l.CapacityFactor != 1 {
			t.Errorf("counters at %g: learned %+v", after, l)
		}
	}
}

func TestUsagePrecedesCounters(t *testing.T) {
	capacityFactor := func(hits float64) float64 {
		r, fleet, c := newFleet(t, 1, "prefix")
		queries, counted := 0.0, 0.0
		play := func(key int) {
			d := mustPick(t, r, ask(fleet, key, 10))
			c.advance(time.Second)
			d.RecordFirstEvent()
			d.Release(usage(640, 0))
			queries += 640
			c.advance(time.Second)
			l := &backends.Load{
				CacheTokens: oldCacheTokens, HitAlignment: 16, BlockSize: 16,
				PrefixKnown: true, PrefixQueries: queries, PrefixHits: counted, PolledAt: c.now,
			}
			fleet[0].SetLoad(l)
			r.ObserveLoad(fleet[0], l)
		}
		for key := range 100 {
			play(key)
		}
		for key := 99; key >= 0; key-- {
			counted += hits
			play(key)
		}
		return r.Estimates()[0].CapacityFactor
	}
	if agree, differ := capacityFactor(624), capacityFactor(0); agree != differ {
		t.Errorf("the factor is %.2f, and %.2f where the counters have no hits, though all responses have usage without any", agree, differ)
	}
}

// Prompts have a tenth more tokens than their bytes say. The counters tell, if
// no one else was there at either end of the window.
func TestBytesPerTokenFromCounters(t *testing.T) {
	f := func(name string, before, after backends.Load, want float64) {
		t.Helper()
		r, fleet, c := newFleet(t, 1, "prefix")
		for key := range 400 {
			for _, l := range []backends.Load{before, after} {
				l.PrefixKnown, l.PrefixQueries, l.PolledAt = true, float64(key*704), c.now
				r.ObserveLoad(fleet[0], &l)
			}
			d := mustPick(t, r, ask(fleet, key, 10))
			c.advance(time.Second)
			d.RecordFirstEvent()
			d.Release(Outcome{End: Completed})
		}
		if got := r.Estimates()[0].BytesPerToken; math.Abs(got-want) > 0.02 {
			t.Errorf("%s: %.2f bytes a token, want %.2f", name, got, want)
		}
	}
	idle := backends.Load{QueuesKnown: true}
	f("no other", idle, idle, 4/1.1)
	f("another when it began", idle, backends.Load{QueuesKnown: true, Running: 1}, 4)
	f("another when it ended", backends.Load{QueuesKnown: true, Waiting: 1}, idle, 4)
	f("who is there is not known", backends.Load{}, backends.Load{}, 4)
}

// The layout of a model's prompts is learned from responses, and survives a change of the settings.
func TestPromptLayoutIsLearned(t *testing.T) {
	for _, disabled := range []bool{false, true} {
		r, fleet, _ := newFleet(t, 1, "prefix", func(o *Options) { o.NoLearning = disabled })
		turn := func(blocks, promptTokens, cachedTokens int) {
			req := ask(fleet, 1, blocks)
			req.Model = "m"
			req.Forks = []prompt.Fork{{Bit: prompt.SystemInPlace, Without: 0.1, WithoutMost: 0.1, With: 0.9}}
			mustPick(t, r, req).Release(usage(promptTokens, cachedTokens))
		}
		for n := range 4 { // each has the one before as its prefix, of which only the head is cached
			turn(80+10*n, (80+10*n)*64, (80+10*n)*64/10)
		}
		if err := configure(r, r.fleet.settings); err != nil {
			t.Fatal(err)
		}
		want := prompt.DefaultLayout
		if !disabled {
			want &^= prompt.SystemInPlace
		}
		if got := r.PromptLayout("m"); got != want {
			t.Errorf("learning disabled %v: layout %v, want %v", disabled, got.BitNames(), want.BitNames())
		}
		if got := r.PromptLayout("other"); got != prompt.DefaultLayout {
			t.Errorf("another model's layout is %v", got.BitNames())
		}
		req := ask(fleet, 1, 10)
		req.Model = "m"
		if got := r.Explain(*req).Layout; len(got) != len(want.BitNames()) {
			t.Errorf("explained as %v", got)
		}
	}
}

// Backends of one model share what is learned of their steps from when they are ready, not from their first poll.
func TestStepsSharedBeforeFirstPoll(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix")
	for _, b := range fleet {
		b.SetModels([]backends.Model{{ID: "m"}})
		r.BackendStateChanged(b)
	}
	fleet[0].SetLoad(&backends.Load{})
	r.ObserveLoad(fleet[0], fleet[0].Load())
	d := mustPick(t, r, ask(fleet, 0, 10))
	c.advance(time.Second)
	d.RecordFirstEvent()
	d.Release(usage(640, 0))
	estimates := r.Estimates()
	if first, second := estimates[0].Step, estimates[1].Step; first != second {
		t.Errorf("the backends of one model have the steps %+v and %+v", first, second)
	}
}
