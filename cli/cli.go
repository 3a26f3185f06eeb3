// Package cli has the commands of warmroute and their output.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"warmroute/config"
)

// Run executes a command line and returns the exit status: 0 on success, 1 for a failure while running, 2 for
// an invalid command line or configuration. It returns when the command is done, or has stopped because ctx is
// done. The other arguments are those of NewRootCommand.
func Run(ctx context.Context, args []string, configs config.Loader, lab []*cobra.Command, stdout, stderr io.Writer) int {
	started := false // the command line was valid
	root := NewRootCommand(configs, lab)
	root.PersistentPreRun = func(*cobra.Command, []string) { started = true }
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)

	cmd, err := root.ExecuteContextC(ctx)
	var invalid config.Errors
	var usage UsageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &invalid):
		fmt.Fprintln(stderr, invalid)
		return 2
	case !started || errors.As(err, &usage):
		fmt.Fprintf(stderr, "warmroute: %v\nRun '%s --help' for usage.\n", err, cmd.CommandPath())
		return 2
	}
	fmt.Fprintf(stderr, "warmroute: %v\n", err)
	return 1
}

// UsageError is an error in the command line that is found when the command runs.
type UsageError struct{ Err error }

func (e UsageError) Error() string { return e.Err.Error() }

func (e UsageError) Unwrap() error { return e.Err }

// The groups of commands in the help.
const (
	groupRun     = "run"
	groupMeasure = "measure"
)

// NewRootCommand returns the command line's root. configs loads the configuration of its
// commands, and lab are the commands that simulate and measure.
func NewRootCommand(configs config.Loader, lab []*cobra.Command) *cobra.Command {
	root := &cobra.Command{
		Use:     "warmroute",
		Version: Version(),
		Long: `Warmroute is a reverse proxy for several vLLM replicas. It speaks the OpenAI API
and sends each request to the replica with the lowest expected time to first
token, given the prompt prefixes that the replicas have cached and their load.

Exit status: 0 on success and after a graceful stop (the first SIGTERM or
Ctrl-C), 1 for a failure while running, 2 for an invalid command line or
configuration. A second SIGTERM or Ctrl-C stops at once.`,
		Example: `  warmroute demo
  warmroute serve http://10.0.0.5:8000 http://10.0.0.6:8000`,
		SilenceErrors: true, // Run prints them
		SilenceUsage:  true,
	}
	root.AddGroup(&cobra.Group{ID: groupRun, Title: "Run a proxy:"}, &cobra.Group{ID: groupMeasure, Title: "Simulate and measure:"})
	root.AddCommand(
		setGroup(groupRun, newServeCommand(configs)),
		setGroup(groupRun, newCheckCommand(configs)),
		setGroup(groupRun, newExplainCommand(configs)),
		setGroup(groupRun, newBackendsCommand(configs)),
		setGroup(groupRun, newRequestsCommand(configs)),
		setGroup(groupRun, newUsageCommand()),
		setGroup(groupRun, newHealthCommand(configs)),
	)
	for _, cmd := range lab {
		root.AddCommand(setGroup(groupMeasure, cmd))
	}
	root.AddCommand(newVersionCommand())
	root.SetVersionTemplate(versionLine())
	root.SetFlagErrorFunc(describeFlagError)
	// By itself, cobra does not wrap the descriptions of flags.
	root.SetUsageTemplate(strings.ReplaceAll(root.UsageTemplate(), ".FlagUsages", ".FlagUsagesWrapped 100"))
	return root
}

func setGroup(group string, cmd *cobra.Command) *cobra.Command {
	cmd.GroupID = group
	return cmd
}
