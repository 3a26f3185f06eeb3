package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"warmroute/cli"
	"warmroute/config"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
	"warmroute/server"
)

// simShutdownTimeout is how long a stopped replica waits for clients to read the
// last responses.
const simShutdownTimeout = time.Second

func newSimCommand() *cobra.Command {
	var listen []string
	var cfg sim.Config
	var drainSeconds int
	var scriptFile string
	cmd := &cobra.Command{
		Use:   "sim",
		Short: "Run a simulated vLLM replica",
		Long: `Run a simulated vLLM replica, which needs no GPU.

It has vLLM's API and metrics, prefix cache and scheduler, responds with
English-like text, and is as fast as the flags describe, by default like an H200
with Llama 3.1 8B.

POST /sim/fault injects a fault, for example:
  curl http://127.0.0.1:8000/sim/fault -d '{"kind":"die","chunks":3}'
Kinds: refuse, hang, reset, reset-late, reset-at-work (delay), die (chunks),
surplus, abort-each (chunks), status (status), queue-full (limit), hold (delay),
slow (factor), freeze, metrics-gone, metrics-garbled, metrics-huge, close-idle, drain,
events-lost (every), events-garbled, replay-silent, transfer-fail, restart, abort, fail, clear.
"requests" and "seconds" limit most of them.

--script sets the model's replies for a client that uses tools: FILE is a
JSON list with the replies of every conversation, in their order, such as
  [{"text": "Let me see.", "tool_calls": [{"name": "ls", "arguments": {"path": "."}}]},
   {"text": "Done."}]
Requests without tools, and turns after the last reply, get generated text.`,
		Example: `  warmroute sim --listen 127.0.0.1:8001 --model sim --kv-tokens 400000
  warmroute sim --listen 127.0.0.1:8002 --speed 5 --adapter sql --adapter chat`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if cfg.Script, err = readScriptFile(scriptFile); err != nil {
				return cli.UsageError{Err: fmt.Errorf("--script: %w", err)}
			}
			return runSim(cmd, listen, cfg, time.Duration(drainSeconds)*time.Second)
		},
	}
	addSimFlags(cmd.Flags(), &listen, &drainSeconds, &cfg)
	cmd.Flags().StringVar(&scriptFile, "script", "", "respond to requests that offer tools with the replies in `FILE`")
	return cmd
}

// readScriptFile returns the script in a file; none without a name.
func readScriptFile(name string) (sim.Script, error) {
	if name == "" {
		return nil, nil
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return sim.ReadScript(f)
}

func addSimFlags(f *pflag.FlagSet, listen *[]string, drainSeconds *int, cfg *sim.Config) {
	f.SortFlags = false
	f.StringArrayVar(listen, "listen", []string{"127.0.0.1:8000"},
		"listen on `ADDRESS` (repeatable: a replica on each, all on one GPU, where a step takes as many times as long as replicas compute "+
			"when it begins)")
	f.StringVar(&cfg.Model, "model", "sim", "`NAME` of the model")
	f.StringArrayVar(&cfg.Adapters, "adapter", nil, "`NAME` of a LoRA adapter (repeatable)")
	f.IntVar(&cfg.MaxModelLen, "max-model-len", 131_072, "context length: `N` tokens of prompt and output")
	f.IntVar(&cfg.BytesPerToken, "bytes-per-token", 4, "`N` bytes of text in a token, 1 to 4")
	f.StringVar(&cfg.APIKey, "api-key", "", "`KEY` that /v1 requires")
	f.StringArrayVar(&cfg.Without, "without", nil,
		"do not serve `PATH` (repeatable): a 404, or for /inference/v1/generate the 403 of vLLM without --enable-scale-out")
	f.BoolVar(&cfg.StoreResponses, "store-responses", false,
		"keep the responses of /v1/responses in memory, like vLLM with VLLM_ENABLE_RESPONSES_API_STORE=1")
	f.BoolVar(&cfg.NoTokenDetails, "no-prompt-tokens-details", false,
		"do not report cached_tokens in usage, like vLLM without --enable-prompt-tokens-details")
	f.IntVar(drainSeconds, "shutdown-timeout", 0,
		"finish requests for up to `SECONDS` after SIGTERM, while /health stays 200 and new requests get a 500; 0 aborts them, like vLLM")

	f.IntVar(&cfg.Ranks, "data-parallel-size", 1, "number `N` of engines behind the one port, each with its own KV cache and scheduler")
	f.IntVar(&cfg.Rank.First, "data-parallel-start-rank", 0,
		"label `N` of the first of these engines, as on a later node of a hybrid deployment")
	f.BoolVar(&cfg.Rank.Rust, "rust-frontend", false,
		"X-data-parallel-rank is the label of an engine, as in vLLM's Rust front end; else its place among the engines of this server")
	f.StringVar(&cfg.KVEvents.Endpoint, "kv-events", "",
		"publish KV cache events like vLLM on `ENDPOINT`: a port, or tcp://HOST:PORT with * for all addresses; replays on the port 1000 "+
			"above; 0 selects free ports, which /kv_event_sources lists")
	f.StringVar(&cfg.KVEvents.Connect, "kv-events-connect", "",
		"connect to `ADDRESS`, tcp://HOST:PORT, to publish KV cache events there, in place of --kv-events")
	f.StringVar(&cfg.KVEvents.Topic, "kv-events-topic", "",
		"`NAME` of the topic of KV cache events (default with --kv-events-connect: kv@ADDRESS@MODEL)")
	f.BoolVar(&cfg.Connector.Enabled, "kv-connector", false,
		"do the prefill or decode of requests with kv_transfer_params, like vLLM with NixlConnector in pull mode; the other replica must be a "+
			"simulated one, too")
	f.Func("kv-load-failure-policy", "what a request does whose KV could not be transferred: `POLICY` fail, or recompute (default fail)",
		func(name string) error {
			if name != "fail" && name != "recompute" {
				return errors.New("choose fail or recompute")
			}
			cfg.Connector.Recompute = name == "recompute"
			return nil
		})
	f.StringVar(&cfg.Version, "vllm-version", "0.32.0", "`VERSION` of vLLM that it claims to be; replicas of two versions transfer no KV")

	e := &cfg.Engine
	f.IntVar(&e.KVTokens, "kv-tokens", 400_000, "size of the KV cache, `N` tokens")
	f.IntVar(&e.HostKVTokens, "host-kv-tokens", 0, "size of a second cache in host memory, like vLLM's --kv-offloading-size, `N` tokens")
	f.Float64Var(&e.HostLoadRate, "host-load-rate", 200_000, "load `N` tokens per second from it")
	f.DurationVar(&e.Lease, "kv-lease", 30*time.Second,
		"keep the KV of a prefill for `DURATION` for another replica, like vLLM's kv_lease_duration; --speed does not shorten it")
	f.DurationVar(&e.TransferTime, "kv-transfer-time", 170*time.Millisecond, "`DURATION` of a transfer of KV besides the copy")
	f.IntVar(&e.TransferTokenBytes, "kv-token-bytes", 131_072, "`N` bytes of KV in a token, for the copy")
	f.Float64Var(&e.TransferBandwidth, "kv-transfer-bandwidth", 10e9, "copy `N` bytes per second")
	f.IntVar(&e.BlockSize, "block-size", 16, "size of a block of the KV cache, `N` tokens; with linear attention rather 544")
	addGroupFlags(f, &e.Groups)
	f.BoolVar(&e.NoPrefixCache, "no-prefix-caching", false, "disable the prefix cache")
	f.IntVar(&e.StepTokens, "max-num-batched-tokens", 8192, "maximum number `N` of tokens in an engine step")
	f.Func("scheduling-policy", "`ORDER` in which waiting requests start: fcfs, or priority, lower first (default fcfs)",
		func(name string) error {
			if name != "fcfs" && name != "priority" {
				return errors.New("choose fcfs or priority")
			}
			e.PriorityScheduling = name == "priority"
			return nil
		})
	f.IntVar(&e.MaxSeqs, "max-num-seqs", 256, "maximum number `N` of running requests")

	f.Float64Var(&e.Speed, "speed", 1, "run `X` times as fast as the other flags describe")
	f.DurationVar(&e.StepTime, "step-time", 5070*time.Microsecond, "minimum `DURATION` of an engine step")
	f.Float64Var(&e.PrefillRate, "prefill-rate", engine.DefaultPrefillRate, "prefill rate, `N` prompt tokens per second")
	f.DurationVar(&e.DecodeTime, "decode-time", 5*time.Microsecond, "`DURATION` of a step per decoding request")
	f.DurationVar(&e.ContextTime, "context-time", 22*time.Nanosecond, "`DURATION` of a step per token of the decoding requests' context")
	addQuadraticFlag(f, &e.QuadraticDepth)
	f.Func("prompt-token-time", "`DURATION` of the API server per prompt token, one prompt after another, before it reaches the scheduler "+
		"(default 1.7µs)", func(text string) (err error) {
		if e.PromptTokenTime, err = time.ParseDuration(text); err == nil && e.PromptTokenTime < 0 {
			return errors.New("choose 0 or more")
		}
		if e.PromptTokenTime == 0 {
			e.PromptTokenTime = engine.NoAPIServer
		}
		return err
	})
	f.Float64Var(&e.DecodeInterference, "decode-interference", 0,
		"`SHARE` by which each decoding request makes the prefill in its step slower")
	f.Float64Var(&e.Jitter, "jitter", 0, "`SHARE` by which the duration of a step varies at random, up and down")
}

// addGroupFlags adds the flags of a hybrid model's KV cache groups.
func addGroupFlags(f *pflag.FlagSet, g *engine.Groups) {
	f.IntVar(&g.States, "linear-attention-groups", 0, "`N` KV cache groups of linear attention or Mamba 2 beside full attention, such as 3")
	f.IntVar(&g.Windows, "sliding-window-groups", 0, "`N` KV cache groups of sliding window attention beside full attention, such as 5")
	f.IntVar(&g.Window, "sliding-window", 1024, "size of their window, `N` tokens")
	f.IntVar(&g.RetentionInterval, "prefix-cache-retention-interval", 0,
		"`N` above 0: these groups let a prompt be hit also where a chunk of it ended; 0: only at its end and where others branched off")
}

// addQuadraticFlag adds --quadratic, whose 0 means engine.LinearPrefill.
func addQuadraticFlag(f *pflag.FlagSet, depth *float64) {
	*depth = engine.DefaultQuadraticDepth
	f.Var((*quadraticValue)(depth), "quadratic",
		"cost of attention: `SHARE` by which each preceding token raises the time of a prompt token; 0: linear prefill")
}

type quadraticValue float64

func (v *quadraticValue) Set(text string) error {
	share, err := strconv.ParseFloat(text, 64)
	if err != nil || !(share >= 0 && share <= 1) {
		return errors.New("choose a share from 0 to 1")
	}
	if *v = quadraticValue(share); share == 0 {
		*v = engine.LinearPrefill
	}
	return nil
}

func (v *quadraticValue) String() string {
	return strconv.FormatFloat(max(0, float64(*v)), 'g', 2, 64)
}

func (v *quadraticValue) Type() string { return "float64" }

// runSim serves a replica on each address until the command's context is done, then drains them for the given time.
func runSim(cmd *cobra.Command, listen []string, cfg sim.Config, drainTimeout time.Duration) error {
	for _, address := range listen {
		if err := config.CheckListenAddress(address); err != nil {
			return cli.UsageError{Err: fmt.Errorf("--listen: %w", err)}
		}
	}
	if len(listen) > 1 {
		cfg.GPU = &sim.GPU{}
	}
	if err := cfg.Validate(); err != nil {
		return cli.UsageError{Err: err}
	}
	var replicas []*sim.Server
	for _, address := range listen {
		s := sim.NewServer(cfg)
		if err := s.Bind(address); err != nil {
			if failed := (*sim.KVEventsBindError)(nil); errors.As(err, &failed) {
				return server.ListenError("--kv-events", failed.Address, err)
			}
			return server.ListenError("--listen", address, err)
		}
		fmt.Fprintf(cmd.ErrOrStderr(), "simulated replica of %s: base URL %s/v1\n", cfg.Model, s.URL())
		replicas = append(replicas, s)
	}
	// After the signal, requests end the way vLLM ends them, so Run must outlive it.
	running, ctx := errgroup.WithContext(context.WithoutCancel(cmd.Context()))
	for _, s := range replicas {
		running.Go(func() error { return runReplica(ctx, cmd.Context(), s, drainTimeout) })
	}
	return running.Wait()
}

// runReplica serves until ctx is done, or until signal is, when it drains for the given time.
func runReplica(ctx, signal context.Context, s *sim.Server, drainTimeout time.Duration) error {
	shutdown := make(chan error, 1)
	stop := context.AfterFunc(signal, func() {
		ctx, cancel := context.WithTimeout(ctx, drainTimeout+simShutdownTimeout)
		defer cancel()
		if drainTimeout > 0 {
			s.Drain(drainTimeout)
		}
		shutdown <- s.AbortAndShutdown(ctx)
	})
	err := s.Run(ctx)
	if stop() {
		return err // it failed before the signal
	}
	if shutdownErr := <-shutdown; !errors.Is(shutdownErr, context.DeadlineExceeded) {
		err = errors.Join(err, shutdownErr)
	}
	return err
}
