package metrics

import (
	"bufio"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/encoding/protodelim"

	"warmroute/backends"
)

const (
	asOpenMetrics = "application/openmetrics-text; version=1.0.0"
	asProtobuf    = "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
)

// scrapeAs is the exposition in a format.
func scrapeAs(t *testing.T, m *Metrics, accept string) *httptest.ResponseRecorder {
	t.Helper()
	w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/metrics", nil)
	r.Header.Set("Accept", accept)
	m.Handler().ServeHTTP(w, r)
	if w.Code != http.StatusOK {
		t.Fatalf("status %d: %s", w.Code, w.Body)
	}
	return w
}

// families are what an exposition in protobuf holds.
func families(t *testing.T, m *Metrics) map[string]*dto.MetricFamily {
	t.Helper()
	body, out := bufio.NewReader(scrapeAs(t, m, asProtobuf).Body), map[string]*dto.MetricFamily{}
	for {
		var f dto.MetricFamily
		if err := protodelim.UnmarshalFrom(body, &f); err != nil {
			if body.Buffered() > 0 || len(out) == 0 {
				t.Fatal(err)
			}
			return out
		}
		out[f.GetName()] = &f
	}
}

func TestExemplarsAreTheRequestsIDs(t *testing.T) {
	m, _, _, scrape := exposed(t, &backends.Backend{Name: "one"})
	at := time.Unix(1_700_000_000, 0)
	m.Ended(&Request{Endpoint: "/v1/chat/completions", Model: "m", Backend: "one", Code: 200, Duration: 3 * time.Second, TTFT: 30 * time.Millisecond}, "req-1", at)
	text := scrapeAs(t, m, asOpenMetrics).Body.String()
	for _, line := range []string{
		`warmroute_ttft_seconds_bucket{backend="one",model="m",le="0.05"} 1 # {request_id="req-1"} 0.03 1.7e+09`,
		`warmroute_request_duration_seconds_bucket{backend="one",model="m",le="5.0"} 1 # {request_id="req-1"} 3.0 1.7e+09`,
	} {
		if !strings.Contains(text, line+"\n") {
			t.Errorf("no %s in\n%s", line, text)
		}
	}
	if !strings.HasSuffix(text, "# EOF\n") {
		t.Error("OpenMetrics without its end")
	}
	if plain := scrape(); strings.Contains(plain, "req-1") || !strings.Contains(plain, `warmroute_ttft_seconds_count{backend="one",model="m"} 1`) {
		t.Error("the text format has exemplars, or no count")
	}
	h := families(t, m)["warmroute_ttft_seconds"].Metric[0].Histogram
	if h.GetSchema() != nativeSchema || len(h.PositiveSpan) != 1 || len(h.Bucket) == 0 || len(h.Exemplars) != 1 || h.Exemplars[0].Label[0].GetValue() != "req-1" {
		t.Errorf("in protobuf: %v", h)
	}
}

func TestABucketsExemplarIsRenewedOnceASecond(t *testing.T) {
	h := newHistogram(newLatencies().layouts[ttft])
	at, shown := time.Unix(1_700_000_000, 0), func() string { return h.read().Exemplars[0].Label[0].GetValue() }
	for _, c := range []struct {
		after    time.Duration
		id, want string
	}{{0, "first", "first"}, {exemplarEvery - 1, "second", "first"}, {exemplarEvery, "third", "third"}} {
		h.of(time.Millisecond, c.id, at.Add(c.after))
		if got := shown(); got != c.want {
			t.Errorf("after %v: %s, want %s", c.after, got, c.want)
		}
	}
	h.of(time.Hour, "slow", at.Add(exemplarEvery))
	if all := h.read().Exemplars; len(all) != 2 || all[1].Label[0].GetValue() != "slow" {
		t.Errorf("the rare one is not shown beside the others: %v", all)
	}
}

func TestAnIDThatFitsNoExemplarIsLeftOut(t *testing.T) {
	room := exemplarRunes - len(exemplarLabel)
	for _, c := range []struct {
		id    string
		shown bool
	}{{"", false}, {"\xff", false}, {strings.Repeat("a", room), true}, {strings.Repeat("a", room+1), false}, {strings.Repeat("ä", room), true}, {"a\n\"b\\", true}} {
		m, _, _, _ := exposed(t, &backends.Backend{Name: "one"})
		m.Ended(&Request{Model: "m", Backend: "one", Code: 200, Duration: time.Second}, c.id, time.Now())
		if got := strings.Contains(scrapeAs(t, m, asOpenMetrics).Body.String(), "# {"+exemplarLabel); got != c.shown {
			t.Errorf("id %q shown: %v, want %v", c.id, got, c.shown)
		}
	}
}

// What rates are taken of must be there before the first event, or the first is lost.
func TestCountersWithKnownLabelsBeginAtZero(t *testing.T) {
	_, _, _, scrape := exposed(t, &backends.Backend{Name: "one"})
	text := scrape()
	for _, series := range []string{
		`retries_total{reason="connect"}`, `aborts_total{phase="held"}`, `hold_ends_total{end="full"}`, `retry_waits_total{end="given_up"}`,
		`unauthorized_total{reason="missing"}`, `poll_errors_total{backend="one"}`, `config_reloads_total{result="failed"}`,
	} {
		if !strings.Contains(text, "warmroute_"+series+" 0\n") {
			t.Errorf("no %s at 0", series)
		}
	}
}

func TestEveryMetricHasHelpAndOurPrefixOrTheRuntimes(t *testing.T) {
	m, _, _, _ := exposed(t, &backends.Backend{Name: "one"})
	ended(m, "one")
	for name, f := range families(t, m) {
		if f.GetHelp() == "" {
			t.Errorf("%s has no help", name)
		}
		prefix, _, _ := strings.Cut(name, "_")
		switch prefix {
		case "warmroute", "go", "process", "promhttp":
		default:
			t.Errorf("%s has another's prefix", name)
		}
	}
}
