package router

import (
	"math"
	"testing"
	"time"

	"warmroute/backends"
)

func TestPrefillRates(t *testing.T) {
	r, fleet, c := newFleet(t, 3, "prefix")
	key := 0
	prefill := func(b *backends.Backend, tokens int, took time.Duration) {
		key++
		req := ask([]*backends.Backend{b}, key, tokens/64)
		d := mustPick(t, r, req)
		c.advance(took)
		d.RecordFirstEvent()
		d.Release(Outcome{End: Completed})
	}
	f := func(name string, want ...float64) {
		t.Helper()
		for slot, l := range r.Estimates() {
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

// What a prefill's first event tells of speed: nothing when it was short, in
// tokens or in time, and what is cached is not computed.
func TestWhatTellsThePrefillRate(t *testing.T) {
	f := func(name string, blocks, cached int, took time.Duration, want float64) {
		t.Helper()
		r, fleet, c := newFleet(t, 1, "prefix")
		for key := range 20 {
			d := mustPick(t, r, ask(fleet, key, blocks))
			c.advance(took)
			d.RecordFirstEvent()
			d.Release(usage(blocks*64, cached))
		}
		if got := r.Estimates()[0].PrefillRate; math.Abs(got-want) > 0.01*want {
			t.Errorf("%s: %.0f tokens a second, want %.0f", name, got, want)
		}
	}
	f("a prefill that tells", 200, 0, time.Second, 12_800)
	f("few tokens", 10, 0, time.Second, 8000)
	f("a short time", 200, 0, 50*time.Millisecond, 8000)
	f("half of it cached, which nobody predicted", 400, 12_800, time.Second, 12_800)
	f("all of it but a little cached", 200, 12_736, time.Second, 8000)
}

func TestAnswersAreLearnedBySequence(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	for key := range 100 {
		req := ask(fleet, key, 2)
		req.Sequences = 8
		mustPick(t, r, req).Release(Outcome{End: Completed, AnswerTokens: 8 * 100})
	}
	if n := r.Estimates()[0].AnswerTokens; n < 100 || n > 120 {
		t.Errorf("answers of 100 tokens, eight of each: learned %.0f", n)
	}
}

func TestAnswersLongerThanTheyCanBeTeachNothing(t *testing.T) {
	f := func(name string, maxTokens, sequences, tokens int, want bool) {
		t.Helper()
		r, fleet, c := newFleet(t, 1, "prefix")
		req := ask(fleet, 1, 2)
		req.MaxAnswerTokens, req.Sequences = maxTokens, sequences
		d := mustPick(t, r, req)
		d.RecordFirstEvent()
		c.advance(time.Second)
		d.Release(Outcome{End: Completed, AnswerTokens: tokens})
		if got := r.Estimates()[0].AnswerTokens != defaultAnswerTokens; got != want {
			t.Errorf("%s: length learned %v, want %v", name, got, want)
		}
		if got := r.states[0].kv.decodeRate.Value != defaultDecodeRate; got != want {
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
			mustPick(t, r, ask(fleet[i:i+1], 3*key+i, 2)).Release(Outcome{End: Completed, AnswerTokens: tokens})
		}
	}
	mustPick(t, r, ask(fleet, 1000, 2))
	if n := r.decision.request.MeanAnswerTokens; n < 100 || n > 200 {
		t.Errorf("answers are taken to have %.0f tokens, where two of three backends' have about 100", n)
	}
}
