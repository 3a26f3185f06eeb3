package main

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"warmroute/loadgen"
)

// clients ask one question after another: every second one for streams, every
// fourth what nobody has asked before.
type clients struct {
	url       string
	model     string
	number    int
	questions []question
	next      atomic.Int64
}

// afterFailure is how long a client waits that was refused: a fleet that fails
// at once would else be sent nothing but failures.
const afterFailure = 100 * time.Millisecond

// answerLimit is for one request: as long as it may be held (routing.queue.time).
const answerLimit = time.Minute

// play keeps the clients busy until stop is closed and then waits for their last
// answers. Four connection pools, as of four programs.
func (c *clients) play(ctx context.Context, stop <-chan struct{}, judge func(*question, bool, loadgen.Response)) {
	var all sync.WaitGroup
	defer all.Wait()
	players := make([]*loadgen.Client, 4)
	for i := range players {
		client := loadgen.NewHTTPClient()
		players[i] = &loadgen.Client{URL: c.url, Model: c.model, HTTP: client, Speed: 1, Timeout: answerLimit}
	}
	for i := range c.number {
		all.Go(func() {
			for streams := i/2%2 == 0; ctx.Err() == nil; {
				select {
				case <-stop:
					return
				default:
				}
				n := int(c.next.Add(1))
				q := &c.questions[n%len(c.questions)]
				if i%4 == 3 {
					q = strange(c.model, n)
				}
				r := players[i%len(players)].Send(ctx, q.ask(streams))
				if ctx.Err() != nil {
					return // the run is over; nobody's fault
				}
				judge(q, streams, r)
				if r.Err != "" {
					time.Sleep(afterFailure)
				}
			}
		})
	}
	all.Wait()
	for _, p := range players {
		p.HTTP.CloseIdleConnections()
	}
}
