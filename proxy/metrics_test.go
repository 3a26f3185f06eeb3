package proxy

import (
	"strings"
	"testing"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

func TestMetricsOfRequests(t *testing.T) {
	chat, other := &replica{models: []string{"m"}, script: always(streamed(goodStream))}, &replica{models: []string{"n"}, script: always(answered("400 Bad Request", "{}"))}
	f := serve(t, nil, chat, other)
	f.post("/v1/chat/completions", askStream)
	f.post("/v1/chat/completions", askStream)
	f.post("/v1/completions", `{"model":"n","prompt":"x"}`)
	f.post("/v1/completions", `{"model":"evil\nname{}","prompt":"x"}`, "X-Request-Id", "evil-id")
	f.post("/v1/chat/completions", "evil body")
	f.post("/v1/evil-path", "{}")
	f.settled()
	for _, line := range []string{
		`warmroute_requests_total{backend="r0",code="200",endpoint="/v1/chat/completions",model="m"} 2`,
		`warmroute_requests_total{backend="r1",code="400",endpoint="/v1/completions",model="n"} 1`,
		`warmroute_requests_total{backend="",code="404",endpoint="/v1/completions",model=""} 1`,
		`warmroute_requests_total{backend="",code="400",endpoint="/v1/chat/completions",model=""} 1`,
		`warmroute_request_duration_seconds_count{backend="r0",model="m"} 2`,
		`warmroute_ttft_seconds_count{backend="r0",model="m"} 2`,
		`warmroute_overhead_seconds_count 3`,
		`warmroute_prompt_tokens_total{backend="r0",model="m"} 24`,
		`warmroute_observed_cached_tokens_total{backend="r0",model="m"} 16`,
		`warmroute_predicted_cached_tokens_total{backend="r0",model="m"} 256`,
		`warmroute_backend_in_flight{backend="r0"} 0`,
		`warmroute_backend_ready{backend="r1"} 1`,
		`warmroute_index_blocks{backend="r0"} 4`,
	} {
		f.counts(line)
	}
	text := f.exposition()
	if strings.Contains(text, "evil") {
		t.Error("a label holds a client's bytes")
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	if _, err := parser.TextToMetricFamilies(strings.NewReader(text)); err != nil {
		t.Error(err)
	}
}

func TestRetriesAreCountedByTheirOwnReason(t *testing.T) {
	f := serve(t, nil, &replica{script: always(answered("503 Service Unavailable", "full"))}, &replica{script: once()},
		&replica{script: always(answered("200 OK", whole))})
	if resp, _ := f.post("/v1/chat/completions", askWhole); resp.StatusCode != 200 {
		t.Fatalf("status %d", resp.StatusCode)
	}
	f.settled()
	f.counts(`warmroute_retries_total{reason="status_503"} 1`)
	f.counts(`warmroute_retries_total{reason="broken"} 1`)
}

func TestLogTellsWhatBecameOfARequest(t *testing.T) {
	f := serve(t, nil, &replica{script: once()}, &replica{script: always(answered("200 OK", whole))})
	f.post("/v1/chat/completions", askWhole, "X-Request-Id", "my-id")
	eventually(t, "the request is logged", func() bool { return strings.Contains(f.log.String(), "msg=request ") })
	log := f.log.String()
	for _, want := range []string{`msg="attempt failed" backend=r0 reason=broken`, "backend=r1 code=200 attempts=2", "request_id=my-id"} {
		if !strings.Contains(log, want) {
			t.Errorf("the log lacks %s:\n%s", want, log)
		}
	}
	if strings.Contains(log, "What do you make") {
		t.Error("the log holds a prompt")
	}
}
