package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"warmroute/lab/loadgen"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// clients send one request after another: every second client streams, and every
// fourth sends prompts that were never sent before.
type clients struct {
	url     string
	model   string
	number  int
	prompts []prompt
	next    atomic.Int64
}

// failureDelay is how long a client waits after a failure, so that a fleet that fails
// at once is not flooded.
const failureDelay = 100 * time.Millisecond

// requestTimeout bounds one request: as long as it may be queued
// without a ready replica (routing.queue.none_ready_timeout).
const requestTimeout = time.Minute

// sendUntil sends requests until stop is closed, and then waits for the last responses. The
// clients share four connection pools, as those of four programs would.
func (c *clients) sendUntil(ctx context.Context, stop <-chan struct{}, onResponse func(q *prompt, streams bool, r loadgen.Response)) {
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
					return // the run was interrupted
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

// prompt is a chat with the output that every replica gives, or one that was never sent.
type prompt struct {
	stream, plain []byte // request bodies
	tokens        int    // length of the output
	known         bool
	output        string // when known
}

// request returns the request for the prompt.
func (q *prompt) request(streams bool) loadgen.Request {
	if streams {
		return loadgen.Request{Body: q.stream, Stream: true}
	}
	return loadgen.Request{Body: q.plain}
}

// newChats returns chats of users who share a few system prompts.
func newChats(outputTokens loadgen.Range) *loadgen.Chats {
	return &loadgen.Chats{
		Seed: 1, SystemPrompts: 8, SystemTokens: 400, Zipf: 0.8,
		Turns: loadgen.Range{Min: 2, Max: 4}, UserTokens: loadgen.Range{Min: 20, Max: 100}, OutputTokens: outputTokens,
	}
}

// recordPrompts sends n prompts to an undisturbed replica and keeps its outputs.
func recordPrompts(ctx context.Context, url, model string, n int, chats *loadgen.Chats) ([]prompt, error) {
	httpClient := loadgen.NewHTTPClient()
	defer httpClient.CloseIdleConnections()
	client := &loadgen.Client{URL: url, Model: model, HTTP: httpClient, Speed: 1, Timeout: time.Minute}
	var prompts []prompt
	for i := 0; len(prompts) < n; i++ {
		session, output := chats.NewSession(i), ""
		for len(prompts) < n {
			turn, ok := session.Next(output)
			if !ok {
				break
			}
			turn.Greedy = true
			q := newPrompt(model, turn)
			r := client.Send(ctx, q.request(false))
			if r.Err != "" || r.CompletionTokens != q.tokens {
				return nil, fmt.Errorf("recording outputs: %s %s, %d tokens instead of %d", r.Err, r.Detail, r.CompletionTokens, q.tokens)
			}
			q.known, q.output, output = true, r.Output, r.Output
			prompts = append(prompts, q)
		}
	}
	return prompts, nil
}

func newPrompt(model string, t loadgen.Turn) prompt {
	return prompt{stream: loadgen.ChatBody(model, t, true), plain: loadgen.ChatBody(model, t, false), tokens: t.OutputTokens}
}

// newUniquePrompt returns a prompt that was never sent, so no cache prefers a replica
// and the least loaded one should get it.
func newUniquePrompt(model string, i int) *prompt {
	chats := loadgen.Chats{
		Seed: uint64(time.Now().UnixNano()), SystemPrompts: 1, SystemTokens: 1,
		Turns: loadgen.Range{Min: 1, Max: 1}, UserTokens: loadgen.Range{Min: 100, Max: 300}, OutputTokens: loadgen.Range{Min: 20, Max: 60},
	}
	turn, _ := chats.NewSession(i).Next("") // it has one
	turn.Messages = turn.Messages[1:]
	q := newPrompt(model, turn)
	return &q
}

// recordSimulatedPrompts returns prompts with the outputs of a replica in this process.
func recordSimulatedPrompts(ctx context.Context, n int) ([]prompt, error) {
	s := sim.NewServer(sim.Config{Engine: engine.Config{Speed: 10_000}})
	if err := s.Bind("127.0.0.1:0"); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { _ = s.Run(ctx) }) // if it ends early, the prompts fail
	return recordPrompts(ctx, s.URL(), "sim", n, newChats(loadgen.Range{Min: 20, Max: 120}))
}
