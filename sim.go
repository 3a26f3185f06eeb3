package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"warmroute/config"
	"warmroute/sim"
)

// simulatedGrace is how long the last answers of a simulated replica may take
// to be read once it was told to stop.
const simulatedGrace = time.Second

func newSimCommand() *cobra.Command {
	var listen string
	var cfg sim.Config
	var drain int
	cmd := &cobra.Command{
		Use:   "vllmsim",
		Short: "Run a simulated vLLM replica, which needs no GPU",
		Long: `Run a simulated vLLM replica, which needs no GPU.

It answers as vLLM does, with English-like text, as fast as the described GPU
would: by default an 8B-class model. Its prefix cache, its scheduler and its
/metrics follow vLLM's rules. A token is four bytes of text.

POST /sim/fault makes it misbehave, for example:
  curl http://127.0.0.1:8000/sim/fault -d '{"kind":"die","chunks":3}'
Kinds: refuse, hang, reset, reset-late, reset-at-work (delay), die (chunks),
abort-each (chunks), status (status), hold (delay), slow (factor), freeze,
metrics-gone, metrics-garbled, metrics-huge, close-idle, drain, restart, abort,
fail, clear. "requests" and "seconds" limit most of them.`,
		Example: `  warmroute vllmsim --listen 127.0.0.1:8001 --model sim --kv-tokens 400000
  warmroute vllmsim --listen 127.0.0.1:8002 --speed 5 --adapter sql --adapter chat`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runVllmsim(cmd, listen, cfg, time.Duration(drain)*time.Second)
		},
	}
	addVllmsimFlags(cmd.Flags(), &listen, &drain, &cfg)
	return cmd
}

func addVllmsimFlags(f *pflag.FlagSet, listen *string, drain *int, cfg *sim.Config) {
	f.SortFlags = false
	f.StringVar(listen, "listen", "127.0.0.1:8000", "`ADDRESS` to listen on")
	f.StringVar(&cfg.Model, "model", "sim", "`NAME` of the model")
	f.StringArrayVar(&cfg.Adapters, "adapter", nil, "`NAME` of a LoRA adapter to list beside the model (repeatable)")
	f.IntVar(&cfg.MaxModelLen, "max-model-len", 131_072, "`N` tokens of prompt and answer together")
	f.StringVar(&cfg.APIKey, "api-key", "", "`KEY` to ask for on /v1")
	f.BoolVar(&cfg.NoTokenDetails, "no-prompt-tokens-details", false, "leave cached_tokens out of usage, as vLLM does without its flag")

	f.IntVar(drain, "shutdown-timeout", 0, "`SECONDS` for requests to finish after SIGTERM, in which /health stays 200 and new ones get a 500; 0 aborts them, as vLLM does")

	e := &cfg.Engine
	f.IntVar(&e.KVTokens, "kv-tokens", 400_000, "`N` tokens that the KV cache holds")
	f.IntVar(&e.BlockSize, "block-size", 16, "`N` tokens in a block of it")
	f.BoolVar(&e.NoPrefixCache, "no-prefix-caching", false, "cache no prefixes")
	f.IntVar(&e.StepTokens, "max-num-batched-tokens", 8192, "`N` tokens that an engine step takes at most")
	f.IntVar(&e.MaxSeqs, "max-num-seqs", 256, "`N` requests running at once")
	f.Float64Var(&e.Speed, "speed", 1, "`X` times as fast as the described GPU")
	f.DurationVar(&e.StepTime, "step-time", 8*time.Millisecond, "`DURATION` of an engine step however empty it is")
	f.Float64Var(&e.PrefillRate, "prefill-rate", 8000, "`N` prompt tokens a second")
	f.DurationVar(&e.DecodeTime, "decode-time", 40*time.Microsecond, "`DURATION` added to a step by each decoding request")
	f.DurationVar(&e.ContextTime, "context-time", 24*time.Nanosecond, "`DURATION` added to a step by each token of context decoded over")
	f.Float64Var(&e.QuadraticDepth, "quadratic", 0, "`SHARE` by which a prompt token costs more for each token before it; 1.9e-5 is realistic")
}

// checkSimulated finds every mistake in the flags.
func checkSimulated(listen string, cfg sim.Config) error {
	if err := config.CheckListenAddress(listen); err != nil {
		return config.Errors{"--listen: " + err.Error()}
	}
	if err := cfg.Validate(); err != nil {
		return usageError{err}
	}
	return nil
}

// runVllmsim serves until the command's context is done, and then drains for so long.
func runVllmsim(cmd *cobra.Command, listen string, cfg sim.Config, drain time.Duration) error {
	if err := checkSimulated(listen, cfg); err != nil {
		return err
	}
	s := sim.NewServer(cfg)
	if err := s.Listen(listen); err != nil {
		return cannotListen("listen", listen, err)
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "simulated replica of %s: base URL %s/v1\n", cfg.Model, s.URL())

	// The signal ends requests the way vLLM ends them, so Run outlives it.
	ended := make(chan error, 1)
	stop := context.AfterFunc(cmd.Context(), func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(cmd.Context()), drain+simulatedGrace)
		defer cancel()
		if drain > 0 {
			s.Drain(drain)
		}
		ended <- s.Shutdown(ctx)
	})
	ctx, cancel := context.WithCancel(context.WithoutCancel(cmd.Context()))
	defer cancel()
	err := s.Run(ctx)
	if stop() {
		return err // it ended by itself
	}
	if late := <-ended; !errors.Is(late, context.DeadlineExceeded) {
		err = errors.Join(err, late)
	}
	return err
}
