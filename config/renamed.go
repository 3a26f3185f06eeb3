package config

// renamedSettings has the present path of each setting whose path has changed.
var renamedSettings = map[string]string{
	"routing.queue.time":      "routing.queue.none_ready_timeout",
	"routing.queue.busy_time": "routing.queue.busy_timeout",
	"wake":                    "start_hooks",
	"timeouts.drain":          "timeouts.serve_after_term",
}
