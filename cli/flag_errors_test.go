package cli

import (
	"strings"
	"testing"
)

// Flags of other routers are no flags here; the error names what is.
func TestFlagsOfOtherRouters(t *testing.T) {
	for args, want := range map[string]string{
		"serve --port 8000 http://a:1":            "unknown flag: --port: use --listen HOST:PORT, or :PORT for all addresses",
		"serve --host=0.0.0.0":                    "unknown flag: --host: use --listen HOST:PORT",
		"serve --worker-urls http://a:1":          "unknown flag: --worker-urls: the URLs of the replicas are arguments, without a flag",
		"check --static-backends http://a:1":      "unknown flag: --static-backends: the URLs of the replicas are arguments, without a flag",
		"--worker-urls http://a:1 --port 8000":    "unknown flag: --worker-urls: the URLs of the replicas are arguments, without a flag",
		"serve --prometheus-port 9000":            "unknown flag: --prometheus-port: use --admin HOST:PORT, where /metrics is",
		"serve --policy cache_aware http://a:1":   `unknown policy "cache_aware"; what other routers call so is cache-threshold or smg here`,
		"serve --policy Consistent_Hash http://a": `unknown policy "Consistent_Hash"; what other routers call so is session here`,
		"backends list --port 1":                  "unknown flag: --port\n",
		"serve --bogus":                           "unknown flag: --bogus\n",
	} {
		if status, _, stderr := execute(t.Context(), t, strings.Fields(args)...); status != 2 || !strings.Contains(stderr, want) {
			t.Errorf("%s: status %d, %s; want %q", args, status, stderr, want)
		}
	}
}
