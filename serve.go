package main

import (
	"context"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"warmroute/cli"
	"warmroute/config"
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
			return serve(cmd, urls)
		},
	}
	config.AddFlags(cmd.Flags())
	return cmd
}

// serve runs one proxy, and reloads its configuration when that has changed.
func serve(cmd *cobra.Command, urls []string) (err error) {
	started := time.Now()
	reloads, handOvers := make(chan os.Signal, 1), make(chan os.Signal, 1)
	signal.Notify(reloads, syscall.SIGHUP)
	defer signal.Stop(reloads)
	notifyHandOver(handOvers)
	defer signal.Stop(handOvers)
	program, err := programPath()
	if err != nil {
		return err
	}
	before, err := inherit()
	if err != nil {
		return err
	}
	file, _ := config.FilePath(cmd.Flags()) // load tells of an error
	reload := newReloader(file, func() (*config.Config, error) { return config.Load(defaultConfig, cmd.Flags(), urls) })
	c, err := reload.read()
	if err != nil {
		return err
	}
	log, level := newLogger(c.Log, cmd.ErrOrStderr())
	log.Info("starting", "version", cli.Version(), "go", runtime.Version(), "pid", os.Getpid())
	defer func() {
		log.Info("stopped", "reason", stopReason(cmd.Context(), err), "uptime", time.Since(started).Round(time.Millisecond))
	}()
	for _, w := range c.StartWarnings(fileDescriptorLimit()) {
		log.Warn(w)
	}
	s, err := newServiceAfter(before, c, log)
	if err != nil {
		return err
	}
	public, admin, err := before.listen(c)
	if err != nil {
		return err
	}
	log.Info("listening", "public", public.Addr().String(), "tls", c.TLS.Enabled(), "backends", len(c.Backends), "policy", c.Routing.Policy)
	if admin != nil {
		log.Info("listening", "admin", admin.Addr().String(), "tls", c.AdminTLS.Enabled())
	}
	s.control.reloads, s.control.reload, s.control.level = reloads, reload, level
	s.control.handOvers, s.control.program = handOvers, program
	return s.run(cmd.Context(), public, admin)
}

// listen opens both listeners. admin is nil when the configuration has none.
func listen(c *config.Config) (public, admin net.Listener, err error) {
	return (&inherited{}).listen(c)
}

// stopReason says why serve returns: its error, the signal that ended ctx, or a
// hand-over.
func stopReason(ctx context.Context, err error) string {
	switch {
	case err != nil:
		return err.Error()
	case ctx.Err() != nil:
		return stoppedBy(ctx).String()
	}
	return "handed over"
}

// newLogger makes the logger that the configuration asks for. Its level may be
// changed while it is in use.
func newLogger(c config.Log, out io.Writer) (*slog.Logger, *slog.LevelVar) {
	level := new(slog.LevelVar)
	level.UnmarshalText([]byte(c.Level)) // checked with the configuration
	options := &slog.HandlerOptions{Level: level, ReplaceAttr: formatDuration}
	if c.Format == "json" {
		return slog.New(slog.NewJSONHandler(out, options)), level
	}
	return slog.New(slog.NewTextHandler(out, options)), level
}

// formatDuration writes durations as text such as 1.5s, where slog's JSON handler
// would write nanoseconds.
func formatDuration(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		a.Value = slog.StringValue(a.Value.Duration().String())
	}
	return a
}
