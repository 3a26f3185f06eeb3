package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"warmroute/config"
	"warmroute/lab/policies"
	"warmroute/lab/replay"
	"warmroute/lab/sim/engine"
	"warmroute/router/policy"
)

const (
	maxReplayBackends  = 1024
	minSpeed, maxSpeed = 0.01, 100.0 // of a replica, relative to others
)

// replayOptions are the flags of replay.
type replayOptions struct {
	from, tokenFile, caFile string // admin listener of a running proxy

	trace, workload string
	closedLoop      bool
	concurrency     int // 0: the workload's default, also for the next three
	prompts         int
	rate            float64
	loads           []float64
	worlds          int // drawn ones to compare policies in, instead of a workload; 0: none

	backends  int
	kvTokens  int
	perDevice int // replicas that share a device
	speeds    []float64
	prefills  int // replicas for prefill
	decodes   int // replicas for decode
	split     string
	engine    engine.Config
	step      string // file with the times of its steps
	changes   []string

	config   string
	policies []string
	queue    bool
	slo      replay.SLO
	seeds    int
	seed     uint64

	poll, pollLag   time.Duration
	nonStreaming    float64
	noUsage         bool
	conversationIDs bool
	indexFactor     float64
	learning        bool
	evictions       float64
	kvEvents        bool
	bypass          float64

	json   bool
	plot   string
	export string

	recomputed bool
}

// newReplayCommand returns the replay command.
func newReplayCommand(configs config.Loader) *cobra.Command {
	var o replayOptions
	cmd := &cobra.Command{
		Use:   "replay --from URL | --trace FILE | --workload NAME | --worlds N",
		Short: "Compare routing policies in virtual time, on your traffic or a workload",
		Long: `Run a workload against simulated replicas in virtual time, once per policy, and
print the cache hit ratio, the time to first token (TTFT), the time per token
after the first (TPOT), the end-to-end latency (E2E), and the load balance: the
maximum over the mean, across backends, of prefill work and of in-flight requests.

The router is that of "warmroute serve", the replicas are those of "warmroute
sim". The same command always prints the same figures.

  --from URL            the traffic of the last hour of a running proxy, or as much of it as
                        fits into its recording.memory: times, lengths and numbers of blocks,
                        no text. The simulated fleet has the size, the KV caches and the
                        times of steps that the proxy knows of its own.
  --trace FILE          recorded requests, as written to recording.file of the
                        configuration, or in the formats of Mooncake, Bailian, Weka's
                        kv-cache-tester or LiteLLM's spend logs; with --closed-loop its
                        conversations, each turn sent after the previous response
  --workload agentic    --concurrency conversations of agents at once, each
                        turn sent after the previous response
  --workload hot        --rate requests per second that share --prompts prompts
  --workload chats      questions with 200 shared prompts, on small KV caches
  --workload documents  a few questions about each of many long documents
  --worlds N            prefix against all other policies in N worlds, that is fleets,
                        engines, clients, workloads and loads drawn at random; each
                        is simulated about 20 times with three seeds. With --trace, parts of
                        the trace are among the workloads.

A load of 1 is what the fleet can do without a cache: 44,000 prompt tokens per
second and backend; of a trace, also its output tokens, of which each takes 5 µs
and 22 ns for each token before it.`,
		Example: `  warmroute replay --from http://127.0.0.1:9090
  warmroute replay --from http://127.0.0.1:9090 --policy all --load 1.2,1.5
  warmroute replay --workload agentic --concurrency 128 --policy prefix,round-robin,chwbl
  warmroute replay --workload hot --rate 60
  warmroute replay --workload documents --load 0.9,1.5 --policy all
  warmroute replay --trace conversation.jsonl --load 0.7,0.9,1.1 --policy all --plot replay.svg
  warmroute replay --trace conversation.jsonl --seeds 5 --json | jq '.results[] | {policy, ttft_mean_s}'
  warmroute replay --trace conversation.jsonl --load 0.5,0.7 --prefill 2 --decode 6
  warmroute replay --trace recorded.jsonl --speeds 1,0.5 --policy prefix,cache-threshold
  warmroute replay --trace agents.jsonl --closed-loop --concurrency 64 --policy prefix,smg
  warmroute replay --from http://127.0.0.1:9090 --export mooncake
  warmroute replay --trace conversation.jsonl --change join:7@20m --change restart:0@40m`,
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.NoArgs(cmd, args); err != nil {
				return err
			}
			if cmd.Flags().Changed("worlds") {
				return o.validateWorlds(cmd.Flags())
			}
			if o.from == "" && o.hasRoles() && !cmd.Flags().Changed("backends") {
				o.backends = o.prefills + o.decodes
			}
			if err := o.resolvePolicies(cmd.Flags()); err != nil {
				return err
			}
			return o.validate()
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.worlds > 0 {
				return o.runWorlds(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
			}
			if o.export != "" {
				return o.exportTrace(cmd.Context(), configs, cmd.OutOrStdout())
			}
			return runReplay(cmd.Context(), o, configs, cmd.Flags().Changed, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	addFlagGroups(cmd, o.everydayFlags(), o.researchFlags())
	return cmd
}

// runReplay runs every policy at every load with every seed, and prints a report
// per load, in the order of the flags. isSet reports whether a flag was given.
func runReplay(ctx context.Context, o replayOptions, configs config.Loader, isSet func(flag string) bool, stdout,
	stderr io.Writer) (err error) {
	plan, err := o.loadPlan(ctx, configs, isSet)
	if err != nil {
		return err
	}
	if plan.description != "" {
		out := stdout
		if o.json {
			out = stderr
		}
		fmt.Fprintln(out, plan.description)
	}
	plot, err := openPlotFile(o.plot)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, plot.closeAndRemoveEmpty()) }()

	bar := newProgressBar(stderr, "replay")
	start := time.Now()
	runs, err := replay.RunAll(ctx, plan.scenarios, bar.set)
	bar.clear()
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("interrupted after %.0f s: no results", time.Since(start).Seconds())
	case err != nil:
		return err
	}
	reports := plan.addSeedMeans(runs)
	if err := plot.draw(reports); err != nil {
		return err
	}
	if o.json {
		return writeReplayJSON(stdout, reports)
	}
	return writeReplayTables(stdout, reports)
}

// everydayFlags returns the flags that compare policies on a recording or a workload.
func (o *replayOptions) everydayFlags() *pflag.FlagSet {
	f := pflag.NewFlagSet("replay", pflag.ContinueOnError)
	f.SortFlags = false
	f.StringVar(&o.from, "from", "", "run the traffic that the proxy with the admin listener at `URL` has in memory")
	f.StringVar(&o.tokenFile, "token-file", "", "--from: read the admin token from `FILE` (default: from the configuration)")
	f.StringVar(&o.caFile, "ca-file", "", "--from: trust the certificate authorities in `FILE` (default: the system's)")
	f.StringVar(&o.trace, "trace", "", "run recorded requests from `FILE`, one JSON object per line")
	f.StringVar(&o.workload, "workload", "", "run generated requests, by `NAME`: "+strings.Join(workloadNames(), ", "))
	f.BoolVar(&o.closedLoop, "closed-loop", false,
		"play each conversation of the trace as a client: a turn is sent as long after the previous response as their recorded timestamps "+
			"are apart")
	f.IntVar(&o.concurrency, "concurrency", 0, "agentic, --closed-loop: number `N` of concurrent conversations (default 48, of a trace 64)")
	f.Float64SliceVar(&o.loads, "load", nil,
		"scale the arrival rate to each of `LOADS`, such as 0.7,0.9, and print a report for each (default: a trace as recorded, hot by "+
			"--rate, chats and documents 1.5)")
	f.StringSliceVar(&o.policies, "policy", defaultReplayPolicies(), "`POLICIES` to compare, or all")
	f.StringVar(&o.config, "config", "", "read the settings of routing, slo and poll from configuration `FILE`")
	f.DurationVar(&o.slo.TTFT, "slo", 0, "keep the time to first token below `DURATION`, and print the share of "+
		"requests that missed it (default: slo.ttft)")
	f.Float64Var(&o.slo.Share, "slo-share", 1, "`SHARE` of the requests that --slo is for, drawn at random")
	f.BoolVar(&o.slo.Refuse, "slo-refuse", false, "refuse requests that are predicted to miss it (default: slo.refuse)")
	f.IntVar(&o.backends, "backends", 8, "number `N` of simulated replicas (with --from: as many as are ready)")
	f.IntVar(&o.prefills, "prefill", 0, "let `N` of the replicas be for prefill (with --from: as the proxy's are); the policy prefix"+
		withRoles+", which is added, uses them so, others as if each did both")
	f.IntVar(&o.decodes, "decode", 0, "let `N` of the replicas be for decode (default --backends: --prefill plus --decode)")
	f.StringVar(&o.split, "split", "cost", "which `REQUESTS` are split between these: always, never, or cost, as the router decides")
	f.IntVar(&o.kvTokens, "kv-tokens", 0,
		"size of each replica's KV cache, `N` tokens (default 1,536,000; chats 153,600; --from: as reported)")
	f.Float64SliceVar(&o.speeds, "speeds", nil,
		"`SPEEDS` of the replicas, repeated over the fleet: with 1,0.5 every second one is half as fast")
	f.StringVar(&o.step, "step", "", "read the times of the replicas' steps from `FILE`: the JSON object step of a backend in the response "+
		"of /api/explain")
	f.IntVar(&o.seeds, "seeds", 1, "number `N` of runs with different seeds, whose mean is printed")
	f.BoolVar(&o.recomputed, "recomputed", false,
		"print how many of the prompts' tokens were computed although a replica had computed them before, and why")
	f.BoolVar(&o.json, "json", false, "print one JSON object per line and load")
	f.StringVar(&o.export, "export", "", "run nothing: write the requests of --from or --trace to standard output in `FORMAT`: mooncake")
	f.StringVar(&o.plot, "plot", "", "draw the results to SVG `FILE`")
	f.BoolP("help", "h", false, "help for replay")
	for _, list := range []string{"load", "speeds"} {
		f.Lookup(list).DefValue = "" // not "[]" in the help
	}
	return f
}

// researchFlags returns the flags that change the simulation, or what the router knows of it.
func (o *replayOptions) researchFlags() *pflag.FlagSet {
	f := pflag.NewFlagSet("replay", pflag.ContinueOnError)
	f.SortFlags = false
	f.IntVar(&o.worlds, "worlds", 0, "compare policies in `N` random worlds")
	f.Uint64Var(&o.seed, "seed", 1, "first `SEED`")
	f.IntVar(&o.prompts, "prompts", 0, "hot: number `N` of shared prompts (default 1)")
	f.Float64Var(&o.rate, "rate", 0, "hot: `N` requests per second (default 20)")
	f.BoolVar(&o.queue, "queue", true,
		"use the admission queue; --queue=false sends all requests at once (only the policy prefix has a queue)")
	f.BoolVar(&o.learning, "learning", true, "let the router estimate what the replicas do not report, or report wrongly")
	f.BoolVar(&o.slo.Unknown, "slo-unknown", false, "do not tell the router of --slo")
	f.IntVar(&o.perDevice, "per-device", 1, "number `N` of replicas that share a GPU, and slow each other down; the router knows which")
	f.IntVar(&o.engine.StepTokens, "step-tokens", 8192, "maximum number `N` of tokens in an engine step")
	addQuadraticFlag(f, &o.engine.QuadraticDepth)
	addGroupFlags(f, &o.engine.Groups)
	f.DurationVar(&o.engine.TransferTime, "kv-transfer-time", 170*time.Millisecond,
		"`DURATION` of a transfer of KV from a replica for prefill besides the copy")
	f.IntVar(&o.engine.TransferTokenBytes, "kv-token-bytes", 131_072, "`N` bytes of KV in a token, for the copy")
	f.Float64Var(&o.engine.TransferBandwidth, "kv-transfer-bandwidth", 10e9, "copy `N` bytes per second")
	f.StringArrayVar(&o.changes, "change", nil,
		"`join:N@TIME`, leave:N@TIME or restart:N@TIME: change backend N, counted from 0, at a time such as 20m; a restart takes a minute "+
			"(repeatable)")
	f.DurationVar(&o.poll, "poll", 0, "read the replicas' metrics every `DURATION` (default: poll.interval with --config, else 1s, but "+
		"50ms for weighted)")
	f.DurationVar(&o.pollLag, "poll-lag", 0, "delay these metrics by `DURATION`")
	f.Float64Var(&o.nonStreaming, "non-streaming", 0, "`SHARE` of the requests without streaming")
	f.BoolVar(&o.noUsage, "no-usage", false, "do not report cached tokens in usage")
	f.BoolVar(&o.conversationIDs, "conversation-ids", false,
		"let requests name their conversations for every policy (default: only for session), so that prefix can break ties by them")
	f.Float64Var(&o.indexFactor, "index-factor", 1, "report the size of the KV cache to the router multiplied by `F`")
	f.BoolVar(&o.kvEvents, "kv-events", false, "let the router read the replicas' KV events")
	f.Float64Var(&o.bypass, "bypass", 0, "send a `SHARE` of the conversations to replicas at random, bypassing the router; the report "+
		"excludes them")
	f.Float64Var(&o.evictions, "evictions", 0, "evict `F` further blocks, unknown to the router, per block that the cache evicts")
	return f
}

// addFlagGroups adds both sets of flags to a command, whose help lists them separately.
func addFlagGroups(cmd *cobra.Command, everyday, research *pflag.FlagSet) {
	cmd.Flags().AddFlagSet(everyday)
	cmd.Flags().AddFlagSet(research)
	const allFlags, width = "{{.LocalFlags.FlagUsages | trimTrailingWhitespaces}}", 100
	groups := everyday.FlagUsagesWrapped(width) + "\nFlags for research:\n" + strings.TrimRight(research.FlagUsagesWrapped(width), "\n")
	cmd.SetUsageTemplate(strings.Replace(cmd.UsageTemplate(), allFlags, groups, 1))
}

// withRoles is what a policy's name ends in that uses the replicas by their roles.
const withRoles = "+roles"

func usesRoles(policy string) bool { return strings.HasSuffix(policy, withRoles) }

// defaultReplayPolicies are compared if --policy is not given.
func defaultReplayPolicies() []string {
	return []string{"prefix", "least-load", "round-robin", replay.Pooled}
}

// replayPolicies returns the policies of the router and the reference.
func replayPolicies() []string {
	return append(policies.All().Names(), replay.Pooled)
}

// resolvePolicies replaces the policy all by the names of the policies that are not named, removes a
// reference that does not support --change, and returns the first error in --policy.
func (o *replayOptions) resolvePolicies(flags *pflag.FlagSet) error {
	known := replayPolicies()
	switch {
	case len(o.policies) == 0:
		return fmt.Errorf("--policy is empty: name at least one policy, or all")
	case len(o.changes) > 0 && flags.Changed("policy") && slices.Contains(o.policies, replay.Pooled):
		return fmt.Errorf("--change: policy %s does not support changes: remove it from --policy", replay.Pooled)
	case slices.Contains(o.policies, "all"):
		o.policies = slices.DeleteFunc(o.policies, func(name string) bool { return name == "all" })
		for _, name := range known {
			if !slices.Contains(o.policies, name) {
				o.policies = append(o.policies, name)
			}
		}
	}
	if o.hasRoles() && !slices.ContainsFunc(o.policies, usesRoles) {
		o.policies = append([]string{"prefix" + withRoles}, o.policies...)
	}
	if len(o.changes) > 0 {
		o.policies = slices.DeleteFunc(o.policies, func(name string) bool { return name == replay.Pooled })
	}
	seen := make(map[string]bool)
	for _, name := range o.policies {
		switch {
		case usesRoles(name) && !o.hasRoles() && o.from == "":
			return fmt.Errorf("--policy: %s requires --prefill and --decode", name)
		case !slices.Contains(known, strings.TrimSuffix(strings.TrimSuffix(name, withRoles), policy.WithQueue)) ||
			name == replay.Pooled+withRoles:
			if described := policies.All().DescribeUnknown(name); described != "" {
				return fmt.Errorf("--policy: unknown policy %q; %s", name, described)
			}
			return fmt.Errorf("--policy: unknown policy %q; choose one of %s, or all", name, strings.Join(known, ", "))
		case seen[name]:
			return fmt.Errorf("--policy: duplicate policy %s", name)
		}
		seen[name] = true
	}
	return nil
}

// hasRoles reports whether replicas are for prefill and for decode.
func (o *replayOptions) hasRoles() bool { return o.prefills != 0 || o.decodes != 0 }

// validate returns the first error in the flags other than --policy.
func (o *replayOptions) validate() error {
	switch {
	case o.backends < 1 || o.backends > maxReplayBackends:
		return fmt.Errorf("--backends %d is not between 1 and %d", o.backends, maxReplayBackends)
	case o.perDevice < 1 || o.perDevice > o.backends:
		return fmt.Errorf("--per-device %d is not between 1 and --backends, %d", o.perDevice, o.backends)
	case o.hasRoles() && !(o.prefills > 0 && o.decodes > 0 && (o.prefills+o.decodes <= o.backends || o.from != "")):
		return fmt.Errorf("--prefill %d and --decode %d: name at least one replica for each, and not more than --backends, %d", o.prefills,
			o.decodes, o.backends)
	case !slices.Contains([]replay.Split{replay.SplitByCost, replay.SplitAlways, replay.SplitNever}, replay.Split(o.split)):
		return fmt.Errorf("--split: %q is not cost, always or never", o.split)
	case o.kvTokens != 0 && o.kvTokens < 1024 || o.kvTokens > 1<<30:
		return fmt.Errorf("--kv-tokens %d is not between 1,024 and 2^30", o.kvTokens)
	case o.seeds < 1 || o.seeds > 1000:
		return fmt.Errorf("--seeds %d is not between 1 and 1,000", o.seeds)
	case !(o.nonStreaming >= 0 && o.nonStreaming <= 1):
		return fmt.Errorf("--non-streaming %g is not between 0 and 1", o.nonStreaming)
	case !(o.indexFactor >= 0.001 && o.indexFactor <= 1000):
		return fmt.Errorf("--index-factor %g is not between 0.001 and 1,000", o.indexFactor)
	case !(o.bypass >= 0 && o.bypass < 1):
		return fmt.Errorf("--bypass %g is not from 0 to less than 1", o.bypass)
	case !(o.evictions >= 0 && o.evictions <= 1000):
		return fmt.Errorf("--evictions %g is not between 0 and 1,000", o.evictions)
	case o.engine.TransferTime <= 0 || o.engine.TransferTime > time.Minute:
		return fmt.Errorf("--kv-transfer-time %v is not above 0 and at most 1m", o.engine.TransferTime)
	case o.engine.TransferTokenBytes < 1 || o.engine.TransferTokenBytes > 1<<30:
		return fmt.Errorf("--kv-token-bytes %d is not between 1 and 2^30", o.engine.TransferTokenBytes)
	case !(o.engine.TransferBandwidth >= 1e6 && o.engine.TransferBandwidth <= 1e15):
		return fmt.Errorf("--kv-transfer-bandwidth %g is not between 1e6 and 1e15", o.engine.TransferBandwidth)
	case o.engine.StepTokens < 1 || o.engine.StepTokens > 1<<20:
		return fmt.Errorf("--step-tokens %d is not between 1 and 2^20", o.engine.StepTokens)
	case o.engine.Groups.IsHybrid() && o.hasRoles():
		return errors.New("--prefill and --decode: replicas of a hybrid model cannot transfer KV here: remove them, or the KV cache groups")
	case o.slo.TTFT < 0:
		return fmt.Errorf("--slo %v is negative", o.slo.TTFT)
	case !(o.slo.Share > 0 && o.slo.Share <= 1):
		return fmt.Errorf("--slo-share %g is not above 0 and at most 1", o.slo.Share)
	case o.poll != 0 && (o.poll < time.Millisecond || o.poll > time.Hour):
		return fmt.Errorf("--poll %v is not between 1ms and 1h", o.poll)
	case o.pollLag < 0 || o.pollLag > time.Hour:
		return fmt.Errorf("--poll-lag %v is not between 0 and 1h", o.pollLag)
	}
	for _, load := range o.loads {
		if !(load > 0 && load <= 100) {
			return fmt.Errorf("--load %g is not above 0 and at most 100", load)
		}
	}
	for _, speed := range o.speeds {
		if !(speed >= minSpeed && speed <= maxSpeed) {
			return fmt.Errorf("--speeds: %g is not between %g and %g", speed, minSpeed, maxSpeed)
		}
	}
	if len(o.speeds) > o.backends {
		return fmt.Errorf("--speeds has %d values for %d backends", len(o.speeds), o.backends)
	}
	if err := o.engine.WithDefaults().ValidateGroups(); err != nil {
		return err
	}
	if err := o.validateWorkload(); err != nil {
		return err
	}
	_, err := o.parseChanges()
	return err
}

// validateWorkload returns an error for flags that contradict each other, or do
// not apply to the workload.
func (o *replayOptions) validateWorkload() error {
	sources := 0
	for _, source := range []string{o.from, o.trace, o.workload} {
		if source != "" {
			sources++
		}
	}
	switch {
	case sources != 1:
		return fmt.Errorf("name one of --from URL, --trace FILE and --workload %s", strings.Join(workloadNames(), "|"))
	case o.from == "" && o.tokenFile+o.caFile != "":
		return fmt.Errorf("--token-file and --ca-file require --from")
	case o.workload != "" && !slices.Contains(workloadNames(), o.workload):
		return fmt.Errorf("--workload: unknown workload %q; choose one of %s", o.workload, strings.Join(workloadNames(), ", "))
	case o.closedLoop && o.workload != "":
		return fmt.Errorf("--closed-loop requires --from or --trace")
	case o.export != "" && o.export != "mooncake":
		return fmt.Errorf("--export: unknown format %q; the only one is mooncake", o.export)
	case o.export != "" && o.workload != "":
		return fmt.Errorf("--export requires --from or --trace")
	case o.concurrency != 0 && o.workload != "agentic" && !o.closedLoop:
		return fmt.Errorf("--concurrency requires --workload agentic or --closed-loop")
	case (o.prompts != 0 || o.rate != 0) && o.workload != "hot":
		return fmt.Errorf("--prompts and --rate require --workload hot")
	case len(o.loads) > 0 && (o.workload == "agentic" || o.closedLoop):
		return fmt.Errorf("--load: conversations in a closed loop wait for their responses, so their load cannot be set: use --concurrency")
	case len(o.loads) > 0 && o.rate != 0:
		return fmt.Errorf("--rate and --load exclude each other")
	case o.concurrency < 0 || o.concurrency > 10_000:
		return fmt.Errorf("--concurrency %d is not between 1 and 10,000", o.concurrency)
	case o.prompts < 0 || o.prompts > 100_000:
		return fmt.Errorf("--prompts %d is not between 1 and 100,000", o.prompts)
	case !(o.rate >= 0 && o.rate <= 10_000):
		return fmt.Errorf("--rate %g is not between 0 and 10,000", o.rate)
	}
	return nil
}

// parseChanges parses the values of --change.
func (o *replayOptions) parseChanges() ([]replay.Change, error) {
	var changes []replay.Change
	for _, text := range o.changes {
		var c replay.Change
		event, at, found := strings.Cut(text, "@")
		kind, backend, named := strings.Cut(event, ":")
		when, err := time.ParseDuration(at)
		if _, e := fmt.Sscanf(backend+"\n", "%d\n", &c.Backend); !found || !named || e != nil || err != nil || when < 0 {
			return nil, fmt.Errorf("--change: %q is not of the form join:7@20m, leave:0@600s or restart:3@1h", text)
		}
		what, ok := map[string]replay.ChangeKind{"join": replay.Join, "leave": replay.Leave, "restart": replay.Restart}[kind]
		switch {
		case !ok:
			return nil, fmt.Errorf("--change %s: unknown change %q; choose one of join, leave, restart", text, kind)
		case c.Backend < 0 || c.Backend >= o.backends:
			return nil, fmt.Errorf("--change %s: backend %d is not between 0 and %d", text, c.Backend, o.backends-1)
		}
		c.At, c.Kind, c.Away = when, what, time.Minute
		changes = append(changes, c)
	}
	return changes, nil
}
