package cli

import (
	"fmt"
	"math"
	"strings"

	"github.com/spf13/cobra"
)

const anyNumber = math.MaxInt

// requireArgs returns a check that a command has from least to most arguments. Its error is what they are, in the
// imperative, and the first example of the command.
func requireArgs(least, most int, what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if least <= len(args) && len(args) <= most {
			return nil
		}
		example, _, _ := strings.Cut(strings.TrimSpace(cmd.Example), "\n")
		return fmt.Errorf("%s, as in: %s", what, example)
	}
}

// rejectUnknownCommand is the check of the arguments of a command that only has others: cobra prints the help instead.
func rejectUnknownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	cmd.SuggestionsMinimumDistance = 2 // cobra's own, which it sets for the root alone
	advice := ""
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		advice = "; did you mean " + strings.Join(near, " or ") + "?"
	}
	return fmt.Errorf("unknown command %q for %q%s", args[0], cmd.CommandPath(), advice)
}
