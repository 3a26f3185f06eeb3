package main

import (
	"github.com/spf13/cobra"

	"warmroute/cli"
	"warmroute/config"
	"warmroute/server"
)

func newServeCommand() *cobra.Command {
	cmd := &cobra.Command{
		GroupID: "run",
		Use:     "serve [URL ...]",
		Short:   "Stand in front of vLLM replicas",
		Long: `Take OpenAI API requests and send each to the replica that will answer it
soonest. URLs name the replicas, and no file is needed; settings come from the
file that --config names, from WARMROUTE_ variables and from flags, each over
the one before. SIGHUP reads them anew.`,
		Example: `  warmroute serve http://10.0.0.5:8000 http://10.0.0.6:8000
  warmroute serve --config warmroute.yaml
  WARMROUTE_ROUTING_POLICY=chwbl warmroute serve --config warmroute.yaml --listen :9000`,
		RunE: func(cmd *cobra.Command, urls []string) error {
			file, err := config.FilePath(cmd.Flags())
			if err != nil {
				return err
			}
			return server.Serve(cmd.Context(), server.ServeOptions{
				File:    file,
				Load:    func() (*config.Config, error) { return config.Load(defaultConfig, cmd.Flags(), urls) },
				Log:     cmd.ErrOrStderr(),
				Version: cli.Version(),
			})
		},
	}
	config.AddFlags(cmd.Flags())
	return cmd
}
