package kvevents

import (
	"fmt"
	"testing"

	"warmroute/backends"
	"warmroute/kvevents/wire"
	"warmroute/prompt"
	"warmroute/router"
	"warmroute/router/index"
)

// A client that disconnects during the prefill leaves no links.
func TestKVEventsOfDisconnectBeforePrefill(t *testing.T) {
	x := newFixture(t, 2)
	d := x.pick(x.ask(1, 40)) // 2560 tokens
	home := d.Backend.Slot
	x.replicas[home].compute(d.KVSession, 1, 512) // the first chunk
	d.Release(router.Outcome{End: router.ClientDisconnected})
	x.settle()
	// the same again, to its end
	d = x.pick(x.ask(1, 40))
	cached := x.replicas[d.Backend.Slot].compute(d.KVSession, 1, 2560)
	d.RecordFirstEvent()
	d.Release(router.Outcome{End: router.Completed, PromptTokens: 2560, CachedTokens: cached, CachedKnown: true})
	x.settle()
	e := x.Explain(*x.ask(1, 40))
	if got := x.matched(1, 40)[d.Backend.Slot]; got != 2560 || e.PromptTokens != 2560 {
		t.Errorf("computed wholly: %d tokens matched of a prompt thought to have %d, want 2560 of 2560", got, e.PromptTokens)
	}
}

// A request that is aborted while an evicted prefix is computed again does not change its links.
func TestKVEventsOfAbortKeepLinks(t *testing.T) {
	x := newFixture(t, 1)
	x.serve(1, 40)
	x.settle()
	x.replicas[0].evict(1, 0)
	d := x.pick(x.ask(1, 40))
	x.replicas[0].compute(d.KVSession, 1, 512)
	d.Release(router.Outcome{End: router.ClientDisconnected})
	x.settle()
	if got := x.matchedBlocks(1, 40)[0]; got != 8 {
		t.Errorf("%d of 40 blocks matched, 8 are held", got)
	}
}

// A stream that its client stops, without usage.
func TestKVEventsOfStoppedStream(t *testing.T) {
	x := newFixture(t, 1)
	d := x.pick(x.ask(1, 10)) // 640 tokens
	d.RecordFirstEvent()
	x.replicas[0].compute(d.KVSession, 1, 640+1280) // an output of 1280 tokens
	d.Release(router.Outcome{End: router.ClientDisconnected, OutputTokens: 1280})
	x.settle()
	e := x.Explain(*x.ask(1, 10))
	if got := x.matched(1, 10)[0]; got != 640 || e.PromptTokens > 700 {
		t.Errorf("%d tokens matched of a prompt thought to have %d, want 640 of 640", got, e.PromptTokens)
	}
}

// The conversation continues after its client has closed a stream.
func TestKVEventsOfConversationAfterStoppedStream(t *testing.T) {
	x := newFixture(t, 1)
	d := x.pick(x.ask(1, 10)) // 640 tokens
	d.RecordFirstEvent()
	x.replicas[0].compute(d.KVSession, 1, 1920) // with an output of 1280 tokens
	d.Release(router.Outcome{End: router.ClientDisconnected, OutputTokens: 1280})
	x.settle()
	for turn := range 3 {
		x.serve(1, 32+2*turn) // the next turns, with usage
		x.settle()
	}
	l, _ := x.link(x.ask(1, 10).Blocks[9])
	if l.Tokens != 640 {
		t.Errorf("the first ten blocks are thought to have %d tokens, want 640", l.Tokens)
	}
	x.replicas[0].evict(1, 40) // keeps 640 tokens, all of the first ten blocks
	if got := x.matched(1, 10)[0]; got != 640 {
		t.Errorf("%d tokens matched, want 640: all ten blocks are held", got)
	}
}

// A stream without usage whose output is shorter than a block.
func TestKVEventsWithoutUsage(t *testing.T) {
	x := newFixture(t, 1)
	d := x.pick(x.ask(1, 10))
	d.RecordFirstEvent()
	x.replicas[0].compute(d.KVSession, 1, 640+640) // e.g. reasoning, which no later turn sends
	d.Release(router.Outcome{End: router.Completed, OutputTokens: 640})
	x.settle()
	e := x.Explain(*x.ask(1, 10))
	if e.PromptTokens > 700 {
		t.Errorf("the prompt of 640 tokens is thought to have %d", e.PromptTokens)
	}
}

// The links of a conversation are replaced while nothing holds its blocks.
func TestConversationAfterReplacedLinks(t *testing.T) {
	x := newUnread(t, 1, 128*4*120)
	x.updateIndex(func(i *index.Index) { i.SetRequestedCapacity(0, 1000) })
	x.follow()
	x.serve(1, 25)
	x.settle()
	x.replicas[0].evict(1, 0)
	for key := 2; key < 25; key++ {
		x.serve(key, 5)
		x.settle()
		x.replicas[0].evict(key, 0)
		_, first := x.link(prompt.Block(1<<32 + 1))
		_, last := x.link(prompt.Block(1<<32 + 25))
		if !first && last {
			break
		}
	}
	for turn := range 3 {
		x.serve(1, 26+turn)
		x.settle()
		if got, want := x.matched(1, 26+turn)[0], (26+turn)*64; got != want {
			t.Errorf("turn %d: %d tokens matched, want %d; %+v", turn, got, want, x.status(0))
		}
	}
}

// A fleet with more KV blocks than there is room for.
func TestMoreKVBlocksThanRoom(t *testing.T) {
	x := newUnread(t, 2, 128*4*100)
	x.follow()
	x.replicas[0].compute("", 9, 90*testKVTokens) // of another client
	req := x.ask(1, 10)
	req.Backends = x.backends[1:]
	d := x.pick(req)
	x.replicas[1].compute(d.KVSession, 1, 640)
	d.RecordFirstEvent()
	d.Release(router.Outcome{End: router.Completed, PromptTokens: 640})
	x.settle()
	s := x.status(1)
	if got := x.matched(1, 10)[1]; got != 640 || s.Complete {
		t.Errorf("%d tokens matched, want 640; status %+v", got, s)
	}
}

// A cache is forgotten while the room for KV blocks is full.
func TestForgetCacheWhenFull(t *testing.T) {
	x := newUnread(t, 1, 128*4*100)
	x.follow()
	x.serve(1, 10)
	x.settle()
	x.replicas[0].compute("", 9, 60*testKVTokens)
	before := x.matched(1, 10)
	x.ForgetCache(x.backends[0])
	after := x.matched(1, 10)
	if before[0] != after[0] {
		t.Errorf("%v before, %v after, with all 100 KV blocks still held", before, after)
	}
}

// A poll shows that a replica has been restarted before its events do.
func TestRestartSeenByPollFirst(t *testing.T) {
	x := newFixture(t, 1)
	x.serve(1, 10)
	x.settle()
	x.ForgetCache(x.backends[0])
	x.replicas[0].follower.Restart(0, false) // as Subscriber does: it forgets, and then replays from the beginning
	x.replicas[0].follower.Restart(0, true)
	if got := x.matched(1, 10)[0]; got != 0 {
		t.Errorf("%d tokens matched on a replica that was restarted", got)
	}
}

// The events of one of two engines are not received.
func TestKVEventsOfOneOfTwoEngines(t *testing.T) {
	x := newFixture(t, 2) // rank 0 of both; rank 1 is not connected
	for _, k := range x.replicas {
		k.follower.SetEngines(2)
	}
	x.serve(1, 10)
	x.settle()
	home := 0
	if x.matched(1, 10)[1] > 0 {
		home = 1
	}
	req := x.ask(1, 10)
	req.Backends = x.backends[1-home : 2-home]
	d := x.pick(req) // is computed by rank 1 there
	d.RecordFirstEvent()
	d.Release(router.Outcome{End: router.Completed, PromptTokens: 640})
	x.settle()
	if got := x.matched(1, 10)[1-home]; got != 640 {
		t.Errorf("%d tokens matched where rank 1 holds 640, status %+v", got, x.status(1-home))
	}
}

// KV blocks of 512 tokens, and many prompts with a common beginning.
func TestHotPromptWithLargeKVBlocks(t *testing.T) {
	x := newFixture(t, 1)
	const kv = 512
	store := func(session string, hash, parent uint64, first uint32) {
		e := wire.Event{Kind: wire.Stored, BlockSize: kv, Session: session, Hashes: []uint64{hash}, Parent: parent, HasParent: parent != 0}
		for i := range kv {
			e.Tokens = append(e.Tokens, first+uint32(i))
		}
		x.replicas[0].follower.Apply(0, []wire.Event{e})
	}
	store("", 1, 0, 0)
	linked := 0
	const prompts = 100
	for n := range prompts {
		req := x.ask(1, 16)
		for i := 11; i < 16; i++ { // own
			req.Blocks[i] = prompt.Block(uint64(100+n)<<32 | uint64(i))
		}
		d := x.pick(req)
		store(d.KVSession, uint64(100+n), 1, uint32(1000*(n+1)))
		d.RecordFirstEvent()
		d.Release(router.Outcome{End: router.Completed, PromptTokens: 1024})
		x.settle()
		if l, known := x.link(req.Blocks[15]); known && l.KVTokens == 1024 {
			linked++
		}
	}
	if linked < prompts {
		t.Errorf("%d of %d prompts that share a beginning are linked", linked, prompts)
	}
}

// A prompt that leaves a cached one in the midst of a KV block and fills no further one: no event names it. What it has alone does not
// outlive what was cached.
func TestTailShorterThanKVBlock(t *testing.T) {
	x := newFixture(t, 1)
	const kv = 512
	replica := x.replicas[0].follower
	e := wire.Event{Kind: wire.Stored, BlockSize: kv, Hashes: []uint64{1, 2}}
	for i := range 2 * kv {
		e.Tokens = append(e.Tokens, uint32(i))
	}
	serve := func(req *router.Request, event bool) {
		d := x.pick(req)
		if e.Session = d.KVSession; event {
			replica.Apply(0, []wire.Event{e})
		}
		d.RecordFirstEvent()
		d.Release(router.Outcome{End: router.Completed, PromptTokens: len(req.Blocks) * tokensPerBlock})
		x.settle()
	}
	serve(x.ask(1, 16), true)
	fork := x.ask(1, 16)
	for i := 10; i < 15; i++ {
		fork.Blocks[i] = prompt.Block(uint64(2)<<32 | uint64(i))
	}
	fork.Blocks, fork.Bytes = fork.Blocks[:15], 15*256 // 448 tokens after the first KV block
	serve(fork, false)
	if got := x.matchedBlocks(1, 16)[0]; got != 16 {
		t.Errorf("%d blocks matched of the first prompt, want 16", got)
	}
	replica.Apply(0, []wire.Event{{Kind: wire.Removed, Hashes: []uint64{2}}, {Kind: wire.Removed, Hashes: []uint64{1}}})
	if got := x.matchedBlocks(1, 16)[0]; got != 0 {
		t.Errorf("%d blocks matched after the replica has evicted all", got)
	}
}

// Nothing is confirmed after all events were lost.
func TestConfirmedAfterLostKVEvents(t *testing.T) {
	x := newFixture(t, 1)
	x.serve(1, 10)
	d := x.pick(x.ask(1, 12)) // in flight
	_ = d
	x.settle()
	x.replicas[0].follower.Restart(0, false)
	if s := x.status(0); s.Confirmed != 0 {
		t.Errorf("%+v after all events were lost", s)
	}
}

// Two models with the same tokenizer.
func TestKVEventsOfTwoModels(t *testing.T) {
	x := newUnread(t, 2, 1<<26)
	for i, b := range x.backends {
		b.SetModels([]backends.Model{{ID: fmt.Sprint("model", i)}})
	}
	x.follow()
	for i := range 2 { // the same text, so the same tokens; blocks differ by the model
		req := x.ask(i+1, 10)
		req.Backends = x.backends[i : i+1]
		d := x.pick(req)
		x.replicas[i].compute(d.KVSession, 7, 640)
		d.RecordFirstEvent()
		d.Release(router.Outcome{End: router.Completed, PromptTokens: 640})
	}
	x.settle()
	for i := range 2 {
		if parts, _ := x.IndexStats(); parts[i].Blocks != 10 {
			t.Errorf("backend %d has %d blocks, was sent 10", i, parts[i].Blocks)
		}
	}
}

// One of two requests with the same prompt is settled while the other is in flight, or has just ended.
func TestSharedPromptSettledBeforeSecond(t *testing.T) {
	x := newFixture(t, 1)
	x.serve(1, 10)
	x.settle()
	x.replicas[0].evict(1, 0)
	// A second request computes it again; an older one is settled before its events are read.
	old := x.pick(x.ask(1, 10))
	old.RecordFirstEvent()
	old.Release(router.Outcome{End: router.Completed, PromptTokens: 640})
	x.clock.advance(confirmTimeout)
	inFlight := x.pick(x.ask(1, 10))
	x.settleDue()
	inFlight.RecordFirstEvent()
	inFlight.Release(router.Outcome{End: router.Completed, PromptTokens: 640})
	x.replicas[0].compute(inFlight.KVSession, 1, 640)
	if got := x.matched(1, 10)[0]; got != 640 {
		t.Errorf("%d tokens matched, want 640", got)
	}
}

// A replica is restarted without KV events: what they said before does not count.
func TestRestartWithoutKVEvents(t *testing.T) {
	for name, end := range map[string]func(*Follower){
		"the connection is missing": func(f *Follower) { f.Restart(0, false) },
		"it lists no publishers":    (*Follower).Close,
	} {
		x := newFixture(t, 1)
		x.serve(1, 10)
		x.settle()
		x.ForgetCache(x.backends[0])
		end(x.replicas[0].follower)
		if got := x.matched(1, 10)[0]; got != 0 {
			t.Errorf("%s: %d tokens matched", name, got)
		}
	}
}
