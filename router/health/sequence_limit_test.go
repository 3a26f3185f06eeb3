package health

import (
	"testing"

	"warmroute/backends"
)

func TestSequenceLimit(t *testing.T) {
	type poll struct {
		running, waiting int
		kv               float64
		started          bool
	}
	full := func(running int) poll { return poll{running, 9, 0.3, true} }
	five := func(p poll) []poll { return []poll{p, p, p, p, p} }
	for _, c := range []struct {
		name  string
		polls []poll
		want  int
	}{
		{"as many run while others wait", five(full(8)), 8},
		{"some have just ended", []poll{full(62), full(64), full(61), full(63), full(64)}, 64},
		{"too few polls", five(full(8))[:4], 0},
		{"prompts share the steps", []poll{full(3), full(9), full(5), full(12), full(8), full(2), full(14), full(7)}, 0},
		{"nothing waits", five(poll{8, 0, 0.3, true}), 0},
		{"the KV cache is full", five(poll{8, 9, 0.9, true}), 0},
		{"a long prompt is computed", five(poll{8, 9, 0.3, false}), 0},
		{"it stays known while nothing waits", append(five(full(8)), poll{3, 0, 0.1, true}, poll{0, 0, 0, false}), 8},
		{"more run later", append(five(full(8)), full(12)), 0},
		{"fewer run, after a restart", append(five(full(8)), five(full(4))...), 4},
	} {
		var s sequenceLimit
		for _, p := range c.polls {
			s.recordPoll(&backends.Load{
				Running: p.running, Waiting: p.waiting, WaitingForCapacity: p.waiting, QueuesKnown: true, KVCacheUsage: p.kv, KVKnown: true,
			}, p.started)
		}
		if s.known != c.want {
			t.Errorf("%s: %d, want %d", c.name, s.known, c.want)
		}
	}
}
