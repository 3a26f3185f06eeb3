package router

import (
	"math"
	"testing"

	"warmroute/backends"
	"warmroute/kvevents/wire"
	"warmroute/prompt"
)

const testKVTokens = 16 // of a KV block; a block of ask has four times as many

// kvReplica publishes what a replica with a cache of its own would.
type kvReplica struct {
	follower *KVFollower
	salt     uint64 // of its hashes
	held     map[uint64]int
}

func followAll(t testing.TB, r *Router, fleet []*backends.Backend) (replicas []*kvReplica) {
	for i, b := range fleet {
		f := r.FollowKVEvents(b, 1)
		t.Cleanup(f.Close)
		f.Restart(0, true)
		replicas = append(replicas, &kvReplica{f, uint64(i+1) << 56, map[uint64]int{}})
	}
	return replicas
}

// hash returns the replica's hash of the KV block at an index of a prompt made by ask.
func (k *kvReplica) hash(key, i int) uint64 { return k.salt | uint64(key)<<32 | uint64(i+1) }

// compute publishes that a request of so many tokens was computed, but for what is cached, and
// returns how many tokens were.
func (k *kvReplica) compute(session string, key, tokens int) (cached int) {
	e := wire.Event{Kind: wire.Stored, BlockSize: testKVTokens, Session: session}
	for i := range tokens / testKVTokens {
		h := k.hash(key, i)
		if k.held[h] > 0 {
			cached, e.Parent, e.HasParent = (i+1)*testKVTokens, h, true
			continue
		}
		k.held[h]++
		e.Hashes = append(e.Hashes, h)
		for t := range testKVTokens {
			e.Tokens = append(e.Tokens, uint32(key<<16|i*testKVTokens+t))
		}
	}
	if len(e.Hashes) > 0 {
		k.follower.Apply(0, []wire.Event{e})
	}
	return cached
}

// evict publishes that the replica has evicted the KV blocks of a prompt from an index on.
func (k *kvReplica) evict(key, from int) {
	for i := 1 << 10; i >= from; i-- {
		if h := k.hash(key, i); k.held[h] > 0 {
			delete(k.held, h)
			k.follower.Apply(0, []wire.Event{{Kind: wire.Removed, Hashes: []uint64{h}}})
		}
	}
}

// serve sends a request to its replica and completes it.
func serve(t *testing.T, r *Router, fleet []*backends.Backend, replicas []*kvReplica, key, blocks int) *Reservation {
	t.Helper()
	d := mustPick(t, r, ask(fleet, key, blocks))
	tokens := blocks * tokensPerBlock
	cached := replicas[d.Backend.Slot].compute(d.KVSession, key, tokens)
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed, PromptTokens: tokens, CachedTokens: cached, CachedKnown: true})
	return d
}

func settleAll(replicas []*kvReplica) {
	for _, k := range replicas {
		k.follower.Settle()
	}
}

// matched returns how many tokens of a prompt each backend is thought to hold.
func matched(t *testing.T, r *Router, fleet []*backends.Backend, key, blocks int) (tokens []int) {
	t.Helper()
	for _, c := range r.Explain(*ask(fleet, key, blocks)).Backends {
		tokens = append(tokens, int(c.MatchedTokens))
	}
	return tokens
}

func TestKVEventsReplaceTheAccount(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix")
	replicas := followAll(t, r, fleet)
	d := serve(t, r, fleet, replicas, 1, 10)
	home := d.Backend.Slot
	f := func(when string, want int) {
		t.Helper()
		if got := matched(t, r, fleet, 1, 10)[home]; got != want {
			t.Errorf("%s: %d tokens matched, want %d", when, got, want)
		}
	}
	f("just answered", 640)
	replicas[home].evict(1, 30)
	f("evicted before it was settled", 640)
	c.advance(confirmTimeout)
	settleAll(replicas)
	f("settled", 448) // seven blocks of four KV blocks each
	replicas[home].evict(1, 5)
	f("evicted", 64)
	replicas[home].compute("", 1, 400) // of another client
	f("computed again for another client", 384)
	other := replicas[1-home]
	other.compute("", 1, 320)
	if got := matched(t, r, fleet, 1, 10)[1-home]; got != 320 {
		t.Errorf("%d tokens on a backend that this proxy sent nothing, want 320", got)
	}
	parts, _ := r.IndexStats()
	if s := parts[1-home].KV; s.KVBlocks != 20 || s.Confirmed != 5 || !s.Complete {
		t.Errorf("status %+v", s)
	}
}

func TestKVEventsBeforeTheFirstRequest(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix")
	replicas := followAll(t, r, fleet)
	replicas[0].compute("", 1, 640) // of another client, as on the other backend
	replicas[1].compute("", 1, 320)
	if got := matched(t, r, fleet, 1, 10); got[0] != 0 || got[1] != 0 {
		t.Errorf("%v tokens matched of a prompt that is not known", got)
	}
	serve(t, r, fleet, replicas, 1, 12)
	c.advance(confirmTimeout)
	settleAll(replicas)
	got := matched(t, r, fleet, 1, 12)
	if most, least := max(got[0], got[1]), min(got[0], got[1]); most != 768 || least != 320 && least != 640 {
		t.Errorf("%v tokens matched; want 768 where it was computed, and on the other what that computed before", got)
	}
}

func TestLostKVEventsLeaveTheAccount(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	r.fleet.index.SetRequestedCapacity(0, 100)
	replicas := followAll(t, r, fleet)
	serve(t, r, fleet, replicas, 1, 10)
	c.advance(confirmTimeout)
	settleAll(replicas)
	f := func(when string, key, want int) {
		t.Helper()
		if got := matched(t, r, fleet, key, 10)[0]; got != want {
			t.Errorf("%s: %d tokens matched, want %d", when, got, want)
		}
	}
	replicas[0].follower.Restart(0, false)
	f("events were lost", 1, 640)
	serve(t, r, fleet, replicas, 2, 10)
	c.advance(confirmTimeout)
	settleAll(replicas)
	replicas[0].evict(2, 20)
	f("evicted since", 2, 320)
	f("still approximate", 1, 640)
	replicas[0].follower.Restart(0, true)
	f("the replica was restarted", 1, 0)
	f("the replica was restarted", 2, 0)
}

// A scrape shows that a replica has been restarted, after its events have said so and told of
// the first request since.
func TestForgetCacheWithKVEvents(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	replicas := followAll(t, r, fleet)
	serve(t, r, fleet, replicas, 1, 10)
	serve(t, r, fleet, replicas, 2, 10)
	c.advance(confirmTimeout)
	settleAll(replicas)
	replicas[0].follower.Restart(0, true)
	clear(replicas[0].held)
	serve(t, r, fleet, replicas, 1, 10)
	for i, drop := range []func(){func() { r.ForgetCache(fleet[0]) }, func() { r.ResetBackend(fleet[0]) }} {
		drop()
		if got, gone := matched(t, r, fleet, 1, 10)[0], matched(t, r, fleet, 2, 10)[0]; got != 640 || gone != 0 {
			t.Errorf("case %d: %d tokens matched of the prompt since, %d of another; want 640 and 0", i, got, gone)
		}
	}
}

func TestRequestsWithoutKVSession(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	if d := mustPick(t, r, ask(fleet, 1, 2)); d.KVSession != "" {
		t.Error("a session although no events are read")
	}
	replicas := followAll(t, r, fleet)
	image := ask(fleet, 2, 2)
	image.Media = true
	several := ask(fleet, 3, 2)
	several.Sequences = 2
	noEngine := ask(fleet, 4, 2)
	noEngine.NoEngine = true
	for _, req := range []*Request{image, several, noEngine, ask(fleet, 5, 0)} {
		if d := mustPick(t, r, req); d.KVSession != "" {
			t.Errorf("request %+v has a session", req)
		}
	}
	d := mustPick(t, r, ask(fleet, 6, 4))
	replicas[0].compute("", 6, 256) // the events name another session, as that in the body
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed, PromptTokens: 256})
	c.advance(confirmTimeout)
	settleAll(replicas)
	if got := matched(t, r, fleet, 6, 4)[0]; got != 256 {
		t.Errorf("%d tokens matched of a request that no event named, want 256 by our account", got)
	}
}

// The answer's blocks are linked too, so that an eviction of them is seen.
func TestKVEventsOfAnswer(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	replicas := followAll(t, r, fleet)
	next := ask(fleet, 1, 6)
	d := mustPick(t, r, ask(fleet, 1, 4))
	d.RecordFirstEvent()
	replicas[0].compute(d.KVSession, 1, 6*tokensPerBlock-1)
	d.Release(Outcome{
		End: Completed, PromptTokens: 4 * tokensPerBlock, OutputTokens: 2 * tokensPerBlock,
		Reply: []prompt.Block{next.Blocks[4], next.Blocks[5]},
	})
	c.advance(confirmTimeout)
	settleAll(replicas)
	f := func(when string, want int) {
		t.Helper()
		if got := matched(t, r, fleet, 1, 6)[0]; got != want {
			t.Errorf("%s: %d tokens matched, want %d", when, got, want)
		}
	}
	f("the last KV block is not full", 368)
	replicas[0].evict(1, 18)
	f("a part of the answer is evicted", 256)
}

func TestTokensByLinks(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	replicas := followAll(t, r, fleet)
	d := mustPick(t, r, ask(fleet, 1, 10))
	replicas[0].compute(d.KVSession, 1, 1280) // twice as many tokens as usual
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed, PromptTokens: 1280})
	c.advance(confirmTimeout)
	settleAll(replicas)
	e := r.Explain(*ask(fleet, 1, 12))
	if got := int(e.Backends[0].MatchedTokens); got != 1280 {
		t.Errorf("%d tokens matched, want 1280", got)
	}
	if bytesPerToken := r.fleet.estimates.TokenSizes("", 0).BytesPerToken; e.PromptTokens != int(math.Round(1280+512/bytesPerToken)) {
		t.Errorf("%d tokens in the prompt with %.1f bytes per token", e.PromptTokens, bytesPerToken)
	}
}

func TestFollowerOfRemovedBackend(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix")
	replicas := followAll(t, r, fleet)
	d := serve(t, r, fleet, replicas, 1, 10)
	c.advance(confirmTimeout)
	settleAll(replicas)
	slot := d.Backend.Slot
	r.RemoveBackend(d.Backend)
	replicas[slot].compute("", 2, 640)
	replicas[slot].follower.Settle()
	b := &backends.Backend{Name: "new", URL: d.Backend.URL, Slot: slot}
	b.SetState(backends.Ready)
	r.AddBackend(b)
	r.FollowKVEvents(b, 1).Restart(0, true)
	fleet[slot] = b
	if got := matched(t, r, fleet, 1, 10)[slot]; got != 0 {
		t.Errorf("%d tokens matched on a new backend", got)
	}
}

// A replica that publishes wrong tokens for a request does not make the other one worse.
func TestNonsenseKVEvents(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix")
	replicas := followAll(t, r, fleet)
	honest := serve(t, r, fleet, replicas, 1, 10).Backend.Slot
	c.advance(confirmTimeout)
	settleAll(replicas)
	req := ask(fleet, 1, 10)
	req.Backends = fleet[1-honest : 2-honest]
	d := mustPick(t, r, req)
	replicas[1-honest].compute(d.KVSession, 7, 640)
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed, PromptTokens: 640})
	c.advance(confirmTimeout)
	settleAll(replicas)
	if got := matched(t, r, fleet, 1, 10)[honest]; got != 640 {
		t.Errorf("%d tokens matched on the replica that holds all 640", got)
	}
	replicas[honest].evict(1, 20)
	if got := matched(t, r, fleet, 1, 10)[honest]; got != 320 {
		t.Errorf("%d tokens matched on the replica that holds 320", got)
	}
}

// Events of 40 replicas, each with a cache of its own, from the decoded batch to the index.
func BenchmarkKVEvents(b *testing.B) {
	const replicas, perBatch, held = 40, 4, 20_000
	r, fleet, _ := newFleet(b, replicas, "prefix", func(o *Options) { o.IndexMaxBytes = 1 << 30 })
	var followers []*KVFollower
	for _, backend := range fleet {
		f := r.FollowKVEvents(backend, 1)
		f.Restart(0, true)
		followers = append(followers, f)
	}
	var events []wire.Event
	tokens := make([]uint32, perBatch*testKVTokens)
	hashes, gone := make([]uint64, perBatch), make([]uint64, perBatch)
	blocks := 0
	b.ResetTimer()
	for n := uint64(1); b.Loop(); n += perBatch {
		for i := range hashes {
			hashes[i], gone[perBatch-1-i] = n+uint64(i), n+uint64(i)-held
			tokens[i*testKVTokens] = uint32(n) + uint32(i)
		}
		events = append(events[:0], wire.Event{Kind: wire.Stored, Hashes: hashes, Tokens: tokens, BlockSize: testKVTokens})
		if n > held {
			events = append(events, wire.Event{Kind: wire.Removed, Hashes: gone})
		}
		for replica, f := range followers {
			tokens[1] = uint32(replica)
			f.Apply(0, events)
		}
		blocks += replicas * perBatch
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(blocks), "ns/block")
}
