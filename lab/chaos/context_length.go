package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"warmroute/lab/loadgen"
	"warmroute/lab/testbed"
)

const (
	lengthsModel         = "lengths"
	shortLength          = 2000 // tokens, of two replicas
	longLength           = 32_000
	lengthsClients       = 8
	lengthsConversations = 4 // of each client, up to twice the shorter length
)

// lengthsFleet is the replicas of a model with different context lengths.
type lengthsFleet struct {
	*rig
	replicas []*testbed.Replica // the last one has the longest context
}

// mixContextLengths adds a model whose replicas have different context lengths. Conversations that outgrow the shorter ones
// go on, also when the only replica with a longer one is killed and started again.
func mixContextLengths(ctx context.Context, r *rig) (err error) {
	f := &lengthsFleet{rig: r}
	for i, length := range []int{shortLength, shortLength, longLength} {
		// The proxy expects twice as many bytes in a token.
		one, err := r.newReplica(fmt.Sprint("length-", i), "--model", lengthsModel, "--max-model-len", fmt.Sprint(length), "--bytes-per-token",
			"2")
		if err != nil {
			return err
		}
		if err := r.startAndAwaitHealthy(ctx, []*testbed.Replica{one}); err != nil { // or the next one would get its port
			return err
		}
		f.replicas = append(f.replicas, one)
	}
	defer func() {
		for _, one := range f.replicas {
			if one.Running() {
				testbed.KillAndWait(one)
			}
		}
	}()
	if err := r.proxy.Reload(ctx, "ok", append(slices.Clone(r.replicas), f.replicas...)); err != nil {
		return err
	}
	if err := r.awaitReadyBackends(ctx, len(r.replicas)+len(f.replicas)); err != nil {
		return err
	}
	before, err := r.proxy.ReadMetrics(ctx)
	if err != nil {
		return err
	}
	turns := f.converse(ctx, 0)
	long := f.replicas[len(f.replicas)-1]
	if err := testbed.KillAndWait(long); err != nil {
		return err
	}
	done := make(chan int, 1)
	go func() { done <- f.converse(ctx, shortLength) }()
	if err := testbed.Sleep(ctx, 2*time.Second); err != nil {
		return err
	}
	if err := r.startAndAwaitHealthy(ctx, []*testbed.Replica{long}); err != nil {
		return err
	}
	turns += <-done
	after, err := r.proxy.ReadMetrics(ctx)
	if err != nil {
		return err
	}
	refused := after.Sum("warmroute_retries_total", "reason", "context_length") - before.Sum("warmroute_retries_total", "reason",
		"context_length")
	r.verdict.addMeasurement("%.0f of %d turns were refused by a shorter replica first", refused, turns)
	r.verdict.require(refused < float64(turns)/4, "%.0f of %d turns were refused by a shorter replica first", refused, turns)
	return r.proxy.Reload(ctx, "ok", r.replicas)
}

// converse has conversations with the fleet, some at a time, until each has about twice the shorter length. It checks every
// response, and returns how many turns there were. A replica ends an output where its context ends: that is allowed at cutoff,
// while no replica with a longer context is ready; 0: never.
func (f *lengthsFleet) converse(ctx context.Context, cutoff int) (turns int) {
	httpClient := loadgen.NewHTTPClient()
	defer httpClient.CloseIdleConnections()
	client := &loadgen.Client{URL: f.proxy.URL, Model: lengthsModel, HTTP: httpClient, Speed: 1, Timeout: requestTimeout}
	chats := &loadgen.Chats{
		Seed: uint64(time.Now().UnixNano()), SystemPrompts: 2, SystemTokens: 100,
		Turns: loadgen.Range{Min: 8, Max: 12}, UserTokens: loadgen.Range{Min: 100, Max: 200}, OutputTokens: loadgen.Range{Min: 20, Max: 60},
	}
	counts := make([]int, lengthsClients)
	var all sync.WaitGroup
	for i := range lengthsClients {
		all.Go(func() {
			for k := range lengthsConversations {
				session, output := chats.NewSession(i*lengthsConversations+k), ""
				for {
					turn, ok := session.Next(output)
					if !ok || ctx.Err() != nil {
						break
					}
					q := newPrompt(lengthsModel, turn)
					response := client.Send(ctx, q.request(counts[i]%2 == 0))
					isWhole := response.CompletionTokens == turn.OutputTokens || cutoff > 0 && response.PromptTokens+response.CompletionTokens == cutoff
					f.verdict.require(response.Err == "" && isWhole,
						"turn of a conversation: status %d %s %s, %d tokens instead of %d after a prompt of %d",
						response.Status, response.Err, response.Detail, response.CompletionTokens, turn.OutputTokens, response.PromptTokens)
					output = response.Output
					counts[i]++
				}
			}
		})
	}
	all.Wait()
	for _, n := range counts {
		turns += n
	}
	return turns
}
