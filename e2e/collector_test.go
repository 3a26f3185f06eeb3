package e2e

import (
	"bytes"
	"context"
	"encoding/hex"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync"
	"testing"

	collectorpb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	resourcepb "go.opentelemetry.io/proto/otlp/resource/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// collector is a receiver of OpenTelemetry's own protocol.
type collector struct {
	collectorpb.UnimplementedTraceServiceServer

	mu       sync.Mutex
	spans    []*tracepb.Span
	resource *resourcepb.Resource
	header   http.Header // of the last request, over HTTP
}

// startCollector listens for the protocol, and points the programs that the test
// starts at it.
func startCollector(t *testing.T, protocol string) *collector {
	t.Helper()
	c := &collector{}
	var endpoint string
	if protocol == "grpc" {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		server := grpc.NewServer()
		collectorpb.RegisterTraceServiceServer(server, c)
		var serving sync.WaitGroup
		serving.Go(func() { server.Serve(listener) })
		t.Cleanup(func() { server.Stop(); serving.Wait() })
		endpoint = "http://" + listener.Addr().String()
	} else {
		server := httptest.NewServer(c)
		t.Cleanup(server.Close)
		endpoint = server.URL
	}
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
	return c
}

// ServeHTTP implements http.Handler.
func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	var request collectorpb.ExportTraceServiceRequest
	if r.URL.Path != "/v1/traces" || proto.Unmarshal(body, &request) != nil {
		http.Error(w, "no traces", http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	c.header = r.Header
	c.mu.Unlock()
	c.Export(r.Context(), &request)
	w.Header().Set("Content-Type", "application/x-protobuf")
}

// Export implements collectorpb.TraceServiceServer.
func (c *collector) Export(_ context.Context, request *collectorpb.ExportTraceServiceRequest) (*collectorpb.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range request.ResourceSpans {
		c.resource = r.Resource
		for _, s := range r.ScopeSpans {
			c.spans = append(c.spans, s.Spans...)
		}
	}
	return &collectorpb.ExportTraceServiceResponse{}, nil
}

// all is what has come so far.
func (c *collector) all() []*tracepb.Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]*tracepb.Span(nil), c.spans...)
}

// trace waits for the server's span of a request, which ends last, and returns it
// and those of its trace, by name.
func (c *collector) trace(p *program, requestID string) (server *tracepb.Span, named map[string][]*tracepb.Span) {
	p.t.Helper()
	p.eventually("the span of "+requestID+" is there", func() bool {
		for _, s := range c.all() {
			if value(s.Attributes, "warmroute.request_id") == requestID {
				server = s
			}
		}
		return server != nil
	})
	named = map[string][]*tracepb.Span{}
	for _, s := range c.all() { // its children ended before it, and are in no later batch
		if string(s.TraceId) == string(server.TraceId) {
			named[s.Name] = append(named[s.Name], s)
		}
	}
	return server, named
}

// value is that of an attribute; nil: there is none.
func value(attrs []*commonpb.KeyValue, key string) any {
	for _, a := range attrs {
		if a.Key != key {
			continue
		}
		switch v := a.Value.Value.(type) {
		case *commonpb.AnyValue_StringValue:
			return v.StringValue
		case *commonpb.AnyValue_IntValue:
			return int(v.IntValue)
		case *commonpb.AnyValue_DoubleValue:
			return v.DoubleValue
		case *commonpb.AnyValue_BoolValue:
			return v.BoolValue
		}
	}
	return nil
}

// spanHas compares some attributes; nil: it must not be there.
func spanHas(t *testing.T, s *tracepb.Span, want map[string]any) {
	t.Helper()
	for key, v := range want {
		if got := value(s.Attributes, key); got != v {
			t.Errorf("%s: %s is %v, want %v", s.Name, key, got, v)
		}
	}
}

func isChild(t *testing.T, s, parent *tracepb.Span) {
	t.Helper()
	if string(s.ParentSpanId) != string(parent.SpanId) || s.StartTimeUnixNano < parent.StartTimeUnixNano || s.EndTimeUnixNano > parent.EndTimeUnixNano || s.EndTimeUnixNano < s.StartTimeUnixNano {
		t.Errorf("%s is not within and below %s", s.Name, parent.Name)
	}
}

// traceparent is what a server below a span gets.
func traceparent(s *tracepb.Span) string {
	return "00-" + hex.EncodeToString(s.TraceId) + "-" + hex.EncodeToString(s.SpanId) + "-01"
}

// tap stands in front of a replica and keeps the headers of what is asked for.
type tap struct {
	url string

	mu      sync.Mutex
	headers []http.Header
}

func startTap(t *testing.T, replica string) *tap {
	t.Helper()
	to, err := url.Parse(replica)
	if err != nil {
		t.Fatal(err)
	}
	p := &tap{}
	pass := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) }, FlushInterval: -1}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			body, _ := io.ReadAll(r.Body) // net/http closes it with the answer's header, which may come before its end was seen
			r.Body = io.NopCloser(bytes.NewReader(body))
			p.mu.Lock()
			p.headers = append(p.headers, r.Header.Clone())
			p.mu.Unlock()
		}
		pass.ServeHTTP(w, r)
	}))
	t.Cleanup(func() { server.CloseClientConnections(); server.Close() })
	p.url = server.URL
	return p
}

// last is the header of the latest request.
func (p *tap) last() http.Header {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.headers[len(p.headers)-1]
}
