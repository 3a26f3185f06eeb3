package cli

import (
	"github.com/spf13/cobra"

	"warmroute/config"
	"warmroute/server"
)

func newServeCommand(configs config.Loader) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "serve [URL ...]",
		Short: "Run the proxy",
		Long: `Accept requests of the OpenAI and Anthropic APIs and route each to the vLLM replica
with the lowest expected time to first token. URLs name the replicas; no configuration file is
needed. Settings come from the file that --config names, from WARMROUTE_
environment variables and from flags; each overrides the one before. SIGHUP and
changes of the file reload the configuration.`,
		Example: `  warmroute serve http://10.0.0.5:8000 http://10.0.0.6:8000
  warmroute serve --config warmroute.yaml
  WARMROUTE_ROUTING_POLICY=chwbl warmroute serve --config warmroute.yaml --listen :9000`,
		RunE: func(cmd *cobra.Command, urls []string) error {
			file, err := config.FilePath(cmd.Flags())
			if err != nil {
				return err
			}
			return server.Serve(cmd.Context(), server.ServeOptions{
				File:     file,
				Policies: configs.Policies,
				Load:     func() (*config.Config, error) { return configs.Load(cmd.Flags(), urls) },
				Log:      cmd.ErrOrStderr(),
				Version:  Version(),
			})
		},
	}
	configs.AddFlags(cmd.Flags())
	return cmd
}
