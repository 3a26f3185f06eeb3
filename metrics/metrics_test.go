package metrics

import (
	"bufio"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/encoding/protodelim"

	"warmroute/backends"
	"warmroute/recovery"
	"warmroute/router"
)

const (
	openMetrics = "application/openmetrics-text; version=1.0.0"
	protobuf    = "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
)

// fixture is the metrics of a fleet.
type fixture struct {
	t        testing.TB
	metrics  *Metrics
	router   *router.Router
	registry *backends.Registry
}

func newFixture(t testing.TB, fleet ...*backends.Backend) *fixture {
	t.Helper()
	registry, err := backends.NewRegistry(fleet)
	if err != nil {
		t.Fatal(err)
	}
	r, err := router.New(router.Options{
		Settings: router.Settings{Policy: "prefix", PollInterval: time.Second},
		Backends: registry.All(), BlockBytes: 256, IndexMaxBytes: 1 << 20,
		Now: time.Now, Rand: rand.NewPCG(1, 1),
	})
	if err != nil {
		t.Fatal(err)
	}
	return &fixture{t, New(registry, r, "test"), r, registry}
}

// scrape returns the exposition in the format, or as text if accept is empty.
func (f *fixture) scrape(accept string) *httptest.ResponseRecorder {
	f.t.Helper()
	w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/metrics", nil)
	if accept != "" {
		r.Header.Set("Accept", accept)
	}
	f.metrics.Handler().ServeHTTP(w, r)
	if w.Code != http.StatusOK {
		f.t.Fatalf("status %d: %s", w.Code, w.Body)
	}
	return w
}

func (f *fixture) text() string { return f.scrape("").Body.String() }

// families returns the metric families of an exposition in protobuf by name.
func (f *fixture) families() map[string]*dto.MetricFamily {
	f.t.Helper()
	body, out := bufio.NewReader(f.scrape(protobuf).Body), map[string]*dto.MetricFamily{}
	for {
		var family dto.MetricFamily
		if err := protodelim.UnmarshalFrom(body, &family); err != nil {
			if body.Buffered() > 0 || len(out) == 0 {
				f.t.Fatal(err)
			}
			return out
		}
		out[family.GetName()] = &family
	}
}

func (f *fixture) record(model, backend string) {
	f.metrics.RecordRequest(&Request{
		Endpoint: "/v1/chat/completions", MatchedBusy: true, Model: model, Backend: backend, Code: 200,
		TTFT: time.Second, PromptTokens: 1, PredictedTokens: 1, CachedTokens: 1, CachedKnown: true,
	}, "id", time.Now())
}

func TestRemovedBackendHasNoSeries(t *testing.T) {
	stays, goes := &backends.Backend{Name: "stays"}, &backends.Backend{Name: "goes"}
	f := newFixture(t, stays, goes)
	f.record("m", "stays")
	f.record("m", "goes")
	f.metrics.CountPollError(goes)
	if n := strings.Count(f.text(), `backend="goes"`); n == 0 {
		t.Fatal("it has no series")
	}
	f.router.RemoveBackend(goes)
	f.registry.Remove(goes)
	f.metrics.DeleteBackend("goes")
	f.record("m", "goes") // one that was in flight
	text := f.text()
	if strings.Contains(text, `"goes"`) {
		t.Errorf("it still has series:\n%s", text)
	}
	if !strings.Contains(text, `warmroute_requests_total{backend="stays"`) {
		t.Error("the other backend's series were deleted as well")
	}
}

func TestUnlistedModelLosesSeries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &backends.Backend{Name: "one"}
		f := newFixture(t, b)
		list := func(ids ...string) {
			var cards []backends.Model
			for _, id := range ids {
				cards = append(cards, backends.Model{ID: id})
			}
			b.SetModels(cards)
		}
		has := func(when, model string, want bool) {
			t.Helper()
			if got := strings.Contains(f.text(), `model="`+model+`"`); got != want {
				t.Errorf("%s: %s has series: %v, want %v", when, model, got, want)
			}
		}
		list("base", "adapter")
		f.record("base", "one")
		f.record("adapter", "one")
		f.metrics.RecordRequest(&Request{Endpoint: "/v1/chat/completions", Code: 404}, "id", time.Now()) // without a model
		list("base")
		has("unloaded", "adapter", true)
		time.Sleep(unlistedModelTimeout / 2)
		list("base", "adapter")
		has("loaded again", "adapter", true)
		list("base")
		has("unloaded again", "adapter", true)
		time.Sleep(unlistedModelTimeout - time.Second)
		has("before the timeout", "adapter", true)
		time.Sleep(time.Second)
		has("after the timeout", "adapter", false)
		has("after the timeout", "base", true)
		has("after the timeout", "", true)
		f.record("adapter", "one") // it was in flight all the time
		has("another response", "adapter", true)
		time.Sleep(unlistedModelTimeout)
		has("after another timeout", "adapter", false)
	})
}

func TestUnlistedModelsLoseSeriesWithoutScrapes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &backends.Backend{Name: "one"}
		f := newFixture(t, b)
		for i := range 1000 {
			adapter := fmt.Sprint("adapter", i)
			b.SetModels([]backends.Model{{ID: adapter}})
			f.record(adapter, "one")
			time.Sleep(time.Minute)
		}
		if n := strings.Count(f.text(), "warmroute_ttft_seconds_count"); n > 12 {
			t.Errorf("%d of 1,000 adapters have series", n)
		}
	})
}

// Prometheus rejects a scrape with duplicate series.
func TestBackendsWithOneNameHaveOneSeries(t *testing.T) {
	old := &backends.Backend{Name: "one"}
	f := newFixture(t, old)
	old.Retire()
	old.InFlight.Store(5)
	next := &backends.Backend{Name: "one"}
	f.registry.Add(next)
	f.router.AddBackend(next)
	if text := f.text(); !strings.Contains(text, `warmroute_backend_in_flight{backend="one"} 0`) {
		t.Errorf("the series are not those of the new backend:\n%s", text)
	}
}

func TestDrainingBackend(t *testing.T) {
	b := &backends.Backend{Name: "one"}
	b.SetState(backends.Ready)
	f := newFixture(t, b)
	for _, c := range []struct {
		change          func()
		ready, draining string
	}{{func() {}, "1", "0"}, {b.Drain, "0", "1"}, {b.Undrain, "1", "0"}, {b.Retire, "0", "1"}} {
		c.change()
		text := f.text()
		for name, want := range map[string]string{"ready": c.ready, "draining": c.draining} {
			if line := `warmroute_backend_` + name + `{backend="one"} ` + want; !strings.Contains(text, line+"\n") {
				t.Errorf("no %s", line)
			}
		}
	}
}

func TestSlowBackend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &backends.Backend{Name: "one"}
		b.SetState(backends.Ready)
		f := newFixture(t, b)
		load := backends.Load{QueuesKnown: true, Running: 4, OwnInFlight: 4, TokensKnown: true}
		generate := func(seconds int, step float64) {
			for range seconds {
				time.Sleep(time.Second)
				load.Gaps += 4 / step
				load.GapSeconds += 4
				load.GenerationTokens, load.PolledAt = load.Gaps, time.Now()
				l := load
				b.SetLoad(&l)
				f.router.ObserveLoad(b, &l)
			}
		}
		generate(120, 0.02)
		if line := `warmroute_backend_slowdown{backend="one"} 0`; !strings.Contains(f.text(), line+"\n") {
			t.Errorf("no %s", line)
		}
		generate(20, 0.3)
		if text := f.text(); !strings.Contains(text, `warmroute_backend_slowdown{backend="one"} 1`) {
			t.Errorf("no slowdown of 10 or more in %s", text)
		}
	})
}

// constants returns the values of the package's string types by type, as the source
// declares them.
func constants(t *testing.T) map[string][]string {
	t.Helper()
	entries, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	values := map[string][]string{}
	for _, entry := range entries {
		if name := entry.Name(); !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), entry.Name(), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok || len(spec.Values) != 1 {
				return true
			}
			of, named := spec.Type.(*ast.Ident)
			text, literal := spec.Values[0].(*ast.BasicLit)
			if named && literal && text.Kind == token.STRING {
				value, _ := strconv.Unquote(text.Value)
				values[of.Name] = append(values[of.Name], value)
			}
			return true
		})
	}
	return values
}

// A counter must exist before the first event, or the event is missing from its rate.
func TestCountersBeginAtZero(t *testing.T) {
	f := newFixture(t, &backends.Backend{Name: "one"})
	text, named := f.text(), constants(t)
	for of, series := range map[string]string{
		"DisconnectPhase": "disconnected_requests_total{phase", "RetryReason": "retries_total{reason",
		"RetryWaitResult": "retry_waits_total{result", "QueueResult": "queue_ends_total{result",
		"UnauthorizedReason": "unauthorized_total{reason", "SplitResult": "split_requests_total{result",
	} {
		if len(named[of]) == 0 {
			t.Errorf("%s has no constants", of)
		}
		for _, value := range named[of] {
			if !strings.Contains(text, "warmroute_"+series+"="+strconv.Quote(value)+"} 0\n") {
				t.Errorf("no %s=%q} at 0", series, value)
			}
		}
	}
	for _, series := range []string{`poll_errors_total{backend="one"}`, `config_reloads_total{result="failed"}`,
		`retries_total{reason="status_503"}`} {
		if !strings.Contains(text, "warmroute_"+series+" 0\n") {
			t.Errorf("no %s at 0", series)
		}
	}
}

func TestMetricsHaveHelpAndPrefix(t *testing.T) {
	f := newFixture(t, &backends.Backend{Name: "one"})
	f.record("m", "one")
	for name, family := range f.families() {
		if family.GetHelp() == "" {
			t.Errorf("%s has no help", name)
		}
		prefix, _, _ := strings.Cut(name, "_")
		switch prefix {
		case "warmroute", "go", "process", "promhttp":
		default:
			t.Errorf("%s has another prefix", name)
		}
	}
}

func TestExemplars(t *testing.T) {
	f := newFixture(t, &backends.Backend{Name: "one"})
	f.metrics.RecordRequest(&Request{Endpoint: "/v1/chat/completions", Model: "m", Backend: "one", Code: 200, Duration: 3 * time.Second,
		TTFT: 30 * time.Millisecond}, "req-1", time.Now())
	text := f.scrape(openMetrics).Body.String()
	for _, line := range []string{
		`warmroute_ttft_seconds_bucket{backend="one",model="m",le="0.05"} 1 # {request_id="req-1"} 0.03 `,
		`warmroute_request_duration_seconds_bucket{backend="one",model="m",le="5.0"} 1 # {request_id="req-1"} 3.0 `,
	} {
		if !strings.Contains(text, line) {
			t.Errorf("no %s in\n%s", line, text)
		}
	}
	if !strings.HasSuffix(text, "# EOF\n") {
		t.Error("OpenMetrics without its end")
	}
	if plain := f.text(); strings.Contains(plain, "req-1") ||
		!strings.Contains(plain, `warmroute_ttft_seconds_count{backend="one",model="m"} 1`) {
		t.Error("the text format has exemplars, or no count")
	}
	h := f.families()["warmroute_ttft_seconds"].Metric[0].Histogram
	if h.GetSchema() != 3 || len(h.PositiveSpan) != 1 || len(h.Bucket) == 0 || len(h.Exemplars) != 1 ||
		h.Exemplars[0].Label[0].GetValue() != "req-1" {
		t.Errorf("in protobuf: %v", h)
	}
}

func TestExemplarInterval(t *testing.T) {
	h := newLatencyHistogram(prometheus.NewHistogram(ttftOpts), ttftOpts.Buckets)
	shown := func() map[string]bool {
		var out dto.Metric
		if err := h.histogram.Write(&out); err != nil {
			t.Fatal(err)
		}
		ids := map[string]bool{}
		for _, b := range out.Histogram.Bucket {
			if b.Exemplar != nil {
				ids[b.Exemplar.Label[0].GetValue()] = true
			}
		}
		return ids
	}
	at := time.Unix(1_700_000_000, 0)
	for _, c := range []struct {
		after    time.Duration
		id, want string
	}{{0, "first", "first"}, {exemplarInterval - 1, "second", "first"}, {exemplarInterval, "third", "third"}} {
		h.observe(time.Millisecond, c.id, at.Add(c.after))
		if got := shown(); len(got) != 1 || !got[c.want] {
			t.Errorf("after %v: %v, want %s", c.after, got, c.want)
		}
	}
	h.observe(time.Hour, "slow", at.Add(exemplarInterval))
	if got := shown(); len(got) != 2 || !got["slow"] {
		t.Errorf("no exemplar in the last bucket: %v", got)
	}
}

func TestInvalidExemplar(t *testing.T) {
	room := prometheus.ExemplarMaxRunes - len(exemplarLabel)
	for _, c := range []struct {
		id    string
		shown bool
	}{{"", false}, {"\xff", false}, {strings.Repeat("a", room), true}, {strings.Repeat("a", room+1), false}, {strings.Repeat("ä", room), true},
		{"a\n\"b\\", true}} {
		f := newFixture(t, &backends.Backend{Name: "one"})
		f.metrics.RecordRequest(&Request{Model: "m", Backend: "one", Code: 200, Duration: time.Second}, c.id, time.Now())
		if got := strings.Contains(f.scrape(openMetrics).Body.String(), "# {"+exemplarLabel); got != c.shown {
			t.Errorf("ID %q shown: %v, want %v", c.id, got, c.shown)
		}
	}
}

func TestLatenciesHaveClassicAndNativeBuckets(t *testing.T) {
	f := newFixture(t, &backends.Backend{Name: "one"})
	f.record("m", "one")
	f.metrics.ITLHistogram("m", "one").Observe(.02)
	f.metrics.RecordQueueExit(QueueSent, time.Second)
	families := f.families()
	for _, name := range []string{"request_duration_seconds", "ttft_seconds", "itl_seconds", "overhead_seconds", "queue_seconds"} {
		h := families["warmroute_"+name].Metric[0].Histogram
		if h.GetSchema() != 3 || len(h.Bucket) < 12 || h.GetSampleCount() != 1 || h.GetZeroCount()+uint64(len(h.PositiveDelta)) != 1 {
			t.Errorf("%s: %v", name, h)
		}
	}
}

func TestConcurrentRecords(t *testing.T) {
	f := newFixture(t, &backends.Backend{Name: "one"})
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for range 200 {
				f.record(fmt.Sprint("m", i%2), "one")
			}
			f.text()
		})
	}
	all.Wait()
	if want := `warmroute_ttft_seconds_count{backend="one",model="m0"} 800`; !strings.Contains(f.text(), want) {
		t.Errorf("no %s", want)
	}
}

func BenchmarkObserveITL(b *testing.B) {
	random := rand.New(rand.NewPCG(1, 2))
	times := make([]time.Duration, 1024) // as of a stream of 50 tokens per second
	for i := range times {
		times[i] = time.Duration((20 + 3*random.NormFloat64()) * 1e6)
	}
	itl := newFixture(b, &backends.Backend{Name: "one"}).metrics.ITLHistogram("m", "one")
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		itl.Observe(times[i%len(times)].Seconds())
	}
}

func BenchmarkRecordRequest(b *testing.B) {
	f := newFixture(b, &backends.Backend{Name: "one"}, &backends.Backend{Name: "two"})
	random := rand.New(rand.NewPCG(1, 2))
	requests := make([]*Request, 1024)
	for i := range requests {
		requests[i] = &Request{
			Endpoint: "/v1/chat/completions", Model: "m", Backend: []string{"one", "two"}[i%2], Code: 200,
			Duration: time.Duration((2 + random.Float64()) * 1e9), TTFT: time.Duration((.2 + .1*random.Float64()) * 1e9),
			Overhead:     time.Duration((60 + 20*random.Float64()) * 1e3),
			PromptTokens: 1000, PredictedTokens: 500, CachedTokens: 480, CachedKnown: i%2 == 0,
		}
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		f.metrics.RecordRequest(requests[i%len(requests)], "wr-0123456789abcdef", time.Now())
	}
}

func TestPanicsByPlace(t *testing.T) {
	f := newFixture(t, &backends.Backend{Name: "a"})
	f.metrics.CountPanic(recovery.Poll)
	for _, want := range []string{`warmroute_panics_total{where="poll"} 1`, `warmroute_panics_total{where="dispatch"} 0`} {
		if text := f.text(); !strings.Contains(text, want) {
			t.Errorf("%s is missing in\n%s", want, text)
		}
	}
}
