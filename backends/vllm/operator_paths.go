package vllm

import (
	"slices"
	"strings"
)

// operatorPaths change a replica or show its inside, in vLLM and in what reinforcement learning
// frameworks add to it. No client of a proxy may reach them.
var operatorPaths = [...]string{
	"/abort_requests", "/collective_rpc", "/docs", "/fault_tolerance", "/finish_weight_update", "/get_world_size", "/init_broadcaster",
	"/init_weight_transfer_engine", "/is_paused", "/is_scaling_elastic_ep", "/is_sleeping", "/kv_event_sources", "/load", "/metrics",
	"/openapi.json", "/pause", "/redoc", "/release_kv_cache_memory", "/release_memory_occupation", "/reset_encoder_cache", "/reset_mm_cache",
	"/reset_prefix_cache", "/resume", "/resume_memory_occupation", "/scale_elastic_ep", "/server_info", "/shutdown", "/sleep",
	"/start_profile",
	"/start_weight_update", "/stop_profile", "/update_weights", "/update_weights_from_disk", "/update_weights_from_distributed",
	"/update_weights_from_tensor", "/wake_up", "/load_lora_adapter", "/unload_lora_adapter",
}

// IsOperatorPath reports whether a path of a replica, or what it is below, is for its operator, with or without /v1.
func IsOperatorPath(path string) bool {
	path = strings.TrimPrefix(path, "/v1")
	return slices.ContainsFunc(operatorPaths[:], func(p string) bool { return path == p || strings.HasPrefix(path, p+"/") })
}
