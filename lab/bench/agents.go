package main

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
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
	Agent   string         `json:"agent,omitempty"` // of recorded sessions; "all": of those of all agents
	// PooledHitRatio is the hit ratio that one cache for all replicas would give; 0: unknown.
	PooledHitRatio  float64 `json:"pooled_hit_ratio,omitzero"`
	TTFTLongestMean float64 `json:"ttft_longest_mean_s"` // of the tenth of the requests with the longest prompts
	TaskMean        float64 `json:"task_mean_s"`         // from a conversation's first request to its last byte
	LongestPrompt   int     `json:"longest_prompt_tokens"`
	// Load is the work that one cache for all would leave, over what the replicas can prefill in
	// the mean time of a conversation. Of recorded sessions it is the work that was done, over what
	// they can prefill in the time that sessions took, as many at a time as were allowed.
	Load     float64 `json:"load"`
	Duration float64 `json:"duration_s"`
}

// runAgents plays coding agents' conversations to one server and prints what the client
// measured as one JSON object, of recorded sessions as one for each agent and one for all.
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
	recording := flags.String("trace", "", "play the recorded sessions of `FILE`, over chat: a JSON object on each line with agent, session,"+
		" timestamp_ms, input and output; -seed draws their order")
	atOnce := flags.Int("at-once", 16, "number of recorded sessions at the same time")
	maxPrompt := flags.Int("max-prompt-bytes", math.MaxInt, "leave out recorded requests with a prompt above `N` bytes")
	minOutput := flags.Int("min-output-tokens", 1, "lengthen recorded outputs to `N` tokens; those of tool calls have no text")
	maxOutput := flags.Int("max-output-tokens", math.MaxInt, "shorten recorded outputs to `N` tokens")
	flags.StringVar(&agents.Model, "model", agents.Model, "model that requests name")
	flags.Parse(args)
	agents.API, agents.SessionHeader = loadgen.API(*api), *header
	if !slices.Contains([]loadgen.API{loadgen.ChatAPI, loadgen.MessagesAPI, loadgen.ResponsesAPI}, agents.API) {
		return fmt.Errorf("-api %s is not chat, messages or responses", *api)
	}

	httpClient := loadgen.NewHTTPClient()
	defer httpClient.CloseIdleConnections()
	client := &loadgen.Client{URL: *url, Model: agents.Model, HTTP: httpClient, Speed: *speed, Timeout: 10 * time.Minute}
	if *recording != "" {
		sessions, err := readRecordedSessions(*recording, *maxPrompt, *minOutput, *maxOutput)
		if err != nil {
			return err
		}
		order := rand.New(rand.NewPCG(agents.Seed, 0))
		order.Shuffle(len(sessions), func(i, j int) { sessions[i], sessions[j] = sessions[j], sessions[i] })
		start := time.Now()
		runs := client.RunRecorded(ctx, sessions, *atOnce, *header)
		reports := summarizeRecorded(runs, time.Duration(float64(time.Since(start))**speed), *atOnce, *prefillRate)
		for _, report := range reports {
			report.Name, report.API = *name, *api
			if err := json.NewEncoder(os.Stdout).Encode(report); err != nil {
				return err
			}
		}
		return nil
	}
	start := time.Now()
	runs := client.RunAgents(ctx, &agents)
	report := summarizeAgents(runs, time.Duration(float64(time.Since(start))**speed))
	cached := pooledCachedTokens(runs, *blockTokens)
	report.Name, report.API = *name, *api
	report.PooledHitRatio = float64(cached) / float64(max(report.Summary.PromptTokens, 1))
	report.Load = float64(report.Summary.PromptTokens-cached) / (*prefillRate * max(report.TaskMean, 1e-9))
	return json.NewEncoder(os.Stdout).Encode(report)
}

// readRecordedSessions reads the sessions of a file, without requests whose prompt is above maxPromptBytes, and with outputs of
// minOutputTokens to maxOutputTokens.
func readRecordedSessions(path string, maxPromptBytes, minOutputTokens, maxOutputTokens int) ([]loadgen.RecordedSession, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	sessions, err := loadgen.ReadRecordedSessions(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	for i := range sessions {
		s := &sessions[i]
		s.Turns = slices.DeleteFunc(s.Turns, func(t loadgen.Turn) bool {
			bytes := 0
			for _, m := range t.Messages {
				bytes += len(m.Content)
			}
			return bytes > maxPromptBytes
		})
		for j := range s.Turns {
			s.Turns[j].OutputTokens = min(max(s.Turns[j].OutputTokens, minOutputTokens), maxOutputTokens)
		}
	}
	return sessions, nil
}

// summarizeRecorded returns a report for each agent, in alphabetical order, and one for all.
func summarizeRecorded(runs []loadgen.AgentRun, elapsed time.Duration, atOnce int, prefillRate float64) []agentsReport {
	byAgent := map[string][]loadgen.AgentRun{}
	for _, run := range runs {
		byAgent[run.Agent] = append(byAgent[run.Agent], run)
	}
	var reports []agentsReport
	for _, agent := range slices.Sorted(maps.Keys(byAgent)) {
		report := summarizeAgents(byAgent[agent], elapsed)
		report.Agent = agent
		reports = append(reports, report)
	}
	all := summarizeAgents(runs, elapsed)
	all.Agent = "all"
	reports = append(reports, all)
	playing := max(all.TaskMean*float64(len(runs))/float64(min(atOnce, len(runs))), 1e-9)
	for i := range reports {
		computed := float64(reports[i].Summary.PromptTokens) * (1 - reports[i].Summary.HitRatio)
		reports[i].Load = computed / (prefillRate * playing)
	}
	return reports
}

func summarizeAgents(runs []loadgen.AgentRun, elapsed time.Duration) agentsReport {
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
