package router

import (
	"container/heap"
	"slices"

	"warmroute/backends"
)

// mostScored is how many held requests of a group are scored at most for one event.
const mostScored = 96

// holdQueue keeps held requests in the order in which they are served, and in
// that of their arrival. Those that the same backends could take are a group, so
// that many which wait for one model are not in the way of another's.
type holdQueue struct {
	groups []*heldGroup // none of them empty
	count  int

	oldest, newest *Ticket    // by arrival, linked
	due            heldByTime // those that have a time at which their standing changes
	arrivals       uint64
	classes        [classes]waiting
}

// waiting is what the requests of one class that wait amount to.
type waiting struct {
	count  int
	bytes  int64   // of bodies
	tokens float64 // that they would have to compute at least
}

func (w *waiting) add(count int, bytes int64, tokens float64) {
	w.count += count
	w.bytes += bytes
	if w.tokens += tokens; w.count == 0 {
		w.tokens = 0 // no residue of rounding
	}
}

// ahead is what waits of a class and of those before it.
func ahead(all *[classes]waiting, c class) (sum waiting) {
	for _, w := range all[:c+1] {
		sum.add(w.count, w.bytes, w.tokens)
	}
	return sum
}

// heldGroup is in the order of service. Only its first few are ever looked at
// one by one: they stand in a sorted slice, all others behind them in a heap. So
// what an event costs does not grow with the queue.
type heldGroup struct {
	backends []*backends.Backend
	front    []*Ticket // sorted; mostScored of them when rest holds any
	rest     heldHeap
	classes  [classes]waiting
	at       int      // in front, of the next to be scored in this round
	turns    int      // that its requests had in this round
	headroom headroom // of this round, where batch requests wait
}

// inFront is the place of a request that is not in the heap.
const inFront = -1

// rank is lower for those that go first: by priority, and promoted batch requests
// before all others of them.
func (h *Ticket) rank() int {
	if h.req.promoted {
		return 1
	}
	return 2 * h.req.Priority
}

// before is the order of service. Requests that came first go first among equals.
func (h *Ticket) before(other *Ticket) bool {
	switch {
	case h.rank() != other.rank():
		return h.rank() < other.rank()
	case h.key != other.key:
		return h.key < other.key
	}
	return h.number < other.number
}

func (q *holdQueue) push(h *Ticket) {
	q.arrivals++
	h.number = q.arrivals
	h.older = q.newest
	if q.newest != nil {
		q.newest.newer = h
	} else {
		q.oldest = h
	}
	q.newest = h
	if !h.due.IsZero() {
		heap.Push(&q.due, h)
	}
	q.count++
	q.classes[h.req.class()].add(1, int64(h.req.BodyBytes), h.tokens)

	q.enter(h)
}

// enter puts a request into the group of those that the same backends could take.
func (q *holdQueue) enter(h *Ticket) {
	at := slices.IndexFunc(q.groups, func(g *heldGroup) bool { return slices.Equal(g.backends, h.req.Backends) })
	if at < 0 {
		at = len(q.groups)
		q.groups = append(q.groups, &heldGroup{backends: h.req.Backends})
	}
	h.group = q.groups[at]
	h.group.classes[h.req.class()].add(1, int64(h.req.BodyBytes), h.tokens)
	h.group.push(h)
}

// leave takes a request out of its group.
func (q *holdQueue) leave(h *Ticket) {
	h.group.classes[h.req.class()].add(-1, -int64(h.req.BodyBytes), -h.tokens)
	h.group.remove(h)
	if len(h.group.front) == 0 {
		at := slices.Index(q.groups, h.group)
		q.groups = slices.Delete(q.groups, at, at+1)
	}
}

// regroup lets other backends take a request, which keeps its turn.
func (q *holdQueue) regroup(h *Ticket, fleet []*backends.Backend) {
	q.leave(h)
	h.req.Backends = fleet
	q.enter(h)
}

// promote puts a batch request that has waited for half of its time before the other
// batch requests. From now on it starts wherever there is room.
func (q *holdQueue) promote(h *Ticket) {
	q.leave(h)
	h.req.promoted, h.due = true, h.until
	heap.Fix(&q.due, h.duePlace)
	q.enter(h)
}

func (q *holdQueue) remove(h *Ticket) {
	if !h.due.IsZero() {
		heap.Remove(&q.due, h.duePlace)
	}
	if h.older != nil {
		h.older.newer = h.newer
	} else {
		q.oldest = h.newer
	}
	if h.newer != nil {
		h.newer.older = h.older
	} else {
		q.newest = h.older
	}
	h.older, h.newer = nil, nil
	q.count--
	q.classes[h.req.class()].add(-1, -int64(h.req.BodyBytes), -h.tokens)
	q.leave(h)
}

// sharesBackend reports whether a queued request that is not of a later class could
// be taken by one of the backends of req.
func (q *holdQueue) sharesBackend(req *Request) bool {
	return slices.ContainsFunc(q.groups, func(g *heldGroup) bool {
		return ahead(&g.classes, req.class()).count > 0 &&
			slices.ContainsFunc(g.backends, func(b *backends.Backend) bool { return slices.Contains(req.Backends, b) })
	})
}

// rewind begins a round.
func (q *holdQueue) rewind() {
	for _, g := range q.groups {
		g.at, g.turns = 0, 0
	}
}

// next is the first request that this round has not passed and for which a
// backend, by slot, has room; nil when there is none. The caller passes it by
// counting its group's at, or removes it.
func (q *holdQueue) next(takes func(*backends.Backend, *Ticket) bool) *Ticket {
	var first *Ticket
	for _, g := range q.groups {
		if g.at == len(g.front) || g.turns == mostScored || first != nil && first.before(g.front[g.at]) {
			continue
		}
		if slices.ContainsFunc(g.backends, func(b *backends.Backend) bool { return takes(b, g.front[g.at]) }) {
			first = g.front[g.at]
		}
	}
	return first
}

func (g *heldGroup) push(h *Ticket) {
	if len(g.front) == mostScored {
		last := g.front[mostScored-1]
		if last.before(h) {
			heap.Push(&g.rest, h)
			return
		}
		g.front = g.front[:mostScored-1]
		heap.Push(&g.rest, last)
	}
	h.place = inFront
	g.front = slices.Insert(g.front, g.find(h), h)
}

func (g *heldGroup) remove(h *Ticket) {
	if h.place != inFront {
		heap.Remove(&g.rest, h.place)
		return
	}
	at := g.find(h)
	g.front = slices.Delete(g.front, at, at+1)
	if len(g.rest) > 0 {
		next := heap.Pop(&g.rest).(*Ticket)
		next.place = inFront
		g.front = append(g.front, next)
	}
}

// find is where h stands in front, or would.
func (g *heldGroup) find(h *Ticket) int {
	at, _ := slices.BinarySearchFunc(g.front, h, func(a, b *Ticket) int {
		switch {
		case a.before(b):
			return -1
		case b.before(a):
			return 1
		}
		return 0
	})
	return at
}

// heldHeap is a container/heap whose members know their place.
type heldHeap []*Ticket

func (h heldHeap) Len() int           { return len(h) }
func (h heldHeap) Less(i, j int) bool { return h[i].before(h[j]) }

func (h heldHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].place, h[j].place = i, j
}

func (h *heldHeap) Push(x any) {
	x.(*Ticket).place = len(*h)
	*h = append(*h, x.(*Ticket))
}

func (h *heldHeap) Pop() any {
	old := *h
	last := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return last
}

// heldByTime is a container/heap of those whose standing changes first.
type heldByTime []*Ticket

func (h heldByTime) Len() int           { return len(h) }
func (h heldByTime) Less(i, j int) bool { return h[i].due.Before(h[j].due) }

func (h heldByTime) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].duePlace, h[j].duePlace = i, j
}

func (h *heldByTime) Push(x any) {
	x.(*Ticket).duePlace = len(*h)
	*h = append(*h, x.(*Ticket))
}

func (h *heldByTime) Pop() any {
	old := *h
	last := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return last
}
