package cli

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"warmroute/backends"
	"warmroute/config"
	"warmroute/fleet/discovery"
)

func newCheckCommand(configs config.Loader) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check [URL ...]",
		Short: "Validate a configuration and report all errors",
		Long: `Read and validate the configuration as "warmroute serve" does, without contacting
any backend, and look up the names of backends. Print a summary, or one error per line and exit with status 2.`,
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
			summary := fmt.Sprintf("%s, policy %s, listen %s", plural(len(c.Backends), "backend")+formatRoles(c), c.Routing.Policy, c.Listen)
			if keys := c.APIKeys(); len(keys) > 0 {
				summary += ", " + plural(len(keys), "key")
			}
			fmt.Fprintf(cmd.OutOrStdout(), "ok: %s\n", summary)
			return writeAddresses(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(), c)
		},
	}
	configs.AddFlags(cmd.Flags())
	return cmd
}

// formatRoles returns how many backends are for prefill and how many for decode, or "" if none is.
func formatRoles(c *config.Config) string {
	count := c.CountRoles()
	if prefill, decode := count[backends.RolePrefill], count[backends.RoleDecode]; prefill+decode > 0 {
		return fmt.Sprintf(" (%d for prefill, %d for decode)", prefill, decode)
	}
	return ""
}

// checkLookupTimeout bounds the lookup of one name.
const checkLookupTimeout = 2 * time.Second

// writeAddresses looks up the names of the backends and writes of each that stands for several replicas how many it has,
// and a warning of each that has no address.
func writeAddresses(ctx context.Context, out, warnings io.Writer, c *config.Config) error {
	resolver := discovery.NewResolver(c.DNS.Server, nil)
	for _, b := range c.Backends {
		one := b.DNS == "off"
		b.DNS = "auto"
		name, ok := b.DNSName()
		if !ok {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, checkLookupTimeout)
		addresses, err := resolver.Lookup(ctx, discovery.Name(name))
		cancel()
		switch {
		case err != nil:
			fmt.Fprintf(warnings, "warning: %s: no address now: %v\n", b.Name, err)
		case len(addresses) == 0:
			fmt.Fprintf(warnings, "warning: %s: no address now\n", b.Name)
		case len(addresses) > 1 && !one || b.HasDNSScheme():
			if _, err := fmt.Fprintf(out, "%s: %s in DNS\n", b.Name, plural(len(addresses), "replica")); err != nil {
				return err
			}
		}
	}
	return nil
}

// plural formats a number of things, such as "1 backend" or "2 backends".
func plural(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}
