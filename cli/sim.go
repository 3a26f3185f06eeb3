package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"warmroute/config"
	"warmroute/server"
	"warmroute/sim"
)

// simShutdownTimeout is how long a stopped replica waits for clients to read the
// last responses.
const simShutdownTimeout = time.Second

func newSimCommand() *cobra.Command {
	var listen string
	var cfg sim.Config
	var drainSeconds int
	cmd := &cobra.Command{
		Use:   "sim",
		Short: "Run a simulated vLLM replica",
		Long: `Run a simulated vLLM replica, which needs no GPU.

It has vLLM's API and metrics, prefix cache and scheduler, answers with
English-like text, and is as fast as the flags describe, by default like a GPU
with a model of 8 billion parameters.

POST /sim/fault injects a fault, for example:
  curl http://127.0.0.1:8000/sim/fault -d '{"kind":"die","chunks":3}'
Kinds: refuse, hang, reset, reset-late, reset-at-work (delay), die (chunks),
abort-each (chunks), status (status), hold (delay), slow (factor), freeze,
metrics-gone, metrics-garbled, metrics-huge, close-idle, drain, restart, abort,
fail, clear. "requests" and "seconds" limit most of them.`,
		Example: `  warmroute sim --listen 127.0.0.1:8001 --model sim --kv-tokens 400000
  warmroute sim --listen 127.0.0.1:8002 --speed 5 --adapter sql --adapter chat`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runSim(cmd, listen, cfg, time.Duration(drainSeconds)*time.Second)
		},
	}
	addSimFlags(cmd.Flags(), &listen, &drainSeconds, &cfg)
	return cmd
}

func addSimFlags(f *pflag.FlagSet, listen *string, drainSeconds *int, cfg *sim.Config) {
	f.SortFlags = false
	f.StringVar(listen, "listen", "127.0.0.1:8000", "listen on `ADDRESS`")
	f.StringVar(&cfg.Model, "model", "sim", "`NAME` of the model")
	f.StringArrayVar(&cfg.Adapters, "adapter", nil, "`NAME` of a LoRA adapter (repeatable)")
	f.IntVar(&cfg.MaxModelLen, "max-model-len", 131_072, "context length: `N` tokens of prompt and answer")
	f.IntVar(&cfg.BytesPerToken, "bytes-per-token", 4, "`N` bytes of text in a token, 1 to 4")
	f.StringVar(&cfg.APIKey, "api-key", "", "`KEY` that /v1 requires")
	f.StringArrayVar(&cfg.Without, "without", nil, "do not serve `PATH` (repeatable)")
	f.BoolVar(&cfg.NoTokenDetails, "no-prompt-tokens-details", false, "do not report cached_tokens in usage, like vLLM without --enable-prompt-tokens-details")
	f.IntVar(drainSeconds, "shutdown-timeout", 0, "finish requests for up to `SECONDS` after SIGTERM, while /health stays 200 and new requests get a 500; 0 aborts them, like vLLM")

	e := &cfg.Engine
	f.IntVar(&e.KVTokens, "kv-tokens", 400_000, "size of the KV cache, `N` tokens")
	f.IntVar(&e.BlockSize, "block-size", 16, "size of a block of the KV cache, `N` tokens")
	f.BoolVar(&e.NoPrefixCache, "no-prefix-caching", false, "disable the prefix cache")
	f.IntVar(&e.StepTokens, "max-num-batched-tokens", 8192, "maximum number `N` of tokens in an engine step")
	f.IntVar(&e.MaxSeqs, "max-num-seqs", 256, "maximum number `N` of running requests")

	f.Float64Var(&e.Speed, "speed", 1, "run `X` times as fast as the other flags describe")
	f.DurationVar(&e.StepTime, "step-time", 8*time.Millisecond, "minimum `DURATION` of an engine step")
	f.Float64Var(&e.PrefillRate, "prefill-rate", 8000, "prefill rate, `N` prompt tokens per second")
	f.DurationVar(&e.DecodeTime, "decode-time", 40*time.Microsecond, "`DURATION` of a step per decoding request")
	f.DurationVar(&e.ContextTime, "context-time", 24*time.Nanosecond, "`DURATION` of a step per token of the decoding requests' context")
	f.Float64Var(&e.QuadraticDepth, "quadratic", 0, quadraticUsage)
}

const quadraticUsage = "cost of attention: `SHARE` by which each preceding token raises the time of a prompt token; 1.9e-5 is realistic"

// runSim serves until the command's context is done, then drains for the given time.
func runSim(cmd *cobra.Command, listen string, cfg sim.Config, drainTimeout time.Duration) error {
	if err := config.CheckListenAddress(listen); err != nil {
		return usageError{fmt.Errorf("--listen: %w", err)}
	}
	if err := cfg.Validate(); err != nil {
		return usageError{err}
	}
	s := sim.NewServer(cfg)
	if err := s.Bind(listen); err != nil {
		return server.ListenError("listen", listen, err)
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "simulated replica of %s: base URL %s/v1\n", cfg.Model, s.URL())

	// After the signal, requests end the way vLLM ends them, so Run must outlive it.
	shutdown := make(chan error, 1)
	stop := context.AfterFunc(cmd.Context(), func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(cmd.Context()), drainTimeout+simShutdownTimeout)
		defer cancel()
		if drainTimeout > 0 {
			s.Drain(drainTimeout)
		}
		shutdown <- s.AbortAndShutdown(ctx)
	})
	ctx, cancel := context.WithCancel(context.WithoutCancel(cmd.Context()))
	defer cancel()
	err := s.Run(ctx)
	if stop() {
		return err // it failed before the signal
	}
	if shutdownErr := <-shutdown; !errors.Is(shutdownErr, context.DeadlineExceeded) {
		err = errors.Join(err, shutdownErr)
	}
	return err
}
