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
	root := newRootCommand()
	root.PersistentPreRun = func(*cobra.Command, []string) { started = true }
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)

	cmd, err := root.ExecuteContextC(ctx)
	var faults ConfigError
	var misused misuse
	switch {
	case err == nil:
		return 0
	case errors.As(err, &faults):
		fmt.Fprintln(stderr, faults)
		return 2
	case !started || errors.As(err, &misused):
		see := cmd.CommandPath() + " --help"
		if !cmd.HasParent() || cmd.Name() == "help" {
			see = "warmroute help"
		}
		fmt.Fprintf(stderr, "%v\nsee %s\n", err, see)
		return 2
	}
	fmt.Fprintf(stderr, "warmroute: %v\n", err)
	return 1
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:     "warmroute",
		Version: version(),
		Long:    overview,
		Example: `  warmroute demo
  warmroute serve http://10.0.0.5:8000 http://10.0.0.6:8000`,
		Args:              unknownCommand,
		RunE:              func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceErrors:     true, // printed by run, once
		SilenceUsage:      true, // a failure of a backend is no question of usage
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.AddGroup(&cobra.Group{ID: groupRun, Title: "Run"}, &cobra.Group{ID: groupTry, Title: "Try, and measure"})
	root.AddCommand(
		inGroup(groupRun, newServeCommand()),
		inGroup(groupRun, newCheckCommand()),
		inGroup(groupRun, newExplainCommand()),
		inGroup(groupTry, newDemoCommand()),
		inGroup(groupTry, newVllmsimCommand()),
		inGroup(groupTry, newReplayCommand()),
		inGroup(groupTry, newBenchCommand()),
		newCompletionCommand(),
		newVersionCommand(),
		newHealthCommand(),
	)
	root.SetHelpCommand(newHelpCommand())
	root.SetHelpFunc(func(cmd *cobra.Command, _ []string) { writeHelp(cmd.OutOrStdout(), cmd) })
	root.SetFlagErrorFunc(flagFault)
	root.SetVersionTemplate(versionLine())
	for _, cmd := range root.Commands() {
		cmd.Flags().BoolP("help", "h", false, "help for "+cmd.Name())
		completeFlags(cmd)
	}
	return root
}

func inGroup(group string, cmd *cobra.Command) *cobra.Command {
	cmd.GroupID = group
	return cmd
}
