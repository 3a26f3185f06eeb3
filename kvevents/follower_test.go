package kvevents

import (
	"testing"

	"warmroute/backends"
	"warmroute/kvevents/wire"
	"warmroute/prompt"
	"warmroute/router"
	"warmroute/router/index"
)

func TestKVEventsReplaceTheAccount(t *testing.T) {
	x := newFixture(t, 2)
	d := x.serve(1, 10)
	home := d.Backend.Slot
	f := func(when string, want int) {
		t.Helper()
		if got := x.matched(1, 10)[home]; got != want {
			t.Errorf("%s: %d tokens matched, want %d", when, got, want)
		}
	}
	f("just completed", 640)
	x.replicas[home].evict(1, 30)
	f("evicted before it was settled", 640)
	x.settle()
	f("settled", 448) // seven blocks of four KV blocks each
	x.replicas[home].evict(1, 5)
	f("evicted", 64)
	x.replicas[home].compute("", 1, 400) // of another client
	f("computed again for another client", 384)
	other := x.replicas[1-home]
	other.compute("", 1, 320)
	if got := x.matched(1, 10)[1-home]; got != 320 {
		t.Errorf("%d tokens on a backend that this proxy sent nothing, want 320", got)
	}
	parts, _ := x.IndexStats()
	if s := parts[1-home].KV; s.KVBlocks != 20 || s.Confirmed != 5 || !s.Complete {
		t.Errorf("status %+v", s)
	}
}

func TestKVEventsBeforeTheFirstRequest(t *testing.T) {
	x := newFixture(t, 2)
	x.replicas[0].compute("", 1, 640) // of another client, as on the other backend
	x.replicas[1].compute("", 1, 320)
	if got := x.matched(1, 10); got[0] != 0 || got[1] != 0 {
		t.Errorf("%v tokens matched of a prompt that is not known", got)
	}
	x.serve(1, 12)
	x.settle()
	got := x.matched(1, 12)
	if most, least := max(got[0], got[1]), min(got[0], got[1]); most != 768 || least != 320 && least != 640 {
		t.Errorf("%v tokens matched; want 768 where it was computed, and on the other what that computed before", got)
	}
}

func TestLostKVEventsLeaveTheAccount(t *testing.T) {
	x := newUnread(t, 1, 1<<26)
	x.updateIndex(func(i *index.Index) { i.SetRequestedCapacity(0, 100) })
	x.follow()
	x.serve(1, 10)
	x.settle()
	f := func(when string, key, want int) {
		t.Helper()
		if got := x.matched(key, 10)[0]; got != want {
			t.Errorf("%s: %d tokens matched, want %d", when, got, want)
		}
	}
	x.replicas[0].follower.Restart(0, false)
	f("events were lost", 1, 640)
	x.serve(2, 10)
	x.settle()
	x.replicas[0].evict(2, 20)
	f("evicted since", 2, 320)
	f("still approximate", 1, 640)
	x.replicas[0].follower.Restart(0, true)
	f("the replica was restarted", 1, 0)
	f("the replica was restarted", 2, 0)
}

// A poll shows that a replica has been restarted, after its events have said so and told of
// the first request since.
func TestForgetCacheWithKVEvents(t *testing.T) {
	x := newFixture(t, 1)
	x.serve(1, 10)
	x.serve(2, 10)
	x.settle()
	x.replicas[0].follower.Restart(0, true)
	clear(x.replicas[0].held)
	x.serve(1, 10)
	for i, drop := range []func(){func() { x.ForgetCache(x.backends[0]) }, func() { x.ResetBackend(x.backends[0]) }} {
		drop()
		if got, gone := x.matched(1, 10)[0], x.matched(2, 10)[0]; got != 640 || gone != 0 {
			t.Errorf("case %d: %d tokens matched of the prompt since, %d of another; want 640 and 0", i, got, gone)
		}
	}
}

// The event of a reset comes with the next step only, after which blocks count that were stored since.
func TestCacheResetBeforeItsKVEvent(t *testing.T) {
	x := newFixture(t, 1)
	x.serve(1, 10)
	x.settle()
	x.RecordCacheReset(x.Backends()[0])
	if got := x.matched(1, 10)[0]; got != 0 {
		t.Errorf("%d tokens matched after a reset", got)
	}
	if parts, _ := x.IndexStats(); parts[0].KV.KVBlocks != 0 || !parts[0].KV.Complete {
		t.Errorf("status %+v", parts[0].KV)
	}
	x.replicas[0].follower.Apply(0, []wire.Event{{Kind: wire.Cleared}})
	clear(x.replicas[0].held)
	x.serve(1, 10)
	x.settle()
	if got := x.matched(1, 10)[0]; got != 640 {
		t.Errorf("%d tokens matched after the prompt was computed again, want 640", got)
	}
}

func TestRequestsWithoutKVSession(t *testing.T) {
	x := newUnread(t, 1, 1<<26)
	if d := x.pick(x.ask(1, 2)); d.KVSession != "" {
		t.Error("a session although no events are read")
	}
	x.follow()
	image := x.ask(2, 2)
	image.Media = true
	several := x.ask(3, 2)
	several.Sequences = 2
	noEngine := x.ask(4, 2)
	noEngine.NoEngine = true
	for _, req := range []*router.Request{image, several, noEngine, x.ask(5, 0)} {
		if d := x.pick(req); d.KVSession != "" {
			t.Errorf("request %+v has a session", req)
		}
	}
	d := x.pick(x.ask(6, 4))
	x.replicas[0].compute("", 6, 256) // the events name another session, as that in the body
	d.RecordFirstEvent()
	d.Release(router.Outcome{End: router.Completed, PromptTokens: 256})
	x.settle()
	if got := x.matched(6, 4)[0]; got != 256 {
		t.Errorf("%d tokens matched of a request that no event named, want 256 by our account", got)
	}
}

// The output's blocks are linked too, so that an eviction of them is seen.
func TestKVEventsOfOutput(t *testing.T) {
	x := newFixture(t, 1)
	next := x.ask(1, 6)
	d := x.pick(x.ask(1, 4))
	d.RecordFirstEvent()
	x.replicas[0].compute(d.KVSession, 1, 6*tokensPerBlock-1)
	d.Release(router.Outcome{
		End: router.Completed, PromptTokens: 4 * tokensPerBlock, OutputTokens: 2 * tokensPerBlock,
		Reply: []prompt.Block{next.Blocks[4], next.Blocks[5]},
	})
	x.settle()
	f := func(when string, want int) {
		t.Helper()
		if got := x.matched(1, 6)[0]; got != want {
			t.Errorf("%s: %d tokens matched, want %d", when, got, want)
		}
	}
	f("the last KV block is not full", 368)
	x.replicas[0].evict(1, 18)
	f("a part of the output is evicted", 256)
}

func TestTokensByLinks(t *testing.T) {
	x := newFixture(t, 1)
	d := x.pick(x.ask(1, 10))
	x.replicas[0].compute(d.KVSession, 1, 1280) // twice as many tokens as usual
	d.RecordFirstEvent()
	d.Release(router.Outcome{End: router.Completed, PromptTokens: 1280})
	x.settle()
	e := x.Explain(*x.ask(1, 12))
	if got := int(e.Backends[0].MatchedTokens); got != 1280 {
		t.Errorf("%d tokens matched, want 1280", got)
	}
	if unknown := x.Explain(*x.ask(9, 2)).PromptTokens; e.PromptTokens != 1280+unknown {
		t.Errorf("%d tokens in the prompt, of which 1280 are known and %d are not", e.PromptTokens, unknown)
	}
}

func TestFollowerOfRemovedBackend(t *testing.T) {
	x := newFixture(t, 2)
	d := x.serve(1, 10)
	x.settle()
	slot := d.Backend.Slot
	x.RemoveBackend(d.Backend)
	x.replicas[slot].compute("", 2, 640)
	x.replicas[slot].follower.Settle()
	b := &backends.Backend{Name: "new", URL: d.Backend.URL, Slot: slot}
	b.SetState(backends.Ready)
	x.AddBackend(b)
	x.fleet.Follow(b, 1).Restart(0, true)
	x.backends[slot] = b
	if got := x.matched(1, 10)[slot]; got != 0 {
		t.Errorf("%d tokens matched on a new backend", got)
	}
}

// A replica that publishes wrong tokens for a request does not make the other one worse.
func TestNonsenseKVEvents(t *testing.T) {
	x := newFixture(t, 2)
	honest := x.serve(1, 10).Backend.Slot
	x.settle()
	req := x.ask(1, 10)
	req.Backends = x.backends[1-honest : 2-honest]
	d := x.pick(req)
	x.replicas[1-honest].compute(d.KVSession, 7, 640)
	d.RecordFirstEvent()
	d.Release(router.Outcome{End: router.Completed, PromptTokens: 640})
	x.settle()
	if got := x.matched(1, 10)[honest]; got != 640 {
		t.Errorf("%d tokens matched on the replica that holds all 640", got)
	}
	x.replicas[honest].evict(1, 20)
	if got := x.matched(1, 10)[honest]; got != 320 {
		t.Errorf("%d tokens matched on the replica that holds 320", got)
	}
}
