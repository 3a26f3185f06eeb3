package fleet

import (
	"testing"
	"time"

	"warmroute/backends"
)

func TestNextRankAction(t *testing.T) {
	poll := time.Unix(1000, 0)
	load := func(start float64, labels ...int) *backends.Load {
		l := &backends.Load{QueuesKnown: true, StartTime: start, PolledAt: poll}
		for _, label := range labels {
			l.PerEngine = append(l.PerEngine, backends.EngineLoad{Engine: label})
		}
		return l
	}
	divided := rankDecision{startTime: 1, labels: []int{0, 1}, numbers: []int{0, 1}}
	undivided := rankDecision{startTime: 1, labels: []int{2, 3}}
	for _, c := range []struct {
		name     string
		load     *backends.Load
		off      bool
		last     rankDecision
		rejected time.Time
		want     rankAction
	}{
		{"one engine", load(1), false, rankDecision{}, time.Time{}, joinRanks},
		{"first poll of several", load(1, 0, 1), false, rankDecision{}, time.Time{}, divideRanks},
		{"of a later node", load(1, 2, 3), false, rankDecision{}, time.Time{}, probeRanks},
		{"as before", load(1, 0, 1), false, divided, time.Time{}, keepRanks},
		{"not addressable, as before", load(1, 2, 3), false, undivided, time.Time{}, keepRanks},
		{"another process", load(2, 0, 1), false, divided, time.Time{}, divideRanks},
		{"another process of a later node", load(2, 2, 3), false, undivided, time.Time{}, probeRanks},
		{"more engines", load(1, 0, 1, 2), false, divided, time.Time{}, divideRanks},
		{"one engine left", load(1), false, divided, time.Time{}, joinRanks},
		{"no engine in the metrics", &backends.Load{}, false, divided, time.Time{}, keepRanks},
		{"ranks: off", load(1, 0, 1), true, rankDecision{}, time.Time{}, joinRanks},
		{"ranks: off by a reload", load(1, 0, 1), true, divided, time.Time{}, joinRanks},
		{"refused after the poll was sent", load(1, 0, 1), false, divided, poll.Add(time.Millisecond), keepRanks},
		{"refused before, labels unchanged", load(1, 0, 1), false, divided, poll.Add(-time.Millisecond), joinRanks},
		{"refused before, labels changed", load(1, 0, 1, 2), false, divided, poll.Add(-time.Millisecond), divideRanks},
	} {
		if got := nextRankAction(c.load, c.off, &c.last, c.rejected); got != c.want {
			t.Errorf("%s: action %d, want %d", c.name, got, c.want)
		}
	}
}
