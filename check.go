package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"warmroute/config"
)

func newCheckCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check [URL ...]",
		Short: "Validate a configuration and report all errors",
		Long: `Read the configuration as serve does, without contacting any backend. If it is
invalid, print each error on a line of its own and exit with status 2; otherwise
print a summary of what serve would run.`,
		Example: `  warmroute check --config warmroute.yaml
  warmroute check --policy chwbl http://10.0.0.5:8000 http://10.0.0.6:8000`,
		RunE: func(cmd *cobra.Command, urls []string) error {
			c, err := config.Load(defaultConfig, cmd.Flags(), urls)
			if err != nil {
				return err
			}
			for _, w := range c.Warnings() {
				fmt.Fprintln(cmd.ErrOrStderr(), "warning:", w)
			}
			guarded := ""
			if len(c.Keys) > 0 {
				guarded = ", " + plural(len(c.Keys), "key")
			}
			fmt.Fprintf(cmd.OutOrStdout(), "ok: %s, policy %s, listen %s%s\n",
				plural(len(c.Backends), "backend"), c.Routing.Policy, c.Listen, guarded)
			return nil
		},
	}
	config.AddFlags(cmd.Flags())
	return cmd
}

// plural returns "1 noun" or "n nouns".
func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
