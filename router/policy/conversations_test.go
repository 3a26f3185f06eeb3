package policy

import (
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	"warmroute/prompt"
	"warmroute/router/step"
	"warmroute/router/tenantlru"
)

// turns records turns of conversations in a test.
type turns struct {
	conversationStats
	now time.Time
}

func newTurns() *turns { return &turns{now: time.Unix(1000, 0)} }

// record records a turn of the conversation key, sent to the backend of a slot.
func (c *turns) record(turn prompt.TurnKind, key uint64, slot int) {
	c.countTurn(&Request{Now: c.now, PromptKey: key, Turn: turn}, &Candidate{Slot: slot})
}

// pass lets time pass.
func (c *turns) pass(d time.Duration) {
	c.now = c.now.Add(d)
	c.ageConversations(c.now)
}

func (c *turns) expectCounts(t *testing.T, when string, want ...float64) {
	t.Helper()
	for slot, n := range want {
		if got := float64(c.on(slot).count); got != n {
			t.Errorf("%s: %v conversations at backend %d, want %v", when, got, slot, n)
		}
	}
}

// TestChooseRecordsNoTurn has a choice explained, long after the last turn: nothing is counted,
// and nothing is removed.
func TestChooseRecordsNoTurn(t *testing.T) {
	var p Prefix
	first := Request{Now: time.Unix(1000, 0), PromptKey: 1, Turn: prompt.TurnFirst, MeanUncachedTokens: 1000}
	choose(&p, first, Candidate{UncachedTokens: 100})
	before := p.conversationStats
	before.underWay = slices.Clone(p.underWay)
	dry := first
	dry.Now, dry.PromptKey, dry.Trace = first.Now.Add(2*maxConversationTimeout), 2, &Trace{}
	plain := Candidate{NameHash: 1, Weight: 1, Engines: 1, Step: &testStep, UncachedTokens: 100}
	p.Choose(&dry, []Candidate{plain, plain})
	if !reflect.DeepEqual(p.conversationStats, before) || p.active.Len() != 1 || p.overdue.Len() != 0 {
		t.Errorf("a dry run changed %+v to %+v", before, p.conversationStats)
	}
	later := first
	later.Now = dry.Now
	if choose(&p, later, Candidate{UncachedTokens: 100}); p.active.Len()+p.overdue.Len() != 1 || p.ended != 1 {
		t.Errorf("a request that is sent ages nothing: %+v", p.conversationStats)
	}
}

// TestConversationsUnderWay counts a conversation at the backend of its last turn, until its next
// one has been overdue for long.
func TestConversationsUnderWay(t *testing.T) {
	c := newTurns()
	c.expectCounts(t, "at the beginning", 0, 0, 0)
	c.record(prompt.TurnFirst, 1, 0)
	c.record(prompt.TurnFirst, 2, 0)
	c.record(prompt.TurnFirst, 3, 2)
	c.expectCounts(t, "three began", 2, 0, 1, 0)
	c.record(prompt.TurnLater, 2, 1)
	c.expectCounts(t, "one went on elsewhere", 1, 1, 1)
	c.record(prompt.TurnLater, 4, 1)
	c.expectCounts(t, "a later turn of one that was not known", 1, 2, 1)
	c.record(prompt.TurnUnknown, 5, 0)
	c.record(prompt.TurnFirst, 0, 0)
	c.record(prompt.TurnLater, 0, 0)
	c.expectCounts(t, "no turns, and none that can be told apart", 1, 2, 1)

	c.pass(minTurnTimeout + time.Second)
	c.expectCounts(t, "overdue", 1, 2, 1)
	if c.active.Len() != 0 || c.overdue.Len() != 4 {
		t.Errorf("%d conversations are active and %d overdue, want 0 and 4", c.active.Len(), c.overdue.Len())
	}
	c.record(prompt.TurnLater, 1, 0)
	c.pass(minConversationTimeout - minTurnTimeout)
	c.expectCounts(t, "overdue for long", 1, 0, 0)
	c.pass(minConversationTimeout)
	c.expectCounts(t, "all are", 0, 0, 0)
	if c.active.Len()+c.overdue.Len() != 0 {
		t.Errorf("%d and %d conversations are left", c.active.Len(), c.overdue.Len())
	}
}

// TestNamedConversationCounts sends turns whose conversations and first messages tell different
// things: the conversation counts.
func TestNamedConversationCounts(t *testing.T) {
	c := newTurns()
	for conversation := range uint64(3) {
		c.countTurn(&Request{Now: c.now, Conversation: conversation + 1, PromptKey: 9, Turn: prompt.TurnFirst}, &Candidate{})
	}
	c.expectCounts(t, "three conversations with one first message", 3)
	c.countTurn(&Request{Now: c.now, Conversation: 1, PromptKey: 8, Turn: prompt.TurnLater}, &Candidate{Slot: 1})
	c.expectCounts(t, "the next turn of one is at another backend", 2, 1)
}

// TestTenantsConversations sends turns of two tenants with one conversation and one first message.
func TestTenantsConversations(t *testing.T) {
	c := newTurns()
	for tenant := range uint64(2) {
		c.countTurn(&Request{Now: c.now, Conversation: 1, PromptKey: 9, Tenant: tenant, Turn: prompt.TurnFirst}, &Candidate{})
	}
	c.expectCounts(t, "two tenants with one conversation", 2)
	c.countTurn(&Request{Now: c.now, Conversation: 1, Tenant: 1, Turn: prompt.TurnLater}, &Candidate{Slot: 1})
	c.expectCounts(t, "the next turn of one is at another backend", 1, 1)
}

// TestTurnTimeout waits for the next turn of users who take longer or shorter between two turns.
func TestTurnTimeout(t *testing.T) {
	for _, c := range []struct {
		name              string
		gap               time.Duration
		overdue, notUnder time.Duration // after the last turn
	}{
		{"quick users", time.Second, minTurnTimeout, minConversationTimeout},
		{"users who read", 30 * time.Second, maxTurnGaps * 30 * time.Second, maxTurnGaps * 30 * time.Second},
		{"users who sleep", 8 * time.Hour, maxConversationTimeout, maxConversationTimeout},
	} {
		v := newTurns()
		v.record(prompt.TurnFirst, 1, 0)
		v.turnGap, v.turnGaps = c.gap.Seconds(), 1
		v.pass(c.overdue)
		if v.active.Len() != 1 {
			t.Errorf("%s: overdue after %v", c.name, c.overdue)
		}
		v.pass(time.Millisecond)
		if v.active.Len() != 0 {
			t.Errorf("%s: not overdue after more than %v", c.name, c.overdue)
		}
		v.pass(c.notUnder - c.overdue - 2*time.Millisecond)
		if c.notUnder > c.overdue {
			v.expectCounts(t, c.name+": soon", 1)
		}
		v.pass(3 * time.Millisecond)
		v.expectCounts(t, c.name, 0)
	}
}

func TestMeanTurnGap(t *testing.T) {
	c := newTurns()
	c.record(prompt.TurnLater, 7, 0)
	if c.turnGaps != 0 {
		t.Errorf("%v gaps before a conversation that is not known", c.turnGaps)
	}
	for _, gap := range []time.Duration{2 * time.Second, 4 * time.Second, 9 * time.Second} {
		c.now = c.now.Add(gap)
		c.record(prompt.TurnLater, 7, 0)
	}
	if c.turnGaps != 3 || math.Abs(c.turnGap-5) > 1e-9 {
		t.Errorf("%v gaps of %v s, want 3 of 5", c.turnGaps, c.turnGap)
	}
}

func TestLaterTurns(t *testing.T) {
	c := newTurns()
	expect := func(when string, later, ended float64) {
		t.Helper()
		want := min(maxLaterTurns, (later+priorConversations*priorLaterTurns)/(ended+priorConversations))
		if c.later != later || c.ended != ended || c.laterTurns() != want {
			t.Errorf("%s: %v later turns in %v conversations that ended, so %v expected; want %v, %v and %v", when, c.later, c.ended, c.laterTurns(),
				later, ended, want)
		}
	}
	expect("at the beginning", 0, 0)
	c.record(prompt.TurnFirst, 1, 0)
	c.record(prompt.TurnFirst, 2, 0)
	expect("two have begun", 0, 0)
	c.record(prompt.TurnLater, 1, 0)
	c.record(prompt.TurnLater, 1, 0)
	expect("one has gone on", 2, 0)
	c.pass(minTurnTimeout + time.Second)
	expect("both are overdue", 2, 2)
	c.record(prompt.TurnLater, 2, 0)
	expect("one of them has another turn after all", 3, 1)
	c.record(prompt.TurnFirst, 2, 0)
	expect("another one begins alike", 3, 2)
	c.record(prompt.TurnFirst, 1, 0)
	expect("another one begins like one that was overdue", 3, 2)
	c.pass(maxConversationTimeout)
	expect("all have ended", 3, 4)
	for range 1000 {
		c.record(prompt.TurnLater, 1, 0)
	}
	if got := c.laterTurns(); got != maxLaterTurns {
		t.Errorf("%v later turns expected, want the maximum", got)
	}
}

// TestCountedTurnsFade sends more turns than are counted: the newer ones count for more.
func TestCountedTurnsFade(t *testing.T) {
	c := newTurns()
	for range 2 * maxCountedTurns {
		c.record(prompt.TurnFirst, 1, 0)
	}
	before := c.laterTurns()
	for range 2 * maxCountedTurns {
		c.record(prompt.TurnLater, 1, 0)
		if c.later+c.ended >= maxCountedTurns || c.turnGaps >= maxCountedTurns {
			t.Fatalf("%v turns and %v gaps are counted", c.later+c.ended, c.turnGaps)
		}
	}
	if after := c.laterTurns(); before > 0.1 || after < 2 {
		t.Errorf("%.3f later turns expected after single questions, and %.1f after as many later turns", before, after)
	}
}

// TestConversationsAreBounded begins more conversations than are kept: the oldest are dropped, and
// no longer counted.
func TestConversationsAreBounded(t *testing.T) {
	c := newTurns()
	begin := func(key int) { c.record(prompt.TurnFirst, uint64(key+1), key&1) }
	for key := range maxConversations + 100 {
		begin(key)
	}
	c.expectCounts(t, "active", maxConversations/2, maxConversations/2)
	if _, known := c.active.Find(tenantlru.Key{Key: 100}); known {
		t.Error("the oldest ones are kept")
	}
	passUntilOverdue := func() {
		c.pass(minTurnTimeout + time.Second)
		for range maxConversations / maxMoves {
			c.pass(0)
		}
	}
	passUntilOverdue()
	if c.active.Len() != 0 || c.overdue.Len() != maxConversations {
		t.Errorf("%d conversations are active and %d overdue", c.active.Len(), c.overdue.Len())
	}
	for key := range maxConversations {
		begin(1<<20 + key)
	}
	c.expectCounts(t, "active and overdue", maxConversations, maxConversations)
	passUntilOverdue()
	c.expectCounts(t, "all overdue", maxConversations/2, maxConversations/2)
}

func TestForgetConversations(t *testing.T) {
	c := newTurns()
	c.ForgetBackend(2) // without any
	c.record(prompt.TurnFirst, 1, 0)
	c.record(prompt.TurnFirst, 2, 2)
	c.pass(minTurnTimeout + time.Second)
	c.record(prompt.TurnFirst, 3, 2)
	c.record(prompt.TurnFirst, 4, 1)
	c.record(prompt.TurnFirst, 5, 3)
	c.expectCounts(t, "before", 1, 1, 2, 1)
	c.ForgetBackend(2)
	c.ForgetBackend(9)
	c.expectCounts(t, "after", 1, 1, 0, 1)
	c.record(prompt.TurnLater, 2, 1)
	if c.turnGaps != 0 {
		t.Error("a conversation of the backend that was forgotten is known")
	}
	c.pass(maxConversationTimeout)
	c.expectCounts(t, "at the end", 0, 0, 0)
}

// TestLongPauses has users whose pauses are longer than a conversation counts: their next turns
// say so.
func TestLongPauses(t *testing.T) {
	c := newTurns()
	for turn := range 8 {
		for key := range 10 {
			kind := prompt.TurnLater
			if turn == 0 {
				kind = prompt.TurnFirst
			}
			c.record(kind, uint64(key+1), 0)
		}
		c.pass(2 * minConversationTimeout)
	}
	if got := c.turnGap; got < minConversationTimeout.Seconds() {
		t.Errorf("mean time between turns is %.0f s, want %.0f", got, 2*minConversationTimeout.Seconds())
	}
	if got := c.laterTurns(); got < 7 {
		t.Errorf("%.1f later turns expected, want at least 7", got)
	}
}

// TestEndedIsNeverNegative halves the counts between the first turns of many conversations and
// their second ones.
func TestEndedIsNeverNegative(t *testing.T) {
	c := newTurns()
	const conversations = 15_000
	for key := range conversations {
		c.record(prompt.TurnFirst, uint64(key+1), 0)
	}
	for range conversations / maxMoves {
		c.pass(minTurnTimeout + time.Second)
	}
	for key := range conversations {
		c.record(prompt.TurnLater, uint64(key+1), 0)
		if got := c.laterTurns(); c.ended < 0 || got < 0 {
			t.Fatalf("%.0f conversations ended, %.1f later turns expected", c.ended, got)
		}
	}
}

func TestRetryIsNoTurn(t *testing.T) {
	c := newTurns()
	c.record(prompt.TurnFirst, 1, 0)
	before := c.conversationStats
	c.countTurn(&Request{Now: c.now, Turn: prompt.TurnFirst, PromptKey: 1, Retry: true}, &Candidate{Slot: 1})
	if c.ended != before.ended || c.later != before.later || c.on(0).count != 0 || c.on(1).count != 1 {
		t.Errorf("ended %.0f, later %.0f, %d and %d under way", c.ended, c.later, c.on(0).count, c.on(1).count)
	}
}

// beginConversations records the first turns of n conversations, with keys from key on, at the
// backend of a slot. A system prompt of sharedTokens is cached there.
func (c *conversationStats) beginConversations(n, key, slot int, tokens, sharedTokens float64) {
	for i := range n {
		r := Request{Now: time.Unix(1000, 0), PromptKey: uint64(key + i), Turn: prompt.TurnFirst, PromptTokens: sharedTokens + tokens}
		c.countTurn(&r, &Candidate{Slot: slot, MatchedTokens: sharedTokens})
	}
}

func (c *turns) expectTokens(t *testing.T, when string, want ...float64) {
	t.Helper()
	for slot, tokens := range want {
		if got := c.on(slot).tokens; got != tokens {
			t.Errorf("%s: %v tokens at backend %d, want %v", when, got, slot, tokens)
		}
	}
}

// TestConversationTokens counts the last prompt of each conversation under way, less its system
// prompt.
func TestConversationTokens(t *testing.T) {
	c := newTurns()
	c.beginConversations(3, 1, 0, 1000, 500)
	c.beginConversations(1, 4, 1, 2000, 0)
	c.expectTokens(t, "four began", 3000, 2000)
	next := Request{Now: c.now, PromptKey: 1, Turn: prompt.TurnLater, PromptTokens: 2500}
	c.countTurn(&next, &Candidate{MatchedTokens: 1500})
	c.expectTokens(t, "one has grown", 4000, 2000)
	c.countTurn(&next, &Candidate{Slot: 1})
	c.expectTokens(t, "it has moved", 2000, 4000)
	next.PromptKey, next.PromptTokens = 2, 400
	c.countTurn(&next, &Candidate{})
	c.expectTokens(t, "one has a prompt shorter than its first system prompt", 1000, 4000)
	c.ForgetBackend(1)
	c.expectTokens(t, "a backend was forgotten", 1000, 0)

	c = newTurns()
	for key, tokens := range []float64{0.1, 0.2, 0.3} {
		c.beginConversations(1, key+1, 0, tokens, 0)
	}
	c.pass(minTurnTimeout + time.Second)
	if got := c.on(0).tokens; math.Abs(got-0.6) > 1e-9 {
		t.Errorf("overdue: %v tokens, want 0.6", got)
	}
	c.pass(minConversationTimeout)
	c.expectTokens(t, "all ended", 0)
}

// TestOverflow has two backends: one whose conversations exceed its cache, and one with room.
func TestOverflow(t *testing.T) {
	var p Prefix
	p.beginConversations(3, 1, 0, 4000, 2000)
	p.beginConversations(1, 4, 1, 3000, 0)
	for _, c := range []struct {
		name            string
		key             uint64
		tokens, matched float64
		meanUncached    float64
		slot            int
		want            float64
	}{
		{"all fit", 5, 2000, 0, 0, 1, 0},
		{"all fit exactly", 5, 7000, 0, 0, 1, 0},
		{"two are a token too long for the cache", 5, 7001, 0, 0, 1, 2},
		{"two are too long for the cache if one grows as expected", 5, 7000, 0, 10, 1, 2 * growthShare * priorLaterTurns * 10},
		{"no more is evicted than there is", 5, 2000, 0, 0, 0, 14_000 - 3*2000},
		{"the system prompt is there", 5, 4000, 3500, 0, 0, 4*2500 - 3*2000},
		{"a backend that was never sent a turn", 5, 2000, 0, 0, 2, 0},
		{"one that is counted there, without its system prompt", 1, 6500, 6000, 0, 0, 3 * 2500},
		{"the same where there is room", 1, 6500, 2000, 0, 1, 0},
		{"one that is counted elsewhere", 4, 3000, 0, 0, 0, 15_000 - 3*2000},
	} {
		r := Request{Now: time.Unix(1000, 0), PromptKey: c.key, Turn: prompt.TurnLater, PromptTokens: c.tokens,
			MeanUncachedTokens: c.meanUncached}
		f := p.expectFutureTurns(&r, nil, 1)
		if got := f.overflow(&Candidate{Slot: c.slot, MatchedTokens: c.matched, EngineCacheTokens: 10_000}); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("%s: %v tokens, want %v", c.name, got, c.want)
		}
	}
}

func TestDelayOfLaterTurns(t *testing.T) {
	const gap = 10 * time.Second
	v := newTurns()
	v.record(prompt.TurnFirst, 6, 3)
	v.pass(gap)
	v.record(prompt.TurnLater, 6, 3)
	for _, key := range []uint64{1, 2, 3} {
		v.record(prompt.TurnFirst, key, 0)
	}
	v.record(prompt.TurnFirst, 4, 1)
	v.pass(gap)
	for _, key := range []uint64{1, 2, 3} {
		v.record(prompt.TurnLater, key, 0)
	}
	m := step.Model{Base: 0.01, Rate: 1000}
	candidate := func(slot, device int, engines float64) Candidate {
		return Candidate{Slot: slot, Device: device, Engines: engines, Step: &m}
	}
	candidates := []Candidate{candidate(0, 7, 1), candidate(1, 7, 1), candidate(2, 0, 2), candidate(0, 0, 2), candidate(0, 0, 1)}
	of := func(key uint64) futureTurns {
		r := Request{Now: v.now, PromptKey: key, Turn: prompt.TurnLater, MeanUncachedTokens: 500, MeanOutputTokens: 100}
		return v.expectFutureTurns(&r, candidates, m.Rate)
	}
	faded := math.Exp(-1.0 / recentGaps) // one gap ago
	perOther := 0.5 / 10 * (0.5 + 1)     // a prefill of 0.5 s and an output of 1 s, every 10 s
	for _, c := range []struct {
		name      string
		key       uint64
		candidate int
		others    float64
	}{
		{"a new conversation", 5, 4, 3},
		{"one of them", 1, 4, 2},
		{"two engines have a half each", 5, 3, 1.5},
		{"none was sent there", 5, 2, 0},
		{"those on the same device count", 5, 0, 3 + faded},
		{"one that had its last turn there earlier", 4, 1, 3},
	} {
		f := of(c.key)
		if got, want := f.mutualDelay(&candidates[c.candidate]), c.others*perOther; math.Abs(got-want) > 1e-9 {
			t.Errorf("%s: a delay of %v s, want %v", c.name, got, want)
		}
	}
	v.pass(20 * recentGaps * gap)
	if f := of(5); f.mutualDelay(&candidates[4]) > 1e-6 {
		t.Errorf("a delay of %v s by conversations without a turn for long", f.mutualDelay(&candidates[4]))
	}
	v.ForgetBackend(0)
	if f := of(5); f.countRecentOthers(&candidates[4]) != 0 {
		t.Error("conversations of a backend that was forgotten still count")
	}
}

func TestSpareShare(t *testing.T) {
	for _, c := range []struct {
		name   string
		tokens float64 // of each conversation, one at each of two backends
		caches []float64
		want   float64
	}{
		{"no conversation has tokens", 0, []float64{10_000, 10_000}, 1},
		{"half of the share that may be filled", maxFill * 5000, []float64{10_000, 10_000}, 0.5},
		{"the larger cache counts for more", maxFill * 5000, []float64{10_000, 30_000}, 0.75},
		{"a third backend, without any", maxFill * 5000, []float64{10_000, 10_000, 20_000}, 0.75},
		{"full", maxFill * 10_000, []float64{10_000, 10_000}, 0},
		{"more than full", 20_000, []float64{10_000, 10_000}, 0},
		{"the size of one cache is unknown", 100, []float64{10_000, 0}, 0},
	} {
		v := newTurns()
		var candidates []Candidate
		for slot, size := range c.caches {
			candidates = append(candidates, Candidate{Slot: slot, EngineCacheTokens: size})
			if slot < 2 {
				v.beginConversations(1, slot+1, slot, c.tokens, 0)
			}
		}
		if got := v.spareShare(candidates); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// TestConversationMovesToRoom sends the next turn of one of three conversations at a backend, whose
// prompt is cached there.
func TestConversationMovesToRoom(t *testing.T) {
	for _, c := range []struct {
		name                 string
		turn                 prompt.TurnKind
		tokens, othersTokens float64 // of each conversation at the backend, and of one at the other
		caches               [2]float64
		want                 int
	}{
		{"the caches have room", prompt.TurnLater, 2000, 0, [2]float64{10_000, 10_000}, 0},
		{"the other one has more room", prompt.TurnLater, 4000, 0, [2]float64{10_000, 10_000}, 1},
		{"no turn of a conversation", prompt.TurnUnknown, 4000, 0, [2]float64{10_000, 10_000}, 0},
		{"the later turns cost less than the move", prompt.TurnLater, 4000, 0, [2]float64{12_300, 12_300}, 0},
		{"all caches are nearly full", prompt.TurnLater, 4000, 4500, [2]float64{10_000, 10_000}, 0},
		{"the size of one cache is unknown", prompt.TurnLater, 4000, 0, [2]float64{10_000, 0}, 0},
	} {
		var p Prefix
		p.beginConversations(3, 1, 0, c.tokens, 0)
		if c.othersTokens > 0 {
			p.beginConversations(1, 4, 1, c.othersTokens, 0)
		}
		r := Request{PromptKey: 1, Turn: c.turn, PromptTokens: c.tokens + 100}
		got := choose(&p, r, Candidate{MatchedTokens: c.tokens, UncachedTokens: 100, EngineCacheTokens: c.caches[0]},
			Candidate{Slot: 1, UncachedTokens: c.tokens + 100, EngineCacheTokens: c.caches[1]})
		if got != c.want {
			t.Errorf("%s: sent to backend %d, want %d", c.name, got, c.want)
		}
	}
}

func TestConversationKey(t *testing.T) {
	if key := ConversationKey(5, 6, prompt.TurnUnknown); key != 0 {
		t.Errorf("key %d of a request whose turn is unknown, want 0", key)
	}
	if a, b := ConversationKey(5, 6, prompt.TurnLater), ConversationKey(0, 6, prompt.TurnLater); a != 5 || b != 6 {
		t.Errorf("keys %d and %d with a conversation and without, want 5 and 6", a, b)
	}
}

func TestLaterTurnProbability(t *testing.T) {
	c := newTurns()
	if got := c.LaterTurnProbability(); math.Abs(got-10.0/11) > 1e-9 {
		t.Errorf("%.3f at first, want 10 of 11", got)
	}
	for key := range uint64(1000) {
		c.record(prompt.TurnFirst, key+1, 0)
	}
	c.pass(time.Hour)
	if got := c.LaterTurnProbability(); got > 0.05 {
		t.Errorf("%.3f where a thousand conversations had one turn, want about 0.03", got)
	}
}
