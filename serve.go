package main

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

func newServeCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "serve [URL ...]",
		Short: "Stand in front of vLLM replicas",
		Long: `Serve takes OpenAI API requests and sends each to the replica that will answer it
soonest. URLs name the replicas, and no file is needed; settings come from the
file that --config names, from WARMROUTE_ variables and from flags.`,
		Example: `  warmroute serve http://10.0.0.5:8000 http://10.0.0.6:8000
  warmroute serve --config warmroute.yaml`,
		RunE: func(cmd *cobra.Command, urls []string) error {
			return serve(cmd, urls)
		},
	}
	addConfigFlags(cmd.Flags())
	return cmd
}

// serve runs one proxy, and reloads its configuration when that has changed.
func serve(cmd *cobra.Command, urls []string) error {
	reloads := make(chan os.Signal, 1)
	signal.Notify(reloads, syscall.SIGHUP)
	defer signal.Stop(reloads)
	file, _ := cmd.Flags().GetString("config") // load tells of an error
	load := func() (*Config, error) { return loadConfig(cmd.Flags(), urls) }
	config, err := load()
	if err != nil {
		return err
	}
	log, level := newLogger(config.Log, cmd.ErrOrStderr())
	for _, w := range config.Warnings() {
		log.Warn(w)
	}
	s, err := newService(config, log)
	if err != nil {
		return err
	}
	public, admin, err := listen(config)
	if err != nil {
		return err
	}
	log.Info("listening", "public", public.Addr().String(), "tls", config.TLS.enabled(), "backends", len(config.Backends), "policy", config.Routing.Policy)
	if admin != nil {
		log.Info("listening", "admin", admin.Addr().String())
	}
	s.control = &control{reloads: reloads, reload: newReloader(s, file, load, level)}
	return s.run(cmd.Context(), public, admin)
}

// listen opens both listeners, so that a port already taken is an error before
// anything runs. admin is nil when the configuration has none.
func listen(c *Config) (public, admin net.Listener, err error) {
	if public, err = net.Listen("tcp", c.Listen); err != nil {
		return nil, nil, fmt.Errorf("listen: %w", err)
	}
	if c.Admin == "" {
		return public, nil, nil
	}
	if admin, err = net.Listen("tcp", c.Admin); err != nil {
		public.Close()
		return nil, nil, fmt.Errorf("admin: %w; choose another address, or \"\" for none", err)
	}
	return public, admin, nil
}

// newLogger makes the logger that the configuration asks for. Its level may be
// changed while it is in use.
func newLogger(c LogConfig, out io.Writer) (*slog.Logger, *slog.LevelVar) {
	level := new(slog.LevelVar)
	level.UnmarshalText([]byte(c.Level)) // checked with the configuration
	options := &slog.HandlerOptions{Level: level}
	if c.Format == "json" {
		return slog.New(slog.NewJSONHandler(out, options)), level
	}
	return slog.New(slog.NewTextHandler(out, options)), level
}
