package ledger

import (
	"time"

	"warmroute/router/estimate"
	"warmroute/router/index"
	"warmroute/router/policy"
	"warmroute/router/queue"
)

const (
	maxPeers = 64
	// maxPeerRequests and maxPeerBlocks bound what is kept of the requests in flight of all peers.
	// The blocks beyond are indexed, but cannot be removed again if they were never computed.
	maxPeerRequests = 1 << 16
	maxPeerBlocks   = 1 << 22
	// maxAddedBySync is how many requests one Sync counts that were not known: the others have
	// to wait for the next one.
	maxAddedBySync = 512
	// maxPeerTokens is more than any prompt has.
	maxPeerTokens = 1 << 30
)

// Peers are the routers of other proxies in front of the same replicas. What they have in flight
// counts like our own, so that all of them decide as one router would.
type Peers struct {
	byID     map[uint64]*peer
	requests int // of all peers
	blocks   int // kept for these
}

// peer is one of them.
type peer struct {
	requests map[uint64]*peerRequest // in flight, by ID
	syncs    uint64                  // Sync calls so far
}

// peerRequest is a request in flight of a peer.
type peerRequest struct {
	entry Entry
	id    uint64
	seen  uint64 // the Sync call that listed it last
}

// Recorder is what the policy of a router takes part in.
type Recorder struct {
	// Sent records that a peer sent a request; bytesPerToken is the size of its tokens. nil: nothing is recorded.
	Sent    func(e *Entry, p *Placement, bytesPerToken float64)
	Tracker policy.ConversationTracker // of Ledger.End
}

// Count returns how many requests of peers are in flight, as far as is known.
func (p *Peers) Count() int { return p.requests }

// Apply applies an event of a peer: it counts as if this router had sent the request at the time of
// the call. Backends that are not in the fleet are ignored, and so are requests beyond the bounds.
// The event must not be changed afterwards.
func (p *Peers) Apply(l *Ledger, peerID uint64, event *PlacementEvent, r Recorder, now time.Time) {
	from := p.findOrAdd(peerID)
	if from == nil {
		return
	}
	known := from.requests[event.ID]
	if known != nil && event.Late {
		known.entry.untimed = true
	}
	switch {
	case event.Kind == PlacementSent && known == nil:
		p.begin(l, from, &event.Placement, event.Late, r, now)
	case event.Kind == PlacementIndexed:
		if b := event.Backend; b != nil && l.Has(b) {
			l.IndexPrompt(b.Slot, event.Blocks)
		}
	case event.Kind == PlacementPrefilled && known != nil:
		p.recordPrefilled(l, known, now)
	case event.Kind == PlacementEnded && known != nil:
		p.end(l, from, known, &event.End, r, now)
	}
}

// Sync takes inFlight as all that a peer has in flight: other requests of that peer are
// removed, and those that were not known are counted, without their blocks.
func (p *Peers) Sync(l *Ledger, peerID uint64, inFlight []Placement, r Recorder, now time.Time) {
	from := p.findOrAdd(peerID)
	if from == nil {
		return
	}
	from.syncs++
	added := 0
	for i := range inFlight {
		listed := &inFlight[i]
		known := from.requests[listed.ID]
		if known == nil && added < maxAddedBySync {
			added++
			known = p.begin(l, from, listed, true, r, now)
		}
		if known == nil {
			continue
		}
		known.seen = from.syncs
		if listed.Prefilled {
			p.recordPrefilled(l, known, now)
		}
	}
	for _, q := range from.requests {
		if q.seen != from.syncs {
			p.end(l, from, q, &PlacementEnd{Outcome: Outcome{End: ClientDisconnected}}, r, now)
		}
	}
}

// Remove removes a peer without requests in flight.
func (p *Peers) Remove(peerID uint64) { delete(p.byID, peerID) }

// findOrAdd returns a peer, nil if there are too many.
func (p *Peers) findOrAdd(id uint64) *peer {
	from := p.byID[id]
	if from == nil && len(p.byID) < maxPeers {
		if p.byID == nil {
			p.byID = map[uint64]*peer{}
		}
		from = &peer{requests: map[uint64]*peerRequest{}}
		p.byID[id] = from
	}
	return from
}

// begin accounts for a request that a peer has sent, untimed if it was some time ago. It returns nil if the request is not counted.
func (p *Peers) begin(l *Ledger, from *peer, sent *Placement, untimed bool, r Recorder, now time.Time) *peerRequest {
	b := sent.Backend
	if b == nil || !l.Has(b) || p.requests >= maxPeerRequests {
		return nil
	}
	promptTokens, uncached := plausibleTokens(sent.PromptTokens, 0), plausibleTokens(sent.UncachedTokens, estimate.MinUncachedTokens)
	sizes := l.estimates.TokenSizes(sent.Model, sent.TextClass)
	bytes := sent.Bytes
	if bytes <= 0 { // it was listed without its blocks
		bytes = int(promptTokens * sizes.BytesPerToken)
	}
	held := l.match(b.Slot, sent.Blocks)
	depth, matchedTokens := held, sizes.CountTokens(held*l.blockBytes, nil)
	offloaded := sizes.CountTokens(l.CountUnusedSince(b.Slot, sent.Blocks[:held], l.OffloadedBefore(b.Slot))*l.blockBytes, nil)
	var checkpoint *index.Checkpoint
	if found, ok := l.FindCheckpoint(b.Slot, sent.Blocks[:held], &sizes); ok {
		checkpoint, depth, matchedTokens = &found, found.Blocks, float64(found.Tokens)
	}
	if l.estimates.Offloads(b.Slot) { // what the peer expects to be cached beyond that is in a store
		offloaded += max(0, promptTokens-uncached-matchedTokens)
	}
	conversation := queue.ConversationID{Tenant: sent.Tenant, Key: policy.ConversationKey(sent.Conversation, sent.PromptKey, sent.Turn)}
	q := &peerRequest{id: sent.ID, entry: Entry{
		Slot: b.Slot, SentAt: now, OfPeer: true, untimed: untimed, Adapter: sent.Adapter, Class: sent.Class, Streams: sent.Streams,
		NonGenerative:   sent.NonGenerative,
		MaxOutputTokens: sent.MaxOutput, Conversation: conversation, RequestKind: sent.RequestKind,
		Prediction: estimate.Prediction{
			Model: sent.Model, Bytes: bytes, PromptTokens: promptTokens, HeldBlocks: held, MatchedBlocks: depth, Checkpoint: checkpoint,
			MatchedTokens: int(min(matchedTokens, promptTokens)), Uncached: uncached, Offloaded: min(offloaded, promptTokens),
			Sequences: min(max(1, sent.Sequences), MaxSequences), Forks: sent.Forks, TextClass: sent.TextClass,
			IsText: sent.IsText, IsTooLong: sent.TooLong,
		},
	}}
	if r.Sent != nil {
		r.Sent(&q.entry, sent, sizes.BytesPerToken)
	}
	keepBlocks := p.blocks+len(sent.Blocks) <= maxPeerBlocks
	l.Begin(&q.entry, Prompt{Blocks: sent.Blocks, Bytes: bytes, BytesPerToken: sizes.BytesPerToken}, keepBlocks, now)
	p.blocks += len(q.entry.blocks)
	from.requests[sent.ID] = q
	p.requests++
	return q
}

// plausibleTokens returns a number of tokens as a peer has reported it, within bounds.
func plausibleTokens(reported, least float64) float64 {
	if !(reported > least) { // also if it is not a number
		return least
	}
	return min(reported, maxPeerTokens)
}

// recordPrefilled records, once, that the prefill of a peer's request is over.
func (p *Peers) recordPrefilled(l *Ledger, q *peerRequest, now time.Time) {
	p.blocks -= len(q.entry.blocks)
	l.Prefilled(&q.entry, now)
}

// end ends the account of a peer's request, and learns from its outcome.
func (p *Peers) end(l *Ledger, from *peer, q *peerRequest, e *PlacementEnd, r Recorder, now time.Time) {
	delete(from.requests, q.id)
	p.requests--
	o := e.Outcome
	if o.End == Completed {
		p.recordPrefilled(l, q, now)
		q.entry.Prediction.TTFT, q.entry.Prediction.QueuedAhead = e.TTFT, e.QueuedAhead
	}
	kept := len(q.entry.blocks)
	l.End(&q.entry, &o, r.Tracker, now)
	p.blocks -= kept
}
