package policy

import (
	"math"
	"testing"
	"time"

	"warmroute/router/prompt"
)

// TestFirstTurnsSpread begins conversations that share a system prompt: they must not all stay
// where it is cached. Later turns follow their prefix as before.
func TestFirstTurnsSpread(t *testing.T) {
	var p Prefix
	now := time.Unix(1000, 0)
	count := [2]int{}
	for range 10 {
		now = now.Add(time.Second)
		r := Request{Now: now, Turn: prompt.TurnFirst, MeanUncachedTokens: 1000}
		count[choose(&p, r, Candidate{MatchedTokens: 3000, UncachedTokens: 100, InFlight: float64(count[0])},
			Candidate{Slot: 1, UncachedTokens: 3100, InFlight: float64(count[1])})]++
	}
	if count[0] < 4 || count[1] < 4 {
		t.Errorf("the conversations began at the two backends %v times", count)
	}
	for _, turn := range []prompt.Turn{prompt.TurnLater, prompt.TurnUnknown} {
		r := Request{Now: now, Turn: turn, MeanUncachedTokens: 1000}
		for want := range 2 {
			candidates := []Candidate{{UncachedTokens: 3100}, {Slot: 1, UncachedTokens: 3100}}
			candidates[want].MatchedTokens, candidates[want].UncachedTokens = 3000, 100
			if got := choose(&p, r, candidates...); got != want {
				t.Errorf("turn %d went to backend %d instead of %d, which has its prefix", turn, got, want)
			}
		}
	}
}

// TestSingleTurnsNotSpread sends single questions: once they were seen to have no later turns,
// they go where their prompt is cached.
func TestSingleTurnsNotSpread(t *testing.T) {
	var p Prefix
	now := time.Unix(1000, 0)
	send := func() int {
		now = now.Add(100 * time.Millisecond)
		return choose(&p, Request{Now: now, Turn: prompt.TurnFirst, MeanUncachedTokens: 1000},
			Candidate{MatchedTokens: 3000, UncachedTokens: 100, InFlight: 1}, Candidate{Slot: 1, UncachedTokens: 3100})
	}
	for range 5000 {
		send()
	}
	elsewhere := 0
	for range 100 {
		elsewhere += send()
	}
	if elsewhere > 0 {
		t.Errorf("%d of 100 questions went where their prompt is not cached", elsewhere)
	}
}

func TestChooseRecordsNoTurn(t *testing.T) {
	var p Prefix
	r := Request{Turn: prompt.TurnFirst, MeanUncachedTokens: 1000, Trace: &Trace{}}
	plain := Candidate{NameHash: 1, Weight: 1, PrefillRate: 8000, UncachedTokens: 100}
	p.Choose(&r, []Candidate{plain, plain})
	if p.first != 0 || len(p.began) != 0 {
		t.Errorf("a request that was not sent was counted: %+v", p.conversations)
	}
	if terms := r.Trace.Terms[0]; terms[len(terms)-1].Name != "later turns" || terms[len(terms)-1].Tokens <= 0 {
		t.Errorf("the terms are %v, without later turns", terms)
	}
}

func TestConversationCounts(t *testing.T) {
	var c conversations
	now := time.Unix(1000, 0)
	if got := c.laterTurns(); got != maxLaterTurns {
		t.Errorf("%.1f later turns at the beginning, want %d", got, maxLaterTurns)
	}
	for range 970 {
		c.recordTurn(prompt.TurnFirst, 2, now)
	}
	for range 1700 {
		c.recordTurn(prompt.TurnLater, 2, now)
	}
	c.recordTurn(prompt.TurnUnknown, 2, now)
	if got := c.laterTurns(); math.Abs(got-2) > 1e-9 {
		t.Errorf("%.2f later turns, want 2", got)
	}
	if got := c.countOn(2, now.Add(conversationInterval)); math.Abs(got-970/math.E) > 1e-9 {
		t.Errorf("%.1f conversations after the interval, want %.1f", got, 970/math.E)
	}
	if a, b := c.countOn(1, now), c.countOn(9, now); a != 0 || b != 0 {
		t.Errorf("%v and %v conversations on backends without any", a, b)
	}
	c.Forget(2)
	c.Forget(9)
	if got := c.countOn(2, now); got != 0 {
		t.Errorf("%v conversations on a backend that was forgotten", got)
	}
	for range 3 * maxCountedTurns {
		c.recordTurn(prompt.TurnLater, 0, now)
	}
	if c.first+c.later > maxCountedTurns {
		t.Errorf("%v turns are counted, above the limit", c.first+c.later)
	}
}
