// Package queue orders the requests that no backend can start soon. It is the admission queue, with bounds by
// priority class, fairness between tenants, and the share of the fleet that low-priority requests may use.
package queue

import (
	"container/heap"
	"iter"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
)

// MaxTurns is how many requests of a group get a turn in one round.
const MaxTurns = 96

const (
	ageingRate = 0.2 // seconds of prefill that a second of waiting is worth
	// MaxLead is by how much a turn of a conversation is served as if it had arrived earlier, at most.
	MaxLead = time.Minute
	// maxChecks bounds how many are checked at once: others wait for the caller's lock. The rest
	// follows in the next round.
	maxChecks = 1024
)

// Queue holds requests in the order in which they are served, and in that of their arrival. Those that the same
// backends could take form a group, so that many which wait for one model are not in the way of another's. T is
// what the owner keeps with each request. Not safe for concurrent use.
type Queue[T any] struct {
	settings Settings
	start    time.Time
	groups   []*Group[T] // none of them empty
	count    int

	oldest, newest *Item[T] // by arrival, linked
	toReorder      *Item[T] // the next one; nil: the oldest
	delayed        int      // requests in this round; see delayLeads
	due            itemHeap[T]
	arrivals       uint64
	conversations  conversations[T]
	classes        [classCount]Waiting
	outside        [classCount]Waiting // requests that wait for something else than their turn

	departures departures
	fairness   fairness
}

// Item is a request in the queue.
type Item[T any] struct {
	Value    T
	Backends []*backends.Backend // that could take it
	Class    Class
	Priority int           // lower first
	Tenant   uint64        // a TenantID
	Bytes    int           // of its body
	Tokens   float64       // that it has to compute at least
	Ahead    time.Duration // that first come, first served would take for what is before it, about
	Timeouts Timeouts      // none: those of the Settings
	Waited   Waited        // with earlier waits
	Arrival  time.Time     // of a retry, as Queue.Arrival has returned it for an earlier attempt; zero: unknown
	Arrived  time.Time
	Promoted bool // it has been overtaken for as long as it may be
	// FirstTokenDue is when its first token is due; zero: it has no target, or cannot meet it any more. One that is set makes it
	// overtake what has none, by MaxLead at most and within its tenant's share.
	FirstTokenDue time.Time

	// A later turn of a conversation has its blocks, by which it is known to continue an earlier one.
	Conversation ConversationID
	Blocks       []prompt.Block

	group        *Group[T]
	counted      time.Time     // up to when Waited was counted
	noneReady    bool          // no backend was ready then, as in Timeouts
	overtakeTime time.Duration // of its ageingTime, after which it is promoted
	due          time.Time     // when its time is looked at next
	charged      float64       // seconds of its tenant's share
	arrival      float64       // second at which it counts as arrived
	conversation *conversation[T]
	lead         time.Duration // by how much it is served as if it had arrived earlier, as far as its tenant's share allows

	prefillSeconds float64 // that its tokens take on one backend
	key            float64 // lower first, among equal priorities
	number         uint64  // in the order of arrival
	place          int     // in its group's rest; inFront: in front
	duePlace       int
	older, newer   *Item[T]
}

// Group is in the order of service. Only its first few are looked at one by one: they stand in a sorted slice,
// all others behind them in a heap, so that the cost of a round does not grow with the queue.
type Group[T any] struct {
	Backends []*backends.Backend
	Headroom Headroom // of this round

	front   []*Item[T] // sorted; MaxTurns of them when rest holds any
	rest    itemHeap[T]
	classes [classCount]Waiting
	next    int // in front, of the next in this round
	turns   int // that its requests had in this round
}

// New returns an empty queue.
func New[T any](now time.Time) *Queue[T] {
	return &Queue[T]{
		start:    now,
		fairness: fairness{accounts: new([classCount][maxTenants]tenantAccount)},
		due: itemHeap[T]{
			before: func(a, b *Item[T]) bool { return a.due.Before(b.due) },
			place:  func(it *Item[T]) *int { return &it.duePlace },
		},
	}
}

// Configure changes the bounds. They hold for requests to come.
func (q *Queue[T]) Configure(s Settings) { q.settings = s }

// Len returns how many requests are queued.
func (q *Queue[T]) Len() int { return q.count }

// Contains reports whether it is in the queue.
func (q *Queue[T]) Contains(it *Item[T]) bool { return it.group != nil }

// Add adds a request whose arrival is now. prefill is how many seconds its tokens take on one backend, rate how
// many tokens its backends prefill together in a second. A retry is not charged to its tenant, since its first
// attempt was, and keeps the place of that, or else the one that it has by its earlier waits.
func (q *Queue[T]) Add(it *Item[T], prefillSeconds, tokensPerSecond float64, isRetry bool, now time.Time) {
	it.Arrived, it.counted = now, now
	if it.Timeouts == (Timeouts{}) {
		it.Timeouts = q.settings.Timeouts()
	}
	arrived := now.Sub(q.start).Seconds()
	switch {
	case !it.Arrival.IsZero():
		it.arrival = it.Arrival.Sub(q.start).Seconds()
	case isRetry:
		it.arrival = arrived - it.Waited.Total().Seconds()
	default:
		it.arrival, it.charged = q.fairness.chargeTenant(it.Class, it.Tenant, it.Tokens, tokensPerSecond, it.Timeouts.limit().Seconds(), arrived)
	}
	if it.arrival > arrived || it.Class == LowPriority {
		it.Ahead = 0 // others go first: the share of its tenant is used, or it gives way to interactive requests
	}
	it.overtakeTime = it.Timeouts.maxOvertakeTime(it.Ahead)
	q.fairness.addQueued(it.Class, it.Tenant, it.charged)
	q.setKey(it, prefillSeconds)
	it.due = now // to find out whether a backend is ready
	q.fairness.addWaiting(it.Class, it.Tenant, 1, int64(it.Bytes))
	if q.count == 0 {
		q.departures.restart(now)
	}
	q.arrivals++
	it.number = q.arrivals
	it.older = q.newest
	if q.newest != nil {
		q.newest.newer = it
	} else {
		q.oldest = it
	}
	q.newest = it
	heap.Push(&q.due, it)
	q.count++
	q.classes[it.Class].add(1, int64(it.Bytes), it.Tokens)
	q.joinGroup(it)
	if v := q.conversations.find(it.Conversation); v != nil && len(it.Blocks) > 0 && len(v.queued) < maxQueuedTurns {
		it.conversation = v
		v.queued = append(v.queued, it)
		q.giveLead(v, now)
	}
}

// setKey sets the key of a request whose prefill takes so many seconds on one backend: short work first, but a
// second of prefill is overtaken by nothing that comes 1/ageingRate seconds later. A promoted request is
// overtaken by nothing that comes later: it has the lowest key that a request of its arrival can have.
func (q *Queue[T]) setKey(it *Item[T], prefillSeconds float64) {
	it.prefillSeconds = prefillSeconds
	it.key = q.keyOf(it)
}

// keyOf returns the key that a request has now: what its tenant is served delays those with a lead.
func (q *Queue[T]) keyOf(it *Item[T]) float64 {
	switch {
	case it.Promoted:
		return ageingRate * (it.arrival - MaxLead.Seconds())
	case it.lead == 0 && it.FirstTokenDue.IsZero():
		return it.prefillSeconds + ageingRate*it.arrival
	}
	earliest := min(it.arrival, q.fairness.earliestArrival(it.Class, it.Tenant))
	return it.prefillSeconds + ageingRate*max(it.arrival-q.leadOf(it), earliest)
}

// leadOf returns how many seconds are subtracted from the arrival of a request: the lead of a later turn, or, if that is more, MaxLead
// less the slack of a request with a target. Slack is the time from its arrival to the latest start of its prefill that meets the target.
func (q *Queue[T]) leadOf(it *Item[T]) (seconds float64) {
	seconds = it.lead.Seconds()
	if !it.FirstTokenDue.IsZero() {
		latestStart := it.FirstTokenDue.Sub(q.start).Seconds() - it.prefillSeconds
		slack := max(0, latestStart-it.arrival)
		seconds = max(seconds, MaxLead.Seconds()-slack)
	}
	return seconds
}

// ReorderNext gives the next requests, at most n, the places of what their prefill takes on one backend
// now, in seconds. Further calls go on with those that arrived later, and begin again with the
// oldest. It must not be called within a round.
func (q *Queue[T]) ReorderNext(n int, prefillSeconds func(*Item[T]) float64) {
	for range min(n, q.count) {
		it := q.toReorder
		if it == nil {
			it = q.oldest
		}
		q.toReorder = it.newer
		seconds := prefillSeconds(it)
		it.group.removeItem(it)
		q.limitArrival(it)
		q.setKey(it, seconds)
		it.group.insertItem(it)
	}
}

// limitArrival has a request count as arrived when the share of its tenant is used, at the latest: less
// of it may be used than at its arrival, since others of the tenant were removed.
func (q *Queue[T]) limitArrival(it *Item[T]) {
	usedUntil := q.fairness.part(it.Class, it.Tenant).usedUntil
	it.arrival = min(it.arrival, max(it.Arrived.Sub(q.start).Seconds(), usedUntil))
}

// ChargeUnqueued charges a tenant for a request that was not queued. It returns when the request counts as arrived.
func (q *Queue[T]) ChargeUnqueued(c Class, tenant uint64, tokens, tokensPerSecond float64, now time.Time) (arrival time.Time) {
	second, _ := q.fairness.chargeTenant(c, tenant, tokens, tokensPerSecond, 0, now.Sub(q.start).Seconds())
	return q.timeOf(second)
}

// Arrival returns when a request counts as arrived: later than it was added if its tenant has used its share.
func (q *Queue[T]) Arrival(it *Item[T]) time.Time { return q.timeOf(it.arrival) }

func (q *Queue[T]) timeOf(second float64) time.Time {
	return q.start.Add(time.Duration(second * float64(time.Second)))
}

// IsDueBefore reports whether a tenant has used no more of its share than another one, at least as much as both have by now.
func (q *Queue[T]) IsDueBefore(c Class, tenant, other uint64, now time.Time) bool {
	second := now.Sub(q.start).Seconds()
	return max(second, q.fairness.servedUntil(c, tenant)) <= max(second, q.fairness.servedUntil(c, other))
}

// RefundTenant gives back what Add charged for a request that no backend was sent.
func (q *Queue[T]) RefundTenant(it *Item[T]) {
	q.fairness.refundTenant(it.Class, it.Tenant, it.charged)
}

// RecordSent counts the tokens of a request that is sent, before its Remove.
func (q *Queue[T]) RecordSent(it *Item[T], now time.Time) { q.departures.addTokens(it.Tokens, now) }

// TokensPerSecond returns the rate at which the tokens of queued requests were sent of late, or when that was last known; 0: never.
func (q *Queue[T]) TokensPerSecond(now time.Time) float64 { return q.departures.tokensPerSecond(now) }

// Remove removes a request.
func (q *Queue[T]) Remove(it *Item[T], now time.Time) {
	q.departures.addDeparture(now)
	q.fairness.removeQueued(it.Class, it.Tenant, it.charged)
	q.fairness.addWaiting(it.Class, it.Tenant, -1, -int64(it.Bytes))
	heap.Remove(&q.due, it.duePlace)
	if it.older != nil {
		it.older.newer = it.newer
	} else {
		q.oldest = it.newer
	}
	if it.newer != nil {
		it.newer.older = it.older
	} else {
		q.newest = it.older
	}
	if q.toReorder == it {
		q.toReorder = it.newer
	}
	it.older, it.newer = nil, nil
	q.count--
	q.classes[it.Class].add(-1, -int64(it.Bytes), -it.Tokens)
	q.removeFromGroup(it)
	if v := it.conversation; v != nil {
		it.conversation = nil
		v.removeQueued(it)
		q.giveLead(v, now)
	}
}

// RecordPrompt records a prompt of a conversation that is sent, which its next turn continues.
func (q *Queue[T]) RecordPrompt(id ConversationID, blocks []prompt.Block, now time.Time) {
	if v := q.conversations.recordPrompt(id, blocks, now); v != nil {
		q.giveLead(v, now)
	}
}

// giveLead gives a queued turn of a conversation a lead, if none has one.
func (q *Queue[T]) giveLead(v *conversation[T], now time.Time) {
	if it := v.giveLead(now); it != nil {
		it.group.removeItem(it)
		q.setKey(it, it.prefillSeconds)
		it.group.insertItem(it)
	}
}

// IsFull reports whether the bounds of a class have no room for a tenant's request with such a body. Nothing that waits is
// removed for it.
func (q *Queue[T]) IsFull(c Class, tenant uint64, bytes int) bool {
	w := q.classes[c]
	w.add(q.outside[c].Count, q.outside[c].Bytes, 0)
	return !q.fairness.hasRoom(c, tenant, w, q.settings.limits(c), bytes)
}

// UnreadyExceedHalf reports whether requests without a ready backend take half of their class's bounds, in which the tenant has
// its share: the other half is kept for models that have one.
func (q *Queue[T]) UnreadyExceedHalf(c Class, tenant uint64, bytes int, isReady func(*backends.Backend) bool) bool {
	unready := Waiting{}
	for _, g := range q.groups {
		if !slices.ContainsFunc(g.Backends, isReady) {
			unready.add(g.classes[c].Count, g.classes[c].Bytes, 0)
		}
	}
	half := q.settings.limits(c)
	half.Count /= 2
	half.Bytes /= 2
	return unready.Count > 0 && !q.fairness.hasRoom(c, tenant, unready, half, bytes)
}

// AddWaitingOutsideQueue counts a request that waits for something else than its turn.
func (q *Queue[T]) AddWaitingOutsideQueue(c Class, tenant uint64, bytes int) {
	q.outside[c].add(1, int64(bytes), 0)
	q.fairness.addWaiting(c, tenant, 1, int64(bytes))
}

// RemoveWaitingOutsideQueue undoes AddWaitingOutsideQueue.
func (q *Queue[T]) RemoveWaitingOutsideQueue(c Class, tenant uint64, bytes int) {
	q.outside[c].add(-1, -int64(bytes), 0)
	q.fairness.addWaiting(c, tenant, -1, -int64(bytes))
}

// CountWaiting returns how many requests wait, queued or outside the queue.
func (q *Queue[T]) CountWaiting() int {
	n := q.count
	for c := range q.outside {
		n += q.outside[c].Count
	}
	return n
}

// CountWaitingByClass returns how many requests wait, queued or outside the queue, by the name of their class.
func (q *Queue[T]) CountWaitingByClass() map[string]int {
	waiting := make(map[string]int, classCount)
	for c := range classCount {
		waiting[c.String()] = q.classes[c].Count + q.outside[c].Count
	}
	return waiting
}

// EstimateWait returns how long the queue took of late to lose as many requests as are ahead of a new one of a
// class, 0 when that is not known; the time since the last departure; and the tokens of those ahead.
func (q *Queue[T]) EstimateWait(c Class, now time.Time) (wait, sinceLastDeparture time.Duration, tokensAhead float64) {
	w := waitingUpTo(&q.classes, c)
	if w.Count > 0 {
		wait, sinceLastDeparture = q.departures.estimateWait(w.Count, now)
	}
	return wait, sinceLastDeparture, w.Tokens
}

// WaitingAhead sums over the queued requests of the class and those before it that could be taken
// by one of the backends.
func (q *Queue[T]) WaitingAhead(c Class, candidates []*backends.Backend) (sum Waiting) {
	for _, g := range q.groups {
		if slices.ContainsFunc(g.Backends, func(b *backends.Backend) bool { return slices.Contains(candidates, b) }) {
			w := waitingUpTo(&g.classes, c)
			sum.add(w.Count, w.Bytes, w.Tokens)
		}
	}
	return sum
}

// Items returns the queued requests, the oldest first. The current one may be moved.
func (q *Queue[T]) Items() iter.Seq[*Item[T]] {
	return func(yield func(*Item[T]) bool) {
		for it := q.oldest; it != nil; it = it.newer {
			if !yield(it) {
				return
			}
		}
	}
}

// Groups returns the groups; the caller does not change the slice.
func (q *Queue[T]) Groups() []*Group[T] { return q.groups }

// First returns the group's first request; nil when the group is empty.
func (g *Group[T]) First() *Item[T] {
	if len(g.front) == 0 {
		return nil
	}
	return g.front[0]
}

// HasLowPriority reports whether low-priority requests are queued.
func (q *Queue[T]) HasLowPriority() bool { return q.classes[LowPriority].Count > 0 }

// ExpireNext counts how long requests have waited, promotes those that may not be overtaken any more, and
// returns one whose time is over, which the caller removes; nil when there is none. noneReady reports whether no
// backend that could take a request is ready and makes progress.
func (q *Queue[T]) ExpireNext(now time.Time, noneReady func(*Item[T]) bool) *Item[T] {
	for range maxChecks {
		if len(q.due.items) == 0 || now.Before(q.due.items[0].due) {
			break
		}
		it := q.due.items[0]
		it.Waited.add(now.Sub(it.counted), it.noneReady)
		it.counted, it.noneReady = now, noneReady(it)
		if it.Timeouts.Left(it.Waited, it.noneReady) <= 0 {
			return it
		}
		if !it.Promoted && it.ageingTime() >= it.overtakeTime {
			q.removeFromGroup(it)
			it.Promoted = true
			q.limitArrival(it)
			q.setKey(it, 0)
			q.joinGroup(it)
		}
		it.scheduleCheck()
		heap.Fix(&q.due, it.duePlace)
	}
	return nil
}

// ageingTime returns the part of its time in the queue after which it is promoted: that with
// which its time ends where replicas work.
func (it *Item[T]) ageingTime() time.Duration {
	if it.Timeouts.Total > 0 {
		return it.Waited.Total()
	}
	return it.Waited.Busy
}

// scheduleCheck sets when its time is looked at next.
func (it *Item[T]) scheduleCheck() {
	next := min(it.Timeouts.checkInterval(it.noneReady), it.Timeouts.Left(it.Waited, it.noneReady))
	if !it.Promoted {
		next = min(next, it.overtakeTime-it.ageingTime())
	}
	it.due = it.counted.Add(max(0, next))
}

// SetBackends changes which backends could take a request. It keeps its turn.
func (q *Queue[T]) SetBackends(it *Item[T], candidates []*backends.Backend) {
	q.removeFromGroup(it)
	it.Backends = candidates
	q.joinGroup(it)
}

// StartRound starts a round of turns.
func (q *Queue[T]) StartRound() {
	q.delayed = 0
	for _, g := range q.groups {
		g.next, g.turns = 0, 0
	}
}

// GiveNextTurn gives a turn to the first request that was not skipped in this round and for
// which a backend has room; nil when there is none. The caller skips or removes it.
func (q *Queue[T]) GiveNextTurn(hasRoom func(*backends.Backend, *Item[T], *Group[T]) bool) *Item[T] {
	var first *Item[T]
	for _, g := range q.groups {
		q.delayLeads(g)
		if g.next == len(g.front) || g.turns == MaxTurns || first != nil && first.isBefore(g.front[g.next]) {
			continue
		}
		if slices.ContainsFunc(g.Backends, func(b *backends.Backend) bool { return hasRoom(b, g.front[g.next], g) }) {
			first = g.front[g.next]
		}
	}
	if first != nil {
		first.group.turns++
	}
	return first
}

// delayLeads moves the requests whose turn is next to the places of their keys, at most MaxTurns of all in a round: others
// of their tenants were served since these were set.
func (q *Queue[T]) delayLeads(g *Group[T]) {
	for ; g.next < len(g.front) && q.delayed < MaxTurns; q.delayed++ {
		it := g.front[g.next]
		key := q.keyOf(it)
		if key <= it.key {
			return
		}
		g.removeItem(it)
		it.key = key
		g.insertItem(it)
	}
}

// Skip ends a request's turn for this round.
func (q *Queue[T]) Skip(it *Item[T]) { it.group.next++ }

// rank is lower for requests that go first: by priority, and promoted low-priority requests before the others.
func (it *Item[T]) rank() int {
	if it.Promoted && it.Class == LowPriority {
		return 1
	}
	return 2 * it.Priority
}

// isBefore reports whether it is served before other.
func (it *Item[T]) isBefore(other *Item[T]) bool {
	switch {
	case it.rank() != other.rank():
		return it.rank() < other.rank()
	case it.key != other.key:
		return it.key < other.key
	}
	return it.number < other.number
}

func (q *Queue[T]) joinGroup(it *Item[T]) {
	at := slices.IndexFunc(q.groups, func(g *Group[T]) bool { return slices.Equal(g.Backends, it.Backends) })
	if at < 0 {
		at = len(q.groups)
		q.groups = append(q.groups, &Group[T]{Backends: it.Backends, rest: itemHeap[T]{
			before: (*Item[T]).isBefore,
			place:  func(it *Item[T]) *int { return &it.place },
		}})
	}
	it.group = q.groups[at]
	it.group.classes[it.Class].add(1, int64(it.Bytes), it.Tokens)
	it.group.insertItem(it)
}

func (q *Queue[T]) removeFromGroup(it *Item[T]) {
	g := it.group
	g.classes[it.Class].add(-1, -int64(it.Bytes), -it.Tokens)
	g.removeItem(it)
	if len(g.front) == 0 {
		at := slices.Index(q.groups, g)
		q.groups = slices.Delete(q.groups, at, at+1)
	}
	it.group = nil
}

// inFront is the place of a request that is not in the heap.
const inFront = -1

func (g *Group[T]) insertItem(it *Item[T]) {
	if len(g.front) == MaxTurns {
		last := g.front[MaxTurns-1]
		if last.isBefore(it) {
			heap.Push(&g.rest, it)
			return
		}
		g.front = g.front[:MaxTurns-1]
		heap.Push(&g.rest, last)
	}
	it.place = inFront
	g.front = slices.Insert(g.front, g.frontPlace(it), it)
}

func (g *Group[T]) removeItem(it *Item[T]) {
	if it.place != inFront {
		heap.Remove(&g.rest, it.place)
		return
	}
	at := g.frontPlace(it)
	g.front = slices.Delete(g.front, at, at+1)
	if g.rest.Len() > 0 {
		next := heap.Pop(&g.rest).(*Item[T])
		next.place = inFront
		g.front = append(g.front, next)
	}
}

// frontPlace returns where a request stands in front, or would.
func (g *Group[T]) frontPlace(it *Item[T]) int {
	at, _ := slices.BinarySearchFunc(g.front, it, func(a, b *Item[T]) int {
		switch {
		case a.isBefore(b):
			return -1
		case b.isBefore(a):
			return 1
		}
		return 0
	})
	return at
}

// itemHeap implements heap.Interface. Its items know their place.
type itemHeap[T any] struct {
	items  []*Item[T]
	before func(a, b *Item[T]) bool
	place  func(*Item[T]) *int
}

func (h *itemHeap[T]) Len() int           { return len(h.items) }
func (h *itemHeap[T]) Less(i, j int) bool { return h.before(h.items[i], h.items[j]) }

func (h *itemHeap[T]) Swap(i, j int) {
	h.items[i], h.items[j] = h.items[j], h.items[i]
	*h.place(h.items[i]), *h.place(h.items[j]) = i, j
}

func (h *itemHeap[T]) Push(x any) {
	it := x.(*Item[T])
	*h.place(it) = len(h.items)
	h.items = append(h.items, it)
}

func (h *itemHeap[T]) Pop() any {
	last := len(h.items) - 1
	it := h.items[last]
	h.items[last] = nil
	h.items = h.items[:last]
	return it
}
