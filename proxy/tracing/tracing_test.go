package tracing

import (
	"bytes"
	"errors"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// setEnv sets OpenTelemetry's variables to those in env and no others.
func setEnv(t *testing.T, env map[string]string) {
	t.Helper()
	for _, pair := range os.Environ() {
		if name, _, _ := strings.Cut(pair, "="); strings.HasPrefix(name, "OTEL_") {
			t.Setenv(name, "")
		}
	}
	for name, value := range env {
		t.Setenv(name, value)
	}
}

func TestEnvironment(t *testing.T) {
	type env = map[string]string
	const tracesEndpoint, endpoint = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
	for _, c := range []struct {
		name    string
		env     env
		enabled bool
		err     string // prefix
	}{
		{"nothing", env{}, false, ""},
		{"empty endpoint", env{endpoint: ""}, false, ""},
		{"endpoint", env{endpoint: "http://c:4318"}, true, ""},
		{"endpoint for traces", env{tracesEndpoint: "http://c:4318/v1/traces"}, true, ""},
		{"exporter with its default endpoint", env{"OTEL_TRACES_EXPORTER": "otlp"}, true, ""},
		{"gRPC", env{endpoint: "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, true, ""},
		{"gRPC for traces", env{endpoint: "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "x", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"},
			true, ""},
		{"no exporter", env{endpoint: "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, false, ""},
		{"disabled", env{endpoint: "http://c:4318", "OTEL_SDK_DISABLED": "TRUE"}, false, ""},
		{"not disabled", env{endpoint: "http://c:4318", "OTEL_SDK_DISABLED": "false"}, true, ""},
		{"unknown exporter", env{endpoint: "http://c:4318", "OTEL_TRACES_EXPORTER": "zipkin"}, false,
			`OTEL_TRACES_EXPORTER: unknown value "zipkin"`},
		{"unknown protocol", env{endpoint: "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, false,
			`OTEL_EXPORTER_OTLP_PROTOCOL: unknown value "http/json"`},
		{"unknown protocol, disabled", env{endpoint: "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json", "OTEL_SDK_DISABLED": "true"},
			false, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			setEnv(t, c.env)
			tracer, err := New("1", slog.New(slog.DiscardHandler))
			if (tracer != nil) != c.enabled || (err != nil) != (c.err != "") || err != nil && !strings.HasPrefix(err.Error(), c.err) {
				t.Errorf("enabled %v, %v", tracer != nil, err)
			}
		})
	}
}

// The SDK would panic with a negative size and spin without a delay.
func TestInvalidQueueSettings(t *testing.T) {
	for _, value := range []string{"-1", "0", "many", "99999999999"} {
		setEnv(t, map[string]string{
			"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_BSP_MAX_QUEUE_SIZE": value, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": value,
			"OTEL_BSP_SCHEDULE_DELAY": value,
		})
		q := startQueue(newExporter(nil, slog.New(slog.DiscardHandler)))
		if q.maxSpans != sdk.DefaultMaxQueueSize {
			t.Errorf("%s: queue of %d spans", value, q.maxSpans)
		}
		q.Shutdown(t.Context())
	}
}

func TestInvalidSettingsAreLoggedWithoutValues(t *testing.T) {
	const otlp = "OTEL_EXPORTER_OTLP_"
	for _, c := range []struct{ name, value, message string }{
		{otlp + "TRACES_ENDPOINT", "http://u:SECRET@c:x", "parse url"},
		{otlp + "HEADERS", "Authorization Bearer SECRET", "parse headers"},
		{otlp + "HEADERS", "a SECRET=b", "parse headers"},
		{otlp + "TRACES_HEADERS", "a=SECRET%zz", "escape header value"},
		{otlp + "CERTIFICATE", "SECRET.pem", "read tls ca cert file"},
	} {
		setEnv(t, map[string]string{otlp + "ENDPOINT": "http://c:4318", c.name: c.value})
		var out bytes.Buffer
		tracer, err := New("1", slog.New(slog.NewTextHandler(&out, nil)))
		if tracer == nil || err != nil || !strings.Contains(out.String(), c.message) || strings.Contains(out.String(), "SECRET") {
			t.Errorf("%s=%s: %v, %q", c.name, c.value, err, out.String())
		}
		t.Setenv(c.name, "")
	}
}

func TestSDKErrorDoesNotHideExportError(t *testing.T) {
	var said bytes.Buffer
	e := newExporter(nil, slog.New(slog.NewTextHandler(&said, nil)))
	for range 10 {
		e.logSDKError(errors.New("an odd attribute"))
		e.logExportError(errors.New("connection refused"))
	}
	if n := strings.Count(said.String(), "\n"); n != 2 || !strings.Contains(said.String(), "connection refused") {
		t.Errorf("it says %s", said.String())
	}
}

// untraced makes all calls of a request without tracing.
func untraced(r *http.Request, a *Attempt) string {
	q := (*Tracer)(nil).StartRequest(r, "/v1/chat/completions", netip.Addr{}, time.Time{})
	q.AddQueueWaitSpan(time.Second, "sent")
	q.StartAttempt(a, r.Header)
	q.SetStatus(200)
	q.AddFirstTokenSpan()
	q.SetConversation("c")
	q.EndAttempt("", &Response{ID: "r", Tokens: Tokens{Prompt: 1, Output: 1, Cached: 1}})
	q.End(nil, Tokens{})
	return q.TraceID(r.Header)
}

func TestDisabledTracingDoesNotAllocate(t *testing.T) {
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

func TestExportErrorsAreBounded(t *testing.T) {
	var said bytes.Buffer
	e := newExporter(nil, slog.New(slog.NewTextHandler(&said, nil)))
	for range 1000 {
		e.logExportError(errors.New(strings.Repeat("the collector's page of an error ", 1000)))
	}
	if n := strings.Count(said.String(), "\n"); n != 1 || said.Len() > 2*maxErrorBytes {
		t.Errorf("%d lines of %d bytes", n, said.Len())
	}
}

func FuzzTraceID(f *testing.F) {
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
