package e2e

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"

	collectorpb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	grpcstatus "google.golang.org/grpc/status"

	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// TestInvalidTracingVariablesAreLoggedWithoutValues sets variables whose values the
// SDK's own logger would write to standard error.
func TestInvalidTracingVariablesAreLoggedWithoutValues(t *testing.T) {
	t.Parallel()
	const endpoint = "OTEL_EXPORTER_OTLP_ENDPOINT"
	replica, _ := startSimReplica(t, sim.Config{}, "127.0.0.1:0")
	for _, c := range []struct{ name, variable, value string }{
		{"headers without =", "OTEL_EXPORTER_OTLP_HEADERS", "Authorization Bearer " + marked},
		{"headers badly escaped", "OTEL_EXPORTER_OTLP_TRACES_HEADERS", "authorization=" + marked + "%zz"},
		{"an endpoint with a password", endpoint, "http://u:" + marked + "@collector:port"},
		{"an endpoint without a scheme", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "u:" + marked + "@collector:4318"},
		{"a key in place of its file", "OTEL_EXPORTER_OTLP_CERTIFICATE", marked},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			// Of a variable that stands twice, the last value counts.
			env := []string{endpoint + "=http://127.0.0.1:4318", c.variable + "=" + c.value, "OTEL_BSP_SCHEDULE_DELAY=20",
				"OTEL_EXPORTER_OTLP_TIMEOUT=500"}
			p := startTraced(t, env, "timeouts: {serve_after_term: 0}\n", replica)
			p.read("sim", "lost", false)
			p.awaitLog("OpenTelemetry error|sending traces failed")
			p.signal(syscall.SIGTERM)
			p.exit()
			for line := range strings.Lines(p.log.String()) {
				if strings.Contains(line, mark) || !strings.HasPrefix(line, "time=") {
					t.Errorf("in the log: %.300s", line)
				}
			}
		})
	}
}

// echo refuses spans and repeats the headers that it got.
type echo struct {
	collectorpb.UnimplementedTraceServiceServer
	status int // over HTTP
}

// ServeHTTP implements http.Handler.
func (e echo) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	http.Error(w, fmt.Sprint("no: ", r.Header), e.status)
}

// Export implements collectorpb.TraceServiceServer.
func (echo) Export(ctx context.Context, _ *collectorpb.ExportTraceServiceRequest) (*collectorpb.ExportTraceServiceResponse, error) {
	got, _ := metadata.FromIncomingContext(ctx)
	return nil, grpcstatus.Errorf(codes.Unauthenticated, "no: %v", got)
}

func TestCollectorResponseNotLogged(t *testing.T) {
	t.Parallel()
	replica, _ := startSimReplica(t, sim.Config{Engine: engine.Config{Speed: 20}}, "127.0.0.1:0")
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	overGRPC := grpc.NewServer()
	collectorpb.RegisterTraceServiceServer(overGRPC, echo{})
	serving := make(chan error, 1)
	go func() { serving <- overGRPC.Serve(listener) }()
	t.Cleanup(func() { overGRPC.Stop(); <-serving })
	refuses, busy := httptest.NewServer(echo{status: 401}), httptest.NewServer(echo{status: 503})
	t.Cleanup(refuses.Close)
	t.Cleanup(busy.Close)
	for _, c := range []struct{ name, protocol, url, want string }{
		{"refused over HTTP", "http/protobuf", refuses.URL, "401 Unauthorized"},
		{"busy over HTTP", "http/protobuf", busy.URL, "status 429, 502, 503 or 504"},
		{"refused over gRPC", "grpc", "http://" + listener.Addr().String(), "gRPC status Unauthenticated"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := startTraced(t, []string{
				"OTEL_EXPORTER_OTLP_ENDPOINT=" + c.url, "OTEL_EXPORTER_OTLP_PROTOCOL=" + c.protocol,
				"OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer%20" + marked,
				"OTEL_EXPORTER_OTLP_TIMEOUT=500", // of all attempts where the collector is busy
				"OTEL_BSP_EXPORT_TIMEOUT=500", "OTEL_BSP_SCHEDULE_DELAY=20",
			}, "timeouts: {serve_after_term: 0}\n", replica)
			p.read("sim", "lost", false)
			p.signal(syscall.SIGTERM)
			p.exit()
			if said := p.log.String(); strings.Contains(said, mark) || !strings.Contains(said, c.want) ||
				!strings.Contains(said, "sending traces failed") {
				t.Errorf("it says %s", said)
			}
		})
	}
}
