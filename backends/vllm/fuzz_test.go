package vllm

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// FuzzParseMetrics holds ParseMetrics to prometheus/common/expfmt: what expfmt
// accepts we accept, and both read the same. Exposition.go lists where expfmt is
// stricter; it is laxer only about names in quotes, the length of a line, and a
// last line that is blank or a comment and does not end.
func FuzzParseMetrics(f *testing.F) {
	samples, err := fs.Glob(os.DirFS("testdata"), "metrics-*.txt")
	if err != nil || len(samples) == 0 {
		f.Fatal("no samples", err)
	}
	for _, name := range samples {
		text, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(text))
	}
	for _, seed := range []string{
		"vllm:num_requests_running{a=\"\\\\\\\"\\n\", b=\"}\",} 3 17\nvllm:num_requests_waiting -0\n",
		"vllm:kv_cache_usage_perc 1.005\nvllm:gpu_cache_usage_perc{} NaN\nprocess_start_time_seconds+5e-1\n",
		"vllm:lora_requests_info{max_lora=\"3\",running_lora_adapters=\",a\\\\, b,\"} 2\n" +
			"vllm:lora_requests_info{running_lora_adapters=\"c\"} 2\n",
		"# HELP vllm:prefix_cache_hits_total In blocks.\nvllm:prefix_cache_hits_total 2\nvllm:prefix_cache_queries " +
			"3\nvllm:cache_config_info{block_size=\"16\",engine=\"\\\\\"} 1\n",
		"vllm:prefix_cache_hits 2\nvllm:prefix_cache_queries 9\nvllm:prompt_tokens_cached_by_source{source=\"host\"} " +
			"3\nvllm:external_prefix_cache_hits 4\n",
		"vllm:num_requests_waiting_by_reason{reason=\"capacity\"} 2\nvllm:num_requests_waiting 3\nvllm:num_requests_running 0\n",
		"vllm:num_requests_running{engine=\"4\"} 1\nvllm:num_requests_running{engine=\"12\"} 2\nvllm:num_requests_waiting " +
			"3\nvllm:num_requests_waiting_by_reason{engine=\"4\",reason=\"x\"} 2\n" +
			"vllm:cache_config_info{block_size=\"16\",engine=\"4\",num_gpu_blocks=\"9\"} " +
			"1\nvllm:engine_sleep_state{engine=\"12\",sleep_state=\"awake\"} 0\n",
		"vllm:nixl_bytes_transferred_sum{engine=\"0\"} 1\nvllm:cache_config_info{cache_dtype=\"f\\\\p8\",engine=\"0\"} " +
			"1\nvllm:cache_config_info{cache_dtype=\"auto\",engine=\"1\"} 1\n",
		"vllm:num_requests_running{\"a\"=\"b\"} 1\n", "{\"vllm:num_requests_running\"} 1\n", "\n \t\n#\n", "",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got, err := ParseMetrics(strings.NewReader(text))
		if text != "" && !strings.HasSuffix(text, "\n") {
			if err == nil {
				t.Fatal("accepted without an end of its last line")
			}
			return
		}
		want, oracleErr := readByOracle(text)
		switch {
		case oracleErr != nil, longestLine(text) >= MaxLineBytes, errors.Is(err, errQuotedName):
		case err != nil:
			t.Fatalf("expfmt accepts what we refuse: %v", err)
		case !reflect.DeepEqual(got, want):
			t.Fatalf("got  %+v\nwant %+v", got, want)
		}
	})
}

func longestLine(text string) int {
	longest := 0
	for line := range strings.Lines(text) {
		longest = max(longest, len(line))
	}
	return longest
}

// series is one sample as expfmt read it.
type series struct {
	labels map[string]string
	value  float64
}

// readByOracle makes a Load of expfmt's reading, by another way than
// ParseMetrics: from maps, family by family.
func readByOracle(text string) (Load, error) {
	var samples, comments strings.Builder
	for line := range strings.Lines(text) {
		if strings.HasPrefix(strings.TrimLeft(line, " \t"), "#") {
			comments.WriteString(strings.TrimLeft(line, " \t"))
			continue // without TYPE, expfmt leaves a histogram's series as they are
		}
		if strings.HasPrefix(strings.TrimLeft(line, " \t"), "{") {
			return Load{}, errQuotedName // and "{}" would be a panic of expfmt 0.67
		}
		samples.WriteString(line)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(samples.String()))
	if err != nil {
		return Load{}, err
	}
	o := oracle{}
	for name, family := range families {
		for _, m := range family.Metric {
			s := series{labels: map[string]string{}, value: m.GetUntyped().GetValue()}
			for _, l := range m.Label {
				s.labels[l.GetName()] = l.GetValue()
			}
			o[name] = append(o[name], s)
		}
	}
	return o.load(comments.String()), nil
}

type oracle map[string][]series

// sum returns the sum and the maximum of the first of names whose values are all
// within 0 to limit.
func (o oracle) sum(limit float64, names ...string) (sum, most float64, ok bool) {
	for _, name := range names {
		sum, most, ok = 0, 0, len(o[name]) > 0
		for _, s := range o[name] {
			if math.IsNaN(s.value) || s.value < 0 || s.value > limit {
				ok = false
			}
			sum += s.value
			most = max(most, s.value)
		}
		if ok && !math.IsInf(sum, 0) {
			return sum, most, true
		}
	}
	return 0, 0, false
}

func (o oracle) load(comments string) (l Load) {
	l = o.loadOfEngines(comments, 1)
	ranks := map[string]int{}
	for name := range o {
		l.TransfersKV = l.TransfersKV || strings.HasPrefix(name, "vllm:nixl_")
	}
	for name, all := range o {
		for _, s := range all {
			label := s.labels["engine"]
			if _, isRead := metrics[name]; !isRead || label == "" {
				continue
			}
			rank, err := strconv.ParseUint(label, 10, 16)
			if err != nil || strconv.FormatUint(rank, 10) != label {
				return l
			}
			ranks[label] = int(rank)
		}
	}
	if len(ranks) < 2 {
		return l
	}
	for label, rank := range ranks {
		own := o.ofEngine(label).loadOfEngines(comments, max(1, l.Engines))
		own.TransfersKV = l.TransfersKV
		l.PerEngine = append(l.PerEngine, EngineLoad{rank, own})
	}
	slices.SortFunc(l.PerEngine, func(a, b EngineLoad) int { return a.Engine - b.Engine })
	return l
}

// ofEngine returns what an engine has of all samples: its own, and those without a label of families of which it
// has no value.
func (o oracle) ofEngine(label string) oracle {
	engine := oracle{}
	for name, all := range o {
		own, shared := []series(nil), []series(nil)
		hasValue := metrics[name].quantity > summed
		for _, s := range all {
			switch s.labels["engine"] {
			case label:
				own = append(own, s)
				source := s.labels["source"]
				hasValue = hasValue || (name != "vllm:num_requests_waiting_by_reason" || s.labels["reason"] == "capacity") &&
					(!strings.Contains(name, "cached_by_source") && !strings.Contains(name, "external_prefix_cache_hits") || source != "device" &&
						source != "p2p")
			case "":
				shared = append(shared, s)
			}
		}
		switch {
		case name == "vllm:lora_requests_info":
			own = all
		case !hasValue:
			own = append(own, shared...)
		}
		if len(own) > 0 {
			engine[name] = own
		}
	}
	return engine
}

func (o oracle) loadOfEngines(comments string, sharers int) (l Load) {
	run, _, runOK := o.sum(1e9, "vllm:num_requests_running")
	wait, _, waitOK := o.sum(1e9, "vllm:num_requests_waiting")
	if l.QueuesKnown = runOK && waitOK; l.QueuesKnown {
		l.Running, l.Waiting, l.WaitingForCapacity = int(run), int(wait), int(wait)
		capacity := oracle{}
		for _, s := range o["vllm:num_requests_waiting_by_reason"] {
			if s.labels["reason"] == "capacity" {
				capacity["c"] = append(capacity["c"], s)
			}
		}
		if c, _, ok := capacity.sum(1e9, "c"); ok {
			l.WaitingForCapacity = int(c)
		}
	}
	for _, name := range []string{"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"} {
		if used, _, ok := o.sum(1.01, name); ok && !l.KVKnown {
			l.KVCacheUsage, l.KVKnown = min(used/float64(len(o[name])), 1), true
		}
	}
	prompt, _, promptOK := o.sum(math.MaxFloat64, "vllm:prompt_tokens_total", "vllm:prompt_tokens")
	l.Gaps, _, _ = o.sum(math.MaxFloat64, "vllm:inter_token_latency_seconds_count", "vllm:time_per_output_token_seconds_count")
	l.GapSeconds, _, _ = o.sum(math.MaxFloat64, "vllm:inter_token_latency_seconds_sum", "vllm:time_per_output_token_seconds_sum")
	l.FirstTokens, _, _ = o.sum(math.MaxFloat64, "vllm:time_to_first_token_seconds_count")
	l.FirstTokenSeconds, _, _ = o.sum(math.MaxFloat64, "vllm:time_to_first_token_seconds_sum")
	generated, _, generatedOK := o.sum(math.MaxFloat64, "vllm:generation_tokens_total", "vllm:generation_tokens")
	if l.TokensKnown = promptOK && generatedOK; l.TokensKnown {
		l.PromptTokens, l.GenerationTokens = prompt, generated
	}
	_, l.StartTime, _ = o.sum(math.MaxFloat64, "process_start_time_seconds")
	for _, s := range o["vllm:engine_sleep_state"] {
		awake := s.labels["sleep_state"] == "awake"
		l.Asleep = l.Asleep || awake && s.value == 0 || !awake && s.value > 0
	}
	newest := series{}
	for _, s := range o["vllm:lora_requests_info"] {
		if s.value >= newest.value {
			newest = s
		}
	}
	l.MaxAdapters = labelNumber(newest.labels["max_lora"])
	for name := range strings.SplitSeq(newest.labels["running_lora_adapters"], ",") {
		if name = strings.TrimSpace(name); name != "" {
			l.RunningAdapters = append(l.RunningAdapters, name)
		}
	}
	o.cache(&l, sharers)
	o.prefix(&l, comments)
	return l
}

func labelNumber(s string) int {
	v, err := strconv.ParseFloat(s, 64)
	if err != nil || strings.ContainsAny(s, "xX") || math.IsNaN(v) || v < 1 || v > 1e9 {
		return 0
	}
	return int(v)
}

func (o oracle) cache(l *Load, sharers int) {
	type cache struct{ tokens, server int }
	caches, best := map[string]cache{}, map[string]map[string]string{}
	for _, s := range o["vllm:cache_config_info"] {
		c := cache{tokens: labelNumber(s.labels["kv_cache_size_tokens"])}
		if size := float64(labelNumber(s.labels["num_gpu_blocks"])) * float64(attentionBlock(s.labels)); size <= 1e9 {
			c.server = int(size)
		}
		if e, is := s.labels["engine"], caches[s.labels["engine"]]; max(c.tokens, c.server) >= max(is.tokens, is.server) {
			caches[e], best[e] = c, s.labels
		}
	}
	l.Engines, l.PrefixCachingOff = len(best), len(best) > 0
	server, unknown := 0, 0
	for e, labels := range best {
		l.CacheTokens += caches[e].tokens
		server = max(server, caches[e].server)
		if caches[e].tokens == 0 {
			unknown++
		}
		l.BlockSize = max(l.BlockSize, labelNumber(labels["block_size"]))
		l.HitAlignment = max(l.HitAlignment, cmp.Or(labelNumber(labels["cache_hit_alignment_tokens"]), attentionBlock(labels)))
		l.CacheDtype = max(l.CacheDtype, labels["cache_dtype"])
		l.PrefixCachingOff = l.PrefixCachingOff && labels["enable_prefix_caching"] == "False"
	}
	if unknown > 0 {
		l.CacheTokens = server / sharers
	}
}

func attentionBlock(labels map[string]string) int {
	return max(labelNumber(labels["block_size"]), labelNumber(labels["effective_attention_block_size"]))
}

func (o oracle) prefix(l *Load, comments string) {
	l.HostHits, l.HostHitsKnown = o.hostHits()
	for _, prefix := range []string{"vllm:", "vllm:gpu_"} {
		q, _, queriesOK := o.sum(math.MaxFloat64, prefix+"prefix_cache_queries_total", prefix+"prefix_cache_queries")
		h, _, hitsOK := o.sum(math.MaxFloat64, prefix+"prefix_cache_hits_total", prefix+"prefix_cache_hits")
		if !queriesOK || !hitsOK {
			continue
		}
		scale := 1.0
		if prefix == "vllm:gpu_" {
			scale = float64(l.BlockSize)
		}
		for line := range strings.Lines(comments) {
			line, ok := strings.CutPrefix(line, "# HELP "+prefix+"prefix_cache_")
			switch {
			case !ok:
			case strings.Contains(line, " blocks"):
				scale = float64(l.BlockSize)
			case strings.Contains(line, " tokens"):
				scale = 1
			case prefix == "vllm:gpu_":
				scale = float64(l.BlockSize)
			default:
				scale = 1
			}
		}
		h = h*scale + l.HostHits
		if scale > 0 && !math.IsInf(max(q*scale, h), 0) {
			l.PrefixQueries, l.PrefixHits, l.PrefixKnown = q*scale, h, true
		}
		return
	}
}

// hostHits returns the hits on blocks that were neither on the GPU nor on another replica.
func (o oracle) hostHits() (tokens float64, ok bool) {
	for _, end := range []string{"_total", ""} {
		own := oracle{}
		for _, s := range o["vllm:prompt_tokens_cached_by_source"+end] {
			if source := s.labels["source"]; source != "device" && source != "p2p" {
				own["own"] = append(own["own"], s)
			}
		}
		if sum, _, ok := own.sum(math.MaxFloat64, "own"); ok {
			return sum, true
		}
	}
	tokens, _, ok = o.sum(math.MaxFloat64, "vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_hits")
	return tokens, ok
}

// FuzzModels checks what every reader of a list relies on, whatever a replica writes.
func FuzzModels(f *testing.F) {
	for _, seed := range []string{
		vllmModels("1", "p", `"id":"m","root":"/m","parent":null,"max_model_len":10`, `"id":"a","parent":"m"`),
		`{"data":[{"id":"m"},{"id":"m"}]}`, `{"data":[{"ID":"M","Id":"n"}]}`, `{"data":null}`, `{"data":[null]}`,
		`{"data":[{"id":"\ud800\u0000"}]}`,
		`{"data":[{"id":"m","max_model_len":1e999}]}`, `{"data":[{"id":"m","max_model_len":"9"}]} x`, `[]`, ``, "{\"data\":[{\"id\":\"\xff\"}]}",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		models, err := ParseModels(body)
		if err != nil {
			if models != nil {
				t.Errorf("models %v beside the error %v", models, err)
			}
			return
		}
		if len(models) > maxModels {
			t.Errorf("%d models", len(models))
		}
		for _, m := range models {
			if m.ID == "" || len(m.ID) > maxModelIDBytes || m.MaxTokens < 0 || m.MaxTokens > maxCount {
				t.Errorf("%+v", m)
			}
			if !json.Valid(m.Card) || !bytes.Contains(body, m.Card) {
				t.Errorf("card %q is not what the replica wrote", m.Card)
			}
			again, err := parseModelCard(m.Card)
			if err != nil || !EqualModels([]Model{m}, []Model{again}) {
				t.Errorf("read again, %q is another: %+v, %v", m.Card, again, err)
			}
		}
	})
}

func FuzzParsePaused(f *testing.F) {
	f.Add([]byte(`{"is_paused":true}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		if paused, err := ParsePaused(body); paused && err != nil {
			t.Errorf("paused and %v", err)
		}
	})
}

func FuzzParseVersion(f *testing.F) {
	for _, seed := range []string{`{"version":"0.32.0"}`, `{"version":"0.1.dev1+g0123456.d20260801"}`, `{"version":"a b"}`, `{"version":null}`,
		`{}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		version, err := ParseVersion(body)
		if (version == "") != (err != nil) || len(version) > maxVersionBytes || strings.ContainsAny(version, " \n\x00") {
			t.Errorf("%q, %v", version, err)
		}
	})
}

// FuzzErrorEvent checks that every event stands for the status of an error.
func FuzzErrorEvent(f *testing.F) {
	f.Add([]byte(messagesEvent(`{'error': {'message': 'Th...am': None, 'code': 503}}`)))
	f.Add([]byte(`{"type":"response.failed","response":{"error":{"code":"server_error"}}}`))
	f.Add([]byte(`{"error":"The model is currently scaling. Please try again later."}`))
	f.Add([]byte(`{"error":{"code":1e300}}`))
	f.Add([]byte(errorJSON("max_tokens=5000 cannot be greater than max_model_len=1024. Please request fewer output tokens.")))
	f.Fuzz(func(t *testing.T, event []byte) {
		status := ErrorEventStatus(event)
		if status < 400 || status > 599 {
			t.Fatalf("%q stands for %d", event, status)
		}
		ClassifyError(status, event)
		if IsContextLengthError(event) && !json.Valid(event) {
			t.Fatalf("%q is taken for an error about the context length", event)
		}
	})
}
