package main

import (
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// benchOptions are the flags of bench.
type benchOptions struct {
	urls              []string
	model             string
	keyFiles, keyEnvs []string

	length, warmup time.Duration // for each URL; for each round
	conversations  int           // for each URL; 0: as many as length allows
	rounds         int           // 0: two where URLs are compared, else one
	timeout        time.Duration

	sessions, turns                         int
	systemPrompts, systemTokens, userTokens int
	answerTokens                            int
	think                                   time.Duration
	seed                                    uint64
	plain                                   bool

	json bool
}

func newBenchCommand() *cobra.Command {
	var o benchOptions
	var targets []*benchTarget
	cmd := &cobra.Command{
		Use:   "bench --url URL [--url URL ...]",
		Short: "Measure OpenAI endpoints side by side, under multi-turn chats",
		Long: `Play the same chats to each URL, be it a warmroute, another proxy or a single
vLLM, and print time to first token (TTFT), gap between chunks (ITL), time for
each token after the first (TPOT), end to end (E2E), hit ratio and throughput,
each as a ratio to the first URL's as well.

Users come back: --sessions of them chat at a time, each sends the whole
conversation with the server's own answers, waits for the answer and thinks.
Each conversation begins with one of a few shared system prompts.

What is compared is alike: the seed gives every URL the same conversations; URLs
take turns, in rounds, each round in the opposite order to the one before, so
that what changes with time falls on all of them; and in each round each URL's
prompts begin with a nonce of their own, so that none is served from what
another left in the caches of replicas that they share.

Prompts and keys are never printed. Ctrl-C prints what there is.`,
		Example: `  warmroute bench --url http://127.0.0.1:8080
  warmroute bench --url http://nginx:80 --url http://warmroute:8080 --for 5m --sessions 32
  warmroute bench --url http://127.0.0.1:8000 --api-key-env VLLM_API_KEY --json | jq '.results[].ttft_p99_s'`,
		Args: func(cmd *cobra.Command, args []string) (err error) {
			if err := cobra.NoArgs(cmd, args); err != nil {
				return err
			}
			if err := o.check(cmd.Flags()); err != nil {
				return err
			}
			targets, err = o.targets()
			return err
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runBench(cmd.Context(), &o, targets, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	o.addTo(cmd.Flags())
	return cmd
}

func (o *benchOptions) addTo(f *pflag.FlagSet) {
	f.SortFlags = false
	f.StringArrayVar(&o.urls, "url", nil, "`URL` of an OpenAI endpoint, like http://10.0.0.5:8000 (repeatable)")
	f.StringVar(&o.model, "model", "", "`MODEL` to ask for (default: the only one that the URL lists)")
	f.StringArrayVar(&o.keyFiles, "api-key-file", nil, "read the API key from `FILE`; once for all URLs, or once for each, in order")
	f.StringArrayVar(&o.keyEnvs, "api-key-env", nil, "the same, from the environment `VARIABLE`")
	f.BoolVar(&o.plain, "plain", false, "send nothing that OpenAI's API does not have: else ignore_eos, vLLM's, gives all answers their length")

	f.DurationVar(&o.length, "for", time.Minute, "`DURATION` of the measured time of each URL, all its rounds together")
	f.IntVar(&o.conversations, "conversations", 0, "`N` conversations for each URL, however long they take, instead of --for and without warm-up")
	f.DurationVar(&o.warmup, "warmup", 5*time.Second, "`DURATION` at the start of each round that is not measured")
	f.IntVar(&o.rounds, "rounds", 0, "`N` rounds (default 2; 1 for a single URL)")
	f.DurationVar(&o.timeout, "timeout", time.Minute, "`DURATION` after which a request counts as lost")

	f.IntVar(&o.sessions, "sessions", 16, "`K` conversations at a time")
	f.IntVar(&o.turns, "turns", 6, "`N` requests in each")
	f.IntVar(&o.systemPrompts, "system-prompts", 8, "`N` system prompts that they share, the first most")
	f.IntVar(&o.systemTokens, "system-tokens", 1000, "`N` tokens of each of these, about: 4 characters count as one")
	f.IntVar(&o.userTokens, "user-tokens", 200, "`N` tokens of a user's message, about, on average")
	f.IntVar(&o.answerTokens, "answer-tokens", 64, "`N` tokens of an answer, on average")
	f.DurationVar(&o.think, "think", time.Second, "mean `DURATION` between an answer and the user's next message")
	f.Uint64Var(&o.seed, "seed", 1, "`S`: another one gives other conversations")

	f.BoolVar(&o.json, "json", false, "print one JSON object instead of the table")
}
