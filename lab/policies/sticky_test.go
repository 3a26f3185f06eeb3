package policies

import (
	"testing"

	"warmroute/router/policy"
)

func TestStickyLeastLoaded(t *testing.T) {
	p := newTester(t, "sticky-least-loaded", policy.Settings{})
	session := func(key uint64) policy.Request { return policy.Request{Conversation: key} }
	p.send(session(1), 0)
	p.send(session(2), 1)
	p.send(session(2), 1)
	p.expect("the fewest conversations", session(3), idle(3), 2)
	p.expect("it stays, whatever the load", session(3), busy(0, 0, 1000), 2)
	p.send(session(4), 0)
	p.send(session(5), 1)
	p.expect("two conversations each but on the last one", session(6), idle(3), 2)
	p.send(session(6), 0) // its backend was away
	p.expect("it stays where it was sent last", session(6), idle(3), 0)
	p.Policy.(policy.Forgetter).ForgetBackend(0)
	p.expect("a forgotten backend has no conversation", session(7), idle(3), 0)
}

func TestDualMap(t *testing.T) {
	p := newTester(t, "dualmap", policy.Settings{})
	fleet := idle(8)
	for i := range fleet {
		fleet[i].NameHash, fleet[i].PrefillRate, fleet[i].UncachedTokens = policy.RendezvousRank(uint64(i), 7), 8000, 1000
	}
	r := policy.Request{PromptKey: 42, PromptTokens: 1000}
	first := highestRank(42, fleet, -1)
	second := highestRank(policy.RendezvousRank(42, oddGolden), fleet, first)
	p.expect("idle: the first of its two", r, fleet, first)
	fleet[second].MatchedTokens = 500
	p.expect("the longer match of the two", r, fleet, second)
	fleet[second].UnstartedTokens = 100_000
	p.expect("which cannot meet the promised TTFT", r, fleet, first)
	fleet[first].UnstartedTokens = 200_000
	p.expect("nor can the other, which is slower", r, fleet, second)
	p.expect("one candidate", r, fleet[:1], 0)
}

func TestSkyWalker(t *testing.T) {
	p := newTester(t, "skywalker", policy.Settings{})
	f := func(why string, want int, candidates ...policy.Candidate) {
		t.Helper()
		p.expect(why, policy.Request{PromptTokens: 1000}, fleet(candidates...), want)
	}
	f("the longest match", 1, policy.Candidate{MatchedTokens: 100}, policy.Candidate{MatchedTokens: 200, Requests: 5})
	f("which has nothing to prefill", 0, policy.Candidate{MatchedTokens: 100}, policy.Candidate{MatchedTokens: 200, QueuedSeconds: 1})
	f("the least loaded of equals", 1, policy.Candidate{Requests: 2}, policy.Candidate{Requests: 1})
	f("none is idle: the longest match", 1, policy.Candidate{QueuedSeconds: 1}, policy.Candidate{QueuedSeconds: 9, MatchedTokens: 10})
}
