package main

import (
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// groupAnnotation is where a flag's heading in the help stands.
const groupAnnotation = "warmroute_group"

// groupFlags puts flags under a heading of their own in the help.
func groupFlags(flags *pflag.FlagSet, heading string, names ...string) {
	for _, name := range names {
		if err := flags.SetAnnotation(name, groupAnnotation, []string{heading}); err != nil {
			panic(err) // a flag that is not there
		}
	}
}

// noArguments is cobra.NoArgs with an error that says what to do.
func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return fmt.Errorf("%s takes no arguments, and was given %q; values of flags stand behind their flags", cmd.CommandPath(), args[0])
}
