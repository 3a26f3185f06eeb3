package sim

import (
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"warmroute/sim/engine"
)

// start is when the process, as clients see it, started.
func (s *Server) start() time.Time {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	return s.began
}

func (s *Server) metrics(w http.ResponseWriter, _ *http.Request) {
	switch {
	case s.faults.has(MetricsGone):
		writeJSON(w, http.StatusNotFound, `{"detail":"Not Found"}`)
		return
	case s.faults.has(MetricsGarbled):
		writeJSON(w, http.StatusOK, "vllm:num_requests_running{engine=\"0\" NaN oops\n\x00\xff{{{\nvllm:kv_cache_usage_perc{} many\n")
		return
	}
	w.Header().Set("Content-Type", "text/plain; version=1.0.0; charset=utf-8")
	_, _ = w.Write(s.exposition())
	if s.faults.has(MetricsHuge) {
		writeSeries(w, hugeMetrics)
	}
}

// hugeMetrics is the length of an exposition that some replica got wrong, in bytes.
const hugeMetrics = 50 << 20

// writeSeries writes so many bytes of a family that has too many series.
func writeSeries(w io.Writer, bytes int) {
	var block []byte
	for i := range 1000 {
		block = append(block, `vllm:too_many{engine="0",request="`...)
		block = strconv.AppendInt(block, int64(i), 10)
		block = append(block, "\"} 1.0\n"...)
	}
	for ; bytes > 0; bytes -= len(block) {
		if _, err := w.Write(block); err != nil {
			return // the reader has had enough
		}
	}
}

func (s *Server) exposition() []byte {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	e := &exposition{labels: `engine="0",model_name="` + s.cfg.Model + `"`, created: unix(s.began)}
	e.family("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.")
	e.sample("process_start_time_seconds", "", unix(s.began))
	s.exposeEngine(e)
	s.exposeRequests(e)
	s.exposeConfig(e)
	return e.b
}

func (s *Server) exposeEngine(e *exposition) {
	st := s.engine.Stats()
	e.gauge("vllm:num_requests_running", "Number of requests in model execution batches.", float64(st.Running))
	e.gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", float64(st.Waiting))
	e.family("vllm:num_requests_waiting_by_reason", "gauge", "Number of waiting requests by reason.")
	e.sample("vllm:num_requests_waiting_by_reason", e.labels+`,reason="capacity"`, float64(st.Waiting))
	e.sample("vllm:num_requests_waiting_by_reason", e.labels+`,reason="deferred"`, 0)
	e.family("vllm:engine_sleep_state", "gauge", "Engine sleep state.")
	e.sample("vllm:engine_sleep_state", e.labels+`,sleep_state="awake"`, 1)
	e.sample("vllm:engine_sleep_state", e.labels+`,sleep_state="weights_offloaded"`, 0)
	e.sample("vllm:engine_sleep_state", e.labels+`,sleep_state="discard_all"`, 0)
	e.gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", st.KVUsage)
	e.counter("vllm:prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", st.PrefixQueries)
	e.counter("vllm:prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", st.PrefixHits)
	e.counter("vllm:num_preemptions", "Cumulative number of preemption from the engine.", 0)
	e.counter("vllm:prompt_tokens", "Number of prefill tokens processed.", st.PromptTokens)
	e.counter("vllm:prompt_tokens_cached", "Number of cached prompt tokens (local + external).", st.PrefixHits)
	e.counter("vllm:generation_tokens", "Number of generation tokens processed.", st.GenerationTokens)

	steps := newHistogram(engine.StepBuckets[:]...)
	copy(steps.counts, st.StepTokens[:])
	steps.sum = float64(st.StepTokensSum)
	e.histogram("vllm:iteration_tokens_total", "Histogram of number of tokens per engine_step.", steps)
}

func (s *Server) exposeRequests(e *exposition) {
	c := s.counters
	e.family("vllm:request_success_total", "counter", "Count of successfully processed requests.")
	for _, why := range [...]reason{stopped, length, aborted, failed} {
		e.sample("vllm:request_success_total", `engine="0",finished_reason="`+why.String()+`",model_name="`+s.cfg.Model+`"`, float64(c.success[why]))
	}
	e.histogram("vllm:request_prompt_tokens", "Number of prefill tokens processed.", c.promptTokens)
	e.histogram("vllm:request_generation_tokens", "Number of generation tokens processed.", c.generationTokens)
	e.histogram("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", c.ttft)
	e.histogram("vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", c.itl)
	e.histogram("vllm:request_time_per_output_token_seconds", "Histogram of time_per_output_token_seconds per request.", c.tpot)
	e.histogram("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", c.e2e)
	e.histogram("vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", c.queue)
	e.histogram("vllm:request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", c.inference)
	e.histogram("vllm:request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", c.prefill)
	e.histogram("vllm:request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", c.decode)
	e.histogram("vllm:request_prefill_kv_computed_tokens", "Histogram of new KV tokens computed during prefill (excluding cached tokens).", c.uncachedTokens)
}

// exposeConfig shows the cache's configuration, with the labels that a reader
// can use, and which adapters are at work.
func (s *Server) exposeConfig(e *exposition) {
	c := s.cfg.Engine
	size, blocks := strconv.Itoa(c.BlockSize), c.KVTokens/c.BlockSize
	caching := "True"
	if c.NoPrefixCache {
		caching = "False"
	}
	e.family("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
	e.sample("vllm:cache_config_info", `block_size="`+size+`",cache_dtype="auto",cache_hit_alignment_tokens="None",`+
		`effective_attention_block_size="`+size+`",enable_prefix_caching="`+caching+`",engine="0",gpu_memory_utilization="0.92",`+
		`kv_cache_size_tokens="`+strconv.Itoa(blocks*c.BlockSize)+`",num_cpu_blocks="None",num_gpu_blocks="`+strconv.Itoa(blocks)+`",`+
		`num_gpu_blocks_override="None",prefix_caching_hash_algo="sha256",sliding_window="None"`, 1)
	loaded := s.adapters.loaded()
	if len(loaded) == 0 {
		return
	}
	var running, waiting []string
	for _, q := range s.live {
		switch {
		case q.model == s.cfg.Model:
		case q.seen > 0:
			running = append(running, q.model)
		default:
			waiting = append(waiting, q.model)
		}
	}
	list := func(names []string) string {
		slices.Sort(names)
		return strings.Join(slices.Compact(names), ",")
	}
	e.family("vllm:lora_requests_info", "gauge", "Running stats on lora requests.")
	e.sample("vllm:lora_requests_info", `max_lora="`+strconv.Itoa(len(loaded))+`",running_lora_adapters="`+list(running)+
		`",waiting_lora_adapters="`+list(waiting)+`"`, unix(time.Now()))
}

// exposition is Prometheus' text format as Python's client library writes it:
// counters named _total, a _created gauge after each, floats everywhere.
type exposition struct {
	b       []byte
	labels  string // of most samples
	created float64
}

func (e *exposition) family(name, kind, help string) {
	e.b = append(e.b, "# HELP "+name+" "+help+"\n# TYPE "+name+" "+kind+"\n"...)
}

func (e *exposition) sample(name, labels string, v float64) {
	e.b = append(e.b, name...)
	if labels != "" {
		e.b = append(e.b, "{"+labels+"}"...)
	}
	e.b = append(e.b, " "+pythonFloat(v)+"\n"...)
}

func (e *exposition) gauge(name, help string, v float64) {
	e.family(name, "gauge", help)
	e.sample(name, e.labels, v)
}

func (e *exposition) counter(name, help string, v int64) {
	e.family(name+"_total", "counter", help)
	e.sample(name+"_total", e.labels, float64(v))
	e.gauge(name+"_created", help, e.created)
}

func (e *exposition) histogram(name, help string, h *histogram) {
	e.family(name, "histogram", help)
	engine, model, _ := strings.Cut(e.labels, ",")
	var below int64
	for i, n := range h.counts {
		below += n
		bound := "+Inf"
		if i < len(h.bounds) {
			bound = pythonFloat(h.bounds[i])
		}
		e.sample(name+"_bucket", engine+`,le="`+bound+`",`+model, float64(below))
	}
	e.sample(name+"_count", e.labels, float64(below))
	e.sample(name+"_sum", e.labels, h.sum)
	e.gauge(name+"_created", help, e.created)
}

func pythonFloat(v float64) string {
	if v >= 1e6 {
		return strconv.FormatFloat(v, 'e', -1, 64)
	}
	text := strconv.FormatFloat(v, 'f', -1, 64)
	if !strings.Contains(text, ".") {
		text += ".0"
	}
	return text
}

func unix(t time.Time) float64 { return float64(t.UnixMicro()) / 1e6 }
