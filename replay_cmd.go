package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"warmroute/replay"
)

func newReplayCommand() *cobra.Command {
	var o replayOptions
	cmd := &cobra.Command{
		Use:   "replay --trace FILE | --workload NAME",
		Short: "Compare routing policies on a trace or a workload, in virtual time",
		Long: `Play a workload against simulated replicas in virtual time, once for each
policy, and print what became of it: hit ratio, time to first token (TTFT), time
for each token after it (TPOT), end to end (E2E), and how much more than the
mean the most loaded backend had, of prefill work and of requests in flight.

The router is the one that serves; the replicas are those of "warmroute
vllmsim". The same command prints the same figures.

  --trace FILE          recorded requests: Mooncake's format, or what
                        record.file in the configuration wrote
  --workload agentic    long sessions of agents, --sessions open at once, each
                        turn sent when the answer before has come
  --workload hot        --rate requests a second that share --prompts prompts
  --workload chats      questions behind 200 prompts, on small KV caches
  --workload documents  a few questions about each of many long documents

A load of 1 is as many prompt tokens as the fleet could prefill without any
cache, 8,000 a second on each backend.`,
		Example: `  warmroute replay --workload hot --rate 60
  warmroute replay --workload agentic --sessions 128 --policy prefix,chwbl,least-load
  warmroute replay --workload documents --load 0.9,1.5 --policy all
  warmroute replay --trace conversation.jsonl --load 0.7,0.9,1.1 --policy all --plot replay.svg
  warmroute replay --trace conversation.jsonl --seeds 5 --json | jq '.results[] | {policy, ttft_mean_s}'
  warmroute replay --trace recorded.jsonl --speeds 1,0.5 --policy prefix,cache-threshold
  warmroute replay --trace conversation.jsonl --change join:7@20m --change restart:0@40m`,
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.NoArgs(cmd, args); err != nil {
				return err
			}
			return o.check(cmd.Flags())
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
func runReplay(ctx context.Context, o replayOptions, stdout, stderr io.Writer) (err error) {
	plan, err := o.plan()
	if err != nil {
		return err
	}
	picture, err := openPicture(o.plot)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, picture.close()) }()

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
	if err := picture.draw(reports); err != nil {
		return err
	}
	if o.json {
		return writeReplayJSON(stdout, reports)
	}
	return writeReplayTables(stdout, reports)
}
