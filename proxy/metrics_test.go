package proxy

import (
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"warmroute/router"
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

func TestMetricsOfWhatWasLearned(t *testing.T) {
	f := simulated(t, 1, router.QueueSettings{})
	ask := `{"model":"m","max_tokens":30,"messages":[{"role":"user","content":"` + question + `"}]}`
	for range 5 {
		if resp, answer := f.post("/v1/chat/completions", ask); resp.StatusCode != 200 {
			t.Fatalf("%d %s", resp.StatusCode, answer)
		}
	}
	f.settled()
	value := func(name string) float64 {
		t.Helper()
		_, rest, found := strings.Cut(f.exposition(), "\nwarmroute_"+name+`{backend="r0"} `)
		line, _, _ := strings.Cut(rest, "\n")
		v, err := strconv.ParseFloat(line, 64)
		if !found || err != nil {
			t.Fatalf("%s is %q", name, line)
		}
		return v
	}
	if predicted, observed := value("compared_predicted_tokens_total"), value("compared_observed_tokens_total"); predicted < 4*192 || observed < 4*192 || observed > 5*300 {
		t.Errorf("%v tokens predicted to be cached, %v were, of five times about 270", predicted, observed)
	}
	if bytes := value("learned_bytes_per_token"); bytes < 3 || bytes > 5 {
		t.Errorf("%v bytes a token, where there are four", bytes)
	}
	if answer := value("learned_answer_tokens"); answer < 30 || answer >= 250 {
		t.Errorf("an answer of %v tokens, where all have 30 and the guess is 250", answer)
	}
	if factor := value("learned_capacity_factor"); factor < 0.2 || factor > 2 {
		t.Errorf("a capacity factor of %v", factor)
	}
	if value("learned_prefill_tokens_per_second") <= 0 || value("learned_step_tokens") <= 0 {
		t.Error("no rate, or no step")
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

func TestLogTellsOfFailedAttempts(t *testing.T) {
	f := serve(t, nil, &replica{script: once()}, &replica{script: always(answered("200 OK", whole))})
	f.post("/v1/chat/completions", askWhole, "X-Request-Id", "my-id")
	log := f.log.String()
	for _, want := range []string{`msg="attempt failed" backend=r0 reason=broken`, "request_id=my-id"} {
		if !strings.Contains(log, want) {
			t.Errorf("the log lacks %s:\n%s", want, log)
		}
	}
	if strings.Contains(log, "What do you make") {
		t.Error("the log holds a prompt")
	}
}
