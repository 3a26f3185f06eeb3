package kvevents

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/url"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/kvevents/wire"
	"warmroute/prompt"
	"warmroute/router"
	"warmroute/router/index"
)

const (
	tokensPerBlock = 64 // of ask
	testKVTokens   = 16 // of a KV block; a block of ask has four times as many
)

// wallClock stands still until a test moves it.
type wallClock struct{ now time.Time }

func (c *wallClock) read() time.Time { return c.now }

func (c *wallClock) advance(d time.Duration) { c.now = c.now.Add(d) }

// fixture is a router with its backends, whose KV events are read.
type fixture struct {
	t testing.TB
	*router.Router
	fleet    *Fleet
	backends []*backends.Backend
	replicas []*kvReplica // by slot
	clock    *wallClock
}

// newUnread returns a router with n backends, whose KV events are not read.
func newUnread(t testing.TB, n int, indexBytes int64) *fixture {
	t.Helper()
	x := &fixture{t: t, clock: &wallClock{time.Unix(1000, 0)}}
	for i := range n {
		b := &backends.Backend{Name: fmt.Sprintf("b%d", i), URL: &url.URL{}, Slot: i}
		b.SetState(backends.Ready)
		x.backends = append(x.backends, b)
	}
	r, err := router.New(router.Options{
		Settings: router.Settings{Policy: "prefix", PollInterval: time.Second}, Backends: x.backends, BlockBytes: 256, IndexMaxBytes: indexBytes,
		Now: x.clock.read, Rand: rand.NewPCG(1, 1),
	})
	if err != nil {
		t.Fatal(err)
	}
	x.Router, x.fleet = r, NewFleet(r)
	return x
}

func newFixture(t testing.TB, n int) *fixture {
	t.Helper()
	x := newUnread(t, n, 1<<26)
	x.follow()
	return x
}

// follow begins to read the events of all backends, whose caches are empty.
func (x *fixture) follow() {
	for i, b := range x.backends {
		f := x.fleet.Follow(b, 1)
		x.t.Cleanup(f.Close)
		f.Restart(0, true)
		x.replicas = append(x.replicas, &kvReplica{f, uint64(i+1) << 56, map[uint64]int{}})
	}
}

// ask makes a streamed request of n blocks, all of them different for each key.
func (x *fixture) ask(key, n int) *router.Request {
	blocks := make([]prompt.Block, n)
	for i := range blocks {
		blocks[i] = prompt.Block(uint64(key)<<32 | uint64(i) + 1)
	}
	return &router.Request{Backends: x.backends, Blocks: blocks, Bytes: n * 256, Sequences: 1, Streams: true}
}

func (x *fixture) pick(req *router.Request) *router.Reservation {
	x.t.Helper()
	d, err := x.Pick(context.Background(), req)
	if err != nil {
		x.t.Fatal(err)
	}
	return d
}

// serve sends a request to its replica and completes it.
func (x *fixture) serve(key, blocks int) *router.Reservation {
	x.t.Helper()
	d := x.pick(x.ask(key, blocks))
	tokens := blocks * tokensPerBlock
	cached := x.replicas[d.Backend.Slot].compute(d.KVSession, key, tokens)
	d.RecordFirstEvent()
	d.Release(router.Outcome{End: router.Completed, PromptTokens: tokens, CachedTokens: cached, CachedKnown: true})
	return d
}

// settle settles all requests that have ended.
func (x *fixture) settle() {
	x.clock.advance(confirmTimeout)
	x.settleDue()
}

// settleDue settles the requests that are due now.
func (x *fixture) settleDue() {
	for _, k := range x.replicas {
		k.follower.Settle()
	}
}

// matched returns how many tokens of a prompt each backend is thought to hold.
func (x *fixture) matched(key, blocks int) (tokens []int) {
	x.t.Helper()
	for _, c := range x.Explain(*x.ask(key, blocks)).Backends {
		tokens = append(tokens, int(c.MatchedTokens))
	}
	return tokens
}

// matchedBlocks returns how many leading blocks of a prompt each backend is thought to hold.
func (x *fixture) matchedBlocks(key, blocks int) []int {
	depths := make([]int, len(x.backends))
	x.updateIndex(func(i *index.Index) { i.Match(x.ask(key, blocks).Blocks, depths) })
	return depths
}

func (x *fixture) updateIndex(update func(*index.Index)) {
	x.UpdateIndex(x.backends[0], func(i *index.Index, _ time.Time) { update(i) })
}

// link returns the link of a block.
func (x *fixture) link(b prompt.Block) (l index.Link, known bool) {
	x.updateIndex(func(i *index.Index) { l, known = i.Link(b) })
	return l, known
}

// status returns what a backend has reported.
func (x *fixture) status(slot int) router.KVStatus {
	parts, _ := x.IndexStats()
	return *parts[slot].KV
}

// kvReplica publishes what a replica with a cache of its own would.
type kvReplica struct {
	follower *Follower
	salt     uint64 // of its hashes
	held     map[uint64]int
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
