package replay

import (
	"time"

	"warmroute/backends"
)

// event is something that happens at an instant of virtual time.
type event struct {
	at    time.Duration
	order uint64 // among events of one instant: in the order in which they were planned
	kind  kind
	place int            // of the replica, change or foreign client that it is about
	epoch int            // of the replica; an event from before its restart is void
	job   *Job           // that arrives
	load  *backends.Load // that a poll brought
}

type kind uint8

const (
	arrives  kind = iota // a request that its client sends
	steps                // a replica ends a step, or begins after a rest
	polled               // a replica is asked for its metrics
	loaded               // … and its answer gets to the router
	ticks                // the router looks at its held requests
	changes              // a backend joins, leaves or restarts
	returns              // a restarted replica serves again
	intrudes             // a foreign client sends a request
)

// agenda holds the events to come, as a binary heap.
type agenda struct {
	heap    []event
	planned uint64
}

func (a *agenda) plan(e event) {
	a.planned++
	e.order = a.planned
	a.heap = append(a.heap, e)
	for i := len(a.heap) - 1; i > 0; {
		up := (i - 1) / 2
		if !before(&a.heap[i], &a.heap[up]) {
			break
		}
		a.heap[i], a.heap[up] = a.heap[up], a.heap[i]
		i = up
	}
}

// next takes the earliest event, of which there must be one.
func (a *agenda) next() event {
	first, last := a.heap[0], len(a.heap)-1
	a.heap[0] = a.heap[last]
	a.heap[last] = event{} // or it would keep its job
	a.heap = a.heap[:last]
	for i := 0; ; {
		least := i
		for down := 2*i + 1; down <= 2*i+2 && down < last; down++ {
			if before(&a.heap[down], &a.heap[least]) {
				least = down
			}
		}
		if least == i {
			return first
		}
		a.heap[i], a.heap[least] = a.heap[least], a.heap[i]
		i = least
	}
}

func before(a, b *event) bool {
	return a.at < b.at || a.at == b.at && a.order < b.order
}
