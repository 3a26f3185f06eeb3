package router

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router/policy"
)

// roomy says which backends have room, by slot.
func roomy(room []float64) func(*backends.Backend, *Ticket) bool {
	return func(b *backends.Backend, _ *Ticket) bool { return room[b.Slot] > 0 }
}

// order takes one request after the other out of a queue.
func order(q *holdQueue, room []float64) []int {
	var names []int
	for q.rewind(); ; {
		h := q.next(roomy(room))
		if h == nil {
			return names
		}
		names = append(names, h.req.Bytes)
		q.remove(h)
	}
}

func TestTheQueuesOrder(t *testing.T) {
	var q holdQueue
	b := []*backends.Backend{{Slot: 0}}
	put := func(name, priority int, key float64) {
		q.push(&Ticket{req: Request{Backends: b, Bytes: name, Priority: priority}, key: key})
	}
	put(3, 0, 2)
	put(5, 1, 1)
	put(2, 0, 1)
	put(4, 0, 2)
	put(1, -1, 9)
	if got, want := order(&q, []float64{1}), []int{1, 2, 3, 4, 5}; !slices.Equal(got, want) {
		t.Errorf("served %v, want %v: by priority, then key, then arrival", got, want)
	}
}

func TestARoundPassesGroupsThatNoBackendHasRoomFor(t *testing.T) {
	var q holdQueue
	a, b := &backends.Backend{Slot: 0}, &backends.Backend{Slot: 1}
	for i := range 300 {
		q.push(&Ticket{req: Request{Backends: []*backends.Backend{a}, Bytes: i}, key: float64(i)})
	}
	q.push(&Ticket{req: Request{Backends: []*backends.Backend{b}, Bytes: 1000}, key: 1000})
	q.rewind()
	if h := q.next(roomy([]float64{0, 1})); h == nil || h.req.Bytes != 1000 {
		t.Error("three hundred requests for one model are in the way of another's")
	}
	if h := q.next(roomy([]float64{0, 0})); h != nil {
		t.Error("a request is next, and no backend has room")
	}
	if h := q.next(roomy([]float64{1, 1})); h.req.Bytes != 0 {
		t.Errorf("request %d is next, want the first of all", h.req.Bytes)
	}
}

// counted counts what is scored.
type counted struct {
	policy.Policy
	scored int
}

func (c *counted) Choose(req *policy.Request, candidates []policy.Candidate) int {
	c.scored++
	return c.Policy.Choose(req, candidates)
}

// BenchmarkDispatch tells the time; here is what it consists of.
func TestTheWorkForARequestDoesNotGrowWithTheQueue(t *testing.T) {
	perRequest := func(held int) float64 {
		r, fleet, c := newFleet(t, 8, "prefix", func(o *Options) { o.Queue = QueueSettings{Requests: 2 * held} })
		count := &counted{Policy: r.policy}
		r.policy = count
		var running []*Decision
		key, sent := 0, 0
		fill := func() {
			for r.WaitingRequests() < held {
				r.Submit(ask(fleet, key%5000, 20+key%100), func(d *Decision, _ error) {
					running = append(running, d)
					sent++
				})
				key++
			}
		}
		fill()
		count.scored, sent = 0, 0
		for sent < 2000 {
			c.advance(50 * time.Millisecond)
			d := running[0]
			running = running[1:]
			d.RecordFirstEvent()
			d.Release(Outcome{End: Completed, AnswerTokens: 100})
			fill()
		}
		return float64(count.scored) / float64(sent)
	}
	short, long := perRequest(1000), perRequest(10_000)
	if long > 2*short {
		t.Errorf("%.1f scorings for a request sent through a queue of 10,000, and %.1f through one of 1,000", long, short)
	}
}

// Random arrivals and departures from anywhere, against a plain sorted list.
func TestTheQueueAgreesWithASortedList(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 7))
	fleets := [][]*backends.Backend{{{Slot: 0}}, {{Slot: 1}}}
	var q holdQueue
	var plain []*Ticket
	bytes := int64(0)
	for step := range 20000 {
		grows := step%8000 < 5000 // now long, now short
		if len(plain) == 0 || rng.IntN(10) < 4 || grows && rng.IntN(3) > 0 {
			h := &Ticket{
				req: Request{Backends: fleets[rng.IntN(2)], BodyBytes: rng.IntN(100), Priority: rng.IntN(2)},
				key: float64(rng.IntN(500)), tokens: 1,
			}
			q.push(h)
			plain = append(plain, h)
			bytes += int64(h.req.BodyBytes)
		} else {
			i := rng.IntN(len(plain))
			q.remove(plain[i])
			bytes -= int64(plain[i].req.BodyBytes)
			plain = slices.Delete(plain, i, i+1)
		}
		if q.count != len(plain) || ahead(&q.classes, classBatch).bytes != bytes || ahead(&q.classes, classBatch).tokens != float64(len(plain)) {
			t.Fatalf("step %d: %d requests of %d bytes and %.0f tokens, want %d of %d", step, q.count, ahead(&q.classes, classBatch).bytes, ahead(&q.classes, classBatch).tokens, len(plain), bytes)
		}
		if len(plain) > 0 && q.oldest != plain[0] {
			t.Fatalf("step %d: the oldest is not the one that came first", step)
		}
		if step%500 != 0 {
			continue
		}
		sorted := slices.Clone(plain)
		slices.SortFunc(sorted, func(a, b *Ticket) int {
			if a.before(b) {
				return -1
			}
			return 1
		})
		for _, g := range q.groups {
			mine := slices.DeleteFunc(slices.Clone(sorted), func(h *Ticket) bool { return h.group != g })
			if n := min(len(mine), mostScored); !slices.Equal(g.front, mine[:n]) || len(g.rest) != len(mine)-n {
				t.Fatalf("step %d: the front of a group is not its first %d", step, n)
			}
		}
	}
	for len(plain) > 0 {
		q.remove(plain[0])
		plain = plain[1:]
	}
	if q.count != 0 || ahead(&q.classes, classBatch).bytes != 0 || ahead(&q.classes, classBatch).tokens != 0 || len(q.groups) != 0 || q.oldest != nil || q.newest != nil {
		t.Errorf("something is left of an empty queue: %+v", q)
	}
}
