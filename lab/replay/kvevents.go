package replay

import (
	"warmroute/kvevents"
	"warmroute/kvevents/wire"
	"warmroute/lab/sim/engine"
)

// followKVEvents makes the router read the KV events of all replicas, if it is to.
func (r *run) followKVEvents() {
	if !r.KVEvents || r.router == nil {
		return
	}
	fleet := kvevents.NewFleet(r.router)
	for _, p := range r.fleet {
		p.follower = fleet.Follow(p.backend, len(p.ranks))
		p.restartKVEvents()
	}
}

// restartKVEvents tells the router that the engines of a replica begin with empty caches.
func (p *replica) restartKVEvents() {
	for rank := range p.ranks {
		if p.follower != nil {
			p.follower.Restart(rank, true)
		}
	}
}

// publishKVEvents passes what an engine's step has changed in its cache to the router.
func (r *run) publishKVEvents(p *replica, rank int, events []engine.KVEvent) {
	if p.follower == nil {
		return
	}
	r.kvEvents = r.kvEvents[:0]
	for i := range events {
		r.kvEvents = append(r.kvEvents, r.convertKVEvent(&events[i]))
	}
	if len(r.kvEvents) > 0 {
		p.follower.Apply(rank, r.kvEvents)
	}
	p.follower.Settle()
}

// convertKVEvent returns an event as a replica publishes it. The tokens of a block follow from
// its content, also where a group does not keep the block.
func (r *run) convertKVEvent(e *engine.KVEvent) wire.Event {
	out := wire.Event{Kind: wire.Removed, Offloaded: e.Host, BlockSize: r.requests.BlockTokens}
	for _, h := range e.Hashes {
		out.Hashes = append(out.Hashes, uint64(h))
	}
	if e.Group != nil {
		out.Group, out.NoPrefix = e.Group.Index, e.Group.Kind != engine.FullAttention && e.Kind == engine.BlocksStored
	}
	switch {
	case e.Kind == engine.CacheCleared:
		out.Kind = wire.Cleared
	case e.Kind == engine.BlocksStored:
		out.Kind, out.Parent, out.HasParent = wire.Stored, uint64(e.Parent), e.Parent != 0
		if !e.Host {
			blocks := e.Request.Blocks[e.First:][:len(e.Hashes)+int(e.NotKept)]
			out.Tokens = make([]uint32, len(blocks)*out.BlockSize)
			for i, h := range blocks {
				out.Tokens[i*out.BlockSize], out.Tokens[(i+1)*out.BlockSize-1] = uint32(h), uint32(h>>32)
			}
			if f, ok := e.Request.Owner.(*request); ok && f.decision != nil {
				out.Session = f.decision.KVSession
			}
		}
	}
	return out
}
