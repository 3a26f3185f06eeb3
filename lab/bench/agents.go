package main

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"slices"
	"time"

	"warmroute/lab/loadgen"
	"warmroute/lab/replay"
)

// agentsReport is what runAgents prints. Times are in the replicas' time.
type agentsReport struct {
	Name    string         `json:"name"`
	API     string         `json:"api"`
	Summary replay.Summary `json:"requests"`
	// PooledHitRatio is the hit ratio that one cache for all replicas would give.
	PooledHitRatio  float64 `json:"pooled_hit_ratio"`
	TTFTLongestMean float64 `json:"ttft_longest_mean_s"` // of the tenth of the requests with the longest prompts
	TaskMean        float64 `json:"task_mean_s"`         // from a conversation's first request to its last byte
	LongestPrompt   int     `json:"longest_prompt_tokens"`
	DistinctTokens  int     `json:"distinct_tokens"` // that all conversations together computed, at least
	// Load is the work that one cache for all would leave, over what the replicas can prefill in
	// the mean time of a conversation.
	Load     float64 `json:"load"`
	Duration float64 `json:"duration_s"`
}

// runAgents plays coding agents' conversations to one server and prints what the client
// measured as one JSON object.
func runAgents(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("agents", flag.ExitOnError)
	url := flags.String("url", "http://127.0.0.1:8080", "server to send to, without /v1")
	name := flags.String("name", "", "name of the result")
	api := flags.String("api", "chat", "chat, messages or responses")
	header := flags.String("session-header", "", "header in which each request names its conversation")
	speed := flags.Float64("speed", 1, "how many times faster than real time the replicas run")
	prefillRate := flags.Float64("prefill-rate", 8*8000, "prompt tokens per second of all replicas")
	blockTokens := flags.Int("block-size", 16, "tokens in a block of the replicas' cache")
	agents := loadgen.Agents{
		Model: "sim", ToolSets: 4, SystemBytes: 14_000, Tools: 16, ToolBytes: 1_000,
		TaskBytes: loadgen.Range{Min: 300, Max: 3_000}, ResultBytes: 3_600, ReplyTokens: loadgen.Range{Min: 20, Max: 60},
	}
	flags.Uint64Var(&agents.Seed, "seed", 1, "seed of the conversations")
	flags.IntVar(&agents.Conversations, "conversations", 64, "number of conversations, all at the same time")
	flags.IntVar(&agents.Turns, "turns", 30, "requests of each")
	flags.DurationVar(&agents.ToolTime, "tool-time", 300*time.Millisecond, "mean time from a reply to the next request")
	flags.DurationVar(&agents.StartWithin, "start-within", 10*time.Second, "time over which the conversations start")
	flags.Parse(args)
	agents.API, agents.SessionHeader = loadgen.API(*api), *header
	if !slices.Contains([]loadgen.API{loadgen.ChatAPI, loadgen.MessagesAPI, loadgen.ResponsesAPI}, agents.API) {
		return fmt.Errorf("-api %s is not chat, messages or responses", *api)
	}

	httpClient := loadgen.NewHTTPClient()
	defer httpClient.CloseIdleConnections()
	client := &loadgen.Client{URL: *url, Model: agents.Model, HTTP: httpClient, Speed: *speed, Timeout: 10 * time.Minute}
	start := time.Now()
	runs := client.RunAgents(ctx, &agents)
	report := summarizeAgents(runs, *blockTokens, time.Duration(float64(time.Since(start))**speed))
	report.Name, report.API = *name, *api
	report.Load = float64(report.DistinctTokens) / (*prefillRate * max(report.TaskMean, 1e-9))
	return json.NewEncoder(os.Stdout).Encode(report)
}

func summarizeAgents(runs []loadgen.AgentRun, blockTokens int, elapsed time.Duration) agentsReport {
	var tally replay.Tally
	var complete []replay.Result
	r := agentsReport{Duration: elapsed.Seconds()}
	for _, run := range runs {
		r.TaskMean += run.Task.Seconds() / float64(len(runs))
		for _, result := range run.Results {
			tally.Add(result)
			if result.Err == "" {
				complete = append(complete, result)
				r.LongestPrompt = max(r.LongestPrompt, result.PromptTokens)
			} else {
				fmt.Fprintln(os.Stderr, "agents:", result.Err, result.Detail)
			}
		}
	}
	r.Summary = tally.Summary("", elapsed)
	cached := pooledCachedTokens(runs, blockTokens)
	r.DistinctTokens = r.Summary.PromptTokens - cached
	r.PooledHitRatio = float64(cached) / float64(max(r.Summary.PromptTokens, 1))

	slices.SortStableFunc(complete, func(a, b replay.Result) int { return cmp.Compare(b.PromptTokens, a.PromptTokens) })
	longest := complete[:(len(complete)+9)/10]
	for _, result := range longest {
		r.TTFTLongestMean += result.TTFT.Seconds() / float64(len(longest))
	}
	return r
}

// pooledCachedTokens returns the cached tokens of one cache that holds everything: of a
// turn the full blocks of the previous turn and its reply, whose last token is not computed;
// of a conversation's first turn its system prompt and tools, unless it is the first
// conversation with these. Their length is the most that a first turn had cached.
func pooledCachedTokens(runs []loadgen.AgentRun, blockTokens int) (tokens int) {
	shared, uses := map[int]int{}, map[int]int{}
	for _, run := range runs {
		before := 0
		for turn, r := range run.Results {
			if r.Err != "" {
				break
			}
			if turn == 0 {
				shared[run.ToolSet] = max(shared[run.ToolSet], r.CachedTokens)
				uses[run.ToolSet]++
			} else {
				tokens += min(before-1, r.PromptTokens-1) / blockTokens * blockTokens
			}
			before = r.PromptTokens + r.CompletionTokens
		}
	}
	for set, n := range uses {
		tokens += (n - 1) * shared[set]
	}
	return tokens
}
