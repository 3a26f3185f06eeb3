package ledger

import (
	"math"
	"testing"
	"time"

	"warmroute/backends"
)

// A request's rate and its first token are told from the replica's counters, which include those of other clients' requests.
func TestOutputPolls(t *testing.T) {
	type poll struct {
		at                          float64 // seconds
		tokens, gaps, gapSeconds    float64
		firstTokens, firstTokenTime float64
		waiting                     int
	}
	for _, c := range []struct {
		name        string
		polls       []poll
		sentAt      float64
		rate, delay float64
	}{
		{"no poll", nil, 1, 0, 0},
		{"no counters", []poll{{at: 0}, {at: 2}}, 1, 0, 0},
		{"too few outputs", []poll{{at: 0}, {at: 2, tokens: 16, gaps: 15, gapSeconds: 1, firstTokens: 1, firstTokenTime: 0.1}}, 1, 0, 0.1},
		{"beside others since it was sent", []poll{
			{at: 0}, {at: 1, tokens: 201, gaps: 200, gapSeconds: 1, firstTokens: 1}, {at: 2, tokens: 302, gaps: 300, gapSeconds: 3, firstTokens: 2,
				firstTokenTime: 0.2},
		}, 1, 50, 0.2},
		{"as in the shortest time before, if too short", []poll{
			{at: 0}, {at: 1, tokens: 201, gaps: 200, gapSeconds: 1, firstTokens: 1}, {at: 2, tokens: 302, gaps: 300, gapSeconds: 3, firstTokens: 2},
		}, 5, 50, 0},
		{"several tokens in an output", []poll{{at: 0}, {at: 2, tokens: 302, gaps: 100, gapSeconds: 2, firstTokens: 2}}, 0, 150, 0},
		{"one token each beside it", []poll{{at: 0}, {at: 2, tokens: 1100, gaps: 100, gapSeconds: 2, firstTokens: 1000}}, 0, 50, 0},
		{"behind those that had begun", []poll{
			{at: 0}, {at: 1.5, firstTokens: 8, firstTokenTime: 0.1, waiting: 1}, {at: 2.5, firstTokens: 8, firstTokenTime: 0.1, waiting: 1},
			{at: 3.5, firstTokens: 9, firstTokenTime: 2.1},
		}, 1, 0, 2},
		{"nothing has begun since", []poll{{at: 0, firstTokens: 8}, {at: 2, firstTokens: 8, waiting: 3}, {at: 4, firstTokens: 8, waiting: 3}}, 1,
			0, 3},
		{"those that have begun came before it", []poll{
			{at: 0, firstTokens: 8}, {at: 2, firstTokens: 9, firstTokenTime: 1, waiting: 3}, {at: 4, firstTokens: 10, firstTokenTime: 8, waiting: 3},
		}, 1, 0, 3},
		{"a restart", []poll{{at: 0, tokens: 1000, gaps: 1000, gapSeconds: 1000, firstTokens: 5}, {at: 1},
			{at: 2, tokens: 101, gaps: 100, gapSeconds: 1, firstTokens: 1, firstTokenTime: 0.5}}, 1, 100, 0.5},
	} {
		start := time.Now()
		at := func(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }
		var polls outputPolls
		for _, p := range c.polls {
			polls.add(&backends.Load{
				PolledAt: at(p.at), Waiting: p.waiting, GenerationTokens: p.tokens, Gaps: p.gaps, GapSeconds: p.gapSeconds,
				FirstTokens: p.firstTokens, FirstTokenSeconds: p.firstTokenTime,
			})
		}
		if got := polls.rate(at(c.sentAt)); math.Abs(got-c.rate) > 1e-6 {
			t.Errorf("%s: %f tokens a second, want %f", c.name, got, c.rate)
		}
		if got := polls.firstTokenDelay(at(c.sentAt)); math.Abs(got-c.delay) > 1e-6 {
			t.Errorf("%s: the first token came after %f s, want %f", c.name, got, c.delay)
		}
	}
}

func TestOutputPollsAreBounded(t *testing.T) {
	var polls outputPolls
	for i := range 3 * maxOutputPolls {
		polls.add(&backends.Load{PolledAt: time.Unix(int64(i), 0), Gaps: float64(i)})
	}
	if n := len(polls.list); n != maxOutputPolls || polls.list[n-1].gaps != 3*maxOutputPolls-1 || polls.list[0].gaps != 2*maxOutputPolls {
		t.Errorf("%d polls are kept, from %v to %v", n, polls.list[0].gaps, polls.list[n-1].gaps)
	}
}
