package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"warmroute/loadgen"
	"warmroute/replay"
)

// demoOptions are the demo's flags.
type demoOptions struct {
	backends int
	length   time.Duration // 0: until interrupted
	listen   string
	admin    string
	json     bool
}

func newDemoCommand() *cobra.Command {
	var o demoOptions
	cmd := &cobra.Command{
		GroupID: "measure",
		Use:     "demo",
		Short:   "Show round robin and warmroute side by side, on simulated replicas",
		Long: `Two identical fleets of simulated replicas serve the same live chats, over real
sockets: one behind a proxy that routes round robin, one behind a proxy that
routes by prefix and load. Ends at Ctrl-C, or after --for. No GPU, no network.`,
		Example: `  warmroute demo
  warmroute demo --for 30s --backends 8
  warmroute demo --for 20s --json | jq '.results[] | {policy, hit_ratio, ttft_mean_s}'`,
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.NoArgs(cmd, args); err != nil {
				return err
			}
			return o.check()
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runDemo(cmd.Context(), o, cmd.OutOrStdout())
		},
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.IntVar(&o.backends, "backends", 4, "`N` simulated replicas in each of the two fleets")
	flags.DurationVar(&o.length, "for", 0, "`DURATION` after which it ends; 0: at Ctrl-C")
	flags.StringVar(&o.listen, "listen", "127.0.0.1:0", "`ADDRESS` of the proxy that routes by prefix, which may be asked as well; port 0: any")
	flags.StringVar(&o.admin, "admin", "127.0.0.1:0", "`ADDRESS` of its admin listener, which has metrics and the live page")
	flags.BoolVar(&o.json, "json", false, "print nothing but the results, as JSON, at the end")
	return cmd
}

// check finds the first mistake in the flags.
func (o *demoOptions) check() error {
	switch {
	case o.backends < 1 || o.backends > 64:
		return fmt.Errorf("--backends %d is not between 1 and 64", o.backends)
	case o.length < 0:
		return fmt.Errorf("--for %v is below 0; 0 goes on until Ctrl-C", o.length)
	}
	return nil
}

// demoChats is the demo's traffic: long chats over many system prompts, six
// users for each replica, each waiting about a second before the next message.
// Their conversations fit all replicas' caches together, and a quarter of them
// does not quite fit one's (demoKVTokens): as in a fleet that earns its keep.
func demoChats(backends int) *loadgen.Chats {
	return &loadgen.Chats{
		Seed:          1,
		Concurrency:   6 * backends,
		SystemPrompts: 10 * backends,
		SystemTokens:  1200,
		Zipf:          0.8,
		Turns:         loadgen.Range{Min: 6, Max: 14},
		UserTokens:    loadgen.Range{Min: 200, Max: 600},
		AnswerTokens:  loadgen.Range{Min: 30, Max: 90},
		Think:         time.Second,
	}
}

// demoTimeout ends a request that hangs; the demo's take about a second.
const demoTimeout = time.Minute

func runDemo(ctx context.Context, o demoOptions, out io.Writer) error {
	// The fleets outlive the players, so that none of their requests is cut.
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	playing, end := context.WithCancelCause(ctx)
	defer end(nil)

	var servers sync.WaitGroup
	defer servers.Wait()
	defer stop()
	// run is for what serves until stopped; when it fails the demo ends.
	run := func(serve func(context.Context) error) {
		servers.Go(func() {
			if err := serve(serving); err != nil {
				end(err)
			}
		})
	}
	// Round robin first: what follows is compared with it.
	baseline, err := startDemoFleet(ctx, "round-robin", o.backends, "127.0.0.1:0", "", run)
	if err != nil {
		return err
	}
	ours, err := startDemoFleet(ctx, "prefix", o.backends, o.listen, o.admin, run)
	if err != nil {
		return err
	}
	fleets := []*demoFleet{baseline, ours}

	screen := newDemoScreen(out)
	if !o.json {
		writeDemoIntroduction(out, o.backends, ours)
	}
	if o.length > 0 {
		var cancel context.CancelFunc
		playing, cancel = context.WithTimeout(playing, o.length)
		defer cancel()
	}
	elapsed := playDemo(playing, o, fleets, screen)
	// However it was interrupted, it ends well; only what served may have failed.
	if cause := context.Cause(playing); ctx.Err() == nil && !errors.Is(cause, context.DeadlineExceeded) {
		return cause
	}
	results := demoResults(fleets, elapsed)
	if o.json {
		return json.NewEncoder(out).Encode(replay.Report{Results: results})
	}
	screen.finish(elapsed, results)
	return nil
}

// playDemo plays the chats on all fleets until ctx is done, and returns how long that was.
func playDemo(ctx context.Context, o demoOptions, fleets []*demoFleet, screen *demoScreen) time.Duration {
	chats := demoChats(o.backends)
	start := time.Now()
	var players sync.WaitGroup
	for _, f := range fleets {
		players.Go(func() { f.play(ctx, chats) })
	}
	sample, show := time.NewTicker(50*time.Millisecond), time.NewTicker(screen.interval())
	defer sample.Stop()
	defer show.Stop()
	if screen.terminal && !o.json {
		screen.update(0, demoResults(fleets, 0)) // nobody is to wonder whether it hangs
	}
	for ctx.Err() == nil {
		select {
		case <-sample.C:
			for _, f := range fleets {
				f.sample()
			}
		case <-show.C:
			if !o.json {
				screen.update(time.Since(start), demoResults(fleets, time.Since(start)))
			}
		case <-ctx.Done():
		}
	}
	elapsed := time.Since(start)
	players.Wait()
	return elapsed
}

func demoResults(fleets []*demoFleet, elapsed time.Duration) []replay.Summary {
	var all []replay.Summary
	for _, f := range fleets {
		all = append(all, f.summary(elapsed))
	}
	return all
}

func writeDemoIntroduction(out io.Writer, backends int, f *demoFleet) {
	fmt.Fprintf(out, `Two fleets of %d simulated replicas serve the same live chats: one behind a proxy
that goes round robin, one behind a proxy that goes by prefix. The second is
yours too, with any key:

  curl %s/v1/chat/completions \
    -H 'Content-Type: application/json' \
    -d '{"model":"sim","messages":[{"role":"user","content":"Hello"}]}'

`, backends, f.url)
	if f.admin != "" {
		fmt.Fprintf(out, "Live page and metrics: %s/ and /metrics\n\n", f.admin)
	}
}
