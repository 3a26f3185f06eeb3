package backends

// family is one name that vLLM has used. Where a quantity was renamed, both
// names are here, since some versions write both and must not be added up.
type family int

const (
	running family = iota
	waiting
	waitingCapacity
	kvUsage
	gpuUsage // kvUsage before 0.10
	queries
	queriesBare // without Python's _total, as some exporters write a counter
	gpuQueries  // queries before 0.9
	gpuQueriesBare
	hits
	hitsBare
	gpuHits
	gpuHitsBare
	promptTokens
	promptTokensBare
	generationTokens
	generationTokensBare
	startTime
	summed // the families up to here are one number; those from here on live in labels

	cacheConfig
	loraInfo
	stepBucket
	sleepState
	unread
)

// familyOf tells whether we read a line. The _created lines that Python writes
// beside each counter hold times and are among the unread.
func familyOf(name []byte) family {
	switch string(name) {
	case "vllm:num_requests_running":
		return running
	case "vllm:num_requests_waiting":
		return waiting
	case "vllm:num_requests_waiting_by_reason":
		return waitingCapacity
	case "vllm:kv_cache_usage_perc":
		return kvUsage
	case "vllm:gpu_cache_usage_perc":
		return gpuUsage
	case "vllm:prefix_cache_queries_total":
		return queries
	case "vllm:prefix_cache_queries":
		return queriesBare
	case "vllm:gpu_prefix_cache_queries_total":
		return gpuQueries
	case "vllm:gpu_prefix_cache_queries":
		return gpuQueriesBare
	case "vllm:prefix_cache_hits_total":
		return hits
	case "vllm:prefix_cache_hits":
		return hitsBare
	case "vllm:gpu_prefix_cache_hits_total":
		return gpuHits
	case "vllm:gpu_prefix_cache_hits":
		return gpuHitsBare
	case "vllm:prompt_tokens_total":
		return promptTokens
	case "vllm:prompt_tokens":
		return promptTokensBare
	case "vllm:generation_tokens_total":
		return generationTokens
	case "vllm:generation_tokens":
		return generationTokensBare
	case "process_start_time_seconds":
		return startTime
	case "vllm:cache_config_info":
		return cacheConfig
	case "vllm:lora_requests_info":
		return loraInfo
	case "vllm:iteration_tokens_total_bucket":
		return stepBucket
	case "vllm:engine_sleep_state":
		return sleepState
	}
	return unread
}
