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
type question struct {
	stream, plain []byte // bodies that ask for it
	tokens        int    // of the answer
	known         bool
	answer        string // when known
}

// ask is the question as a request.
func (q *question) ask(streams bool) loadgen.Request {
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

// newQuestions asks a replica that nothing happens to, and keeps its answers.
func newQuestions(ctx context.Context, url, model string, n int, chats *loadgen.Chats) ([]question, error) {
	client := loadgen.NewHTTPClient()
	defer client.CloseIdleConnections()
	player := &loadgen.Client{URL: url, Model: model, HTTP: client, Speed: 1, Timeout: time.Minute}
	var questions []question
	for i := 0; len(questions) < n; i++ {
		session, answer := chats.Session(i), ""
		for len(questions) < n {
			turn, ok := session.Next(answer)
			if !ok {
				break
			}
			turn.Greedy = true
			q := newQuestion(model, turn)
			r := player.Send(ctx, q.ask(false))
			if r.Err != "" || r.CompletionTokens != q.tokens {
				return nil, fmt.Errorf("the replica that knows the answers: %s %s, %d tokens where %d were asked for", r.Err, r.Detail, r.CompletionTokens, q.tokens)
			}
			q.known, q.answer, answer = true, r.Answer, r.Answer
			questions = append(questions, q)
		}
	}
	return questions, nil
}

func newQuestion(model string, t loadgen.Turn) question {
	return question{stream: loadgen.ChatBody(model, t, true), plain: loadgen.ChatBody(model, t, false), tokens: t.AnswerTokens}
}

// strange is a question that nobody has asked before, and so no reason to prefer
// a replica: the one with the least to do should get it.
func strange(model string, i int) *question {
	chats := loadgen.Chats{
		Seed: uint64(time.Now().UnixNano()), SystemPrompts: 1, SystemTokens: 1,
		Turns: loadgen.Range{Min: 1, Max: 1}, UserTokens: loadgen.Range{Min: 100, Max: 300}, AnswerTokens: loadgen.Range{Min: 20, Max: 60},
	}
	turn, _ := chats.Session(i).Next("") // it has one
	turn.Messages = turn.Messages[1:]
	q := newQuestion(model, turn)
	return &q
}

// simulatedQuestions have the answers of a replica in this process.
func simulatedQuestions(ctx context.Context, n int) ([]question, error) {
	s := sim.NewServer(sim.Config{Engine: engine.Config{Speed: 10_000}})
	if err := s.Listen("127.0.0.1:0"); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { _ = s.Run(ctx) }) // what ends it early fails the questions
	return newQuestions(ctx, s.URL(), "sim", n, conversations(loadgen.Range{Min: 20, Max: 120}))
}
