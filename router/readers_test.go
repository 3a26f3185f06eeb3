package router

import (
	"testing"
	"time"

	"warmroute/backends"
)

func TestAnswersGrowNoLongerThanTheyCanBe(t *testing.T) {
	for name, c := range map[string]struct{ sequences, most, want int }{
		"nothing said":   {1, 0, maxMeanAnswers * defaultAnswerTokens},
		"two sequences":  {2, 0, 2 * maxMeanAnswers * defaultAnswerTokens},
		"fewer allowed":  {1, 16, 16},
		"more than ever": {1, 1 << 20, maxMeanAnswers * defaultAnswerTokens},
	} {
		r, fleet, clock := newFleet(t, 1, "prefix")
		req := ask(fleet, 1, 10)
		req.Sequences, req.MaxAnswerTokens = c.sequences, c.most
		d := mustPick(t, r, req)
		d.RecordFirstEvent()
		before := r.kvTokens(0, clock.now)
		clock.advance(time.Hour)
		if got := int(r.kvTokens(0, clock.now) - before); got != c.want {
			t.Errorf("%s: grown to %d tokens in an hour, want %d", name, got, c.want)
		}
		d.Release(Outcome{End: ClientDisconnected})
		if got := r.kvTokens(0, clock.now); got != 0 {
			t.Errorf("%s: %.0f tokens left at the end", name, got)
		}
	}
}

// reading is a fleet of one backend with so many streams, of 640 tokens each,
// whose engine has long put out all of them.
func reading(t *testing.T, streams int) (*Router, *backends.Backend, *clock) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	for key := range streams {
		mustPick(t, r, ask(fleet, key, 10)).RecordFirstEvent()
	}
	for range 10 {
		c.advance(time.Second)
		scraped(r, fleet[0], c, 0, 0)
	}
	return r, fleet[0], c
}

// scraped lets a poll find so many requests and such a share of the cache in use.
func scraped(r *Router, b *backends.Backend, c *clock, running int, usage float64) {
	l := &backends.Load{
		CacheTokens: 10_000, KVKnown: true, KVCacheUsage: usage, QueuesKnown: true, Running: running,
		TokensKnown: true, PromptTokens: 1, GenerationTokens: 1, OwnInFlight: b.InFlight.Load(), ScrapedAt: c.now,
	}
	b.SetLoad(l)
	r.ObserveLoad(b, l)
}

func TestWhatSlowReadersHaveYetToReadIsNotInTheCache(t *testing.T) {
	r, b, c := reading(t, 14) // 8,960 of 10,000 tokens, and what they were answered
	next := ask([]*backends.Backend{b}, 99, 10)
	d := sent(t, "the cache is empty", submit(r, next))
	c.advance(time.Second)
	scraped(r, b, c, 1, 0) // it waits for its first step
	large := submit(r, ask([]*backends.Backend{b}, 100, 140))
	waits(t, "640 tokens are still to come into the cache, and 8,960 would fill it", large)
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed})
	sent(t, "nothing is to come", large)
}

func TestSlowReadersAreNoStall(t *testing.T) {
	r, b, c := reading(t, 3)
	if times, now := r.Stalls(b); times > 0 || now {
		t.Errorf("stalled %d times (now: %v), and its engine has nothing to do", times, now)
	}
	mustPick(t, r, ask([]*backends.Backend{b}, 99, 1))
	for s := range 10 {
		c.advance(time.Second)
		scraped(r, b, c, 1, 0)
		if _, now := r.Stalls(b); now != (s >= 3) { // 3 s, and a few milliseconds of prefill
			t.Errorf("%d s after another was sent, and nothing came of it: stalled %v", s+1, now)
		}
	}
}
