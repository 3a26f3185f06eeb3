package queue_test

import (
	"fmt"
	"time"

	"warmroute/backends"
	"warmroute/router/queue"
)

func ExampleQueue() {
	now := time.Unix(0, 0)
	replica := &backends.Backend{}
	q := queue.New[string](now)
	add := func(name string, priority int, prefillSeconds float64) {
		q.Add(&queue.Item[string]{
			Value: name, Backends: []*backends.Backend{replica},
			Priority: priority, Class: queue.ClassOf(priority),
		}, prefillSeconds, 1000, false, now)
	}
	add("low", 10, 0.1)
	add("long prompt", 0, 2)
	add("short prompt", 0, 0.5)
	add("urgent", -1, 1)

	hasRoom := func(*backends.Backend, *queue.Item[string], *queue.Group[string]) bool { return true }
	q.StartRound()
	for {
		request := q.GiveNextTurn(hasRoom)
		if request == nil {
			break
		}
		fmt.Println(request.Value)
		q.Remove(request, now)
	}
	// Output:
	// urgent
	// short prompt
	// long prompt
	// low
}
