package vllm

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// The samples but those of 0.32, which a real vLLM wrote, are shortened by hand to the
// families that matter.
func TestParseMetricsOfEveryVersion(t *testing.T) {
	for file, want := range map[string]Load{
		"metrics-0.32.txt": {
			QueuesKnown: true, KVKnown: true,
			Engines: 1, CacheTokens: 16384, BlockSize: 32, HitAlignment: 32, CacheDtype: "auto",
			PrefixQueries: 4066, PrefixHits: 3392, PrefixKnown: true, HostHitsKnown: true,
			PromptTokens: 4066, GenerationTokens: 26616, TokensKnown: true, Gaps: 26604, GapSeconds: 58.32603010099979,
			FirstTokens: 12, FirstTokenSeconds: 0.23054885864257812,
			StartTime: 1795199784.85,
		},
		// Two engines behind two API server processes, idle: those have no gauges before the first request.
		"metrics-0.32-dp2.txt": {
			Engines: 2, CacheTokens: 32768, BlockSize: 32, HitAlignment: 32, CacheDtype: "auto", PrefixKnown: true, HostHitsKnown: true,
			TokensKnown: true,
			PerEngine: []EngineLoad{
				{0, Load{Engines: 1, CacheTokens: 16384, BlockSize: 32, HitAlignment: 32, CacheDtype: "auto", PrefixKnown: true, HostHitsKnown: true,
					TokensKnown: true}},
				{1, Load{Engines: 1, CacheTokens: 16384, BlockSize: 32, HitAlignment: 32, CacheDtype: "auto", PrefixKnown: true, HostHitsKnown: true,
					TokensKnown: true}},
			},
		},
		"metrics-0.6-v0.txt": {
			Running: 7, Waiting: 3, WaitingForCapacity: 3, QueuesKnown: true,
			KVCacheUsage: 0.4375, KVKnown: true,
			Engines: 1, CacheTokens: 27858 * 16, BlockSize: 16, HitAlignment: 16, CacheDtype: "auto", PrefixCachingOff: true,
			PromptTokens: 91234, GenerationTokens: 4567, TokensKnown: true,
			RunningAdapters: []string{"sql", "chat"}, MaxAdapters: 4,
		},
		"metrics-0.8-v1.txt": { // counts blocks, and says so in HELP only
			Running: 2, QueuesKnown: true, KVCacheUsage: 0.25, KVKnown: true,
			Engines: 1, CacheTokens: 9000 * 16, BlockSize: 16, HitAlignment: 16, CacheDtype: "auto",
			PrefixQueries: 16000, PrefixHits: 9600, PrefixKnown: true,
			PromptTokens: 16100, GenerationTokens: 900, TokensKnown: true,
			StartTime: 1745000000.25,
		},
		"metrics-0.11.txt": { // writes old and new names side by side
			Running: 12, Waiting: 1, WaitingForCapacity: 1, QueuesKnown: true,
			KVCacheUsage: 0.5, KVKnown: true,
			Engines: 1, CacheTokens: 960000, BlockSize: 16, HitAlignment: 16, CacheDtype: "auto",
			PrefixQueries: 5000, PrefixHits: 3200, PrefixKnown: true,
			PromptTokens: 5100, GenerationTokens: 800, TokensKnown: true,
			StartTime: 1760000000.12,
		},
		"metrics-dp4.txt": {
			Running: 10, Waiting: 5, WaitingForCapacity: 2, QueuesKnown: true,
			KVCacheUsage: 0.3425, KVKnown: true,
			Engines: 4, CacheTokens: 400000, BlockSize: 16, HitAlignment: 16,
			PrefixQueries: 450, PrefixHits: 352, PrefixKnown: true,
			PromptTokens: 450, GenerationTokens: 45, TokensKnown: true,
			StartTime: 1.79e9,
			PerEngine: []EngineLoad{
				{0, Load{
					Running: 3, QueuesKnown: true, KVCacheUsage: 0.1, KVKnown: true,
					Engines: 1, CacheTokens: 100000, BlockSize: 16, HitAlignment: 16,
					PrefixQueries: 100, PrefixHits: 64, PrefixKnown: true,
					PromptTokens: 100, GenerationTokens: 10, TokensKnown: true, StartTime: 1.79e9,
				}},
				{1, Load{
					QueuesKnown: true, KVKnown: true, Engines: 1, CacheTokens: 100000, BlockSize: 16, HitAlignment: 16,
					PrefixKnown: true, TokensKnown: true, StartTime: 1.79e9,
				}},
				{2, Load{
					Running: 5, Waiting: 4, WaitingForCapacity: 1, QueuesKnown: true, KVCacheUsage: 0.97, KVKnown: true,
					Engines: 1, CacheTokens: 100000, BlockSize: 16, HitAlignment: 16,
					PrefixQueries: 300, PrefixHits: 256, PrefixKnown: true,
					PromptTokens: 300, GenerationTokens: 30, TokensKnown: true, StartTime: 1.79e9,
				}},
				{3, Load{
					Running: 2, Waiting: 1, WaitingForCapacity: 1, QueuesKnown: true, KVCacheUsage: 0.3, KVKnown: true,
					Engines: 1, CacheTokens: 100000, BlockSize: 16, HitAlignment: 16,
					PrefixQueries: 50, PrefixHits: 32, PrefixKnown: true,
					PromptTokens: 50, GenerationTokens: 5, TokensKnown: true, StartTime: 1.79e9,
				}},
			},
		},
		"metrics-lora.txt": {
			Running: 2, Waiting: 1, WaitingForCapacity: 1, QueuesKnown: true,
			RunningAdapters: []string{"sql", `fr\en`, `say "hi"`}, MaxAdapters: 2,
		},
		"metrics-sleeping.txt": {QueuesKnown: true, KVKnown: true, Asleep: true},
	} {
		t.Run(file, func(t *testing.T) {
			text, err := os.ReadFile("testdata/" + file)
			if err != nil {
				t.Fatal(err)
			}
			for _, text := range []string{string(text), strings.ReplaceAll(string(text), "\n", "\r\n"), string(text) + "# EOF\n"} {
				got, err := ParseMetrics(iotest.OneByteReader(strings.NewReader(text)))
				if err != nil {
					t.Fatal(err)
				}
				if !reflect.DeepEqual(got, want) {
					t.Errorf("got  %+v\nwant %+v", got, want)
				}
			}
		})
	}
}

// parse reads lines given without their line ends.
func parse(t *testing.T, lines ...string) Load {
	t.Helper()
	l, err := ParseMetrics(strings.NewReader(strings.Join(lines, "\n") + "\n"))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestMissingValuesAreUnknown(t *testing.T) {
	if l := parse(t, "# nothing of vLLM's", "python_info 1"); !reflect.DeepEqual(l, Load{}) {
		t.Errorf("%+v", l)
	}
	if l := parse(t, "vllm:num_requests_running 1"); l.QueuesKnown {
		t.Error("running alone says nothing of the queue")
	}
	if l := parse(t, "vllm:prefix_cache_queries_total 1", "vllm:prompt_tokens_total 1"); l.PrefixKnown || l.TokensKnown {
		t.Errorf("%+v", l)
	}
}

func TestInvalidValuesAreUnknown(t *testing.T) {
	for _, v := range []string{"NaN", "nan", "+Inf", "-Inf", "-1", "1e300", "1e999"} {
		l := parse(t, "vllm:num_requests_running 1", "vllm:num_requests_waiting "+v,
			"vllm:kv_cache_usage_perc 0.5", "vllm:kv_cache_usage_perc "+v)
		if !reflect.DeepEqual(l, Load{}) {
			t.Errorf("%s: %+v", v, l)
		}
	}
	for _, v := range []string{"NaN", "-1", "Inf", "1e308"} {
		l := parse(t, "vllm:prompt_tokens_total 1e308", "vllm:prompt_tokens_total "+v, "vllm:generation_tokens_total 1")
		if l.TokensKnown {
			t.Errorf("%s: %+v", v, l)
		}
	}
}

func TestUsageAboveOne(t *testing.T) {
	if l := parse(t, "vllm:kv_cache_usage_perc 1.0000000002"); !l.KVKnown || l.KVCacheUsage != 1 {
		t.Errorf("%+v", l)
	}
	if l := parse(t, "vllm:kv_cache_usage_perc 37.5"); l.KVKnown {
		t.Errorf("%+v", l)
	}
}

func TestInvalidNewNameFallsBackToOld(t *testing.T) {
	if l := parse(t, "vllm:kv_cache_usage_perc NaN", "vllm:gpu_cache_usage_perc 0.25"); !l.KVKnown || l.KVCacheUsage != 0.25 {
		t.Errorf("%+v", l)
	}
}

func TestCountersWithoutSuffix(t *testing.T) {
	l := parse(t, "vllm:prefix_cache_queries 10", "vllm:prefix_cache_hits 5", "vllm:prompt_tokens 10", "vllm:generation_tokens 3")
	if l.PrefixQueries != 10 || l.PrefixHits != 5 || l.PromptTokens != 10 || l.GenerationTokens != 3 {
		t.Errorf("%+v", l)
	}
}

func TestPrefixCountersInBlocks(t *testing.T) {
	block := `vllm:cache_config_info{block_size="16"} 1`
	help := "# HELP vllm:gpu_prefix_cache_queries_total In terms of number of queried "
	counters := []string{"vllm:gpu_prefix_cache_queries_total 10", "vllm:gpu_prefix_cache_hits_total 5"}
	if l := parse(t, append(counters, block, help+"blocks.")...); l.PrefixQueries != 160 || l.PrefixHits != 80 {
		t.Errorf("blocks: %+v", l)
	}
	if l := parse(t, append(counters, block, help+"tokens.")...); l.PrefixQueries != 10 || l.PrefixHits != 5 {
		t.Errorf("tokens: %+v", l)
	}
	if l := parse(t, append(counters, block)...); l.PrefixQueries != 160 {
		t.Errorf("the old name without HELP: %+v", l)
	}
	if l := parse(t, append(counters, help+"blocks.")...); l.PrefixKnown {
		t.Errorf("blocks of unknown size: %+v", l)
	}
}

func TestHostHits(t *testing.T) {
	local := []string{"vllm:prefix_cache_queries_total 100", "vllm:prefix_cache_hits_total 10"}
	source := func(name, value string) string {
		return `vllm:prompt_tokens_cached_by_source_total{engine="0",source="` + name + `"} ` + value
	}
	for _, c := range []struct {
		name  string
		lines []string
		host  float64
		known bool
	}{
		{"the GPU alone", nil, 0, false},
		{"host memory and a disk", []string{source("device", "10"), source("host", "20"), source("disk", "3"),
			source("external_unspecified", "1"), "vllm:external_prefix_cache_hits_total 24"}, 24, true},
		{"another replica", []string{source("device", "10"), source("host", "20"), source("p2p", "5"),
			"vllm:external_prefix_cache_hits_total 25"}, 20, true},
		{"two engines", []string{source("host", "20"), strings.ReplaceAll(source("host", "7"), `"0"`, `"1"`)}, 27, true},
		{"tiers not told apart", []string{"vllm:external_prefix_cache_queries_total 90", "vllm:external_prefix_cache_hits_total 24"}, 24, true},
		{"garbage", []string{source("host", "NaN")}, 0, false},
		{"nothing loaded yet", []string{source("device", "10"), source("host", "0")}, 0, true},
	} {
		l := parse(t, append(c.lines, local...)...)
		if l.HostHits != c.host || l.HostHitsKnown != c.known || l.PrefixHits != 10+c.host || l.PrefixQueries != 100 || !l.PrefixKnown {
			t.Errorf("%s: %+v, want %.0f tokens from the host", c.name, l, c.host)
		}
	}
}

func TestCacheSize(t *testing.T) {
	config := func(labels string) string { return "vllm:cache_config_info{" + labels + "} 1" }
	for _, c := range []struct {
		name    string
		lines   []string
		tokens  int
		engines int
	}{
		{"tokens win over blocks", []string{config(`kv_cache_size_tokens="500",block_size="16",num_gpu_blocks="10"`)}, 500, 1},
		{"None falls back to blocks", []string{config(`kv_cache_size_tokens="None",block_size="16",num_gpu_blocks="10"`)}, 160, 1},
		{"no blocks yet", []string{config(`block_size="16",num_gpu_blocks="None"`)}, 0, 1},
		{"garbage", []string{config(`block_size="16",num_gpu_blocks="-3"`)}, 0, 1},
		{"absurd", []string{config(`block_size="1000000000000",num_gpu_blocks="1000000000000"`)}, 0, 1},
		{"absurd, though each figure may be", []string{config(`block_size="100000",num_gpu_blocks="100000"`)}, 0, 1},
		{"absurd tokens", []string{config(`kv_cache_size_tokens="1125899906842624"`)}, 0, 1},
		{"one of two engines unsaid", []string{config(`engine="0",kv_cache_size_tokens="500"`), config(`engine="1",kv_cache_size_tokens="None"`)},
			0, 2},
		{"tokens of each of two engines", []string{config(`engine="0",kv_cache_size_tokens="500",block_size="16",num_gpu_blocks="62"`),
			config(`engine="1",kv_cache_size_tokens="500",block_size="16",num_gpu_blocks="62"`)}, 1000, 2},
		{"blocks of both engines in each series", []string{config(`engine="0",block_size="16",num_gpu_blocks="62"`),
			config(`engine="1",block_size="16",num_gpu_blocks="62"`)}, 992, 2},
		{"one of two engines unsaid, blocks of both",
			[]string{config(`engine="0",kv_cache_size_tokens="500",block_size="16",num_gpu_blocks="62"`),
				config(`engine="1",kv_cache_size_tokens="None",block_size="16",num_gpu_blocks="62"`)}, 992, 2},
		{"an engine's second, better series", []string{config(`engine="0",block_size="16",num_gpu_blocks="None"`),
			config(`engine="0",block_size="16",num_gpu_blocks="10"`)}, 160, 1},
		{"an engine's second, worse series", []string{config(`engine="0",block_size="16",num_gpu_blocks="10"`),
			config(`engine="0",block_size="16",num_gpu_blocks="None"`)}, 160, 1},
	} {
		if l := parse(t, c.lines...); l.CacheTokens != c.tokens || l.Engines != c.engines {
			t.Errorf("%s: %d tokens, %d engines, want %d and %d", c.name, l.CacheTokens, l.Engines, c.tokens, c.engines)
		}
	}
	if l := parse(t, config(`block_size="16",cache_hit_alignment_tokens="768",enable_prefix_caching="None"`)); l.HitAlignment != 768 ||
		l.PrefixCachingOff {
		t.Errorf("%+v", l)
	}
}

// TestKeepsCheckpoints has the labels of vLLM 0.32 for tiny models of several architectures.
func TestKeepsCheckpoints(t *testing.T) {
	for _, c := range []struct {
		model, labels   string
		keeps           bool
		alignment, pool int
	}{
		{"Qwen 2", `block_size="32",effective_attention_block_size="32",kv_cache_size_tokens="16384",num_gpu_blocks="512"`, false, 32, 0},
		{"Gemma 3", `block_size="32",effective_attention_block_size="32",kv_cache_size_tokens="54887",num_gpu_blocks="3072"`, true, 32, 98304},
		{"Gemma 4", `block_size="32",effective_attention_block_size="64",kv_cache_size_tokens="76144",num_gpu_blocks="3072"`, true, 64, 196608},
		{"Gemma 4, longer", `block_size="32",effective_attention_block_size="64",kv_cache_size_tokens="109774",num_gpu_blocks="3072"`,
			true, 64, 196608},
		{"Qwen 3.5", `block_size="544",effective_attention_block_size="544",kv_cache_size_tokens="159854",mamba_cache_mode="align",` +
			`num_gpu_blocks="361"`, true, 544, 196384},
	} {
		l := parse(t, `vllm:cache_config_info{`+c.labels+`,cache_hit_alignment_tokens="None"} 1`)
		if l.KeepsCheckpoints != c.keeps || l.HitAlignment != c.alignment || l.PoolTokens != c.pool {
			t.Errorf("%s: keeps checkpoints %v, alignment %d, pool %d; want %v, %d, %d", c.model, l.KeepsCheckpoints, l.HitAlignment,
				l.PoolTokens, c.keeps, c.alignment, c.pool)
		}
	}
}

func TestEngineLabels(t *testing.T) {
	running := func(labels ...string) (lines []string) {
		for i, l := range labels {
			lines = append(lines, `vllm:num_requests_running{engine="`+l+`"} `+strconv.Itoa(i+1), `vllm:num_requests_waiting{engine="`+l+`"} 0`)
		}
		return lines
	}
	for _, c := range []struct {
		name  string
		lines []string
		want  []int // label and running requests of each engine
	}{
		{"one", running("0"), nil},
		{"none", []string{"vllm:num_requests_running 1", "vllm:num_requests_waiting 1"}, nil},
		{"two", running("0", "1"), []int{0, 1, 1, 2}},
		{"not in order", running("5", "10", "4"), []int{4, 3, 5, 1, 10, 2}},
		{"two API server processes", append(running("0", "1"), running("0", "1")...), []int{0, 2, 1, 4}},
		{"not numbers", running("a", "b"), nil},
		{"one is not a number", running("0", "x"), nil},
		{"one is negative", running("0", "-1"), nil},
		{"one number written twice", running("1", "01"), nil},
		{"too large", running("0", "65536"), nil},
	} {
		l := parse(t, c.lines...)
		var got []int
		for _, e := range l.PerEngine {
			got = append(got, e.Engine, e.Running)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestUnlabeledSeriesOfSeveralEngines(t *testing.T) {
	l := parse(t, "process_start_time_seconds 17", `vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql"} 1`,
		`vllm:num_requests_running{engine="4"} 1`, `vllm:num_requests_running{engine="5"} 2`, "vllm:num_requests_waiting 3",
		`vllm:cache_config_info{engine="4",block_size="16",num_gpu_blocks="100"} 1`,
		`vllm:cache_config_info{engine="5",block_size="16",num_gpu_blocks="100"} 1`,
		`vllm:engine_sleep_state{engine="5",sleep_state="awake"} 0`)
	if len(l.PerEngine) != 2 || !l.Asleep || l.CacheTokens != 1600 {
		t.Fatalf("%+v", l)
	}
	for i, e := range l.PerEngine {
		want := Load{
			Running: i + 1, Waiting: 3, WaitingForCapacity: 3, QueuesKnown: true, StartTime: 17, RunningAdapters: []string{"sql"}, MaxAdapters: 2,
			Engines: 1, CacheTokens: 800, BlockSize: 16, HitAlignment: 16, Asleep: i == 1, // blocks are those of both
		}
		if e.Engine != 4+i || !reflect.DeepEqual(e.Load, want) {
			t.Errorf("got  %+v\nwant %d %+v", e, 4+i, want)
		}
	}
}

func TestTooManyEngines(t *testing.T) {
	var lines []string
	for i := range maxEngines {
		lines = append(lines, fmt.Sprintf(`vllm:num_requests_running{engine="%d"} 1`, i))
	}
	if l := parse(t, lines...); len(l.PerEngine) != maxEngines {
		t.Errorf("%d engines, want %d", len(l.PerEngine), maxEngines)
	}
	text := strings.Join(append(lines, `vllm:num_requests_running{engine="x"} 1`), "\n") + "\n"
	if _, err := ParseMetrics(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), "more than 1024 engines") {
		t.Errorf("one more: %v", err)
	}
}

func TestOneSleepingEngine(t *testing.T) {
	if l := parse(t, `vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1`,
		`vllm:engine_sleep_state{engine="1",sleep_state="discard_all"} 1`); !l.Asleep {
		t.Error("awake")
	}
}

func TestTextFormat(t *testing.T) {
	for _, line := range []string{
		"vllm:num_requests_running 3",
		"  vllm:num_requests_running\t3  ",
		"vllm:num_requests_running {} 3",
		`vllm:num_requests_running{ a = "b" , c="d",} 3`,
		`vllm:num_requests_running{a="\\\"\n}"} 3 1795199784000`,
		`vllm:num_requests_running{a="# } , ="}3`,
		`vllm:num_requests_running 3 1795199784.5 # {trace_id="x"} 0.5 1795199784.5`,
		`vllm:num_requests_running 3 # {trace_id="x"} 0.5`,
		"vllm:num_requests_running 0.3e1\r",
	} {
		if l := parse(t, line, "vllm:num_requests_waiting 0", "", "\t"); l.Running != 3 || !l.QueuesKnown {
			t.Errorf("%q: %+v", line, l)
		}
	}
}

func TestParseErrorsNameTheLine(t *testing.T) {
	const good = "# HELP x y\nvllm:num_requests_running 1\n"
	for bad, want := range map[string]string{
		"<html>\n":                                          "no metric name",
		`{"error":"no"}` + "\n":                             "none before the brace",
		"vllm:num_requests_running\n":                       "no value",
		"vllm:num_requests_running x\n":                     "not a number",
		"vllm:num_requests_running 0x1p4\n":                 "not a number",
		"vllm:num_requests_running 1 2 3\n":                 "after the timestamp",
		"vllm:num_requests_running 1 x\n":                   "timestamp",
		"vllm:num_requests_running{a\n":                     "no = after",
		"vllm:num_requests_running{a=b} 1\n":                "no quoted value",
		"vllm:num_requests_running{=\"b\"} 1\n":             "no label name",
		"vllm:num_requests_running{a=\"b\n":                 "no closing quote",
		`vllm:num_requests_running{a="\x"} 1` + "\n":        "backslash",
		`vllm:num_requests_running{a="\` + "\n":             "backslash",
		`vllm:num_requests_running{a="b" c="d"} 1` + "\n":   "neither , nor }",
		`vllm:num_requests_running{"a"="b"} 1` + "\n":       "quoted metric name",
		`{"vllm:num_requests_running"} 1` + "\n":            "quoted metric name",
		"vllm:num_requests_running 12":                      "truncated",
		"vllm:x" + strings.Repeat("y", MaxLineBytes) + "\n": "longer than",
	} {
		_, err := ParseMetrics(strings.NewReader(good + bad))
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "metrics line 3") {
			t.Errorf("%.60q: %v, want %q", bad, err, want)
		}
		if err != nil && len(err.Error()) > 300 {
			t.Errorf("%.60q: an error of %d bytes", bad, len(err.Error()))
		}
	}
	broken := errors.New("broken")
	if _, err := ParseMetrics(io.MultiReader(strings.NewReader(good), iotest.ErrReader(broken))); !errors.Is(err, broken) {
		t.Errorf("a read error became %v", err)
	}
}

func BenchmarkParseMetrics(b *testing.B) {
	text, err := os.ReadFile("testdata/metrics-0.32.txt")
	if err != nil {
		b.Fatal(err)
	}
	b.Run("own", func(b *testing.B) {
		br := bufio.NewReaderSize(nil, MaxLineBytes)
		b.SetBytes(int64(len(text)))
		b.ReportAllocs()
		for b.Loop() {
			br.Reset(bytes.NewReader(text))
			if _, err := ParseMetrics(br); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("expfmt", func(b *testing.B) {
		b.SetBytes(int64(len(text)))
		b.ReportAllocs()
		for b.Loop() {
			parser := expfmt.NewTextParser(model.LegacyValidation)
			if _, err := parser.TextToMetricFamilies(bytes.NewReader(text)); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// A line of many labels takes time in proportion to its length.
func TestManyLabels(t *testing.T) {
	var line strings.Builder
	line.WriteString("vllm:num_requests_running{")
	for i := 0; line.Len() < MaxLineBytes-100; i++ {
		fmt.Fprintf(&line, `a%d="",`, i)
	}
	line.WriteString("} 1")
	began := time.Now()
	parse(t, line.String())
	if took := time.Since(began); took > time.Second {
		t.Errorf("%d bytes took %v", line.Len(), took)
	}
}

// What tells which replicas can read each other's KV caches.
func TestKVTransfer(t *testing.T) {
	info := `vllm:cache_config_info{block_size="16",cache_dtype="fp8",engine="0",num_gpu_blocks="10"} 1`
	for name, c := range map[string]struct {
		lines     []string
		transfers bool
	}{
		"a connector":   {[]string{info, `vllm:nixl_num_kv_expired_reqs_total{engine="0"} 0`}, true},
		"a histogram":   {[]string{info, `vllm:nixl_xfer_time_seconds_bucket{engine="0",le="0.005"} 0`}, true},
		"none":          {[]string{info, `vllm:nixlx 0`}, false},
		"only its help": {[]string{"# TYPE vllm:nixl_num_kv_expired_reqs counter", info}, false},
	} {
		if l := parse(t, c.lines...); l.TransfersKV != c.transfers || l.CacheDtype != "fp8" || l.BlockSize != 16 {
			t.Errorf("%s: %+v", name, l)
		}
	}
	l := parse(t, info, `vllm:cache_config_info{block_size="16",cache_dtype="fp8",engine="1",num_gpu_blocks="10"} 1`,
		`vllm:nixl_bytes_transferred_count 0`)
	for _, e := range l.PerEngine {
		if !e.TransfersKV || e.CacheDtype != "fp8" {
			t.Errorf("engine %d: %+v", e.Engine, e.Load)
		}
	}
	if len(l.PerEngine) != 2 {
		t.Errorf("%d engines", len(l.PerEngine))
	}
}
