// Warmroute stands in front of several vLLM replicas, speaks the OpenAI API,
// and sends each request to the replica that will answer it soonest, counting
// the prefix it already holds and the queue it would wait in.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		first := <-signals
		// It begins an orderly end; from then on a second one kills.
		signal.Stop(signals)
		stop(stopSignal{first})
	}()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run executes one command line and returns the exit status: 0, 1 for what
// failed while running, 2 for a command line or a configuration to be mended.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	started := false // the command line was understood
	root := &cobra.Command{
		Use:   "warmroute",
		Short: "An OpenAI endpoint for several vLLM replicas, routed by prefix cache and load",
		Example: `  warmroute serve http://10.0.0.5:8000 http://10.0.0.6:8000
  warmroute check --config warmroute.yaml
  warmroute demo --for 30s
  warmroute vllmsim --listen 127.0.0.1:8001
  warmroute replay --workload agentic --policy prefix,least-load
  warmroute bench --url http://nginx:80 --url http://warmroute:8080
  warmroute explain -f request.json
  warmroute version`,
		SilenceErrors:     true, // printed below, once
		SilenceUsage:      true, // a failure of a backend is no question of usage
		PersistentPreRun:  func(*cobra.Command, []string) { started = true },
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: true},
	}
	root.AddCommand(
		newServeCommand(),
		newDemoCommand(),
		newVllmsimCommand(),
		newReplayCommand(),
		newBenchCommand(),
		newExplainCommand(),
		newCheckCommand(),
		newVersionCommand(),
		newHealthCommand(),
	)
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)

	cmd, err := root.ExecuteContextC(ctx)
	var faults ConfigError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &faults):
		fmt.Fprintln(stderr, faults)
		return 2
	case !started:
		fmt.Fprintf(stderr, "%v\nsee %s --help\n", err, cmd.CommandPath())
		return 2
	}
	fmt.Fprintf(stderr, "warmroute: %v\n", err)
	return 1
}
