package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"warmroute/loadgen"
	"warmroute/sim"
	"warmroute/sim/engine"
)

// question is a chat of which it is known what every replica answers, or a new one.
type prompt struct {
	stream, plain []byte // bodies that ask for it
	tokens        int    // of the answer
	known         bool
	answer        string // when known
}

// ask is the question as a request.
func (q *prompt) request(streams bool) loadgen.Request {
	if streams {
		return loadgen.Request{Body: q.stream, Stream: true}
	}
	return loadgen.Request{Body: q.plain}
}

// conversations are those of users who share a few system prompts.
func conversations(answers loadgen.Range) *loadgen.Chats {
	return &loadgen.Chats{
		Seed: 1, SystemPrompts: 8, SystemTokens: 400, Zipf: 0.8,
		Turns: loadgen.Range{Min: 2, Max: 4}, UserTokens: loadgen.Range{Min: 20, Max: 100}, AnswerTokens: answers,
	}
}

// recordPrompts asks a replica that nothing happens to, and keeps its answers.
func recordPrompts(ctx context.Context, url, model string, n int, chats *loadgen.Chats) ([]prompt, error) {
	httpClient := loadgen.NewHTTPClient()
	defer httpClient.CloseIdleConnections()
	client := &loadgen.Client{URL: url, Model: model, HTTP: httpClient, Speed: 1, Timeout: time.Minute}
	var prompts []prompt
	for i := 0; len(prompts) < n; i++ {
		session, answer := chats.Session(i), ""
		for len(prompts) < n {
			turn, ok := session.Next(answer)
			if !ok {
				break
			}
			turn.Greedy = true
			q := newPrompt(model, turn)
			r := client.Send(ctx, q.request(false))
			if r.Err != "" || r.CompletionTokens != q.tokens {
				return nil, fmt.Errorf("the replica that knows the answers: %s %s, %d tokens where %d were asked for", r.Err, r.Detail, r.CompletionTokens, q.tokens)
			}
			q.known, q.answer, answer = true, r.Answer, r.Answer
			prompts = append(prompts, q)
		}
	}
	return prompts, nil
}

func newPrompt(model string, t loadgen.Turn) prompt {
	return prompt{stream: loadgen.ChatBody(model, t, true), plain: loadgen.ChatBody(model, t, false), tokens: t.AnswerTokens}
}

// newUniquePrompt is a question that nobody has asked before, and so no reason to prefer
// a replica: the one with the least to do should get it.
func newUniquePrompt(model string, i int) *prompt {
	chats := loadgen.Chats{
		Seed: uint64(time.Now().UnixNano()), SystemPrompts: 1, SystemTokens: 1,
		Turns: loadgen.Range{Min: 1, Max: 1}, UserTokens: loadgen.Range{Min: 100, Max: 300}, AnswerTokens: loadgen.Range{Min: 20, Max: 60},
	}
	turn, _ := chats.Session(i).Next("") // it has one
	turn.Messages = turn.Messages[1:]
	q := newPrompt(model, turn)
	return &q
}

// recordSimulatedPrompts have the answers of a replica in this process.
func recordSimulatedPrompts(ctx context.Context, n int) ([]prompt, error) {
	s := sim.NewServer(sim.Config{Engine: engine.Config{Speed: 10_000}})
	if err := s.Listen("127.0.0.1:0"); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { _ = s.Run(ctx) }) // what ends it early fails the prompts
	return recordPrompts(ctx, s.URL(), "sim", n, conversations(loadgen.Range{Min: 20, Max: 120}))
}
