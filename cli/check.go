package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"warmroute/config"
)

func newCheckCommand(configs config.Loader) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check [URL ...]",
		Short: "Validate a configuration and report all errors",
		Long: `Read and validate the configuration as "warmroute serve" does, without contacting
any backend. Print a summary, or one error per line and exit with status 2.`,
		Example: `  warmroute check --config warmroute.yaml
  warmroute check --policy chwbl http://10.0.0.5:8000 http://10.0.0.6:8000`,
		RunE: func(cmd *cobra.Command, urls []string) error {
			c, err := configs.Load(cmd.Flags(), urls)
			if err != nil {
				return err
			}
			for _, w := range c.Warnings(configs.Policies) {
				fmt.Fprintln(cmd.ErrOrStderr(), "warning:", w)
			}
			summary := fmt.Sprintf("%s, policy %s, listen %s", plural(len(c.Backends), "backend"), c.Routing.Policy, c.Listen)
			if keys := c.APIKeys(); len(keys) > 0 {
				summary += ", " + plural(len(keys), "key")
			}
			fmt.Fprintf(cmd.OutOrStdout(), "ok: %s\n", summary)
			return nil
		},
	}
	configs.AddFlags(cmd.Flags())
	return cmd
}

// plural formats a number of things, such as "1 backend" or "2 backends".
func plural(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}
