// Package ledger accounts for what the backends were sent and have not finished: tokens to
// prefill, sequences that decode, and tokens of their KV caches. The requests of this router and
// those of its peers, the routers of other proxies in front of the same replicas, count alike.
package ledger

import (
	"cmp"
	"iter"
	"math"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/estimate"
	"warmroute/router/index"
	"warmroute/router/policy"
	"warmroute/router/queue"
)

const (
	externalLoadDecay  = 2    // poll intervals in which external load fades to 1/e
	maxExternalLoadAge = 3    // poll intervals, after which it counts for nothing
	upkeepBlocks       = 4096 // of the index's upkeep per poll: well below a millisecond under the lock
)

// Ledger is the account of a fleet. It is not safe for concurrent use.
type Ledger struct {
	start        time.Time
	blockBytes   int
	index        *index.Index
	estimates    *estimate.Estimates
	pollInterval time.Duration
	accounts     []*account // by slot
	interactive  queue.InteractiveLoad
	nextTurns    nextTurns
	matched      []int // scratch of match, by slot
}

// account is that of one backend.
type account struct {
	backend  *backends.Backend // nil: the slot is free
	prefill  requestAccount
	kv       kvAccount
	classes  queue.ClassLoad
	polled   polledGaps
	measured measurement // the current one of its speed
	outputs  outputPolls
	// unsent are the sequences of this router's decode requests that were not sent yet.
	unsent  int64
	lastEnd *prefillEnd // of the last step that ended a stream's prefill; nil: none yet

	cacheResets uint64 // that were found
}

// New returns a ledger without backends. What requests use and show is recorded in the index and the estimates.
func New(blockBytes int, x *index.Index, estimates *estimate.Estimates, start time.Time) *Ledger {
	return &Ledger{start: start, blockBytes: blockBytes, index: x, estimates: estimates, nextTurns: nextTurns{}}
}

// SetPollInterval sets how often backends are polled.
func (l *Ledger) SetPollInterval(d time.Duration) { l.pollInterval = d }

// SetBackend begins the account of a slot's new backend, or of none. Entries of an earlier one remain valid.
func (l *Ledger) SetBackend(slot int, b *backends.Backend) {
	for len(l.accounts) <= slot {
		l.accounts = append(l.accounts, nil)
		l.index.Grow(len(l.accounts))
		l.estimates.Grow(len(l.accounts))
	}
	l.accounts[slot] = &account{backend: b, kv: newKVAccount()}
	l.estimates.ResetSlot(slot)
	l.index.ResetSlot(slot)
	if b != nil {
		l.ResizeIndex(slot)
	}
}

// Has reports whether b is in the fleet. Requests may outlive its membership, and its Slot may be
// another backend's by then.
func (l *Ledger) Has(b *backends.Backend) bool {
	return b.Slot < len(l.accounts) && l.accounts[b.Slot].backend == b
}

// ResizeIndex adapts a backend's part of the index to what its cache is thought to
// hold. Small changes are ignored.
func (l *Ledger) ResizeIndex(slot int) {
	want, have := l.estimates.IndexCapacity(slot), l.index.RequestedCapacity(slot)
	if want > have+have/64 || want < have-have/64 {
		l.index.SetRequestedCapacity(slot, want)
	}
}

// ForgetNextTurns forgets the tokens that are reserved on a backend for next turns.
func (l *Ledger) ForgetNextTurns(slot int) {
	l.nextTurns.removeWhere(func(t reservedTokens) bool { return t.slot == slot })
}

// DecodeRate returns how many tokens a second a backend generates of one sequence, as learned from streams.
func (l *Ledger) DecodeRate(slot int) float64 { return l.accounts[slot].kv.decodeRate.Value }

// ForgetDecodeRate forgets the decode rate that was learned of a backend.
func (l *Ledger) ForgetDecodeRate(slot int) {
	a := l.accounts[slot]
	a.kv.decodeRate, a.outputs = newKVAccount().decodeRate, outputPolls{}
}

// IsOrphaned reports whether the backend of an entry was removed from the fleet since Begin.
func (l *Ledger) IsOrphaned(e *Entry) bool { return l.accounts[e.Slot] != e.account }

// BeginNoEngine counts a request that no engine works on. EndNoEngine must follow.
func (l *Ledger) BeginNoEngine(e *Entry) {
	e.account = l.accounts[e.Slot]
	e.account.backend.NoEngineInFlight.Add(1)
}

// EndNoEngine ends the account of a request that no engine works on.
func (l *Ledger) EndNoEngine(e *Entry) { e.account.backend.NoEngineInFlight.Add(-1) }

// Begin accounts for a request that is sent to its backend, and reports whether it is the only one
// of this router there. keepBlocks keeps the prompt's blocks until Prefilled, so that End can remove
// those that were never computed. End must follow.
func (l *Ledger) Begin(e *Entry, p Prompt, keepBlocks bool, now time.Time) (onlyInFlight bool) {
	a, slot := l.accounts[e.Slot], e.Slot
	e.account = a
	if e.unsent = e.RequestKind == DecodeRequest && !e.OfPeer; e.unsent {
		a.unsent += e.Prediction.Sequences
	}
	if keepBlocks {
		e.blocks = p.Blocks
	}
	e.head = prompt.HeadOf(p.Blocks)
	l.nextTurns.removeContinued(e.Conversation, p.Blocks)
	if !e.Prediction.IsTooLong {
		l.index.Add(&e.pin, slot, p.Blocks, max(e.Prediction.HeldBlocks, e.Prediction.MatchedBlocks))
		e.Prediction.Distance, e.Prediction.Use, e.Prediction.Reused = e.pin.ReuseDistance, e.pin.Use, e.pin.Reused
		if k := e.Prediction.Checkpoint; k != nil { // the last use of the blocks says nothing of the checkpoint
			e.Prediction.Distance, e.Prediction.Reused = k.Distance, [index.MaxReusedSpans]index.ReusedSpan{}
			if k.Certain {
				e.Prediction.Reused[0] = index.ReusedSpan{Blocks: k.Blocks, LastUse: k.LastUse, Distance: k.Distance}
			}
			l.addExpectedCheckpoints(e)
		}
		if !e.OfPeer { // the last poll may have been after a peer sent it
			e.Prediction.RecordSent(a.backend.Load())
		}
		e.kv.unindexed = p.UnindexedMediaTokens
	}
	a.measured.addPrompt(e.Prediction.PromptTokens)
	sent := l.workDone(a, slot, now)
	a.prefill.add(e, now)
	e.steps = entrySteps{sent: sent, queuedSince: a.prefill.since, tokens: a.prefill.tokens, attended: a.prefill.depth}
	seconds := e.Prediction.Uncached / l.estimates.PrefillRate(slot)
	if e.Class == queue.LowPriority { // it is charged for the whole step
		seconds += l.estimates.Step(slot).Base
	}
	l.interactive.RecordSent(&a.classes, e.Class, e.Prediction.Sequences, seconds, now)
	if e.OfPeer {
		a.backend.PeerInFlight.Add(e.Prediction.Sequences)
	} else {
		onlyInFlight = a.backend.InFlight.Add(e.Prediction.Sequences)-a.unsent == e.Prediction.Sequences
	}
	inBlocks := (len(p.Blocks) - e.pin.Omitted) * l.blockBytes
	e.kv.unindexed += int64(float64(max(0, p.Bytes-inBlocks)) / p.BytesPerToken)
	a.kv.unindexed += e.kv.unindexed
	if !e.Streams { // it does not say when its output begins
		a.kv.startOutputGrowth(e, l.estimates.OutputTokens(slot), now.Sub(l.start))
	}
	return onlyInFlight
}

// StartDecode records that a decode request is being sent, and reports whether it is the only request of this router there.
func (l *Ledger) StartDecode(e *Entry, now time.Time) (onlyInFlight bool) {
	e.SentAt = now
	e.countAsSent()
	return e.account.backend.InFlight.Load()-e.account.unsent == e.Prediction.Sequences
}

// countAsSent records, once, that a decode request is sent, or will not be.
func (e *Entry) countAsSent() {
	if e.unsent {
		e.unsent = false
		e.account.unsent -= e.Prediction.Sequences
	}
}

// SentSequences returns how many sequences of this router a backend was sent that have not ended.
func (l *Ledger) SentSequences(slot int) int64 {
	a := l.accounts[slot]
	return a.backend.InFlight.Load() - a.unsent
}

// Prefilled records, once, that the prefill of a request is over: its prompt's blocks stay.
func (l *Ledger) Prefilled(e *Entry, now time.Time) {
	if e.prefilled {
		return
	}
	e.prefilled, e.blocks = true, nil
	if l.IsOrphaned(e) {
		return
	}
	a := e.account
	l.addGrowth(a, now)
	a.prefill.recordPrefilled(e, now)
	if e.Streams {
		l.recordPrefillEnd(a, e, now)
	}
	if !e.Prediction.IsTooLong && !e.NonGenerative && e.RequestKind != DecodeRequest && l.countsInMeans(e, now) {
		l.estimates.RecordUncached(e.Prediction.Model, e.Prediction.Uncached)
	}
	l.estimates.RecordPrefillDone(e.Slot, &e.Prediction, l.cacheInfo(e.Slot), now)
	a.kv.waiting = max(0, a.kv.waiting-1)
	if e.Streams {
		a.kv.startOutputGrowth(e, l.estimates.OutputTokens(e.Slot), now.Sub(l.start))
	}
}

// End ends the account of a request, learns from its outcome, and reports whether it changed what is known of
// the layout of prompts. With tracker, tokens are reserved for the conversation's next turn.
func (l *Ledger) End(e *Entry, o *Outcome, tracker policy.ConversationTracker, now time.Time) (layoutChanged bool) {
	a, sequences := e.account, e.Prediction.Sequences
	e.countAsSent()
	if e.OfPeer {
		a.backend.PeerInFlight.Add(-sequences)
	} else {
		a.backend.InFlight.Add(-sequences)
	}
	if l.IsOrphaned(e) {
		l.interactive.RecordEnd(nil, e.Class, sequences, now)
		return false
	}
	l.interactive.RecordEnd(&a.classes, e.Class, sequences, now)
	if o.End == Completed {
		l.Prefilled(e, now)
	}
	if float64(o.OutputTokens) > e.MaxTokens() { // the engine cannot have generated so many
		o.OutputTokens = 0
	}
	switch {
	case o.End == Completed:
		layoutChanged = l.learnFromCompletion(e, o, now)
		l.correctCheckpoints(e, o)
		l.index.Release(&e.pin, o.Reply)
		l.reserveForNextTurn(e, o.OutputTokens, tracker, now)
	case e.prefilled: // the prompt was computed; the blocks are there
		l.index.Release(&e.pin, nil)
	case o.End == ClientDisconnected && e.RequestKind != DecodeRequest:
		l.removeExpectedCheckpoints(e)
		a.prefill.removePending(e)
		l.index.Rollback(&e.pin, e.blocks, l.maxComputedBlocks(e, now))
	default:
		l.removeExpectedCheckpoints(e)
		a.prefill.removePending(e)
		l.index.Rollback(&e.pin, e.blocks, 0)
	}
	l.addGrowth(a, now)
	a.prefill.removeRequest(e)
	a.kv.recordEnd(e, o, now.Sub(l.start))
	e.blocks = nil
	return layoutChanged
}

// learnFromCompletion learns from a response that was complete.
func (l *Ledger) learnFromCompletion(e *Entry, o *Outcome, now time.Time) (layoutChanged bool) {
	if o.OutputTokens > 0 && e.RequestKind != PrefillRequest && l.countsInMeans(e, now) {
		l.estimates.RecordOutputLength(e.Slot, o.OutputTokens, e.Prediction.Sequences)
	}
	usage := estimate.Usage{PromptTokens: o.PromptTokens, CachedTokens: o.CachedTokens, CachedKnown: o.CachedKnown}
	if uncached := l.estimates.LearnFromCompletion(e.Slot, &e.Prediction, usage, l.cacheInfo(e.Slot)); uncached > 0 && !e.untimed {
		l.learnSteps(e, o, uncached, now)
	}
	layoutChanged = l.estimates.LearnLayout(&e.Prediction, usage, l.cacheInfo(e.Slot))
	l.ResizeIndex(e.Slot)
	l.dropLostCache(e.Slot)
	return layoutChanged
}

// dropLostCache removes from the index what a backend's replica held before it lost its cache, if its responses or
// its counters have shown that it did.
func (l *Ledger) dropLostCache(slot int) {
	if before, found := l.estimates.TakeCacheReset(slot); found {
		l.index.DropUnusedSince(slot, before)
		l.estimates.ForgetReplicaProcess(slot)
		l.accounts[slot].cacheResets++
	}
}

// CacheResets returns how often responses or counters have shown that a backend's replica lost its cache.
func (l *Ledger) CacheResets(slot int) uint64 { return l.accounts[slot].cacheResets }

// reserveForNextTurn reserves the tokens of a request, if another turn may follow.
func (l *Ledger) reserveForNextTurn(e *Entry, outputTokens int, tracker policy.ConversationTracker, now time.Time) {
	if tracker == nil || e.Conversation.Key == 0 || e.head.Len() == 0 {
		return
	}
	tokens := int(e.Prediction.PromptTokens) + outputTokens
	seconds := reservedPrefills * tracker.LaterTurnProbability() * float64(tokens) / l.estimates.PrefillRate(e.Slot)
	until := now.Add(time.Duration(seconds * float64(time.Second)))
	l.nextTurns.reserve(e.Conversation, reservedTokens{e.Slot, tokens, until, e.head}, now)
}

// cacheInfo returns the facts about a backend's cache that the estimates need.
func (l *Ledger) cacheInfo(slot int) estimate.CacheInfo {
	c := estimate.CacheInfo{Alignment: 1, Evicting: l.index.Evictions(slot) > 0, Uses: l.index.Uses(slot)}
	if load := l.accounts[slot].backend.Load(); load != nil && load.HitAlignment > 0 {
		c.Alignment = float64(load.HitAlignment)
	}
	return c
}

// countsInMeans reports whether a request and its output count in the means that
// decisions use: low-priority requests would spoil them for recent interactive ones.
func (l *Ledger) countsInMeans(e *Entry, now time.Time) bool {
	return e.Class != queue.LowPriority || !l.interactive.HasRecentRequests(now)
}

// maxComputedBlocks returns how many blocks the engine can have computed by now, had it started at once.
func (l *Ledger) maxComputedBlocks(e *Entry, now time.Time) int {
	matched := e.Prediction.MatchedBlocks
	uncachedBytes := float64(e.Prediction.Bytes - matched*l.blockBytes)
	computed := l.estimates.PrefillRate(e.Slot) * now.Sub(e.SentAt).Seconds() * uncachedBytes / e.Prediction.Uncached
	return matched + int(computed)/l.blockBytes
}

// ApplyPoll learns from a poll of a backend, drops the blocks of a cache that it shows to be lost, and resizes and evicts
// from the index.
func (l *Ledger) ApplyPoll(slot int, load *backends.Load, now time.Time) {
	a := l.accounts[slot]
	l.UpdateModel(slot)
	l.recordStarted(a, slot, load)
	l.estimates.ObserveLoad(slot, load, a.prefill.unseen, l.cacheInfo(slot))
	l.estimates.FadeFetches(slot, now)
	l.dropLostCache(slot)
	l.ResizeIndex(slot)
	l.updateCheckpointSizes(slot, load)
	l.index.SweepAndEvict(upkeepBlocks)
	l.learnFromGaps(a, slot, load, now)
	a.outputs.add(load)
	a.kv.observe(load, l.ownKVTokens(slot, now), a.prefill.unseen)
}

// UpdateModel tells the estimates which model a backend serves. ApplyPoll calls it. Call it also when the backend becomes ready: else
// its step times are its own until the first poll, and not shared with the other backends of the model.
func (l *Ledger) UpdateModel(slot int) {
	if models := l.accounts[slot].backend.Models(); len(models) > 0 {
		l.estimates.SetModel(slot, cmp.Or(models[0].Root, models[0].ID))
	}
}

// recordStarted records what a poll shows of the requests that an engine has started, and whose prefill is not over. It has
// looked up their prompts.
func (l *Ledger) recordStarted(a *account, slot int, load *backends.Load) {
	p := &a.prefill
	if !load.QueuesKnown || int64(load.Running+load.Waiting) != load.OwnInFlight || int64(p.requests) != load.OwnInFlight {
		return // which of them have started is not known
	}
	started := load.Running - (p.requests - len(p.pending)) // engines start requests in the order of arrival
	for _, e := range p.pending[:max(0, min(started, len(p.pending)))] {
		l.estimates.RecordStarted(slot, &e.Prediction, load, l.cacheInfo(slot))
	}
}

// RecordLoadExpected records whether the last poll showed what our own account explains, given that the
// replica is working as far as is known.
func (l *Ledger) RecordLoadExpected(slot int, load *backends.Load, isWorking bool, now time.Time) {
	a := l.accounts[slot]
	a.kv.expected = isWorking && isExpectedLoad(load, l.ownKVTokens(slot, now), a.prefill.unseen)
}

// IsLoadExpected returns what RecordLoadExpected recorded.
func (l *Ledger) IsLoadExpected(slot int) bool { return l.accounts[slot].kv.expected }

// IndexPrompt indexes a prompt for a backend as if it had been used now, and returns how many of its
// blocks that may hold.
func (l *Ledger) IndexPrompt(slot int, blocks []prompt.Block) (heldBlocks int) {
	var p index.Pin
	l.index.Add(&p, slot, blocks, l.match(slot, blocks))
	omitted := p.Omitted
	l.index.Release(&p, nil)
	return len(blocks) - omitted
}

// match returns how many leading blocks of a prompt a backend holds.
func (l *Ledger) match(slot int, blocks []prompt.Block) int {
	for len(l.matched) < len(l.accounts) {
		l.matched = append(l.matched, 0)
	}
	l.index.Match(blocks, l.matched)
	return l.matched[slot]
}

// External returns the load on a backend that is neither ours nor that of a peer: requests,
// and the uncached tokens of those that wait. It is what the last poll saw beyond the
// requests that we know of, and fades with its age, since only a poll says when they end.
func (l *Ledger) External(load *backends.Load, now time.Time) (requests, tokens float64) {
	if load == nil || !load.QueuesKnown {
		return 0, 0
	}
	requests = float64(load.Running+load.Waiting) - float64(load.OwnInFlight)
	age := now.Sub(load.PolledAt)
	if requests <= 0 || age > maxExternalLoadAge*l.pollInterval {
		return 0, 0
	}
	waiting := min(requests, float64(load.Waiting))
	decay := math.Exp(-age.Seconds() / (externalLoadDecay * l.pollInterval.Seconds()))
	return requests * decay, waiting * decay * l.estimates.MeanUncachedTokensOfAll()
}

// ownKVTokens returns how many tokens of a backend's cache the requests in flight use.
func (l *Ledger) ownKVTokens(slot int, now time.Time) float64 {
	return l.ownPromptTokens(slot) + l.accounts[slot].kv.outputTokensInFlight(now.Sub(l.start))
}

// ownPromptTokens is ownKVTokens without outputs.
func (l *Ledger) ownPromptTokens(slot int) float64 {
	blocks := float64(l.index.CountPinned(slot)*l.blockBytes) / l.estimates.BackendBytesPerToken(slot)
	return blocks + float64(l.accounts[slot].kv.unindexed)
}

// isRecentPoll reports whether a backend's last poll still counts: at most two that should
// have followed it are missing.
func (l *Ledger) isRecentPoll(k *kvAccount, now time.Time) bool {
	interval := l.pollInterval
	if k.expected {
		interval = backends.MaxPollInterval(interval)
	}
	return now.Sub(k.polledAt) <= maxExternalLoadAge*interval
}

// Figures are the figures of one backend at one moment. Tokens are estimates.
type Figures struct {
	QueuedTokens      float64 // sent and not yet computed
	QueuedFetchTokens float64 // that requests fetch which are not prefilled yet
	Pending           int     // requests that are not prefilled yet
	Requests          int     // in flight, those of peers included

	QueuedSeconds float64 // that their prefill takes
	ContextTokens float64 // to which the requests in flight attend

	UnstartedTokens    float64 // uncached tokens of requests without output
	UnstartedAttention float64 // tokens that these attend to

	OwnKVTokens  float64 // in the KV cache for the requests in flight
	UsedKVTokens float64 // with those of other clients
	Capacity     int     // of the KV cache in tokens; 0: unknown
	HasWaiting   bool    // the replica reports that requests wait there, and as many have not started since
	NearlyFull   bool    // little of the KV cache is free, or it is not known how much
	DecodeRate   float64 // tokens a second of one sequence
}

// Figures returns the figures of a backend.
func (l *Ledger) Figures(slot int, now time.Time) (f Figures) {
	l.ReadFigures(&f, slot, l.estimates.PrefillRate(slot), now, false)
	return f
}

// ReadFigures sets f to the figures of a backend with a prefill rate. With workOff, the requests that
// should be prefilled by now count as prefilled for later calls too.
func (l *Ledger) ReadFigures(f *Figures, slot int, prefillRate float64, now time.Time, workOff bool) {
	a := l.accounts[slot]
	k, p := &a.kv, &a.prefill
	f.QueuedTokens, f.Pending = p.queuedTokens(now, prefillRate)
	f.QueuedFetchTokens = p.queuedFetches(f.Pending)
	f.QueuedSeconds = l.estimates.Step(slot).PrefillSecondsOf(f.QueuedTokens, p.queuedAttended(f.QueuedTokens, f.Pending))
	outputs := k.outputTokensInFlight(now.Sub(l.start))
	f.ContextTokens = p.prompts + outputs
	if workOff && p.mayHaveWorkedOff() {
		l.addGrowth(a, now)
		p.removeWorkedOff(now, prefillRate)
	}
	f.Requests, f.UnstartedTokens, f.UnstartedAttention = p.requests, p.unstarted, p.attended
	f.OwnKVTokens = l.ownPromptTokens(slot) + outputs
	f.UsedKVTokens, f.HasWaiting = f.OwnKVTokens, false
	f.Capacity, f.NearlyFull, f.DecodeRate = k.capacity, k.nearlyFull, k.decodeRate.Value
	if (k.external != 0 || k.waiting > 0) && l.isRecentPoll(k, now) {
		f.UsedKVTokens += k.external
		f.HasWaiting = k.waiting > 0
	}
}

// UnstartedTokens returns the uncached tokens of a backend's requests without output.
func (l *Ledger) UnstartedTokens(slot int) float64 { return l.accounts[slot].prefill.unstarted }

// CountOwn returns how many requests of this router a backend has in flight.
func (l *Ledger) CountOwn(slot int) int {
	p := &l.accounts[slot].prefill
	return p.requests - p.ofPeers
}

// AdapterCost returns what it costs a backend whose last poll returned load to load an adapter, in
// tokens of prefill; 0 if it has it.
func (l *Ledger) AdapterCost(slot int, adapter string, load *backends.Load) (tokens float64) {
	return l.accounts[slot].prefill.adapterCost(adapter, load)
}

// CountShared returns how many of a backend's blocks other requests in flight use.
func (l *Ledger) CountShared(slot int, matched []prompt.Block) int {
	return len(matched) - l.index.CountUnpinned(slot, matched)
}

// CountUnusedSince returns how many of a backend's blocks were last used before a use of its cache, without those that the
// replica has reported.
func (l *Ledger) CountUnusedSince(slot int, matched []prompt.Block, use uint64) int {
	return l.index.CountUnusedSince(slot, matched, use)
}

// OffloadedBefore returns the use of a backend's cache before which those of its blocks were last used that its GPU does not hold
// any more, but host memory, a disk or a store; 0 if there are none as far as is known.
func (l *Ledger) OffloadedBefore(slot int) (use uint64) {
	if !l.estimates.Offloads(slot) {
		return 0
	}
	return l.index.UseAtDistance(slot, l.estimates.DeviceBlocks(slot))
}

// CountReservedForOthers returns how many tokens of a backend's cache are reserved for other turns than a prompt of a
// conversation: for those of its tenant, and of the others for which holdsBack reports true.
func (l *Ledger) CountReservedForOthers(slot int, id queue.ConversationID, blocks []prompt.Block, holdsBack func(tenant uint64) bool,
	now time.Time) (tokens int) {
	return l.nextTurns.countForOthers(slot, id, blocks, holdsBack, now)
}

// ReserveForInteractive reserves as many of some backends for interactive requests as these need, so
// that low-priority requests slow them down by maxSlowdown at most. It returns the room for low-priority requests.
func (l *Ledger) ReserveForInteractive(slots iter.Seq[int], maxSlowdown float64, now time.Time) queue.Headroom {
	return l.interactive.ReserveBackends(maxSlowdown, now, func(yield func(*queue.ClassLoad) bool) {
		for slot := range slots {
			if !yield(&l.accounts[slot].classes) {
				return
			}
		}
	})
}

// CheckLowPriorityRoom reports whether a backend has room for a low-priority request beside its interactive
// ones, and whether it has to share itself with those.
func (l *Ledger) CheckLowPriorityRoom(slot int, h queue.Headroom, now time.Time) (hasRoom, shared bool) {
	return l.accounts[slot].classes.CheckLowPriorityRoom(h, now)
}

// WithCopiedClasses returns a ledger to call ReserveForInteractive and CheckLowPriorityRoom of without a
// change of l. Its other figures are those of l.
func (l *Ledger) WithCopiedClasses() *Ledger {
	c := *l
	c.accounts = make([]*account, len(l.accounts))
	for slot, a := range l.accounts {
		copied := *a
		c.accounts[slot] = &copied
	}
	return &c
}

// HasRecentInteractive reports whether there were interactive requests of late.
func (l *Ledger) HasRecentInteractive(now time.Time) bool {
	return l.interactive.HasRecentRequests(now)
}
