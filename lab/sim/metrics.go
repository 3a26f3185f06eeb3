package sim

import (
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"warmroute/lab/sim/engine"
)

// processStartTime returns when the simulated process started.
func (s *Server) processStartTime() time.Time {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	return s.startedAt
}

func (s *Server) metrics(w http.ResponseWriter, _ *http.Request) {
	switch {
	case s.faults.isActive(MetricsGone):
		writeJSON(w, http.StatusNotFound, `{"detail":"Not Found"}`)
		return
	case s.faults.isActive(MetricsGarbled):
		writeJSON(w, http.StatusOK, "vllm:num_requests_running{engine=\"0\" NaN oops\n\x00\xff{{{\nvllm:kv_cache_usage_perc{} many\n")
		return
	}
	w.Header().Set("Content-Type", "text/plain; version=1.0.0; charset=utf-8")
	_, _ = w.Write(s.formatMetrics())
	if s.faults.isActive(MetricsHuge) {
		writeFillerSeries(w, hugeMetricsBytes)
	}
}

const hugeMetricsBytes = 50 << 20

// writeFillerSeries writes at least this many bytes of a family with too many series.
func writeFillerSeries(w io.Writer, minBytes int) {
	var block []byte
	for i := range 1000 {
		block = append(block, `vllm:too_many{engine="0",request="`...)
		block = strconv.AppendInt(block, int64(i), 10)
		block = append(block, "\"} 1.0\n"...)
	}
	for ; minBytes > 0; minBytes -= len(block) {
		if _, err := w.Write(block); err != nil {
			return // the client disconnected
		}
	}
}

// formatMetrics returns the response to GET /metrics.
func (s *Server) formatMetrics() []byte {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	s.expireLeases(time.Since(s.startedAt))
	e := &exposition{created: unixSeconds(s.startedAt)}
	for i, k := range s.ranks[:s.serving] {
		e.ranks = append(e.ranks, rankMetrics{
			engine: `engine="` + strconv.Itoa(s.cfg.Rank.First+i) + `"`, model: `model_name="` + s.cfg.Model + `"`, stats: k.engine.Stats(),
			counters: k.counters,
		})
	}
	e.writeHelpAndType("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.")
	e.writeSample("process_start_time_seconds", "", unixSeconds(s.startedAt))
	e.writeHelpAndType("process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds.")
	e.writeSample("process_cpu_seconds_total", "", s.cpuSeconds())
	e.writeHelpAndType("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.")
	e.writeSample("process_resident_memory_bytes", "", residentBytes)
	s.writeEngineMetrics(e)
	if s.cfg.Connector.Enabled {
		writeTransferMetrics(e)
	}
	writeRequestMetrics(e)
	s.writeCacheAndAdapterMetrics(e)
	return e.b
}

const residentBytes = 1e9

// cpuSeconds returns a CPU time that grows slowly and begins between 20 s and 30 s, since loading a model takes each
// process another time.
func (s *Server) cpuSeconds() float64 {
	return 20 + float64(s.startedAt.Nanosecond())/1e8 + time.Since(s.startedAt).Seconds()/50
}

func (s *Server) writeEngineMetrics(e *exposition) {
	e.writeGauge("vllm:num_requests_running", "Number of requests in model execution batches.", func(k *rankMetrics) float64 {
		return float64(k.stats.Running)
	})
	e.writeGauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", func(k *rankMetrics) float64 {
		return float64(k.stats.Waiting)
	})
	e.writeGaugeBy("vllm:num_requests_waiting_by_reason", "Number of waiting requests by reason.", "reason", func(k *rankMetrics) []labeled {
		return []labeled{{"capacity", float64(k.stats.Waiting - k.stats.Loading)}, {"deferred", float64(k.stats.Loading)}}
	})
	e.writeGaugeBy("vllm:engine_sleep_state", "Engine sleep state.", "sleep_state", func(*rankMetrics) []labeled {
		asleep := len(s.pause.asleep) > 0
		return []labeled{{"awake", oneIf(!asleep)}, {"weights_offloaded", oneIf(asleep && s.pause.level == 1)},
			{"discard_all", oneIf(asleep && s.pause.level == 2)}}
	})
	e.writeGauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", func(k *rankMetrics) float64 {
		return k.stats.KVUsage
	})
	e.writeCounter("vllm:prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", func(k *rankMetrics) int64 {
		return k.stats.PrefixQueries
	})
	e.writeCounter("vllm:prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", func(k *rankMetrics) int64 {
		return k.stats.PrefixHits
	})
	e.writeCounter("vllm:external_prefix_cache_queries", "External prefix cache queries, in terms of number of queried tokens.",
		func(k *rankMetrics) int64 {
			if s.cfg.Engine.HostKVTokens == 0 && !s.cfg.Connector.Enabled {
				return 0
			}
			return k.stats.PrefixQueries - k.stats.PrefixHits
		})
	e.writeCounter("vllm:external_prefix_cache_hits", "External prefix cache hits, in terms of number of cached tokens.",
		func(k *rankMetrics) int64 { return k.stats.HostHits + k.stats.RemoteHits })
	e.writeCounter("vllm:num_preemptions", "Cumulative number of preemption from the engine.", func(k *rankMetrics) int64 {
		return k.stats.Preemptions
	})
	e.writeCounter("vllm:prompt_tokens", "Number of prefill tokens processed.", func(k *rankMetrics) int64 { return k.stats.PromptTokens })
	e.writeCounterBySource("vllm:prompt_tokens_by_source", "Number of prompt tokens by source.", func(k *rankMetrics) []labeled {
		st := &k.stats
		return []labeled{
			{"local_compute", float64(st.PromptTokens - st.CachedPromptTokens)},
			{"local_cache_hit", float64(st.CachedPromptTokens - st.LoadedPromptTokens)},
			{"external_kv_transfer", float64(st.LoadedPromptTokens)},
		}
	})
	e.writeCounter("vllm:prompt_tokens_cached", "Number of cached prompt tokens (local + external).", func(k *rankMetrics) int64 {
		return k.stats.CachedPromptTokens
	})
	e.writeCounterBySource("vllm:prompt_tokens_cached_by_source", "Prefix-cache hit tokens by the cache tier that supplied them.",
		func(k *rankMetrics) []labeled {
			return []labeled{{"device", float64(k.stats.PrefixHits)}, {"host", float64(k.stats.HostHits)}, {"p2p", 0}, {"disk", 0},
				{"external_unspecified", float64(k.stats.RemoteHits)}}
		})
	e.writeCounter("vllm:generation_tokens", "Number of generation tokens processed.", func(k *rankMetrics) int64 {
		return k.stats.GenerationTokens
	})
	e.writeHistogram("vllm:iteration_tokens_total", "Histogram of number of tokens per engine_step.", func(k *rankMetrics) *histogram {
		return &histogram{bounds: engine.StepBuckets[:], counts: k.stats.StepTokens[:], sum: float64(k.stats.StepTokensSum)}
	})
}

// writeTransferMetrics writes the metrics of NixlConnector.
func writeTransferMetrics(e *exposition) {
	e.writeHistogram("vllm:nixl_xfer_time_seconds", "Histogram of transfer duration for NIXL KV Cache transfers.",
		func(k *rankMetrics) *histogram { return k.counters.transferTime })
	e.writeHistogram("vllm:nixl_bytes_transferred", "Histogram of bytes transferred per NIXL KV Cache transfers.",
		func(k *rankMetrics) *histogram { return k.counters.transferBytes })
	e.writeCounter("vllm:nixl_num_failed_transfers", "Number of failed NIXL KV Cache transfers.", func(k *rankMetrics) int64 {
		return k.counters.failedTransfers
	})
	e.writeCounter("vllm:nixl_num_kv_expired_reqs", "Number of requests that had their KV expire.", func(k *rankMetrics) int64 {
		return k.stats.ExpiredLeases
	})
	e.writeCounter("vllm:nixl_num_notifications_after_expiry", "Number of completion notifications for requests that were no longer tracked.",
		func(k *rankMetrics) int64 { return k.counters.lateNotifications })
}

func writeRequestMetrics(e *exposition) {
	e.writeHelpAndType("vllm:request_success_total", "counter", "Count of successfully processed requests.")
	for i := range e.ranks {
		k := &e.ranks[i]
		for _, end := range [...]endReason{stopped, lengthLimit, aborted, engineFailed} {
			e.writeSample("vllm:request_success_total", k.engine+`,finished_reason="`+end.String()+`",`+k.model, float64(k.counters.success[end]))
		}
	}
	for _, h := range [...]struct {
		name, help string
		of         func(*counters) *histogram
	}{
		{"vllm:request_prompt_tokens", "Number of prefill tokens processed.", func(c *counters) *histogram { return c.promptTokens }},
		{"vllm:request_generation_tokens", "Number of generation tokens processed.", func(c *counters) *histogram { return c.generationTokens }},
		{"vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", func(c *counters) *histogram { return c.ttft }},
		{"vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", func(c *counters) *histogram { return c.itl }},
		{"vllm:request_time_per_output_token_seconds", "Histogram of time_per_output_token_seconds per request.", func(c *counters) *histogram {
			return c.tpot
		}},
		{"vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", func(c *counters) *histogram { return c.e2e }},
		{"vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", func(c *counters) *histogram {
			return c.queue
		}},
		{"vllm:request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", func(c *counters) *histogram {
			return c.inference
		}},
		{"vllm:request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", func(c *counters) *histogram {
			return c.prefill
		}},
		{"vllm:request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", func(c *counters) *histogram {
			return c.decode
		}},
		{"vllm:request_prefill_kv_computed_tokens", "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
			func(c *counters) *histogram { return c.uncachedTokens }},
	} {
		e.writeHistogram(h.name, h.help, func(k *rankMetrics) *histogram { return h.of(k.counters) })
	}
}

// writeCacheAndAdapterMetrics writes the caches' configuration and the adapters in use.
func (s *Server) writeCacheAndAdapterMetrics(e *exposition) {
	c := s.cfg.Engine
	size, blocks := strconv.Itoa(c.BlockSize), c.KVTokens/c.BlockSize
	caching, stateCaching, stateSize := "True", "none", "None"
	if c.Groups.States > 0 {
		stateCaching, stateSize = "align", size
	}
	if c.NoPrefixCache {
		caching, stateCaching = "False", "none"
	}
	e.writeHelpAndType("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
	for _, k := range e.ranks {
		// vLLM adds up the blocks of all ranks, but not their tokens.
		e.writeSample("vllm:cache_config_info", `block_size="`+size+`",cache_dtype="auto",cache_hit_alignment_tokens="None",`+
			`effective_attention_block_size="`+size+`",enable_prefix_caching="`+caching+`",`+k.engine+`,gpu_memory_utilization="0.92",`+
			`kv_cache_size_tokens="`+strconv.Itoa(c.ReportedKVTokens(s.cfg.MaxModelLen))+`",`+
			`mamba_block_size="`+stateSize+`",mamba_cache_mode="`+stateCaching+`",`+
			`num_cpu_blocks="None",num_gpu_blocks="`+strconv.Itoa(len(e.ranks)*blocks)+`",num_gpu_blocks_override="None",`+
			`prefix_cache_retention_interval="`+strconv.Itoa(c.Groups.RetentionInterval)+`",`+
			`prefix_caching_hash_algo="sha256",sliding_window="None"`, 1)
	}
	loaded := s.adapters.loaded()
	if len(loaded) == 0 {
		return
	}
	var running, waiting []string
	for _, k := range s.ranks {
		for _, q := range k.live {
			switch {
			case q.model == s.cfg.Model:
			case q.seen > 0:
				running = append(running, q.model)
			default:
				waiting = append(waiting, q.model)
			}
		}
	}
	list := func(names []string) string {
		slices.Sort(names)
		return strings.Join(slices.Compact(names), ",")
	}
	e.writeHelpAndType("vllm:lora_requests_info", "gauge", "Running stats on lora requests.")
	e.writeSample("vllm:lora_requests_info", `max_lora="`+strconv.Itoa(len(loaded))+`",running_lora_adapters="`+list(running)+
		`",waiting_lora_adapters="`+list(waiting)+`"`, unixSeconds(time.Now()))
}

// exposition is Prometheus' text format as Python's client writes it: counters named
// _total, a _created gauge after each, all values floats. A metric has a series for each
// rank.
type exposition struct {
	b       []byte
	ranks   []rankMetrics
	created float64
}

// rankMetrics are the labels and the figures of one engine.
type rankMetrics struct {
	engine, model string // labels
	stats         engine.Stats
	counters      *counters
}

func (k *rankMetrics) labels() string { return k.engine + "," + k.model }

// labeled is a value with that of its only further label.
type labeled struct {
	label string
	value float64
}

func (e *exposition) writeHelpAndType(name, kind, help string) {
	e.b = append(e.b, "# HELP "+name+" "+help+"\n# TYPE "+name+" "+kind+"\n"...)
}

func (e *exposition) writeSample(name, labels string, v float64) {
	e.b = append(e.b, name...)
	if labels != "" {
		e.b = append(e.b, "{"+labels+"}"...)
	}
	e.b = append(e.b, " "+formatPythonFloat(v)+"\n"...)
}

func (e *exposition) writeGauge(name, help string, of func(*rankMetrics) float64) {
	e.writeHelpAndType(name, "gauge", help)
	for i := range e.ranks {
		e.writeSample(name, e.ranks[i].labels(), of(&e.ranks[i]))
	}
}

func (e *exposition) writeGaugeBy(name, help, key string, of func(*rankMetrics) []labeled) {
	e.writeHelpAndType(name, "gauge", help)
	e.writeLabeled(name, key, of)
}

func (e *exposition) writeLabeled(name, key string, of func(*rankMetrics) []labeled) {
	for i := range e.ranks {
		for _, l := range of(&e.ranks[i]) {
			e.writeSample(name, e.ranks[i].labels()+`,`+key+`="`+l.label+`"`, l.value)
		}
	}
}

func (e *exposition) writeCounter(name, help string, of func(*rankMetrics) int64) {
	e.writeHelpAndType(name+"_total", "counter", help)
	for i := range e.ranks {
		e.writeSample(name+"_total", e.ranks[i].labels(), float64(of(&e.ranks[i])))
	}
	e.writeCreated(name, help)
}

func (e *exposition) writeCreated(name, help string) {
	e.writeGauge(name+"_created", help, func(*rankMetrics) float64 { return e.created })
}

func (e *exposition) writeCounterBySource(name, help string, of func(*rankMetrics) []labeled) {
	e.writeHelpAndType(name+"_total", "counter", help)
	e.writeLabeled(name+"_total", "source", of)
	e.writeGaugeBy(name+"_created", help, "source", func(k *rankMetrics) []labeled {
		created := of(k)
		for i := range created {
			created[i].value = e.created
		}
		return created
	})
}

func (e *exposition) writeHistogram(name, help string, of func(*rankMetrics) *histogram) {
	e.writeHelpAndType(name, "histogram", help)
	for i := range e.ranks {
		k := &e.ranks[i]
		h := of(k)
		var below int64
		for j, n := range h.counts {
			below += n
			bound := "+Inf"
			if j < len(h.bounds) {
				bound = formatPythonFloat(h.bounds[j])
			}
			e.writeSample(name+"_bucket", k.engine+`,le="`+bound+`",`+k.model, float64(below))
		}
		e.writeSample(name+"_count", k.labels(), float64(below))
		e.writeSample(name+"_sum", k.labels(), h.sum)
	}
	e.writeCreated(name, help)
}

func formatPythonFloat(v float64) string {
	if v >= 1e6 {
		return strconv.FormatFloat(v, 'e', -1, 64)
	}
	text := strconv.FormatFloat(v, 'f', -1, 64)
	if !strings.Contains(text, ".") {
		text += ".0"
	}
	return text
}

func oneIf(condition bool) float64 {
	if condition {
		return 1
	}
	return 0
}

func unixSeconds(t time.Time) float64 { return float64(t.UnixMicro()) / 1e6 }

// histogram counts values in buckets, as Prometheus does.
type histogram struct {
	bounds []float64 // upper, ascending
	counts []int64   // one more than bounds, for what is above all of them
	sum    float64
}

func newHistogram(bounds ...float64) *histogram {
	return &histogram{bounds: bounds, counts: make([]int64, len(bounds)+1)}
}

// observe counts n values v.
func (h *histogram) observe(v float64, count int) {
	i := 0
	for i < len(h.bounds) && v > h.bounds[i] {
		i++
	}
	h.counts[i] += int64(count)
	h.sum += v * float64(count)
}

// counters are those of /metrics that the engine does not have. Guarded by
// Server.engineMu.
type counters struct {
	success [processKilled]int64 // ends, by endReason

	promptTokens, generationTokens, uncachedTokens *histogram
	ttft, itl, tpot, e2e                           *histogram // seconds, as all below
	queue, prefill, decode, inference              *histogram

	transferTime, transferBytes        *histogram
	failedTransfers, lateNotifications int64

	lastStep time.Duration // end of the previous step
}

func newCounters() *counters {
	tokens := func() *histogram {
		return newHistogram(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
	}
	perToken := func() *histogram {
		return newHistogram(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
	}
	phase := func() *histogram {
		return newHistogram(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
	}
	return &counters{
		promptTokens: tokens(), generationTokens: tokens(), uncachedTokens: tokens(),
		ttft: newHistogram(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
		itl:  perToken(), tpot: perToken(),
		e2e: phase(), queue: phase(), prefill: phase(), decode: phase(), inference: phase(),
		transferTime:  newHistogram(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5),
		transferBytes: newHistogram(1<<11, 1<<13, 1<<15, 1<<17, 1<<19, 1<<21, 1<<23, 1<<25, 1<<27, 1<<29, 1<<31, 1<<33),
	}
}

// countStep counts the outputs of a step. Unless they are preempted, requests decode in every
// step, so that the gap before each token but the first is the time since the previous step.
func (c *counters) countStep(s engine.StepResult) {
	if steady := s.Decoded - len(s.Resumed); steady > 0 {
		c.itl.observe((s.End - c.lastStep).Seconds(), steady)
	}
	for _, r := range s.Resumed {
		c.itl.observe(elapsedSeconds(r.Preempted, s.End), 1)
	}
	c.lastStep = s.End
	for _, r := range s.First {
		c.ttft.observe(elapsedSeconds(r.Arrived, r.FirstToken), 1)
	}
	for _, r := range s.Finished {
		c.promptTokens.observe(float64(r.Prompt), 1)
		c.generationTokens.observe(float64(r.Output), 1)
		c.uncachedTokens.observe(float64(r.Prompt-r.Cached-r.Transferred), 1)
		c.e2e.observe(elapsedSeconds(r.Arrived, r.Finished), 1)
		c.queue.observe(elapsedSeconds(r.Arrived, r.Started), 1)
		c.prefill.observe(elapsedSeconds(r.Started, r.FirstToken), 1)
		c.decode.observe(elapsedSeconds(r.FirstToken, r.Finished), 1)
		c.inference.observe(elapsedSeconds(r.Started, r.Finished), 1)
		if r.Output > 1 {
			c.tpot.observe(elapsedSeconds(r.FirstToken, r.Finished)/float64(r.Output-1), 1)
		}
	}
}

// elapsedSeconds is never negative. A request that arrives while the engine catches up with the
// wall clock can start before it arrived.
func elapsedSeconds(from, to time.Duration) float64 { return max(0, to-from).Seconds() }
