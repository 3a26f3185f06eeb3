package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"warmroute/replay"
	"warmroute/replay/chart"
)

func newReplayCommand() *cobra.Command {
	var o replayOptions
	cmd := &cobra.Command{
		Use:   "replay --trace FILE | --workload NAME",
		Short: "Compare routing policies on a trace or a workload, in virtual time",
		Long: `Play a workload against simulated replicas in virtual time, once for each
policy, and print what became of it: hit ratio, time to first token (TTFT), time
for each token after it (TPOT), end to end (E2E), and how much more than the mean
the most loaded backend had, of prefill work and of requests in flight.

The router is the one that serves; the replicas are those of "warmroute vllmsim".
The same command prints the same figures.

  --trace FILE          recorded requests, in Mooncake's format
  --workload agentic    long sessions of agents, --sessions open at once, each
                        turn sent when the answer before has come
  --workload hot        --rate requests a second that share --prompts prompts
  --workload chats      questions behind 200 prompts, on small KV caches
  --workload documents  a few questions about each of many long documents

A load of 1 is as many prompt tokens as the fleet could prefill without any
cache, 8,000 a second on each backend.`,
		Example: `  warmroute replay --workload hot --rate 60
  warmroute replay --workload agentic --sessions 128 --policy prefix,chwbl,least-load
  warmroute replay --workload documents --load 0.9 --policy all
  warmroute replay --trace conversation.jsonl --load 0.7,0.9,1.1 --policy all --plot replay.svg
  warmroute replay --trace conversation.jsonl --seeds 5 --json | jq '.results[] | {policy, ttft_mean_s}'
  warmroute replay --trace conversation.jsonl --speeds 1,0.5
  warmroute replay --trace conversation.jsonl --change join:7@20m --change restart:0@40m`,
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.NoArgs(cmd, args); err != nil {
				return err
			}
			return o.check()
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runReplay(cmd.Context(), o, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	o.addTo(cmd.Flags())
	return cmd
}

// runReplay plays every policy at every load with every seed, side by side, and
// prints a report a load, in the order of the flags.
func runReplay(ctx context.Context, o replayOptions, stdout, stderr io.Writer) error {
	plan, err := o.plan()
	if err != nil {
		return err
	}
	// Before the work and not after it: a path that cannot be written is better known now.
	var picture *os.File
	if o.plot != "" {
		if picture, err = os.Create(o.plot); err != nil {
			return fmt.Errorf("--plot: %w", err)
		}
		defer picture.Close()
	}

	bar := newProgressBar(stderr)
	start := time.Now()
	runs, err := replay.RunAll(ctx, plan.scenarios, bar.set)
	bar.clear()
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("interrupted after %.0f s; nothing was finished", time.Since(start).Seconds())
	case err != nil:
		return err
	}
	reports := plan.fill(runs)
	if picture != nil {
		if err := chart.Write(picture, reports); err != nil {
			return fmt.Errorf("draw %s: %w", o.plot, err)
		}
		if err := picture.Close(); err != nil {
			return err
		}
	}
	if o.json {
		return writeReplayJSON(stdout, reports)
	}
	return writeReplayTables(stdout, reports)
}
