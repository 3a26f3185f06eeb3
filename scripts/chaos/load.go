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
	url     string
	model   string
	number  int
	prompts []prompt
	next    atomic.Int64
}

// failureDelay is how long a client waits that was refused: a fleet that fails
// at once would else be sent nothing but failures.
const failureDelay = 100 * time.Millisecond

// requestTimeout is for one request: as long as it may be held (routing.queue.time).
const requestTimeout = time.Minute

// run keeps the clients busy until stop is closed and then waits for their last
// answers. Four connection pools, as of four programs.
func (c *clients) run(ctx context.Context, stop <-chan struct{}, onResponse func(*prompt, bool, loadgen.Response)) {
	var all sync.WaitGroup
	defer all.Wait()
	senders := make([]*loadgen.Client, 4)
	for i := range senders {
		httpClient := loadgen.NewHTTPClient()
		senders[i] = &loadgen.Client{URL: c.url, Model: c.model, HTTP: httpClient, Speed: 1, Timeout: requestTimeout}
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
				q := &c.prompts[n%len(c.prompts)]
				if i%4 == 3 {
					q = newUniquePrompt(c.model, n)
				}
				r := senders[i%len(senders)].Send(ctx, q.request(streams))
				if ctx.Err() != nil {
					return // the run is over; nobody's fault
				}
				onResponse(q, streams, r)
				if r.Err != "" {
					time.Sleep(failureDelay)
				}
			}
		})
	}
	all.Wait()
	for _, p := range senders {
		p.HTTP.CloseIdleConnections()
	}
}
