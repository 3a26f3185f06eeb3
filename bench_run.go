package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"warmroute/loadgen"
	"warmroute/replay"
)

// benchRun is one bench under way.
type benchRun struct {
	o       *benchOptions
	targets []*benchTarget
	nonce   string // of this run: a second one is not to profit from the first
	bar     progressBar
	played  int          // slots that are over: a slot is a URL's part of a round
	ended   atomic.Int64 // requests of the slot under way
}

// runBench plays the chats to every target and prints what was seen.
func runBench(ctx context.Context, o *benchOptions, targets []*benchTarget, stdout, stderr io.Writer) error {
	if err := greetAll(ctx, targets); err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("interrupted before anything was measured")
		}
		return err
	}
	r := &benchRun{o: o, targets: targets, nonce: rand.Text()[:8], bar: newProgressBar(stderr)}
	start := time.Now()
	r.play(ctx)
	r.bar.clear()
	took := time.Since(start)

	report := r.report(ctx.Err() != nil)
	if ctx.Err() != nil && !slices.ContainsFunc(report.Results, func(b benchResult) bool { return b.Requests+b.Lost > 0 }) {
		return fmt.Errorf("interrupted after %.0f s, before anything was measured", took.Seconds())
	}
	if o.json {
		if err := report.writeJSON(stdout); err != nil {
			return err
		}
	} else if err := report.writeTable(stdout); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return fmt.Errorf("interrupted after %.0f s: the figures are of what was answered until then", took.Seconds())
	}
	for _, t := range report.Results {
		if t.Requests == 0 {
			return fmt.Errorf("%s (%s) answered no request", t.Name, t.URL)
		}
	}
	return nil
}

func greetAll(ctx context.Context, targets []*benchTarget) error {
	client := loadgen.NewHTTPClient()
	defer client.CloseIdleConnections()
	for _, t := range targets {
		if err := t.greet(ctx, client); err != nil {
			return err
		}
	}
	return nil
}

// play goes through the rounds.
func (r *benchRun) play(ctx context.Context) {
	for round := range r.o.rounds {
		order := slices.Clone(r.targets)
		if round%2 == 1 {
			slices.Reverse(order)
		}
		for _, t := range order {
			if ctx.Err() != nil {
				return
			}
			r.bar.describe(fmt.Sprintf("%s, round %d of %d", t.name, round+1, r.o.rounds))
			r.playSlot(ctx, t, round)
			r.played++
		}
	}
}

// playSlot plays one round to one target.
func (r *benchRun) playSlot(ctx context.Context, t *benchTarget, round int) {
	client := loadgen.NewHTTPClient()
	defer client.CloseIdleConnections()
	enough := make(chan struct{})
	start := time.Now()
	measured := start.Add(r.o.warmup)
	r.ended.Store(0)
	player := &loadgen.Client{
		URL: t.url, Model: t.model, APIKey: t.key, HTTP: client, Speed: 1, Timeout: r.o.timeout,
		OpenAIOnly: r.o.plain, Stop: enough,
		OnResult: func(result replay.Result) {
			r.ended.Add(1)
			if !result.Sent.Before(measured) {
				t.seen.add(result)
			}
		},
	}
	chats := r.chats(t, round)
	if r.o.conversations == 0 {
		defer time.AfterFunc(r.slotLength(), func() { close(enough) }).Stop()
	}
	over := make(chan struct{})
	var showing sync.WaitGroup
	showing.Go(func() { r.show(start, over) })
	player.RunChats(ctx, chats)
	close(over)
	showing.Wait()
	// What is sent in the measured time is counted, and so is that time, not the
	// last answers' own: it would count a long answer twice.
	took := time.Since(measured)
	if r.o.conversations == 0 {
		took = min(took, r.slotLength()-r.o.warmup)
	}
	t.seen.elapsed += max(took, 0)
}

// slotLength is how long a slot takes, its last answers apart.
func (r *benchRun) slotLength() time.Duration {
	return r.o.warmup + r.o.length/time.Duration(r.o.rounds)
}

// chats are those of a round: the same for each target, but for the nonce.
func (r *benchRun) chats(t *benchTarget, round int) *loadgen.Chats {
	sessions := r.o.conversations / r.o.rounds
	if round < r.o.conversations%r.o.rounds {
		sessions++
	}
	around := func(mean int) loadgen.Range { return loadgen.Range{Min: mean / 2, Max: mean + mean/2} }
	return &loadgen.Chats{
		Seed:          r.o.seed + uint64(round)<<32,
		Nonce:         fmt.Sprintf("%s%02d%s ", r.nonce, round, t.name),
		Sessions:      sessions,
		Concurrency:   r.o.sessions,
		SystemPrompts: r.o.systemPrompts,
		SystemTokens:  r.o.systemTokens,
		Zipf:          0.8,
		Turns:         loadgen.Range{Min: r.o.turns, Max: r.o.turns},
		UserTokens:    around(r.o.userTokens),
		AnswerTokens:  around(r.o.answerTokens),
		Think:         r.o.think,
	}
}

// show moves the bar on until over is closed.
func (r *benchRun) show(start time.Time, over <-chan struct{}) {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	slots := float64(len(r.targets) * r.o.rounds)
	for {
		share := time.Since(start).Seconds() / r.slotLength().Seconds()
		if n := r.o.conversations; n > 0 {
			share = float64(r.ended.Load()) * float64(r.o.rounds) / float64(n*r.o.turns)
		}
		r.bar.set((float64(r.played) + min(share, 1)) / slots)
		select {
		case <-tick.C:
		case <-over:
			return
		}
	}
}
