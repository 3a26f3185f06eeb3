package kvevents

import (
	"cmp"
	"crypto/rand"
	mathrand "math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"warmroute/backends"
	"warmroute/kvevents/wire"
	"warmroute/router"
	"warmroute/router/index"
)

// maxChangesPerLock is for how many KV blocks the router is locked: that takes as long as a few decisions.
const maxChangesPerLock = 256

// Fleet makes the Followers of a router's backends, and is what they share. Safe for concurrent use.
type Fleet struct {
	router   *router.Router
	seed     uint64        // of the names of KV blocks
	prefix   string        // of this proxy's sessions
	sessions atomic.Uint64 // given so far
	room     *atomic.Int64 // for how many more KV blocks there is memory; nil before the first Follower; guarded by the router's lock
}

// NewFleet returns a Fleet for all backends of a router.
func NewFleet(r *router.Router) *Fleet {
	return &Fleet{router: r, seed: mathrand.Uint64(), prefix: "warmroute-" + rand.Text()[:12] + "-"}
}

// Follower applies the KV events of one backend's replica to the router's index: what the replica reports
// replaces what is assumed of its cache. To relate KV blocks to blocks of prompts, requests are sent with a
// session of their own, which the events repeat. Safe for concurrent use.
type Follower struct {
	fleet   *Fleet
	backend *backends.Backend

	mu      sync.Mutex // locked before the router, so that changes are applied in order
	tracker *tracker
	closed  bool

	// cacheLost: the replica was found to have lost its cache. Unless its events soon tell the same,
	// they are of a process that has ended.
	cacheLost bool

	blocks   atomic.Int64 // of tracker
	complete atomic.Bool  // likewise

	finished []finishedRequest // oldest first; guarded by the router's lock
}

// Follow returns the Follower of a backend, which must have none, and whose replica has so many
// data-parallel engines at least; nil if the router does not have the backend. The caller closes it.
func (s *Fleet) Follow(b *backends.Backend, engines int) *Follower {
	model := ""
	if models := b.Models(); len(models) > 0 {
		model = cmp.Or(models[0].Root, models[0].ID)
	}
	known := s.router.UpdateIndex(b, func(x *index.Index, _ time.Time) {
		if s.room == nil {
			x.FollowKV()
			s.room = new(atomic.Int64)
			s.room.Store(int64(x.MaxKVBlocks()))
		}
	})
	if !known {
		return nil
	}
	f := &Follower{fleet: s, backend: b, tracker: newTracker(s.seed^xxh3.HashString(model), s.prefix, engines, s.room)}
	if !s.router.SetKVFollower(b, f) {
		return nil
	}
	return f
}

// update calls change with the index while the router is locked. It reports false if the router does
// not have the backend any more.
func (f *Follower) update(change func(x *index.Index, now time.Time)) (known bool) {
	return f.fleet.router.UpdateIndex(f.backend, change)
}

// SetEngines sets how many data-parallel engines the replica has at least. All that it holds is
// known only if all of them publish events.
func (f *Follower) SetEngines(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tracker.engineCount = n
	f.complete.Store(f.tracker.isComplete())
}

// Apply implements wire.Handler.
func (f *Follower) Apply(rank int, events []wire.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.closed {
		f.applyChanges(f.tracker.apply(rank, events))
	}
}

// Restart implements wire.Handler.
func (f *Follower) Restart(rank int, complete bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.closed {
		f.applyChanges(f.tracker.restart(rank, complete))
		f.dropIfLost(complete)
	}
}

// dropIfLost drops what the replica held if it was found to have lost that, and its events, which
// do not count any more, did not say so. known: they say now what it holds.
func (f *Follower) dropIfLost(known bool) {
	if f.cacheLost && !known {
		f.update(func(x *index.Index, _ time.Time) { x.DropCache(f.backend.Slot) })
	}
	f.cacheLost = false
}

// Close ends the Follower: what the replica has reported is approximate again.
func (f *Follower) Close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return
	}
	f.closed = true
	f.applyChanges(f.tracker.forgetAll())
	f.update(func(x *index.Index, _ time.Time) { x.ForgetCheckpointReports(f.backend.Slot) })
	f.dropIfLost(false)
	f.fleet.router.SetKVFollower(f.backend, nil)
}

// RestoreIndex implements router.KVFollower.
func (f *Follower) RestoreIndex() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.closed {
		f.cacheLost = true
		f.applyChanges(f.tracker.heldAsStored())
	}
}

// RecordCacheReset implements router.KVFollower. vLLM sends its event with the next step only. What other
// media than the GPU hold stays.
func (f *Follower) RecordCacheReset() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return
	}
	for rank := range f.tracker.engines {
		f.applyChanges(f.tracker.apply(rank, []wire.Event{{Kind: wire.Cleared}}))
	}
	f.applyChanges(f.tracker.heldAsStored())
}

// Status implements router.KVFollower.
func (f *Follower) Status() (kvBlocks int, complete bool) {
	return int(f.blocks.Load()), f.complete.Load()
}

// NewSessionName implements router.KVFollower.
func (f *Follower) NewSessionName() string {
	return f.fleet.prefix + strconv.FormatUint(f.fleet.sessions.Add(1), 36)
}

// applyChanges applies the tracker's changes to the index, a few at a time.
func (f *Follower) applyChanges(changes []change) {
	f.blocks.Store(int64(f.tracker.blocks))
	f.complete.Store(f.tracker.isComplete())
	slot := f.backend.Slot
	for part := range slices.Chunk(changes, maxChangesPerLock) {
		f.update(func(x *index.Index, _ time.Time) {
			for _, c := range part {
				switch c.op {
				case kvStored:
					x.StoreKV(slot, c.kv)
				case kvRemoved:
					x.RemoveKV(slot, c.kv)
				case kvForgotten:
					x.ForgetKV(slot, c.kv)
				case kvCleared:
					x.DropCache(slot)
				case kvUsable:
					x.AddReportedCheckpoint(slot, c.kv)
				case kvUnusable:
					x.RemoveReportedCheckpoint(slot, c.kv)
				case kvUsableForgotten:
					x.ForgetReportedCheckpoint(slot, c.kv)
				}
			}
		})
		runtime.Gosched() // else this goroutine would have the lock again before those that wait for it
	}
}
