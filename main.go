// Warmroute is a reverse proxy for several vLLM replicas that speaks the OpenAI
// API and routes each request by the prompt prefixes that the replicas have
// cached and by their load.
package main

import (
	"context"
	_ "embed" // for config.yaml
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"warmroute/config"
)

//go:embed config.yaml
var defaultConfig []byte

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

// run executes one command line and returns the exit status: 0, 1 for a failure
// while running, 2 for an invalid command line or configuration.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	started := false // the command line was valid
	root := newRootCommand()
	root.PersistentPreRun = func(*cobra.Command, []string) { started = true }
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)

	cmd, err := root.ExecuteContextC(ctx)
	var configError config.Errors
	var usage usageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &configError):
		fmt.Fprintln(stderr, configError)
		return 2
	case !started || errors.As(err, &usage):
		fmt.Fprintf(stderr, "warmroute: %v\nRun '%s --help' for usage.\n", err, cmd.CommandPath())
		return 2
	}
	fmt.Fprintf(stderr, "warmroute: %v\n", err)
	return 1
}

// usageError is an error of the command line that is found after parsing it. It
// ends with status 2.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:     "warmroute",
		Short:   "Reverse proxy for vLLM replicas that routes by prefix cache and load",
		Version: version(),
		Long: `Warmroute is a reverse proxy for several vLLM replicas. It speaks the OpenAI API
and sends each request to the replica with the lowest expected time to first
token, given the prompt prefixes that each replica has cached and its queue.

Exit status: 0 on success and after a graceful stop (the first SIGTERM or
Ctrl-C), 1 for a failure while running, 2 for an invalid command line or
configuration. A second SIGTERM or Ctrl-C stops at once.`,
		Example: `  warmroute demo
  warmroute serve http://10.0.0.5:8000 http://10.0.0.6:8000`,
		SilenceErrors: true, // run prints them
		SilenceUsage:  true,
	}
	root.AddGroup(&cobra.Group{ID: groupRun, Title: "Run a proxy:"}, &cobra.Group{ID: groupMeasure, Title: "Simulate and measure:"})
	root.AddCommand(
		inGroup(groupRun, newServeCommand()),
		inGroup(groupRun, newCheckCommand()),
		inGroup(groupRun, newExplainCommand()),
		inGroup(groupRun, newHealthCommand()),
		inGroup(groupMeasure, newDemoCommand()),
		inGroup(groupMeasure, newSimCommand()),
		inGroup(groupMeasure, newReplayCommand()),
		inGroup(groupMeasure, newBenchCommand()),
		newVersionCommand(),
	)
	root.SetVersionTemplate(versionLine())
	// cobra does not wrap the descriptions of flags by itself.
	root.SetUsageTemplate(strings.ReplaceAll(root.UsageTemplate(), ".FlagUsages", ".FlagUsagesWrapped 100"))
	return root
}

// The groups of commands in the help.
const (
	groupRun     = "run"
	groupMeasure = "measure"
)

func inGroup(group string, cmd *cobra.Command) *cobra.Command {
	cmd.GroupID = group
	return cmd
}
