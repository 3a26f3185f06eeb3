package router

import (
	"fmt"
	"testing"

	"warmroute/backends"
	"warmroute/kvevents/wire"
	"warmroute/prompt"
)

// A client that disconnects during the prefill leaves no links.
func TestKVEventsOfDisconnectBeforePrefill(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix")
	replicas := followAll(t, r, fleet)
	d := mustPick(t, r, ask(fleet, 1, 40)) // 2560 tokens
	home := d.Backend.Slot
	replicas[home].compute(d.KVSession, 1, 512) // the first chunk
	d.Release(Outcome{End: ClientDisconnected})
	c.advance(confirmTimeout)
	settleAll(replicas)
	e := r.Explain(*ask(fleet, 1, 40))
	// the same again, to its end
	d = mustPick(t, r, ask(fleet, 1, 40))
	cached := replicas[d.Backend.Slot].compute(d.KVSession, 1, 2560)
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed, PromptTokens: 2560, CachedTokens: cached, CachedKnown: true})
	c.advance(confirmTimeout)
	settleAll(replicas)
	e = r.Explain(*ask(fleet, 1, 40))
	if got := matched(t, r, fleet, 1, 40)[d.Backend.Slot]; got != 2560 || e.PromptTokens != 2560 {
		t.Errorf("computed wholly: %d tokens matched of a prompt thought to have %d, want 2560 of 2560", got, e.PromptTokens)
	}
	replicas[d.Backend.Slot].evict(1, 40) // keeps 640 tokens
	depth := 0
	for _, b := range r.Explain(*ask(fleet, 1, 40)).Backends {
		depth = max(depth, int(b.MatchedTokens))
	}
	dd := make([]int, 2)
	r.fleet.index.Match(ask(fleet, 1, 40).Blocks, dd)
}

// A request that is aborted while an evicted prefix is computed again does not change its links.
func TestKVEventsOfAbortKeepLinks(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	replicas := followAll(t, r, fleet)
	serve(t, r, fleet, replicas, 1, 40)
	c.advance(confirmTimeout)
	settleAll(replicas)
	replicas[0].evict(1, 0)
	d := mustPick(t, r, ask(fleet, 1, 40))
	replicas[0].compute(d.KVSession, 1, 512)
	d.Release(Outcome{End: ClientDisconnected})
	c.advance(confirmTimeout)
	settleAll(replicas)
	dd := make([]int, 1)
	r.fleet.index.Match(ask(fleet, 1, 40).Blocks, dd)
	if dd[0] != 8 {
		t.Errorf("%d of 40 blocks matched, 8 are held", dd[0])
	}
}

// A stream that its client stops, without usage.
func TestKVEventsOfStoppedStream(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	replicas := followAll(t, r, fleet)
	d := mustPick(t, r, ask(fleet, 1, 10)) // 640 tokens
	d.RecordFirstEvent()
	replicas[0].compute(d.KVSession, 1, 640+1280) // an answer of 1280 tokens
	d.Release(Outcome{End: ClientDisconnected, OutputTokens: 1280})
	c.advance(confirmTimeout)
	settleAll(replicas)
	e := r.Explain(*ask(fleet, 1, 10))
	if got := matched(t, r, fleet, 1, 10)[0]; got != 640 || e.PromptTokens > 700 {
		t.Errorf("%d tokens matched of a prompt thought to have %d, want 640 of 640", got, e.PromptTokens)
	}
}

// The conversation goes on after its client has stopped a stream.
func TestKVEventsOfConversationAfterStoppedStream(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	replicas := followAll(t, r, fleet)
	d := mustPick(t, r, ask(fleet, 1, 10)) // 640 tokens
	d.RecordFirstEvent()
	replicas[0].compute(d.KVSession, 1, 1920) // with an answer of 1280 tokens
	d.Release(Outcome{End: ClientDisconnected, OutputTokens: 1280})
	c.advance(confirmTimeout)
	settleAll(replicas)
	for turn := range 3 {
		serve(t, r, fleet, replicas, 1, 32+2*turn) // the next turns, with usage
		c.advance(confirmTimeout)
		settleAll(replicas)
	}
	l, _ := r.fleet.index.Link(ask(fleet, 1, 10).Blocks[9])
	if l.Tokens != 640 {
		t.Errorf("the first ten blocks are thought to have %d tokens, want 640", l.Tokens)
	}
	replicas[0].evict(1, 40) // keeps 640 tokens, all of the first ten blocks
	if got := matched(t, r, fleet, 1, 10)[0]; got != 640 {
		t.Errorf("%d tokens matched, want 640: all ten blocks are held", got)
	}
	dd := make([]int, 1)
	r.fleet.index.Match(ask(fleet, 1, 10).Blocks, dd)
}

// A stream without usage whose answer is shorter than a block.
func TestKVEventsWithoutUsage(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	replicas := followAll(t, r, fleet)
	d := mustPick(t, r, ask(fleet, 1, 10))
	d.RecordFirstEvent()
	replicas[0].compute(d.KVSession, 1, 640+640) // e.g. reasoning, which no later turn sends
	d.Release(Outcome{End: Completed, OutputTokens: 640})
	c.advance(confirmTimeout)
	settleAll(replicas)
	e := r.Explain(*ask(fleet, 1, 10))
	if e.PromptTokens > 700 {
		t.Errorf("the prompt of 640 tokens is thought to have %d", e.PromptTokens)
	}
}

// The links of a conversation are replaced while nothing holds its blocks.
func TestConversationAfterReplacedLinks(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", func(o *Options) { o.IndexMaxBytes = 128 * 4 * 120 })
	r.fleet.index.SetRequestedCapacity(0, 1000)
	replicas := followAll(t, r, fleet)
	serve(t, r, fleet, replicas, 1, 25)
	c.advance(confirmTimeout)
	settleAll(replicas)
	replicas[0].evict(1, 0)
	for key := 2; key < 25; key++ {
		serve(t, r, fleet, replicas, key, 5)
		c.advance(confirmTimeout)
		settleAll(replicas)
		replicas[0].evict(key, 0)
		_, first := r.fleet.index.Link(prompt.Block(1<<32 + 1))
		_, last := r.fleet.index.Link(prompt.Block(1<<32 + 25))
		if !first && last {
			break
		}
	}
	for turn := range 3 {
		serve(t, r, fleet, replicas, 1, 26+turn)
		c.advance(confirmTimeout)
		settleAll(replicas)
		if got, want := matched(t, r, fleet, 1, 26+turn)[0], (26+turn)*64; got != want {
			t.Errorf("turn %d: %d tokens matched, want %d; %+v", turn, got, want, *r.fleet.states[0].follower.status())
		}
	}
}

// A fleet with more KV blocks than there is room for.
func TestMoreKVBlocksThanRoom(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix", func(o *Options) { o.IndexMaxBytes = 128 * 4 * 100 })
	replicas := followAll(t, r, fleet)
	replicas[0].compute("", 9, 90*testKVTokens) // of another client
	req := ask(fleet, 1, 10)
	req.Backends = fleet[1:]
	d := mustPick(t, r, req)
	replicas[1].compute(d.KVSession, 1, 640)
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed, PromptTokens: 640})
	c.advance(confirmTimeout)
	settleAll(replicas)
	s := r.fleet.states[1].follower.status()
	if got := matched(t, r, fleet, 1, 10)[1]; got != 640 || s.Complete {
		t.Errorf("%d tokens matched, want 640; status %+v", got, *s)
	}
}

// A cache is forgotten while the room for KV blocks is full.
func TestForgetCacheWhenFull(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", func(o *Options) { o.IndexMaxBytes = 128 * 4 * 100 })
	replicas := followAll(t, r, fleet)
	serve(t, r, fleet, replicas, 1, 10)
	c.advance(confirmTimeout)
	settleAll(replicas)
	replicas[0].compute("", 9, 60*testKVTokens)
	before := matched(t, r, fleet, 1, 10)
	r.ForgetCache(fleet[0])
	after := matched(t, r, fleet, 1, 10)
	if before[0] != after[0] {
		t.Errorf("%v before, %v after, with all 100 KV blocks still held", before, after)
	}
}

// A scrape shows that a replica has been restarted before its events do.
func TestRestartSeenByPollFirst(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	replicas := followAll(t, r, fleet)
	serve(t, r, fleet, replicas, 1, 10)
	c.advance(confirmTimeout)
	settleAll(replicas)
	r.ForgetCache(fleet[0])
	replicas[0].follower.Restart(0, false) // as Subscriber does: it forgets, and then replays from the beginning
	replicas[0].follower.Restart(0, true)
	if got := matched(t, r, fleet, 1, 10)[0]; got != 0 {
		t.Errorf("%d tokens matched on a replica that was restarted", got)
	}
}

// The events of one of two engines are not received.
func TestKVEventsOfOneOfTwoEngines(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix")
	replicas := followAll(t, r, fleet) // rank 0 of both; rank 1 is not connected
	for _, k := range replicas {
		k.follower.SetEngines(2)
	}
	serve(t, r, fleet, replicas, 1, 10)
	c.advance(confirmTimeout)
	settleAll(replicas)
	home := 0
	if matched(t, r, fleet, 1, 10)[1] > 0 {
		home = 1
	}
	req := ask(fleet, 1, 10)
	req.Backends = fleet[1-home : 2-home]
	d := mustPick(t, r, req) // is computed by rank 1 there
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed, PromptTokens: 640})
	c.advance(confirmTimeout)
	settleAll(replicas)
	if got := matched(t, r, fleet, 1, 10)[1-home]; got != 640 {
		t.Errorf("%d tokens matched where rank 1 holds 640, status %+v", got, *r.fleet.states[1-home].follower.status())
	}
}

// KV blocks of 512 tokens, and many prompts with a common beginning.
func TestHotPromptWithLargeKVBlocks(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	replicas := followAll(t, r, fleet)
	const kv = 512
	store := func(session string, hash, parent uint64, first uint32) {
		e := wire.Event{Kind: wire.Stored, BlockSize: kv, Session: session, Hashes: []uint64{hash}, Parent: parent, HasParent: parent != 0}
		for i := range kv {
			e.Tokens = append(e.Tokens, first+uint32(i))
		}
		replicas[0].follower.Apply(0, []wire.Event{e})
	}
	store("", 1, 0, 0)
	linked := 0
	const prompts = 100
	for n := range prompts {
		req := ask(fleet, 1, 16)
		for i := 11; i < 16; i++ { // own
			req.Blocks[i] = prompt.Block(uint64(100+n)<<32 | uint64(i))
		}
		d := mustPick(t, r, req)
		store(d.KVSession, uint64(100+n), 1, uint32(1000*(n+1)))
		d.RecordFirstEvent()
		d.Release(Outcome{End: Completed, PromptTokens: 1024})
		c.advance(confirmTimeout)
		settleAll(replicas)
		if l, known := r.fleet.index.Link(req.Blocks[15]); known && l.KVTokens == 1024 {
			linked++
		}
	}
	if linked < prompts {
		t.Errorf("%d of %d prompts that share a beginning are linked", linked, prompts)
	}
}

// Nothing is confirmed after all events were lost.
func TestConfirmedAfterLostKVEvents(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	replicas := followAll(t, r, fleet)
	serve(t, r, fleet, replicas, 1, 10)
	d := mustPick(t, r, ask(fleet, 1, 12)) // in flight
	_ = d
	c.advance(confirmTimeout)
	settleAll(replicas)
	replicas[0].follower.Restart(0, false)
	if s := r.fleet.states[0].follower.status(); s.Confirmed != 0 {
		t.Errorf("%+v after all events were lost", *s)
	}
}

// Two models with the same tokenizer.
func TestKVEventsOfTwoModels(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix")
	for i, b := range fleet {
		b.SetModels([]backends.Model{{ID: fmt.Sprint("model", i)}})
	}
	replicas := followAll(t, r, fleet)
	for i := range 2 { // the same text, so the same tokens; blocks differ by the model
		req := ask(fleet, i+1, 10)
		req.Backends = fleet[i : i+1]
		d := mustPick(t, r, req)
		replicas[i].compute(d.KVSession, 7, 640)
		d.RecordFirstEvent()
		d.Release(Outcome{End: Completed, PromptTokens: 640})
	}
	c.advance(confirmTimeout)
	settleAll(replicas)
	for i := range 2 {
		if got := r.fleet.index.Len(i); got != 10 {
			t.Errorf("backend %d has %d blocks, was sent 10", i, got)
		}
	}
}

// One of two requests with the same prompt is settled while the other is in flight, or has just ended.
func TestSharedPromptSettledBeforeSecond(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	replicas := followAll(t, r, fleet)
	serve(t, r, fleet, replicas, 1, 10)
	c.advance(confirmTimeout)
	settleAll(replicas)
	replicas[0].evict(1, 0)
	// A second request computes it again; an older one is settled before its events are read.
	old := mustPick(t, r, ask(fleet, 1, 10))
	old.RecordFirstEvent()
	old.Release(Outcome{End: Completed, PromptTokens: 640})
	c.advance(confirmTimeout)
	inFlight := mustPick(t, r, ask(fleet, 1, 10))
	settleAll(replicas)
	inFlight.RecordFirstEvent()
	inFlight.Release(Outcome{End: Completed, PromptTokens: 640})
	replicas[0].compute(inFlight.KVSession, 1, 640)
	if got := matched(t, r, fleet, 1, 10)[0]; got != 640 {
		t.Errorf("%d tokens matched, want 640", got)
	}
}

// A replica is restarted without KV events: what they said before does not count.
func TestRestartWithoutKVEvents(t *testing.T) {
	for name, end := range map[string]func(*KVFollower){
		"the connection is missing": func(f *KVFollower) { f.Restart(0, false) },
		"it lists no publishers":    (*KVFollower).Close,
	} {
		r, fleet, c := newFleet(t, 1, "prefix")
		replicas := followAll(t, r, fleet)
		serve(t, r, fleet, replicas, 1, 10)
		c.advance(confirmTimeout)
		settleAll(replicas)
		r.ForgetCache(fleet[0])
		end(replicas[0].follower)
		if got := matched(t, r, fleet, 1, 10)[0]; got != 0 {
			t.Errorf("%s: %d tokens matched", name, got)
		}
	}
}
