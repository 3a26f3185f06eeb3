package tracing

import (
	"bytes"
	"errors"
	"log/slog"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTheEnvironmentSaysWhetherAndHow(t *testing.T) {
	type env = map[string]string
	const endpoint, all = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
	for _, c := range []struct {
		name   string
		env    env
		on     bool
		faults string // what the error names
	}{
		{"nothing", env{}, false, ""},
		{"an empty endpoint", env{all: ""}, false, ""},
		{"an endpoint", env{all: "http://c:4318"}, true, ""},
		{"an endpoint for traces", env{endpoint: "http://c:4318/v1/traces"}, true, ""},
		{"the exporter, where it looks by itself", env{"OTEL_TRACES_EXPORTER": "otlp"}, true, ""},
		{"gRPC", env{all: "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, true, ""},
		{"gRPC for traces alone", env{all: "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "x", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, true, ""},
		{"no exporter", env{all: "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, false, ""},
		{"disabled", env{all: "http://c:4318", "OTEL_SDK_DISABLED": "TRUE"}, false, ""},
		{"not disabled", env{all: "http://c:4318", "OTEL_SDK_DISABLED": "false"}, true, ""},
		{"another exporter", env{all: "http://c:4318", "OTEL_TRACES_EXPORTER": "zipkin"}, false, `OTEL_TRACES_EXPORTER: unknown value "zipkin"`},
		{"another protocol", env{all: "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, false, `OTEL_EXPORTER_OTLP_PROTOCOL: unknown value "http/json"`},
		{"another protocol, and disabled", env{all: "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json", "OTEL_SDK_DISABLED": "true"}, false, ""},
	} {
		tracer, err := New(func(name string) (string, bool) { v, ok := c.env[name]; return v, ok }, "1", slog.New(slog.DiscardHandler))
		if (tracer != nil) != c.on || (err != nil) != (c.faults != "") || err != nil && !strings.HasPrefix(err.Error(), c.faults) {
			t.Errorf("%s: on %v, %v", c.name, tracer != nil, err)
		}
	}
}

func TestAFaultIsToldByItsVariablesName(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.WriteFile("no.pem", []byte("no certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	const otlp = "OTEL_EXPORTER_OTLP_"
	for _, c := range []struct{ name, value, fault string }{
		{otlp + "ENDPOINT", "collector:4318", "no URL of a collector"},
		{otlp + "ENDPOINT", "http://", "no URL of a collector"},
		{otlp + "TRACES_ENDPOINT", "http://u:SECRET@c:x", "no URL of a collector"},
		{otlp + "HEADERS", "authorization=Bearer SECRET,x=%20", ""},
		{otlp + "HEADERS", "a=b,", ""},
		{otlp + "HEADERS", "Authorization Bearer SECRET", "not of the form"},
		{otlp + "HEADERS", "a SECRET=b", "one of the names is no header's"},
		{otlp + "TRACES_HEADERS", "a=SECRET%zz", "not of the form"},
		{otlp + "COMPRESSION", "none", ""},
		{otlp + "COMPRESSION", "zstd", `unknown value "zstd"`},
		{otlp + "TIMEOUT", "10s", `"10s" is no whole number`},
		{otlp + "CERTIFICATE", "SECRET.pem", "its file cannot be read: no such file"},
		{otlp + "TRACES_CERTIFICATE", "no.pem", "its file has no certificate"},
		{otlp + "CLIENT_KEY", "SECRET.pem", otlp + "CLIENT_CERTIFICATE: is not set"},
		{otlp + "CLIENT_CERTIFICATE", "no.pem", otlp + "CLIENT_KEY: is not set"},
		{"OTEL_RESOURCE_ATTRIBUTES", "a=b,c=d%20e", ""},
		{"OTEL_RESOURCE_ATTRIBUTES", "a=b,SECRET", "not of the form"},
		{"OTEL_TRACES_SAMPLER", "ALWAYS_ON", ""},
		{"OTEL_TRACES_SAMPLER", "nonsense", `unknown value "nonsense"`},
		{"OTEL_BSP_SCHEDULE_DELAY", "0", `"0" is no whole number from 1`},
		{"OTEL_BSP_MAX_QUEUE_SIZE", "-1", `"-1" is no whole number from 1`},
		{"OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "many", `"many" is no whole number`},
	} {
		env := map[string]string{otlp + "ENDPOINT": "http://c:4318"}
		env[c.name] = c.value
		said := ""
		if _, err := New(func(name string) (string, bool) { v, ok := env[name]; return v, ok }, "1", slog.New(slog.DiscardHandler)); err != nil {
			said = err.Error()
		}
		if !strings.Contains(said, c.fault) || (said == "") != (c.fault == "") || said != "" && !strings.Contains(said, c.name) || strings.Contains(said, "SECRET") {
			t.Errorf("%s=%s: %q", c.name, c.value, said)
		}
	}
	env := map[string]string{otlp + "ENDPOINT": "x", "OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "NaN"}
	_, err := New(func(name string) (string, bool) { v, ok := env[name]; return v, ok }, "1", slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), otlp+"ENDPOINT: ") || !strings.Contains(err.Error(), `OTEL_TRACES_SAMPLER_ARG: "NaN" is no share`) {
		t.Errorf("two faults: %v", err)
	}
}

func TestAFaultOfTheSDKsHidesNoneOfTheCollectors(t *testing.T) {
	var said bytes.Buffer
	e := newExporter(nil, slog.New(slog.NewTextHandler(&said, nil)))
	for range 10 {
		e.report(errors.New("an odd attribute"))
		e.warn(errors.New("connection refused"))
	}
	if n := strings.Count(said.String(), "\n"); n != 2 || !strings.Contains(said.String(), "connection refused") {
		t.Errorf("it says %s", said.String())
	}
}

// untraced is what a request without tracing does with its spans.
func untraced(r *http.Request, a *Attempt) string {
	q := (*Tracer)(nil).Begin(r, "/v1/chat/completions", time.Time{})
	q.Held(time.Second, "sent")
	q.Sending(a, r.Header)
	q.Answered(200)
	q.FirstToken()
	q.Sent("", 1, 1, 1)
	q.End(nil)
	return q.TraceID(r.Header)
}

func TestWithoutTracingNothingIsAllocated(t *testing.T) {
	r := &http.Request{Header: http.Header{"Content-Type": {"application/json"}}}
	if n := testing.AllocsPerRun(100, func() { untraced(r, &Attempt{}) }); n != 0 || len(r.Header) != 1 {
		t.Errorf("%v allocations, header %v", n, r.Header)
	}
}

func BenchmarkUntraced(b *testing.B) {
	r, a := &http.Request{Header: http.Header{}}, &Attempt{}
	b.ReportAllocs()
	for b.Loop() {
		untraced(r, a)
	}
}

func TestWarningsAreBounded(t *testing.T) {
	var said bytes.Buffer
	e := newExporter(nil, slog.New(slog.NewTextHandler(&said, nil)))
	for range 1000 {
		e.warn(errors.New(strings.Repeat("the collector's page of an error ", 1000)))
	}
	if n := strings.Count(said.String(), "\n"); n != 1 || said.Len() > 2*mostReason {
		t.Errorf("%d lines of %d bytes", n, said.Len())
	}
}

func FuzzTraceIDOfAClient(f *testing.F) {
	f.Add("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "a=1,b=2")
	f.Add("00-00000000000000000000000000000000-b7ad6b7169203331-01", "")
	f.Add("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x", "=,=")
	plain := regexp.MustCompile(`^([0-9a-f]{32})?$`)
	f.Fuzz(func(t *testing.T, parent, state string) {
		id := (*Request)(nil).TraceID(http.Header{"Traceparent": {parent}, "Tracestate": {state}})
		if !plain.MatchString(id) || id != "" && !strings.Contains(parent, id) {
			t.Errorf("%q of %q", id, parent)
		}
	})
}
