package router

import (
	"time"

	"warmroute/router/estimate"
	"warmroute/router/policy"
)

const (
	maxPeers = 64
	// maxPeerRequests and maxPeerBlocks bound what is kept of the requests in flight of all peers.
	// The blocks beyond are indexed, but cannot be removed again if they were never computed.
	maxPeerRequests = 1 << 16
	maxPeerBlocks   = 1 << 22
	// peerEventsAtOnce is how many events of a peer are applied while the lock is held: they take
	// about as long as one decision each.
	peerEventsAtOnce = 8
	// maxAddedBySync is how many requests one SyncPeer counts that were not known: the others have
	// to wait for the next one.
	maxAddedBySync = 512
	// maxPeerTokens is more than any prompt has.
	maxPeerTokens = 1 << 30
)

// peers are the routers of other proxies in front of the same replicas. What they have in flight
// counts like our own, so that all of them decide as one router would.
type peers struct {
	reporter PlacementReporter // nil: there are none
	lastID   uint64            // of our own placements
	event    PlacementEvent    // scratch of the reports

	// Queued requests wait until pausedUntil before they take what a peer has left: the queues of other
	// peers come first.
	pausedUntil time.Time
	pauses      chan time.Duration // tells Run how long the pause is

	byID     map[uint64]*peer
	requests int // of all peers
	blocks   int // kept for these
}

// peer is one of them.
type peer struct {
	requests map[uint64]*peerRequest // in flight, by ID
	syncs    uint64                  // SyncPeer calls so far
}

// peerRequest is a request in flight of a peer.
type peerRequest struct {
	decision *Decision // as if it were ours; it is not counted in the backend's InFlight
	seen     uint64    // the SyncPeer call that listed it last
}

// ApplyPlacements applies what a peer reports, in the order in which it happened: it counts as if
// this router had sent these requests at the time of the call. Backends that are not in the fleet
// are ignored, and so are requests beyond the bounds. The events must not be changed afterwards.
//
// Queued requests may take the room that they make after delay: several routers would otherwise
// fill it at once.
func (r *Router) ApplyPlacements(peerID uint64, events []PlacementEvent, delay time.Duration) {
	for len(events) > 0 {
		part := events[:min(peerEventsAtOnce, len(events))]
		events = events[len(part):]
		r.applyPlacementsLocked(peerID, part)
	}
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	now := r.now()
	if delay > 0 && r.queue.Len() > 0 {
		r.pauseQueue(now.Add(delay), now)
	}
	r.dispatchUnlessPaused(now)
}

// pauseQueue makes queued requests wait, unless they wait already. It is cut short by what our own
// requests leave.
func (r *Router) pauseQueue(until, now time.Time) {
	p := &r.peers
	if now.Before(p.pausedUntil) {
		return
	}
	p.pausedUntil = until
	select {
	case p.pauses <- until.Sub(now):
	default: // Run has yet to read the last one
	}
}

// dispatchUnlessPaused is dispatchQueued for what others than our own requests have left.
func (r *Router) dispatchUnlessPaused(now time.Time) {
	if !now.Before(r.peers.pausedUntil) {
		r.dispatchQueued(now)
	}
}

func (r *Router) applyPlacementsLocked(peerID uint64, events []PlacementEvent) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	p := r.findOrAddPeer(peerID)
	if p == nil {
		return
	}
	now := r.now()
	for i := range events {
		e := &events[i]
		known := p.requests[e.ID]
		switch {
		case e.Kind == PlacementSent && known == nil:
			r.reservePeerRequest(p, &e.Placement, now)
		case e.Kind == PlacementIndexed:
			if b := e.Backend; b != nil && r.has(b) {
				r.indexPrompt(&Request{Blocks: e.Blocks}, b.Slot, now)
			}
		case e.Kind == PlacementPrefilled && known != nil:
			r.recordPeerPrefillDone(known.decision, now)
		case e.Kind == PlacementEnded && known != nil:
			r.endPeerRequest(p, known.decision, &e.End, now)
		}
	}
}

// SyncPeer takes inFlight as all that a peer has in flight: other requests of that peer are
// removed, and those that were not known are counted, without their blocks.
func (r *Router) SyncPeer(peerID uint64, inFlight []Placement) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	p := r.findOrAddPeer(peerID)
	if p == nil {
		return
	}
	now := r.now()
	p.syncs++
	added := 0
	for i := range inFlight {
		listed := &inFlight[i]
		known := p.requests[listed.ID]
		if known == nil && added < maxAddedBySync {
			added++
			known = r.reservePeerRequest(p, listed, now)
		}
		if known == nil {
			continue
		}
		known.seen = p.syncs
		if listed.Prefilled {
			r.recordPeerPrefillDone(known.decision, now)
		}
	}
	for _, q := range p.requests {
		if q.seen != p.syncs {
			r.endPeerRequest(p, q.decision, &PlacementEnd{Outcome: Outcome{End: ClientDisconnected}}, now)
		}
	}
	r.dispatchUnlessPaused(now)
}

// RemovePeer removes all that a peer has in flight: it has ended, or is not heard of any more.
func (r *Router) RemovePeer(peerID uint64) {
	r.SyncPeer(peerID, nil)
	r.withLock(func() { delete(r.peers.byID, peerID) })
}

// CountPeerRequests returns how many requests of peers are in flight, as far as is known.
func (r *Router) CountPeerRequests() int {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	return r.peers.requests
}

// findOrAddPeer returns a peer, nil if there are too many.
func (r *Router) findOrAddPeer(id uint64) *peer {
	p := r.peers.byID[id]
	if p == nil && len(r.peers.byID) < maxPeers {
		if r.peers.byID == nil {
			r.peers.byID = map[uint64]*peer{}
		}
		p = &peer{requests: map[uint64]*peerRequest{}}
		r.peers.byID[id] = p
	}
	return p
}

// reservePeerRequest accounts for a request that a peer has sent, as reserve does for our own. It
// returns nil if the request is not counted.
func (r *Router) reservePeerRequest(p *peer, sent *Placement, now time.Time) *peerRequest {
	b := sent.Backend
	if b == nil || !r.has(b) || r.peers.requests >= maxPeerRequests {
		return nil
	}
	s, slot := &r.states[b.Slot], b.Slot
	promptTokens, uncached := plausibleTokens(sent.PromptTokens, 0), plausibleTokens(sent.UncachedTokens, minUncachedTokens)
	sequences := min(max(1, sent.Sequences), maxSequences)
	req := &Request{
		Model: sent.Model, Adapter: sent.Adapter, Blocks: sent.Blocks, Forks: sent.Forks, Bytes: sent.Bytes,
		Streams: sent.Streams, NonGenerative: sent.NonGenerative, MaxOutputTokens: sent.MaxOutput, TextClass: sent.TextClass,
		Turn: sent.Turn, PromptKey: sent.PromptKey, Session: sent.Session,
	}
	r.beginDecision(req, nil, now)
	if req.Bytes <= 0 { // it was listed without its blocks
		r.decision.req.Bytes = int(promptTokens * r.decision.sizes.BytesPerToken)
		req.Bytes = r.decision.req.Bytes
	}
	r.matchPrompt()
	depth := r.decision.matched[slot]
	d := &Decision{Backend: b, MatchedBlocks: depth, TotalBlocks: len(req.Blocks), router: r, health: s.health, sentAt: now}
	d.request = sentRequest{
		id: sent.ID, ofPeer: true, adapter: sent.Adapter, class: sent.Class, streams: sent.Streams, nonGenerative: sent.NonGenerative,
		maxOutputTokens: sent.MaxOutput, conversation: req.conversationKey(),
	}
	delete(r.kept, d.request.conversation)
	matched := min(r.decision.countTokens(depth*r.blockBytes), promptTokens)
	d.prediction = estimate.Prediction{
		Model: sent.Model, Bytes: req.Bytes, PromptTokens: promptTokens, MatchedBlocks: depth, MatchedTokens: int(matched),
		Uncached: uncached, Sequences: sequences, Forks: sent.Forks, TextClass: sent.TextClass,
		IsText: sent.IsText, IsTooLong: sent.TooLong,
	}
	r.recordPeerTurn(d, req) // before the accounts, as in reserve
	if r.peers.blocks+len(sent.Blocks) <= maxPeerBlocks {
		d.request.blocks = sent.Blocks
		r.peers.blocks += len(sent.Blocks)
	}
	if !sent.TooLong {
		r.index.Add(&d.pin, slot, req.Blocks, depth)
		d.prediction.Distance = d.pin.ReuseDistance
	}
	s.load.addRequest(d, now)
	r.interactive.RecordSent(&s.classes, sent.Class, sequences, uncached/r.estimates.PrefillRate(slot), now)
	b.PeerInFlight.Add(sequences)
	s.kv.recordSent(d, req, r, now)
	known := &peerRequest{decision: d}
	p.requests[sent.ID] = known
	r.peers.requests++
	return known
}

// plausibleTokens returns a number of tokens as a peer has reported it, within bounds.
func plausibleTokens(reported, least float64) float64 {
	if !(reported > least) { // also if it is not a number
		return least
	}
	return min(reported, maxPeerTokens)
}

// recordPeerTurn records a peer's request in the policy, if that remembers what is sent where.
func (r *Router) recordPeerTurn(d *Decision, req *Request) {
	recorder, ok := r.policy.Policy.(policy.Recorder)
	if !ok {
		return
	}
	s := &r.states[d.Backend.Slot]
	request := policy.Request{
		Now: d.sentAt, Blocks: req.Blocks, BlockTokens: float64(r.blockBytes) / r.decision.sizes.BytesPerToken, PromptTokens: d.prediction.PromptTokens,
		PromptKey: req.PromptKey, Turn: req.Turn, Session: req.Session, MeanUncachedTokens: r.estimates.MeanUncachedTokens(req.Model),
	}
	recorder.RecordSent(&request, &policy.Candidate{
		Slot: d.Backend.Slot, NameHash: s.nameHash, Weight: r.weightOf(d.Backend),
		MatchedTokens: float64(d.prediction.MatchedTokens), UncachedTokens: d.prediction.Uncached,
	})
}

// recordPeerPrefillDone records, once, that the prefill of a peer's request is over.
func (r *Router) recordPeerPrefillDone(d *Decision, now time.Time) {
	if d.started {
		return
	}
	d.started = true
	r.dropPeerBlocks(d)
	if d.isOrphaned() {
		return
	}
	r.accountPrefillDone(d, now)
}

// endPeerRequest ends the account of a peer's request, as Release does for our own, and learns
// from its outcome.
func (r *Router) endPeerRequest(p *peer, d *Decision, e *PlacementEnd, now time.Time) {
	delete(p.requests, d.request.id)
	r.peers.requests--
	defer r.dropPeerBlocks(d)
	d.Backend.PeerInFlight.Add(-d.prediction.Sequences)
	if d.isOrphaned() {
		r.interactive.RecordEnd(nil, d.request.class, d.prediction.Sequences, now)
		return
	}
	r.interactive.RecordEnd(&d.backendState().classes, d.request.class, d.prediction.Sequences, now)
	o := e.Outcome
	if o.End == Completed {
		r.recordPeerPrefillDone(d, now)
	}
	if !d.isPlausibleOutputLength(o.OutputTokens) {
		o.OutputTokens = 0
	}
	if o.End == Completed {
		d.prediction.TTFT, d.prediction.QueuedAhead = e.TTFT, e.QueuedAhead
	}
	r.accountEnd(d, &o, now)
}

// dropPeerBlocks forgets the blocks of a peer's request, which need not be removed from the index
// any more.
func (r *Router) dropPeerBlocks(d *Decision) {
	r.peers.blocks -= len(d.request.blocks)
	d.request.blocks = nil
}
