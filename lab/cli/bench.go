package cli

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"warmroute/backends"
	"warmroute/cli"
	"warmroute/config"
)

// maxBenchURLs is the number of columns that fit side by side in the table.
const maxBenchURLs = 6

// benchOptions are the flags of bench.
type benchOptions struct {
	urls              []string
	model             string
	keyFiles, keyEnvs []string
	caFile            string

	duration, warmup time.Duration // measured time of each URL; unmeasured time of each round
	conversations    int           // of each URL; 0: as many as duration allows
	rounds           int           // 0: two if several URLs are compared, else one
	timeout          time.Duration

	concurrency, turns                      int
	systemPrompts, systemTokens, userTokens int
	outputTokens                            int
	think                                   time.Duration
	seed                                    uint64
	plain                                   bool

	json bool
}

func newBenchCommand() *cobra.Command {
	var o benchOptions
	var targets []*benchTarget
	var tlsConfig *tls.Config // nil: the system's authorities
	cmd := &cobra.Command{
		Use:   "bench --url URL [--url URL ...]",
		Short: "Compare OpenAI endpoints under multi-turn chats",
		Long: `Send the same multi-turn chats to each URL (warmroute, another proxy or a single
vLLM) and print the time to first token (TTFT), the gap between chunks (ITL), the
time per token after the first (TPOT), the end-to-end latency (E2E), the cache
hit ratio and the throughput, each also as a ratio to the first URL.

--concurrency conversations are open at once. Each sends the whole conversation with the
server's own outputs, waits for the response, and pauses before the next message.
Conversations start with one of a few shared system prompts.

All URLs get the same conversations, in rounds whose order alternates, so that
drift over time affects all of them. In each round the prompts of each URL start
with a nonce, so that no URL is served from caches that another one filled.

Prompts and keys are never printed. Ctrl-C prints the results so far.`,
		Example: `  warmroute bench --url http://127.0.0.1:8080
  warmroute bench --url http://nginx:80 --url http://warmroute:8080 --for 5m --concurrency 32
  warmroute bench --url http://127.0.0.1:8000 --api-key-env VLLM_API_KEY --json | jq '.results[].ttft_p99_s'`,
		Args: func(cmd *cobra.Command, args []string) (err error) {
			if err := cobra.NoArgs(cmd, args); err != nil {
				return err
			}
			o.setDependentDefaults(cmd.Flags())
			if err := o.validate(cmd.Flags()); err != nil {
				return err
			}
			keys, err := o.readAPIKeys()
			if err != nil {
				return err
			}
			if o.caFile != "" {
				if tlsConfig, err = cli.LoadCAFile(o.caFile); err != nil {
					return err
				}
			}
			targets, err = o.newTargets(keys)
			return err
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runBench(cmd.Context(), &o, targets, tlsConfig, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	o.addFlags(cmd.Flags())
	return cmd
}

func (o *benchOptions) addFlags(f *pflag.FlagSet) {
	f.SortFlags = false
	f.StringArrayVar(&o.urls, "url", nil, "`URL` of an OpenAI endpoint, such as http://10.0.0.5:8000 (repeatable)")
	f.StringVar(&o.model, "model", "", "`MODEL` to request (default: the only one that the endpoint lists)")
	f.StringArrayVar(&o.keyFiles, "api-key-file", nil, "read the API key from `FILE`; give it once for all URLs, or once per URL, in order")
	f.StringArrayVar(&o.keyEnvs, "api-key-env", nil, "read the API key from the environment `VARIABLE`; likewise")
	f.StringVar(&o.caFile, "ca-file", "", "trust the certificate authorities in `FILE` (default: those of the system)")
	f.BoolVar(&o.plain, "plain", false, "send only fields of the OpenAI API; without it, vLLM's ignore_eos fixes the length of the outputs")

	f.DurationVar(&o.duration, "for", time.Minute, "measure each URL for `DURATION`, over all rounds")
	f.IntVar(&o.conversations, "conversations", 0, "run `N` conversations per URL, instead of --for and without warm-up")
	f.DurationVar(&o.warmup, "warmup", 5*time.Second, "do not measure the first `DURATION` of each round")
	f.IntVar(&o.rounds, "rounds", 0, "number `N` of rounds (default 2; 1 for a single URL)")
	f.DurationVar(&o.timeout, "timeout", time.Minute, "`DURATION` after which a request counts as lost")

	f.IntVar(&o.concurrency, "concurrency", 16, "number `N` of concurrent conversations")
	f.IntVar(&o.turns, "turns", 6, "number `N` of requests per conversation")
	f.IntVar(&o.systemPrompts, "system-prompts", 8, "number `N` of shared system prompts; the first is used most")
	f.IntVar(&o.systemTokens, "system-tokens", 1000, "length of a system prompt, about `N` tokens of 4 characters")
	f.IntVar(&o.userTokens, "user-tokens", 200, "mean length of a user message, about `N` tokens")
	f.IntVar(&o.outputTokens, "output-tokens", 64, "mean length of an output, `N` tokens")
	f.DurationVar(&o.think, "think", time.Second, "mean `DURATION` between a response and the next message")
	f.Uint64Var(&o.seed, "seed", 1, "`SEED` of the generated conversations")

	f.BoolVar(&o.json, "json", false, "print one JSON object instead of the table")
}

// setDependentDefaults sets the defaults that depend on other flags.
func (o *benchOptions) setDependentDefaults(flags *pflag.FlagSet) {
	if o.conversations != 0 && !flags.Changed("warmup") {
		o.warmup = 0
	}
	if o.rounds == 0 && !flags.Changed("rounds") {
		o.rounds = min(len(o.urls), 2)
	}
}

// validate returns the first error in the flags.
func (o *benchOptions) validate(flags *pflag.FlagSet) error {
	switch {
	case len(o.urls) == 0:
		return fmt.Errorf("--url is missing: name one or more endpoints, such as --url http://127.0.0.1:8080")
	case len(o.urls) > maxBenchURLs:
		return fmt.Errorf("too many URLs: %d, maximum %d", len(o.urls), maxBenchURLs)
	case o.conversations != 0 && flags.Changed("for"):
		return fmt.Errorf("--for and --conversations exclude each other")
	case o.conversations != 0 && flags.Changed("warmup"):
		return fmt.Errorf("--warmup and --conversations exclude each other")
	}
	for _, n := range []struct {
		flag            string
		value, min, max int
	}{
		{"rounds", o.rounds, 1, 99},
		{"concurrency", o.concurrency, 1, 10_000},
		{"turns", o.turns, 1, 1000},
		{"system-prompts", o.systemPrompts, 1, 100_000},
		{"system-tokens", o.systemTokens, 16, 1_000_000},
		{"user-tokens", o.userTokens, 8, 1_000_000},
		{"output-tokens", o.outputTokens, 2, 100_000},
		{"conversations", o.conversations, 0, 10_000_000},
	} {
		if n.value < n.min || n.value > n.max {
			return fmt.Errorf("--%s %d is not between %d and %d", n.flag, n.value, n.min, n.max)
		}
	}
	if o.conversations != 0 && o.conversations < o.rounds {
		return fmt.Errorf("--conversations %d is less than --rounds %d", o.conversations, o.rounds)
	}
	for _, d := range []struct {
		flag       string
		value, min time.Duration
	}{
		{"for", o.duration, time.Second}, {"warmup", o.warmup, 0}, {"think", o.think, 0}, {"timeout", o.timeout, 10 * time.Millisecond},
	} {
		if d.value < d.min || d.value > 24*time.Hour {
			return fmt.Errorf("--%s %v is not between %v and 24h", d.flag, d.value, d.min)
		}
	}
	return nil
}

// newTargets returns the endpoints that the flags name. apiKeys has no key, one for
// all of them, or one for each.
func (o *benchOptions) newTargets(apiKeys []string) ([]*benchTarget, error) {
	var targets []*benchTarget
	for i, raw := range o.urls {
		// SDKs want a base URL that ends in /v1.
		u, err := backends.ParseURL(strings.TrimSuffix(strings.TrimRight(raw, "/"), "/v1"))
		if err != nil {
			return nil, fmt.Errorf("--url: %s", strings.TrimPrefix(strings.Replace(err.Error(), "set api_key instead", "use --api-key-file instead",
				1), "backend URL "))
		}
		t := &benchTarget{name: string(rune('A' + i)), url: u.String(), model: o.model}
		if len(apiKeys) > 0 {
			n := min(i, len(apiKeys)-1)
			t.key = apiKeys[n]
			if t.keySource = "--api-key-file"; len(o.keyEnvs) > 0 {
				t.keySource = "--api-key-env"
			}
			t.keySource += " " + slices.Concat(o.keyFiles, o.keyEnvs)[n]
		}
		targets = append(targets, t)
	}
	return targets, nil
}

// readAPIKeys reads the keys from the files or environment variables that the flags
// name: none, one for all URLs, or one per URL.
func (o *benchOptions) readAPIKeys() (keys []string, err error) {
	if len(o.keyFiles) > 0 && len(o.keyEnvs) > 0 {
		return nil, fmt.Errorf("--api-key-file and --api-key-env exclude each other")
	}
	flag, sources, read := "--api-key-file", o.keyFiles, config.ReadFileOrPipe
	if len(o.keyEnvs) > 0 {
		flag, sources = "--api-key-env", o.keyEnvs
		read = func(variable string) ([]byte, error) { return []byte(os.Getenv(variable)), nil }
	}
	if n := len(sources); n > 1 && n != len(o.urls) {
		return nil, fmt.Errorf("%s is given %d times for %d URLs: give it once, or once per URL", flag, n, len(o.urls))
	}
	for _, source := range sources {
		text, err := read(source)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", flag, err)
		}
		key := string(bytes.TrimSpace(text))
		switch {
		case key == "":
			return nil, fmt.Errorf("%s: %s is empty", flag, source)
		case !config.IsHeaderValue(key):
			return nil, fmt.Errorf("%s: %s has more than one line, or characters that are invalid in an HTTP header", flag, source)
		}
		keys = append(keys, key)
	}
	return keys, nil
}
