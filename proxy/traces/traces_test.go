package traces

import (
	"bytes"
	"errors"
	"log/slog"
	"net/http"
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
