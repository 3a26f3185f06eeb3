package config

// renamedSettings has the present path of each setting whose path has changed.
var renamedSettings = map[string]string{
	"breaker.open":                 "breaker.open_time",
	"pd.fallback":                  "disaggregation.fallback",
	"pd.lease":                     "disaggregation.kv_lease",
	"pd.min_uncached_tokens":       "disaggregation.min_uncached_tokens",
	"record":                       "recording",
	"record.file":                  "recording.file",
	"record.keep":                  "recording.keep",
	"record.max_bytes":             "recording.max_bytes",
	"record.memory":                "recording.memory",
	"registration.forget":          "registration.remove_after",
	"retry.timeouts":               "retry.after_timeout",
	"routing.batch_slowdown":       "routing.low_priority_slowdown",
	"routing.queue.batch_bytes":    "routing.queue.low_priority_bytes",
	"routing.queue.batch_requests": "routing.queue.low_priority_requests",
	"routing.queue.busy_time":      "routing.queue.busy_timeout",
	"routing.queue.time":           "routing.queue.none_ready_timeout",
	"routing.session_headers":      "routing.conversation_headers",
	"timeouts.drain":               "timeouts.serve_after_term",
	"wake":                         "start_hooks",
}
