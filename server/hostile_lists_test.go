//go:build !race

// Some of these responses take longer to read with the race detector than a check or a poll may take.

package server

import (
	"bytes"
	"compress/gzip"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"warmroute/config"
)

// Whatever a replica's /metrics are, its load is unknown then, it stays ready, and
// its requests are served.
func TestInvalidMetricsKeepBackendReady(t *testing.T) {
	t.Parallel()
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	io.WriteString(z, "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n")
	z.Close()
	for name, f := range map[string]struct {
		metrics http.HandlerFunc
		why     string
	}{
		"a million series":     {numbered(`vllm:request_success_total{id="`, "\"} 1\n", 1_000_000), "poll failed"}, // too long, or too late
		"a million of engines": {numbered(`vllm:cache_config_info{engine="`, "\",block_size=\"16\"} 1\n", 1_000_000), "more than 1024 engines"},
		"50 MB":                {endless("# a comment\n", 50<<20), "poll failed"},
		"never ending":         {endless("vllm:num_requests_running 1\n", 1<<50), "poll failed"},
		"one line without end": {endless("x", 1<<50), "line 1: longer than"},
		"garbage":              {text("\x00\xff\x01\n"), "line 1"},
		"a page":               {text("<html><body>Login</body></html>\n"), "line 1"},
		"compressed unasked":   {text(packed.String()), "line 1"},
		"cut in a number":      {text("vllm:num_requests_running 12"), "truncated"},
		"gone":                 {http.NotFound, "no /metrics"},
		"a redirect": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/elsewhere", http.StatusFound)
		}, "returned 302"},
		"silent":                 {func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, "deadline exceeded"},
		"silent in mid-sentence": {stall("vllm:num_requests_running 1\nvllm:num_req"), "deadline exceeded"},
	} {
		t.Run(name, func(t *testing.T) {
			p := startFronted(t, func(c *config.Config) {
				c.Poll.Interval, c.Poll.FastInterval, c.Poll.Timeout = 10*time.Millisecond, 10*time.Millisecond, 700*time.Millisecond
			}, standIn{metrics: f.metrics}.start(t))
			p.ready(1)
			p.logs("poll failed")
			if log := p.log.String(); !strings.Contains(log, f.why) {
				t.Errorf("the log does not say %q:\n%s", f.why, log)
			}
			p.checkServed()
			p.ready(1)
		})
	}
}

// A replica whose list of models is no list is down and the log says why; the
// others serve.
func TestInvalidModelLists(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]struct {
		models http.HandlerFunc
		why    string
	}{
		"10,000 long models":   {models(numbered(`{"owned_by":"`+strings.Repeat("x", 1000)+`","id":"m`, `"},`, 10_000)), "longer than"},
		"300,000 small models": {models(numbered(`{"id":"`, `"},`, 300_000)), "lists 300001 models"},
		"100 MB":               {endless(" ", 100<<20), "longer than"},
		"never ending":         {endless(`{"data":[`, 1<<50), "longer than"},
		"deep":                 {text(`{"data":` + strings.Repeat("[", 1<<20)), "/v1/models"},
		"a long name":          {text(`{"data":[{"id":"` + strings.Repeat("n", 1<<20) + `"}]}`), "an id of 1048576 bytes"},
		"a redirect": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/v1/models/", http.StatusTemporaryRedirect)
		}, "a redirect to"},
		"a header bomb": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Bomb", strings.Repeat("b", 1<<20))
		}, "too long"},
	} {
		t.Run(name, func(t *testing.T) {
			// the log has the first failure
			p := startFronted(t, func(c *config.Config) { c.Health.Timeout = time.Minute }, standIn{models: f.models}.start(t), standIn{}.start(t))
			p.logs(f.why)
			p.ready(1)
			p.checkServed()
		})
	}
}
