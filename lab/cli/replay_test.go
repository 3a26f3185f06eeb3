package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"warmroute/lab/replay"
)

// writeReplayTrace writes 40 requests over four prefixes, five a second.
func writeReplayTrace(t *testing.T) string {
	t.Helper()
	var lines bytes.Buffer
	for i := range 40 {
		fmt.Fprintf(&lines, `{"timestamp": %d, "input_length": 1200, "output_length": 20, "hash_ids": [0, %d, %d]}`+"\n",
			i*200, 1+i%4, 100+i)
	}
	path := filepath.Join(t.TempDir(), "small.jsonl")
	if err := os.WriteFile(path, lines.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// runReplayCommand returns the exit status and what was printed.
func runReplayCommand(ctx context.Context, t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	return execute(ctx, t, append([]string{"replay"}, args...)...)
}

func TestReplayJSON(t *testing.T) {
	status, out, errs := runReplayCommand(t.Context(), t, "--trace", writeReplayTrace(t),
		"--backends", "2", "--load", "0.5", "--seeds", "2", "--policy", "prefix,round-robin,pooled", "--json")
	if status != 0 || errs != "" {
		t.Fatalf("status %d, stderr %s", status, errs)
	}
	var report struct {
		Trace    string
		Backends int
		Load     float64
		Seeds    int
		Results  []map[string]any
	}
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	if report.Trace != "small.jsonl" || report.Backends != 2 || report.Load != 0.5 || report.Seeds != 2 {
		t.Errorf("got %+v", report)
	}
	var policies []string
	for _, result := range report.Results {
		policies = append(policies, result["policy"].(string))
		for _, name := range []string{
			"requests", "hit_ratio", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tpot_mean_s",
			"e2e_mean_s", "work_max_over_mean", "in_flight_max_over_mean", "throughput_rps",
		} {
			if v, ok := result[name].(float64); !ok || v <= 0 {
				t.Errorf("%s of %s is %v", name, result["policy"], result[name])
			}
		}
		spread, ok := result["spread"].(map[string]any)["ttft_mean_s"].(map[string]any)
		if mean := result["ttft_mean_s"].(float64); !ok || spread["min"].(float64) > mean || spread["max"].(float64) < mean {
			t.Errorf("mean TTFT of %s is %v, spread %v", result["policy"], mean, spread)
		}
	}
	if want := []string{"prefix", "round-robin", "pooled"}; !slices.Equal(policies, want) {
		t.Errorf("policies %v, want %v", policies, want)
	}
}

func TestReplayJSONPerLoad(t *testing.T) {
	f := func(loads string, want ...float64) {
		t.Helper()
		_, out, errs := runReplayCommand(t.Context(), t, "--trace", writeReplayTrace(t), "--load", loads, "--policy", "prefix", "--json")
		var got []float64
		for line := range strings.Lines(out) {
			var report struct{ Load float64 }
			if err := json.Unmarshal([]byte(line), &report); err != nil {
				t.Fatalf("%v in %s; %s", err, line, errs)
			}
			got = append(got, report.Load)
		}
		if !slices.Equal(got, want) {
			t.Errorf("--load %s: reports of %v", loads, got)
		}
	}
	f("0.9", 0.9)
	f("0.9,0.1,0.5", 0.9, 0.1, 0.5)
}

func TestReplayWorkloads(t *testing.T) {
	f := func(name string, load float64, args ...string) {
		t.Helper()
		_, out, errs := runReplayCommand(t.Context(), t, append(args, "--policy", "least-load", "--json")...)
		var report replay.Report
		if err := json.Unmarshal([]byte(out), &report); err != nil {
			t.Fatalf("%v in %q; %s", err, out, errs)
		}
		if !strings.Contains(out, `"load":`) {
			t.Errorf("%v: no load in %s", args, out)
		}
		if report.Trace != name || math.Abs(report.Load-load) > 0.001 || len(report.Results) != 1 || report.Results[0].Requests == 0 {
			t.Errorf("%v: got %s", args, out)
		}
	}
	f("agentic-2", 0, "--workload", "agentic", "--concurrency", "2", "--backends", "1")
	f("hot-1", 0.119, "--workload", "hot")
	f("hot-3", 0.047, "--workload", "hot", "--backends", "1", "--rate", "1", "--prompts", "3")
	f("hot-1", 0.2, "--workload", "hot", "--backends", "1", "--load", "0.2")
	f("chats", 1.5, "--workload", "chats", "--backends", "1")
	f("chats", 0.5, "--workload", "chats", "--backends", "1", "--load", "0.5")
	f("documents", 1.5, "--workload", "documents", "--backends", "1")
	f("documents", 0.3, "--workload", "documents", "--backends", "1", "--load", "0.3")
}

func TestReplayClosedLoop(t *testing.T) {
	trace := filepath.Join(t.TempDir(), "sessions.jsonl")
	var lines strings.Builder
	for i := range 40 {
		fmt.Fprintf(&lines, `{"timestamp": %d, "input_length": 600, "output_length": 20, "session": %d, "hash_ids": [0, %d]}`+"\n", 100*i, i%4,
			i%4)
	}
	if err := os.WriteFile(trace, []byte(lines.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"--trace", trace, "--closed-loop", "--concurrency", "2", "--policy", "prefix"}
	_, out, errs := runReplayCommand(t.Context(), t, append(args, "--json")...)
	var report replay.Report
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatalf("%v in %q; %s", err, out, errs)
	}
	s := report.Results[0]
	if report.Load != 0 || s.Requests != 40 || s.WallTime <= 0 || math.Abs(s.ConversationTime-10*s.E2EMean) > 1e-6 {
		t.Errorf("%+v: want ten times the mean latency for each session", s)
	}
	if _, out, _ := runReplayCommand(t.Context(), t, args...); !strings.Contains(out,
		"sessions.jsonl, 2 conversations at once, 8 backends\n") || !strings.Contains(out, "conversation s  wall s") {
		t.Errorf("got %s", out)
	}
}

func TestReplayIsDeterministic(t *testing.T) {
	trace := writeReplayTrace(t)
	f := func(args ...string) {
		t.Helper()
		args = append([]string{"--trace", trace, "--policy", "all", "--load", "1,2", "--json"}, args...)
		_, first, _ := runReplayCommand(t.Context(), t, args...)
		_, second, _ := runReplayCommand(t.Context(), t, args...)
		if first == "" || first != second {
			t.Errorf("%v:\n%s\nand then\n%s", args, first, second)
		}
	}
	f()
	f("--seeds", "3")
	f("--conversation-ids")
}

func TestReplayTable(t *testing.T) {
	status, out, errs := runReplayCommand(t.Context(), t, "--trace", writeReplayTrace(t), "--policy", "prefix,random,pooled", "--load", "0.9")
	if status != 0 || errs != "" {
		t.Fatalf("status %d, stderr %q: expected no progress bar", status, errs)
	}
	for _, want := range []string{
		"small.jsonl, 8 backends, load 0.9\n", "  random ", "in flight",
		"\nprefix / best other policy: TTFT × ", "\nprefix / pooled (",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	const overAll = "\nprefix / each other policy"
	if strings.Contains(out, overAll) {
		t.Errorf("one load has a summary of several: %s", out)
	}
	if _, out, _ := runReplayCommand(t.Context(), t, "--trace", writeReplayTrace(t), "--policy", "prefix,random", "--load",
		"0.5,0.9"); !strings.Contains(out, overAll) {
		t.Errorf("no %q in\n%s", overAll, out)
	}
}

// TestReplayRoles plays one replica for prefill and two for decode, and beside it three that do both.
func TestReplayRoles(t *testing.T) {
	args := []string{"--trace", writeReplayTrace(t), "--prefill", "1", "--decode", "2", "--load", "0.9", "--seeds", "2", "--kv-transfer-time",
		"50ms"}
	_, out, errs := runReplayCommand(t.Context(), t, append(args, "--split", "always", "--json")...)
	var report replay.Report
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatalf("%v in %q; %s", err, out, errs)
	}
	split, ok := report.Find("prefix+roles")
	if !ok || report.Backends != 3 || split.SplitShare != 1 || split.KVTransferMean < 0.05 || split.KVTransferMean > 0.1 || split.ITLP99 <= 0 {
		t.Errorf("with --split always: %s", out)
	}
	for _, policy := range []string{"prefix", "least-load", "round-robin", "pooled"} {
		if s, ok := report.Find(policy); !ok || s.SplitShare != 0 || s.KVTransferMean != 0 || s.ITLP99 <= 0 {
			t.Errorf("%s: %+v", policy, s)
		}
	}
	_, out, _ = runReplayCommand(t.Context(), t, append(args, "--split", "never", "--policy", "prefix")...)
	for _, want := range []string{"small.jsonl, 3 backends, load 0.9, mean of 2 seeds\n", "  prefix+roles ", "ITL p99  split  KV transfer"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}

func TestReplayPlot(t *testing.T) {
	trace, plot := writeReplayTrace(t), filepath.Join(t.TempDir(), "replay.svg")
	f := func(loads string) {
		t.Helper()
		status, _, errs := runReplayCommand(t.Context(), t, "--trace", trace, "--policy", "all", "--load", loads, "--plot", plot)
		if status != 0 {
			t.Fatalf("status %d: %s", status, errs)
		}
		svg, err := os.ReadFile(plot)
		if err != nil {
			t.Fatal(err)
		}
		for d := xml.NewDecoder(bytes.NewReader(svg)); ; {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
		}
		for _, name := range replayPolicies() {
			if !bytes.Contains(svg, []byte(">"+name+"</text>")) {
				t.Errorf("--load %s: %s is missing in the plot", loads, name)
			}
		}
	}
	f("0.9")
	f("0.7,0.9")
}

func TestReplayHelpSeparatesResearch(t *testing.T) {
	_, help, _ := execute(t.Context(), t, "replay", "--help")
	everyday, research, _ := strings.Cut(help, "\nFlags for research:\n")
	_, everyday, _ = strings.Cut(everyday, "\nFlags:\n")
	if !strings.Contains(everyday, "  --trace FILE") || strings.Contains(everyday, "--evictions") ||
		!strings.Contains(research, "  --evictions F") || strings.Contains(research, "--trace") {
		t.Errorf("got %s", help)
	}
}

func TestReplayUsageErrors(t *testing.T) {
	trace := writeReplayTrace(t)
	f := func(want int, advice string, args ...string) {
		t.Helper()
		status, out, errs := runReplayCommand(t.Context(), t, args...)
		if status != want || out != "" || !strings.Contains(errs, advice) {
			t.Errorf("%v: status %d, want %d; stdout %q, stderr %q lacks %q", args, status, want, out, errs, advice)
		}
	}
	f(2, "name one of --from URL, --trace FILE and --workload agentic|")
	f(2, "name one of --from URL, --trace FILE and --workload agentic|", "--trace", trace, "--workload", "hot")
	f(2, "choose one of agentic", "--workload", "cold")
	f(2, "requires --workload agentic", "--trace", trace, "--concurrency", "3")
	f(2, "--closed-loop requires --from or --trace", "--workload", "agentic", "--closed-loop")
	f(2, "use --concurrency", "--trace", trace, "--closed-loop", "--load", "0.9")
	f(1, "no request of the trace names its session", "--trace", trace, "--closed-loop")
	f(2, "require --workload hot", "--workload", "chats", "--rate", "3")
	f(2, "use --concurrency", "--workload", "agentic", "--load", "0.9")
	f(2, "exclude each other", "--workload", "hot", "--load", "0.9", "--rate", "3")
	f(2, "--concurrency -1", "--workload", "agentic", "--concurrency", "-1")
	f(2, "--prompts -1", "--workload", "hot", "--prompts", "-1")
	f(2, "--rate -1", "--workload", "hot", "--rate", "-1")
	f(2, "choose one of prefix", "--trace", trace, "--policy", "best")
	f(2, "duplicate policy prefix", "--trace", trace, "--policy", "prefix,prefix")
	f(2, "--load 0 is not above 0", "--trace", trace, "--load", "0.9,0")
	f(2, `--load: "much" is not a list of numbers`, "--trace", trace, "--load", "much")
	f(2, "--backends 0", "--trace", trace, "--backends", "0")
	f(2, "--seeds 0", "--trace", trace, "--seeds", "0")
	f(2, "--kv-tokens 100", "--trace", trace, "--kv-tokens", "100")
	f(2, "--per-device 3 is not between 1 and --backends, 2", "--trace", trace, "--backends", "2", "--per-device", "3")
	f(2, "--prefill 2 and --decode 0: name at least one", "--trace", trace, "--prefill", "2")
	f(2, "--prefill 2 and --decode 7: name at least one replica for each, and not more than --backends, 8", "--trace", trace, "--prefill", "2",
		"--decode", "7", "--backends", "8")
	f(2, "--prefill -1 and", "--trace", trace, "--prefill", "-1", "--decode", "2")
	f(2, `--split: "some" is not`, "--trace", trace, "--split", "some")
	f(2, "prefix+roles requires --prefill and --decode", "--trace", trace, "--policy", "prefix+roles")
	f(2, `unknown policy "pooled+roles"`, "--trace", trace, "--prefill", "1", "--decode", "2", "--policy", "prefix+roles,pooled+roles")
	f(2, "--kv-transfer-time", "--trace", trace, "--kv-transfer-time", "0s")
	f(2, "--kv-token-bytes", "--trace", trace, "--kv-token-bytes", "0")
	f(2, "--kv-transfer-bandwidth NaN", "--trace", trace, "--kv-transfer-bandwidth", "NaN")
	f(2, "--speeds has 3 values for 2", "--trace", trace, "--backends", "2", "--speeds", "1,1,1")
	f(2, "--speeds: 0", "--trace", trace, "--speeds", "1,0")
	f(2, "--non-streaming 1.5 is not between 0 and 1", "--trace", trace, "--non-streaming", "1.5")
	f(2, "--index-factor", "--trace", trace, "--index-factor", "0")
	f(2, "--evictions", "--trace", trace, "--evictions", "-1")
	f(2, "--poll", "--trace", trace, "--poll", "-1s")
	f(2, "--step-tokens", "--trace", trace, "--step-tokens", "0")
	f(2, "must not be negative", "--trace", trace, "--linear-attention-groups", "-1")
	f(2, "a window of at least 2", "--trace", trace, "--sliding-window-groups", "1", "--sliding-window", "1")
	f(2, "cannot transfer KV", "--trace", trace, "--prefill", "1", "--decode", "1", "--linear-attention-groups", "3")
	f(1, "budget of at least a block", "--trace", trace, "--linear-attention-groups", "3", "--step-tokens", "500")
	f(2, "--quadratic", "--trace", trace, "--quadratic", "-1")
	f(2, "--slo", "--trace", trace, "--slo", "-1s")
	f(2, "--index-factor +Inf is not between", "--trace", trace, "--index-factor", "Inf")
	f(2, "--index-factor NaN is not between", "--trace", trace, "--index-factor", "NaN")
	f(2, "--bypass 1 is not from 0", "--trace", trace, "--bypass", "1")
	f(2, "--evictions +Inf is not between", "--trace", trace, "--evictions", "Inf")
	f(2, "--quadratic", "--trace", trace, "--quadratic", "Inf")
	f(2, "--step-tokens 2000000 is not between", "--trace", trace, "--step-tokens", "2000000")
	f(2, "--poll 1ns is not between 1ms", "--trace", trace, "--poll", "1ns")
	f(2, "--poll-lag 2h0m0s is not between", "--trace", trace, "--poll-lag", "2h")
	f(2, "choose one of join, leave, restart", "--trace", trace, "--policy", "prefix", "--change", "explode:1@1s")
	f(2, "backend 8 is not between 0 and 7", "--trace", trace, "--policy", "prefix", "--change", "join:8@1s")
	f(2, "is not of the form join:7@20m", "--trace", trace, "--policy", "prefix", "--change", "join@1s")
	f(2, "is not of the form join:7@20m", "--trace", trace, "--policy", "prefix", "--change", "join:1x@1s")
	f(2, "remove it from --policy", "--trace", trace, "--policy", "pooled", "--change", "join:1@1s")
	f(2, "no such file", "--trace", trace+".missing")
	f(1, "--plot", "--trace", trace, "--plot", filepath.Join(trace, "x.svg"))

	broken := filepath.Join(t.TempDir(), "broken.jsonl")
	if err := os.WriteFile(broken, []byte("{}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	f(2, "line 1: timestamp is missing", "--trace", broken)
}

func TestReplayFlags(t *testing.T) {
	status, out, errs := runReplayCommand(t.Context(), t, "--trace", writeReplayTrace(t), "--policy", "prefix,all",
		"--backends", "4", "--per-device", "2", "--kv-tokens", "100000", "--load", "1.5", "--seeds", "2", "--seed", "7", "--speeds", "1,0.5",
		"--poll", "200ms", "--poll-lag", "50ms", "--non-streaming", "0.5", "--no-usage", "--index-factor", "2", "--evictions", "1", "--kv-events",
		"--bypass", "0.2",
		"--change", "join:3@1s", "--change", "leave:0@2s", "--change", "restart:1@3s", "--step-tokens", "2048", "--quadratic", "1.9e-5",
		"--queue=false", "--learning=false", "--slo", "2s", "--json")
	if status != 0 || !strings.Contains(out, `"requests":40`) {
		t.Errorf("status %d, stdout %s, stderr %s", status, out, errs)
	}
}

// TestReplayHybridModel plays prompts of two blocks, whose first one is the same in all and whose second one has four values.
// The last 36 hit both blocks. Of the others all but the first can hit one, if the groups keep what that needs.
func TestReplayHybridModel(t *testing.T) {
	for _, c := range []struct {
		flags  string
		blocks int // hit
	}{
		{"--linear-attention-groups=3", 36*2 + 2},
		{"--sliding-window-groups=5 --sliding-window=513", 36*2 + 2},
		{"--sliding-window-groups=5", 36*2 + 3}, // below the window everything is kept
		{"--sliding-window-groups=5 --sliding-window=513 --prefix-cache-retention-interval=512 --step-tokens=600", 36*2 + 3},
	} {
		flags := "--trace=" + writeReplayTrace(t) + " --policy=prefix --backends=1 --kv-events --json " + c.flags
		status, out, errs := runReplayCommand(t.Context(), t, strings.Fields(flags)...)
		if want := fmt.Sprintf(`"hit_ratio":%v,`, float64(c.blocks*512)/(40*1200)); status != 0 || !strings.Contains(out, want) {
			t.Errorf("%s: status %d, stdout %s lacks %s; stderr %s", c.flags, status, out, want, errs)
		}
	}
}

func TestReplayConfig(t *testing.T) {
	trace, config := writeReplayTrace(t), filepath.Join(t.TempDir(), "warmroute.yaml")
	f := func(settings string) (status int, stdout, stderr string) {
		t.Helper()
		if err := os.WriteFile(config, []byte(settings), 0o600); err != nil {
			t.Fatal(err)
		}
		return runReplayCommand(t.Context(), t, "--trace", trace, "--backends", "2", "--load", "3", "--policy", "cache-threshold", "--json",
			"--config", config)
	}
	_, plain, errs := f("{}\n")
	if errs != "" {
		t.Fatal(errs)
	}
	if _, out, errs := f("routing: {imbalance_abs: 1, imbalance_ratio: 1.01}\n"); out == plain || out == "" {
		t.Errorf("narrow thresholds change nothing; stderr %q", errs)
	}
	if _, out, errs := f("backends: [{url: http://replica:8000}]\n"); out != plain {
		t.Errorf("with a backend in the file: stderr %q, got %s", errs, out)
	}
	if status, _, errs := f("routing: {gate: 1}\n"); status != 2 || !strings.Contains(errs, "routing.gate") {
		t.Errorf("status %d, stderr %q after an unknown setting", status, errs)
	}
}

func TestReplayInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	plot := filepath.Join(t.TempDir(), "replay.svg")
	f := func(drawn string) {
		t.Helper()
		status, out, errs := runReplayCommand(ctx, t, "--trace", writeReplayTrace(t), "--plot", plot)
		if status != 1 || out != "" || !strings.Contains(errs, "interrupted") {
			t.Errorf("status %d, stdout %q, stderr %q", status, out, errs)
		}
		if got, _ := os.ReadFile(plot); string(got) != drawn {
			t.Errorf("plot changed from %q to %q", drawn, got)
		}
	}
	f("")
	if _, err := os.Stat(plot); err == nil {
		t.Error("an empty plot remains")
	}
	if err := os.WriteFile(plot, []byte("an earlier one"), 0o600); err != nil {
		t.Fatal(err)
	}
	f("an earlier one")
}
