package queue

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"warmroute/backends"
)

var start = time.Unix(1000, 0)

// hasRoom says which backends have room, by slot.
func hasRoom(room ...float64) func(*backends.Backend, *Item[int], *Group[int]) bool {
	return func(b *backends.Backend, _ *Item[int], _ *Group[int]) bool { return room[b.Slot] > 0 }
}

func TestOrder(t *testing.T) {
	q := New[int](start)
	b := []*backends.Backend{{Slot: 0}}
	put := func(value, priority int, prefill float64) {
		q.Add(&Item[int]{Value: value, Backends: b, Class: ClassOf(priority), Priority: priority}, prefill, 1, false, start)
	}
	put(3, 0, 2)
	put(5, 1, 1)
	put(2, 0, 1)
	put(4, 0, 2)
	put(1, -1, 9)
	var got []int
	for q.StartRound(); ; {
		it := q.GiveNextTurn(hasRoom(1))
		if it == nil {
			break
		}
		got = append(got, it.Value)
		q.Remove(it, start)
	}
	if want := []int{1, 2, 3, 4, 5}; !slices.Equal(got, want) {
		t.Errorf("served %v, want %v: by priority, then prefill, then arrival", got, want)
	}
}

func TestRoundPassesGroupsWithoutRoom(t *testing.T) {
	q := New[int](start)
	a, b := &backends.Backend{Slot: 0}, &backends.Backend{Slot: 1}
	for i := range 300 {
		q.Add(&Item[int]{Value: i, Backends: []*backends.Backend{a}, Class: Normal}, float64(i), 1, false, start)
	}
	q.Add(&Item[int]{Value: 1000, Backends: []*backends.Backend{b}, Class: Normal}, 1000, 1, false, start)
	q.StartRound()
	if it := q.GiveNextTurn(hasRoom(0, 1)); it == nil || it.Value != 1000 {
		t.Error("three hundred requests for one model are in the way of another's")
	}
	if it := q.GiveNextTurn(hasRoom(0, 0)); it != nil {
		t.Error("a request is next, and no backend has room")
	}
	if it := q.GiveNextTurn(hasRoom(1, 1)); it.Value != 0 {
		t.Errorf("request %d is next, want the first of all", it.Value)
	}
}

// A request moves to the place of what its prefill takes now; requests get their turns to move by
// arrival, the oldest again after the newest.
func TestReorder(t *testing.T) {
	q := New[int](start)
	b := []*backends.Backend{{Slot: 0}}
	prefill := map[int]float64{}
	var items []*Item[int]
	for i := range 2 * MaxTurns {
		prefill[i] = float64(i)
		items = append(items, &Item[int]{Value: i, Backends: b})
		q.Add(items[i], prefill[i], 1, false, start)
	}
	first := func(name string, n, want int) {
		t.Helper()
		q.ReorderNext(n, func(it *Item[int]) float64 { return prefill[it.Value] })
		if got := q.Groups()[0].First().Value; got != want {
			t.Errorf("%s: request %d is the first, want %d", name, got, want)
		}
	}
	prefill[3], prefill[150], prefill[170] = -3, -2, -1
	first("before its turn", 3, 0)
	first("from the front", 1, 3)
	first("from behind the front", 147, 3)
	q.Remove(items[3], start)
	q.Remove(items[151], start) // whose turn is next
	first("without the first one", 1, 150)
	prefill[150] = 1000
	first("before its next turn", 30, 150)
	first("all others", 1000, 170)
	for i := range items {
		prefill[i] = 0
	}
	first("by arrival where all are equal", 1000, 0)
}

// Random arrivals, departures from anywhere and changes of places, against a plain sorted list.
func TestQueueAgreesWithSortedList(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 7))
	fleets := [][]*backends.Backend{{{Slot: 0}}, {{Slot: 1}}}
	q := New[int](start)
	var plain []*Item[int]
	bytes := int64(0)
	for step := range 20000 {
		grows := step%8000 < 5000 // now long, now short
		if len(plain) == 0 || rng.IntN(10) < 4 || grows && rng.IntN(3) > 0 {
			it := &Item[int]{Backends: fleets[rng.IntN(2)], Bytes: rng.IntN(100), Priority: rng.IntN(2), Tokens: 1, Tenant: uint64(rng.IntN(3))}
			it.Class = ClassOf(it.Priority)
			q.Add(it, float64(rng.IntN(500)), 1000, true, start)
			plain = append(plain, it)
			bytes += int64(it.Bytes)
		} else {
			i := rng.IntN(len(plain))
			q.Remove(plain[i], start)
			bytes -= int64(plain[i].Bytes)
			plain = slices.Delete(plain, i, i+1)
		}
		if step%3 == 0 {
			q.ReorderNext(2, func(*Item[int]) float64 { return float64(rng.IntN(500)) })
		}
		if w := waitingUpTo(&q.classes, LowPriority); q.Len() != len(plain) || w.Bytes != bytes || w.Tokens != float64(len(plain)) {
			t.Fatalf("step %d: %d requests of %d bytes and %.0f tokens, want %d of %d", step, q.Len(), w.Bytes, w.Tokens, len(plain), bytes)
		}
		if len(plain) > 0 && q.oldest != plain[0] {
			t.Fatalf("step %d: the oldest is not the one that came first", step)
		}
		if step%500 != 0 {
			continue
		}
		sorted := slices.Clone(plain)
		slices.SortFunc(sorted, func(a, b *Item[int]) int {
			if a.isBefore(b) {
				return -1
			}
			return 1
		})
		for _, g := range q.groups {
			mine := slices.DeleteFunc(slices.Clone(sorted), func(it *Item[int]) bool { return it.group != g })
			if n := min(len(mine), MaxTurns); !slices.Equal(g.front, mine[:n]) || g.rest.Len() != len(mine)-n {
				t.Fatalf("step %d: the front of a group is not its first %d", step, n)
			}
		}
	}
	for len(plain) > 0 {
		q.Remove(plain[0], start)
		plain = plain[1:]
	}
	if w := waitingUpTo(&q.classes, LowPriority); q.Len() != 0 || w.Bytes != 0 || w.Tokens != 0 || len(q.groups) != 0 || q.oldest != nil ||
		q.newest != nil || q.toReorder != nil || q.fairness.tenants != [classCount]int{} || q.fairness.waiting != [classCount]int{} {
		t.Errorf("something is left of an empty queue: %+v", q)
	}
}

// Of three tenants that wait, each has a third of the fleet: what one asks for
// puts its next request back by three times the work.
func TestShareIsThatOfWaitingTenants(t *testing.T) {
	f := func(name string, tenants int, want float64) {
		t.Helper()
		q := New[int](start)
		add := func(tenant uint64) *Item[int] {
			it := &Item[int]{Class: Normal, Tenant: tenant, Tokens: 8000}
			q.Add(it, 1, 8000, false, start)
			return it
		}
		for other := range tenants {
			add(uint64(2 + other))
		}
		first, second, third := add(1), add(1), add(1)
		if got := (third.key - second.key) / ageingRate; math.Abs(got-want) > 0.01 {
			t.Errorf("%s: put back by %.2f s, want %.2f (%.2f for the one before)", name, got, want, (second.key-first.key)/ageingRate)
		}
	}
	f("alone", 0, 1)
	f("one of three", 2, 3)
}

// However many values divide the share of a tenant, it is served as one, and each of them has an equal part of it.
func TestPartsDivideShareOfTenant(t *testing.T) {
	const work = 8000 // tokens: a second
	served := func(name string, put func(add func(value int, tenant, part uint64)), want func(order []int) bool) {
		t.Helper()
		q, b, now := New[int](start), []*backends.Backend{{}}, start
		put(func(value int, tenant, part uint64) {
			q.Add(&Item[int]{Value: value, Backends: b, Class: Normal, Tenant: TenantID(tenant, part), Tokens: work}, 1, work, false, now)
			now = now.Add(time.Millisecond)
		})
		var order []int
		for q.Len() > 0 {
			q.StartRound()
			it := q.GiveNextTurn(hasRoom(1))
			order = append(order, it.Value)
			q.Remove(it, now)
		}
		if !want(order) {
			t.Errorf("%s: served %v", name, order)
		}
	}
	const one, two = 7, 8
	count := func(order []int, value int) (n int) {
		for _, v := range order {
			if v == value {
				n++
			}
		}
		return n
	}
	served("many values against none", func(add func(int, uint64, uint64)) {
		for i := range 40 {
			add(one, one, uint64(i))
			add(two, two, 0)
		}
	}, func(order []int) bool { // nearly in turn from the beginning
		for n := 10; n < 70; n += 10 {
			if got := count(order[:n], two); got < n/2-4 || got > n/2+4 {
				return false
			}
		}
		return true
	})
	served("many values, then another tenant", func(add func(int, uint64, uint64)) {
		for i := range 100 {
			add(one, one, uint64(i))
		}
		add(two, two, 0)
	}, func(order []int) bool { return count(order[:3], two) == 1 })
	served("many requests of a value, then another value of the tenant", func(add func(int, uint64, uint64)) {
		for range 100 {
			add(1, one, 1)
		}
		add(2, one, 2)
	}, func(order []int) bool { return count(order[:4], 2) == 1 })
}

func TestBounds(t *testing.T) {
	q := New[int](start)
	q.Configure(Settings{Requests: 2, Bytes: 100, LowPriorityRequests: 1})
	expect := func(when string, c Class, bytes int, want bool) {
		t.Helper()
		if got := q.IsFull(c, 1, bytes); got != want {
			t.Errorf("%s: %v requests are full: %v, want %v", when, c, got, want)
		}
	}
	b := []*backends.Backend{{}}
	normal := &Item[int]{Backends: b, Class: Normal, Tenant: 1, Bytes: 60}
	q.Add(normal, 1, 1, false, start)
	expect("one of two", Normal, 40, false)
	expect("more bytes than are left", Normal, 41, true)
	expect("another class", Urgent, 100, false)
	q.AddWaitingOutsideQueue(Normal, 1, 10)
	expect("one queued and one outside the queue", Normal, 0, true)
	q.RemoveWaitingOutsideQueue(Normal, 1, 10)
	q.Add(&Item[int]{Backends: b, Class: LowPriority, Tenant: 1}, 1, 1, false, start)
	expect("one of one", LowPriority, 0, true)
	expect("low-priority requests have bounds of their own", Normal, 0, false)
	if got := q.CountWaitingByClass(); q.CountWaiting() != 2 || got["normal"] != 1 || got["low"] != 1 || got["urgent"] != 0 {
		t.Errorf("%d wait, by class %v", q.CountWaiting(), got)
	}
}

// What is full for a tenant that fills the queue is not for others: each has room up to an equal share, and the last
// room is for those of which nothing waits.
func TestFullQueueLeavesRoomToOtherTenants(t *testing.T) {
	for name, bound := range map[string]Settings{
		"requests": {Requests: 8, Bytes: 1 << 20, LowPriorityRequests: 8},
		"bytes":    {Requests: 1 << 20, Bytes: 800, LowPriorityRequests: 1 << 20, LowPriorityBytes: 800},
	} {
		for _, class := range []Class{Urgent, Normal, LowPriority} {
			for _, outside := range []bool{false, true} {
				q := New[int](start)
				q.Configure(bound)
				b := []*backends.Backend{{}}
				var items []*Item[int]
				add := func(tenant uint64, want int) {
					t.Helper()
					added := 0
					for ; added < 100 && !q.IsFull(class, tenant, 100); added++ {
						if outside && tenant%2 == 1 {
							q.AddWaitingOutsideQueue(class, tenant, 100)
							continue
						}
						it := &Item[int]{Backends: b, Class: class, Tenant: tenant, Bytes: 100}
						q.Add(it, 1, 1, false, start)
						items = append(items, it)
					}
					if added != want {
						t.Errorf("%s, %v, outside %v: %d requests of tenant %d were added, want %d", name, class, outside, added, tenant, want)
					}
				}
				add(1, 8)
				add(2, 4) // an equal share of eight
				add(1, 0)
				add(3, 2) // of which all together are fourteen
				add(4, 1)
				add(5, 1)
				add(6, 0)
				for _, it := range items {
					q.Remove(it, start)
				}
				if outside {
					for range 8 {
						q.RemoveWaitingOutsideQueue(class, 1, 100)
					}
					for range 2 {
						q.RemoveWaitingOutsideQueue(class, 3, 100)
					}
					q.RemoveWaitingOutsideQueue(class, 5, 100)
				}
				if q.fairness.waiting != [classCount]int{} || q.fairness.account(class, 1).waiting != (Waiting{}) {
					t.Errorf("%s: something is left of an empty queue: %v", name, q.fairness.waiting)
				}
				add(2, 8)
			}
		}
	}
}

func never(*Item[int]) bool { return false }

func TestTimeoutAndPromotion(t *testing.T) {
	q := New[int](start)
	b := []*backends.Backend{{}}
	lowPriority := &Item[int]{Value: 1, Backends: b, Class: LowPriority, Priority: 5, Ahead: 50 * time.Second,
		Timeouts: Timeouts{Total: time.Minute}}
	other := &Item[int]{Value: 2, Backends: b, Class: LowPriority, Priority: 1}
	q.Add(lowPriority, 1, 1, false, start)
	q.Add(other, 1, 1, false, start)
	q.StartRound()
	if it := q.GiveNextTurn(hasRoom(1)); it != other {
		t.Error("a lower priority goes first")
	}
	if q.ExpireNext(start.Add(29*time.Second), never); lowPriority.Promoted {
		t.Error("promoted before half of its time")
	}
	if it := q.ExpireNext(start.Add(30*time.Second), never); it != nil || !lowPriority.Promoted {
		t.Errorf("after half of its time: expired %v, promoted %v", it, lowPriority.Promoted)
	}
	q.StartRound()
	if it := q.GiveNextTurn(hasRoom(1)); it != lowPriority {
		t.Error("a promoted request does not go first")
	}
	if it := q.ExpireNext(start.Add(time.Minute), never); it != lowPriority {
		t.Error("a request does not expire at the end of its time")
	}
	q.Remove(lowPriority, start)
	if it := q.ExpireNext(start.Add(time.Hour), never); it != nil {
		t.Error("a request without a timeout expires")
	}
}

func TestEstimateWait(t *testing.T) {
	q := New[int](start)
	var items []*Item[int]
	for range 30 {
		it := &Item[int]{Backends: []*backends.Backend{{}}, Class: Normal, Tokens: 10}
		q.Add(it, 1, 1, false, start)
		items = append(items, it)
	}
	if wait, silence, tokens := q.EstimateWait(Normal, start.Add(time.Second)); wait != 0 || silence != time.Second || tokens != 300 {
		t.Errorf("no departures: %v, silent for %v, %.0f tokens", wait, silence, tokens)
	}
	for i := range 10 { // one every half a second
		q.Remove(items[i], start.Add(time.Duration(i)*500*time.Millisecond))
	}
	if wait, _, _ := q.EstimateWait(Normal, start.Add(5*time.Second)); wait != 10*time.Second {
		t.Errorf("20 requests at 2 a second take %v, want 10 s", wait)
	}
	if wait, _, tokens := q.EstimateWait(Urgent, start.Add(5*time.Second)); wait != 0 || tokens != 0 {
		t.Errorf("ahead of an urgent request: %v, %.0f tokens", wait, tokens)
	}
}

func TestRegroupAndCancel(t *testing.T) {
	q := New[int](start)
	a, b := &backends.Backend{Slot: 0}, &backends.Backend{Slot: 1}
	it := &Item[int]{Backends: []*backends.Backend{a}, Class: Normal, Tenant: 7, Tokens: 100}
	q.Add(it, 1, 10, false, start)
	q.SetBackends(it, []*backends.Backend{b})
	ahead := func(c Class, b *backends.Backend) int { return q.WaitingAhead(c, []*backends.Backend{b}).Count }
	if ahead(Normal, a) != 0 || ahead(Normal, b) != 1 || ahead(Urgent, b) != 0 {
		t.Error("a request is not in the group of its backends")
	}
	used := q.fairness.part(Normal, 7).usedUntil
	q.Remove(it, start)
	q.RefundTenant(it)
	if q.Contains(it) || len(q.Groups()) != 0 || used != 10 || q.fairness.part(Normal, 7).usedUntil != 0 {
		t.Errorf("charged until second %v, then %v; %d groups", used, q.fairness.part(Normal, 7).usedUntil, len(q.Groups()))
	}
}

// After half of its time a request is preceded by none that came later, neither by short ones nor by
// those of conversations that began long ago.
func TestPromotionPrecedesLaterRequests(t *testing.T) {
	q := New[int](start)
	b := []*backends.Backend{{}}
	long := &Item[int]{Value: 1, Backends: b, Class: Normal, Timeouts: Timeouts{Busy: 10 * time.Minute}}
	q.Add(long, 100, 1, false, start)
	now := start
	q.RecordPrompt(ConversationID{Key: 1}, chain(1, 1), start.Add(-MaxLead))
	for now.Before(start.Add(5 * time.Minute)) {
		now = now.Add(time.Second)
		it := &Item[int]{Value: 2, Backends: b, Class: Normal, Conversation: ConversationID{Key: 1}, Blocks: chain(1, 2)}
		q.Add(it, 0, 1, false, now)
		if q.ExpireNext(now, never) != nil {
			t.Fatal("a request expires")
		}
		q.StartRound()
		if first := q.GiveNextTurn(hasRoom(1)); long.Promoted != (first == long) {
			t.Fatalf("after %v: request %d is the first, promoted %v", now.Sub(start), first.Value, long.Promoted)
		}
		q.Remove(it, now)
	}
	if !long.Promoted {
		t.Error("not promoted after half of its time")
	}
}

func TestMaxOvertakeTime(t *testing.T) {
	for _, c := range []struct {
		timeouts Timeouts
		ahead    time.Duration
		want     time.Duration
	}{
		{Timeouts{Busy: 10 * time.Minute, NoneReady: time.Minute}, 0, 5 * time.Minute},
		{Timeouts{Busy: 10 * time.Minute}, 4 * time.Minute, 3 * time.Minute},
		{Timeouts{Busy: 10 * time.Minute}, 7 * time.Minute, 90 * time.Second},
		{Timeouts{Busy: 10 * time.Minute}, 11 * time.Minute, 5 * time.Minute}, // no order would start it in time
		{Timeouts{Total: time.Minute}, 50 * time.Second, 5 * time.Second},
	} {
		if got := c.timeouts.maxOvertakeTime(c.ahead); got != c.want {
			t.Errorf("%+v with %v ahead: %v, want %v", c.timeouts, c.ahead, got, c.want)
		}
	}
}

// A request that waited, was sent and failed has the place that it would have had without that.
func TestRetryKeepsPlace(t *testing.T) {
	q := New[int](start)
	b := []*backends.Backend{{}}
	now := start.Add(9 * time.Minute)
	q.Add(&Item[int]{Value: 1, Backends: b, Class: Normal, Timeouts: Timeouts{Busy: 10 * time.Minute}}, 1, 1, false, start.Add(time.Minute))
	retry := &Item[int]{Value: 2, Backends: b, Class: Normal, Timeouts: Timeouts{Busy: 10 * time.Minute},
		Waited: Waited{Busy: 9 * time.Minute}}
	q.Add(retry, 1, 1, true, now)
	if q.ExpireNext(now, never) != nil {
		t.Fatal("a request expires")
	}
	q.StartRound()
	if first := q.GiveNextTurn(hasRoom(1)); first != retry {
		t.Errorf("request %d is the first", first.Value)
	}
}

// The lock is not held for long by many that are due at once.
func TestChecksAreBounded(t *testing.T) {
	q := New[int](start)
	limit := Timeouts{Busy: time.Minute}
	for range 3 * maxChecks {
		q.Add(&Item[int]{Backends: []*backends.Backend{{}}, Class: Normal, Timeouts: limit}, 1, 1, false, start)
	}
	checks := 0
	check := func(*Item[int]) bool { checks++; return false }
	now := start.Add(time.Second)
	for i := range 4 {
		q.ExpireNext(now, check)
		if want := min(i+1, 3) * maxChecks; checks != want {
			t.Errorf("%d checks after round %d, want %d", checks, i, want)
		}
	}
}

func TestCheckInterval(t *testing.T) {
	for _, c := range []struct {
		timeouts  Timeouts
		noneReady bool
		want      time.Duration
	}{
		{Timeouts{NoneReady: time.Minute, Busy: 10 * time.Minute}, false, 5 * time.Second},
		{Timeouts{NoneReady: time.Minute, Busy: 10 * time.Minute}, true, time.Second},
		{Timeouts{Busy: time.Minute}, true, time.Second},
		{Timeouts{Total: time.Hour}, true, noLimit},
		{Timeouts{}, false, noLimit},
	} {
		if got := c.timeouts.checkInterval(c.noneReady); got != c.want {
			t.Errorf("%+v: %v after a check, want %v", c, got, c.want)
		}
	}
}

// What a tenant has cancelled does not delay its other requests.
func TestCancelledRequestsDelayNone(t *testing.T) {
	q := New[int](start)
	b := []*backends.Backend{{}}
	add := func(value int, tenant uint64, tokens float64, now time.Time) *Item[int] {
		it := &Item[int]{Value: value, Backends: b, Class: Normal, Tenant: tenant, Tokens: tokens, Timeouts: Timeouts{Busy: 10 * time.Minute}}
		q.Add(it, 1, 1, false, now)
		return it
	}
	var cancelled []*Item[int]
	for range 50 {
		cancelled = append(cancelled, add(1, 7, 10, start))
	}
	left := add(2, 7, 1, start)
	for _, it := range cancelled {
		q.Remove(it, start)
		q.RefundTenant(it)
	}
	add(3, 8, 1, start.Add(30*time.Second))
	q.ReorderNext(q.Len(), func(*Item[int]) float64 { return 1 })
	q.StartRound()
	if first := q.GiveNextTurn(hasRoom(1)); first != left {
		t.Errorf("request %d is the first", first.Value)
	}
}

// TestTargets has requests that came at the same time, with and without a target for the time to first token.
func TestTargets(t *testing.T) {
	q := New[int](start)
	b := []*backends.Backend{{}}
	put := func(value int, target time.Duration, now time.Time) *Item[int] {
		it := &Item[int]{Value: value, Backends: b, Class: Normal}
		if target > 0 {
			it.FirstTokenDue = now.Add(target)
		}
		q.Add(it, 1, 1, false, now)
		return it
	}
	put(3, 0, start)
	put(2, 30*time.Second, start)
	put(1, 10*time.Second, start)
	hopeless := put(4, time.Second, start)
	q.ReorderNext(10, func(it *Item[int]) float64 {
		hopeless.FirstTokenDue = time.Time{} // it has found out
		return it.prefillSeconds
	})
	if got, want := serveAll(q, start), []int{1, 2, 3, 4}; !slices.Equal(got, want) {
		t.Errorf("served %v, want %v: those with a target by their slack, then the others", got, want)
	}
	// What has no target waits for none that came more than a minute later.
	put(2, 0, start)
	put(1, 2*time.Second, start.Add(MaxLead-5*time.Second))
	put(3, 2*time.Second, start.Add(MaxLead+5*time.Second))
	if got, want := serveAll(q, start), []int{1, 2, 3}; !slices.Equal(got, want) {
		t.Errorf("served %v, want %v", got, want)
	}
}

// serveAll removes all requests, and returns them in the order of service.
func serveAll(q *Queue[int], now time.Time) (served []int) {
	for q.Len() > 0 {
		q.StartRound()
		it := q.GiveNextTurn(hasRoom(1))
		served = append(served, it.Value)
		q.Remove(it, now)
	}
	return served
}

// TestTargetStaysInShare has a tenant whose requests all have a target beside one without: each is served its half.
func TestTargetStaysInShare(t *testing.T) {
	q := New[int](start)
	now := start
	put := func(tenant int) {
		it := &Item[int]{Value: tenant, Backends: []*backends.Backend{{}}, Class: Normal, Tenant: uint64(tenant), Tokens: 1}
		if tenant == 1 {
			it.FirstTokenDue = now.Add(2 * time.Second)
		}
		q.Add(it, 1, 1, false, now)
	}
	for range 30 {
		put(1)
		put(2)
	}
	served := map[int]int{}
	for range 200 { // each takes a second
		q.StartRound()
		it := q.GiveNextTurn(hasRoom(1))
		q.Remove(it, now)
		served[it.Value]++
		now = now.Add(time.Second)
		put(it.Value)
		if d := served[1] - served[2]; d < -2 || d > 2 {
			t.Fatalf("served %v", served)
		}
	}
}
