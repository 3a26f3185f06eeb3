package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	collectorpb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	resourcepb "go.opentelemetry.io/proto/otlp/resource/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

const (
	clientTrace  = "0af7651916cd43dd8448eb211c80319c"
	clientSpan   = "b7ad6b7169203331"
	clientParent = "00-" + clientTrace + "-" + clientSpan + "-01"
)

// traced is a program in front of replicas, and a client of it.
type traced struct {
	*program
}

func startTraced(t *testing.T, env []string, yaml string, replicas ...string) traced {
	t.Helper()
	f := &simFleet{urls: replicas}
	file := f.configFile(t, "health: {down_interval: 20ms}\naccess_log: {file: stderr, format: text}\n"+yaml)
	return traced{startProgramWithEnv(t, env, "--config", file.path)}
}

// ask sends a chat with an id for its request, and further headers.
func (p traced) ask(model, id string, stream bool, headers ...string) *http.Response {
	p.t.Helper()
	options := ""
	if stream {
		options = `"stream_options":{"include_usage":true},`
	}
	body := fmt.Sprintf(`{"model":%q,"stream":%v,`+options+`"max_tokens":5,"messages":[{"role":"user","content":"SECRET %s"}]}`, model, stream,
		strings.Repeat("words ", 300))
	req, err := http.NewRequest(http.MethodPost, p.url+"/v1/chat/completions?api_key=SECRET", strings.NewReader(body))
	if err != nil {
		p.t.Fatal(err)
	}
	req.Header = http.Header{"Content-Type": {"application/json"}, "X-Request-Id": {id}, "Authorization": {"Bearer SECRET"}}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Add(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		p.t.Fatal(err)
	}
	return resp
}

// read is ask for a whole answer.
func (p traced) read(model, id string, stream bool, headers ...string) {
	p.t.Helper()
	resp := p.ask(model, id, stream, headers...)
	defer resp.Body.Close()
	if answer, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		p.t.Fatalf("%s: %d %s %v", id, resp.StatusCode, answer, err)
	}
}

func oneSpan(t *testing.T, named map[string][]*tracepb.Span, name string) *tracepb.Span {
	t.Helper()
	if len(named[name]) != 1 {
		t.Fatalf("%d spans %q, of %v", len(named[name]), name, named)
	}
	return named[name][0]
}

func TestTraceOfRequest(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"http/protobuf", "grpc"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			c := startCollector(t, protocol)
			env := append(c.env, "OTEL_SERVICE_NAME=my-proxy", "OTEL_RESOURCE_ATTRIBUTES=deployment.environment.name=test",
				"OTEL_EXPORTER_OTLP_HEADERS=x-tenant=a")
			replica, _ := startSimReplica(t, sim.Config{Engine: engine.Config{Speed: 20}}, "127.0.0.1:0")
			front := startTap(t, replica)
			p := startTraced(t, env, "", front.url)
			p.read("sim", "streamed", true, "Traceparent", clientParent, "Tracestate", "vendor=1,other=2", "Baggage", "user=x",
				"X-Session-Id", "chat-1\xff"+strings.Repeat("x", 1000))

			server, named := c.trace(p.program, "streamed")
			attempt := oneSpan(t, named, "chat sim")
			first := oneSpan(t, named, "first token")
			if hex.EncodeToString(server.TraceId) != clientTrace || hex.EncodeToString(server.ParentSpanId) != clientSpan {
				t.Errorf("the client's trace is not gone on with: %x below %x", server.TraceId, server.ParentSpanId)
			}
			isChild(t, attempt, server)
			isChild(t, first, attempt)
			if server.Kind != tracepb.Span_SPAN_KIND_SERVER || attempt.Kind != tracepb.Span_SPAN_KIND_CLIENT ||
				first.Kind != tracepb.Span_SPAN_KIND_INTERNAL || len(named) != 3 {
				t.Errorf("%v, %v, %v of %d names", server.Kind, attempt.Kind, first.Kind, len(named))
			}
			if got := front.last(); got.Get("Traceparent") != traceparent(attempt) || got.Get("Tracestate") != "vendor=1,other=2" ||
				got.Get("Baggage") != "user=x" {
				t.Errorf("the replica got %v", got)
			}
			host, port, _ := net.SplitHostPort(strings.TrimPrefix(front.url, "http://"))
			spanHas(t, server, map[string]any{
				"http.request.method": "POST", "http.route": "/v1/chat/completions", "url.path": "/v1/chat/completions", "url.scheme": "http",
				"http.response.status_code": 200,
				"network.protocol.version":  "1.1", "client.address": "127.0.0.1", "server.address": "127.0.0.1", "error.type": nil, "url.query": nil,
				"gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm", "gen_ai.request.model": "sim", "gen_ai.usage.output_tokens": 5,
				"warmroute.attempts": 1, "warmroute.reason": "only", "warmroute.backend": host + ":" + port, "warmroute.predicted_tokens": 0,
				"warmroute.disconnected": nil, "warmroute.queue.seconds": nil, "warmroute.input_tokens_estimated": nil,
				"warmroute.output_tokens_estimated": nil,
			})
			for _, s := range []*tracepb.Span{server, attempt} {
				spanHas(t, s, map[string]any{"gen_ai.response.model": "sim", "gen_ai.response.finish_reasons": "length",
					"gen_ai.conversation.id": "chat-1" + strings.Repeat("x", 249)})
				if id, _ := value(s.Attributes, "gen_ai.response.id").(string); !strings.HasPrefix(id, "chatcmpl-streamed-wr") {
					t.Errorf("%s: the response's id is %q", s.Name, id)
				}
			}
			spanHas(t, attempt, map[string]any{
				"http.request.method": "POST", "url.full": front.url + "/v1/chat/completions", "http.response.status_code": 200, "server.address": host,
				"http.request.resend_count": nil, "error.type": nil,
				"gen_ai.operation.name": "chat", "gen_ai.request.model": "sim", "gen_ai.request.max_tokens": 5, "gen_ai.request.stream": true,
				"gen_ai.usage.output_tokens": 5, "gen_ai.usage.input_tokens": value(server.Attributes, "gen_ai.usage.input_tokens"),
				"warmroute.reason": "only",
			})
			if seconds, _ := value(attempt.Attributes, "gen_ai.response.time_to_first_chunk").(float64); seconds <= 0 {
				t.Error("no time to the first token")
			}
			if said := fmt.Sprint(c.all()); strings.Contains(said, "SECRET") {
				t.Errorf("a prompt or a key is in a span: %s", said)
			}
			if c.resource == nil || value(c.resource.Attributes, "service.name") != "my-proxy" ||
				value(c.resource.Attributes, "deployment.environment.name") != "test" {
				t.Errorf("resource %v", c.resource)
			}
			if protocol != "grpc" && c.header.Get("X-Tenant") != "a" {
				t.Errorf("the collector got %v", c.header)
			}
			p.awaitLog("msg=request request_id=streamed .*trace_id=" + clientTrace)

			p.read("sim", "whole", false, "X-Session-Id", "chat of SECRET") // which is the client's key
			server, named = c.trace(p.program, "whole")
			isChild(t, oneSpan(t, named, "chat sim"), server)
			if len(server.ParentSpanId) != 0 || hex.EncodeToString(server.TraceId) == clientTrace || named["first token"] != nil {
				t.Errorf("a request without a trace: %v", named)
			}
			spanHas(t, server, map[string]any{"gen_ai.usage.output_tokens": 5, "gen_ai.response.model": "sim",
				"gen_ai.response.finish_reasons": "length", "gen_ai.conversation.id": nil})
			p.eventually("the spans are counted", func() bool { return metricSum(t, p.admin, "warmroute_trace_spans_total") >= 5 })
		})
	}
}

func TestTraceOfRetries(t *testing.T) {
	t.Parallel()
	c := startCollector(t, "http/protobuf")
	var mu sync.Mutex
	var parents []string
	failing := standIn{chat: func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		parents = append(parents, r.Header.Get("Traceparent"))
		if len(parents) == 1 {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, wholeAnswer)
	}}
	p := startTraced(t, c.env, "", failing.start(t), failing.start(t))
	p.eventually("both are ready", func() bool { return metricSum(t, p.admin, "warmroute_backend_ready") == 2 })
	p.read("m", "retried", false)
	server, named := c.trace(p.program, "retried")
	attempts := named["chat m"]
	if len(attempts) != 2 || len(parents) != 2 {
		t.Fatalf("%d attempts, %d at the replicas", len(attempts), len(parents))
	}
	for i, a := range attempts {
		isChild(t, a, server)
		if parents[i] != traceparent(a) {
			t.Errorf("attempt %d was sent with %s, and is %s", i, parents[i], traceparent(a))
		}
	}
	spanHas(t, attempts[0], map[string]any{"http.response.status_code": 502, "error.type": "status_502", "http.request.resend_count": nil})
	spanHas(t, attempts[1], map[string]any{"http.response.status_code": 200, "error.type": nil, "http.request.resend_count": 1})
	spanHas(t, server, map[string]any{"warmroute.attempts": 2, "error.type": nil, "http.response.status_code": 200})
	if attempts[0].Status.GetCode() != tracepb.Status_STATUS_CODE_ERROR || attempts[1].Status.GetCode() != tracepb.Status_STATUS_CODE_UNSET {
		t.Errorf("status %v and %v", attempts[0].Status, attempts[1].Status)
	}
}

func TestTraceOfSplitRequest(t *testing.T) {
	t.Parallel()
	c := startCollector(t, "http/protobuf")
	replica := sim.Config{Engine: engine.Config{Speed: 20}, Connector: sim.ConnectorConfig{Enabled: true}}
	prefill, _ := startSimReplica(t, replica, "127.0.0.1:0")
	decode, _ := startSimReplica(t, replica, "127.0.0.1:0")
	p := startTraced(t, c.env, fmt.Sprintf("disaggregation: {min_uncached_tokens: 1}\nbackends: [{name: first, url: %q, role: prefill}, "+
		"{name: second, url: %q, role: decode}]\n", prefill, decode))
	id := ""
	p.eventually("a request is split", func() bool {
		id += "x"
		p.read("sim", id, true)
		return metricSum(t, p.admin, "warmroute_split_requests_total", "split") > 0
	})
	server, named := c.trace(p.program, id)
	attempts := named["chat sim"]
	if len(attempts) != 2 {
		t.Fatalf("%d attempts", len(attempts))
	}
	isChild(t, attempts[0], server)
	isChild(t, attempts[1], server)
	isChild(t, oneSpan(t, named, "first token"), attempts[1])
	spanHas(t, server, map[string]any{"warmroute.attempts": 1, "warmroute.backend": "second", "warmroute.prefill.backend": "first",
		"gen_ai.usage.output_tokens": 5})
	spanHas(t, attempts[0], map[string]any{"warmroute.request_kind": "prefill", "warmroute.backend": "first", "gen_ai.request.max_tokens": 1,
		"gen_ai.request.stream": nil, "gen_ai.usage.output_tokens": 1, "error.type": nil})
	spanHas(t, attempts[1], map[string]any{"warmroute.request_kind": "decode", "warmroute.backend": "second", "gen_ai.request.max_tokens": 5,
		"gen_ai.request.stream": true, "gen_ai.usage.output_tokens": 5, "error.type": nil})
	p.awaitLog("msg=request request_id=" + id + " .*backend=second .*prefill_backend=first prefill_ms=[0-9.]+ .*")
}

func TestTraceOfQueuedRequest(t *testing.T) {
	t.Parallel()
	c := startCollector(t, "http/protobuf")
	free := make(chan bool)
	slow := standIn{chat: func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		<-free
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, wholeAnswer)
	}}
	p := startTraced(t, c.env, "backends: [{url: \""+slow.start(t)+"\", max_in_flight: 1}]\n")
	var asking sync.WaitGroup
	for _, id := range []string{"a", "b"} {
		asking.Go(func() { p.ask("m", id, false).Body.Close() })
	}
	p.eventually("one waits", func() bool { return metricSum(t, p.admin, "warmroute_queue_requests") == 1 })
	free <- true
	free <- true
	asking.Wait()
	waits := 0
	for _, id := range []string{"a", "b"} {
		server, named := c.trace(p.program, id)
		for _, hold := range named["queue"] {
			waits++
			isChild(t, hold, server)
			spanHas(t, hold, map[string]any{"warmroute.queue.result": "sent"})
			if held, _ := value(server.Attributes, "warmroute.queue.seconds").(float64); held <= 0 {
				t.Error("the request's span says nothing of it")
			}
		}
	}
	if waits != 1 {
		t.Errorf("%d spans of waits", waits)
	}
}

// streamsOn answers with a stream that goes on until somebody leaves.
var streamsOn = standIn{chat: func(w http.ResponseWriter, r *http.Request) {
	io.Copy(io.Discard, r.Body)
	w.Header().Set("Content-Type", "text/event-stream")
	io.WriteString(w, `data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}`+"\n\n")
	w.(http.Flusher).Flush()
	<-r.Context().Done()
}}

func TestTraceOfRequestInFlightAtShutdown(t *testing.T) {
	t.Parallel()
	c := startCollector(t, "http/protobuf")
	p := startTraced(t, c.env, "timeouts: {serve_after_term: 0, shutdown: 10ms}\n", streamsOn.start(t))
	resp := p.ask("m", "cut-off", true)
	defer resp.Body.Close()
	if _, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	p.signal(syscall.SIGTERM)
	p.exit()
	server, named := c.trace(p.program, "cut-off")
	spanHas(t, server, map[string]any{"http.response.status_code": 503, "error.type": "503", "warmroute.disconnected": nil})
	spanHas(t, oneSpan(t, named, "chat m"), map[string]any{"error.type": "shutting_down"})
	if !strings.Contains(p.log.String(), "msg=request request_id=cut-off") {
		t.Error("the access log has nothing of it")
	}
}

func TestTraceOfDisconnectedClient(t *testing.T) {
	t.Parallel()
	c := startCollector(t, "http/protobuf")
	p := startTraced(t, c.env, "", streamsOn.start(t))
	resp := p.ask("m", "left", true)
	if _, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	server, named := c.trace(p.program, "left")
	attempt := oneSpan(t, named, "chat m")
	isChild(t, oneSpan(t, named, "first token"), attempt)
	spanHas(t, server, map[string]any{"http.response.status_code": 499, "error.type": "client_disconnected",
		"warmroute.disconnected": "in_stream", "warmroute.input_tokens_estimated": true, "warmroute.output_tokens_estimated": true})
	spanHas(t, attempt, map[string]any{"http.response.status_code": 200, "error.type": "client_disconnected"})
	if server.Status.GetCode() == tracepb.Status_STATUS_CODE_ERROR {
		t.Error("it counts as the proxy's error")
	}
}

func TestUnsampledTracePropagated(t *testing.T) {
	t.Parallel()
	c := startCollector(t, "http/protobuf")
	env := append(c.env, "OTEL_TRACES_SAMPLER=parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG=0")
	replica, _ := startSimReplica(t, sim.Config{Engine: engine.Config{Speed: 20}}, "127.0.0.1:0")
	front := startTap(t, replica)
	p := startTraced(t, env, "", front.url)
	p.read("sim", "unsampled", true)
	if got := front.last().Get("Traceparent"); !strings.HasSuffix(got, "-00") || len(got) != len(clientParent) {
		t.Errorf("the replica got %q", got)
	}
	p.read("sim", "unsampled-by-the-client", true, "Traceparent", "00-"+clientTrace+"-"+clientSpan+"-00")
	if got := front.last().Get("Traceparent"); !strings.HasPrefix(got, "00-"+clientTrace) || !strings.HasSuffix(got, "-00") ||
		strings.Contains(got, clientSpan) {
		t.Errorf("the replica got %q", got)
	}
	p.read("sim", "sampled", true, "Traceparent", clientParent)
	c.trace(p.program, "sampled")
	for _, s := range c.all() {
		if hex.EncodeToString(s.TraceId) != clientTrace {
			t.Errorf("%s was not to be sampled", s.Name)
		}
	}
}

func TestTraceHeadersWithoutTracing(t *testing.T) {
	t.Parallel()
	replica, _ := startSimReplica(t, sim.Config{Engine: engine.Config{Speed: 20}}, "127.0.0.1:0")
	for name, variable := range map[string]string{
		"off": "", "disabled": "OTEL_SDK_DISABLED=true", "none": "OTEL_TRACES_EXPORTER=none",
		"a protocol that is none": "OTEL_EXPORTER_OTLP_PROTOCOL=http/json",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var env []string
			if variable != "" {
				env = append(startCollector(t, "http/protobuf").env, variable)
			}
			front := startTap(t, replica)
			p := startTraced(t, env, "", front.url)
			// The state is none that a tracer would pass on.
			p.read("sim", "untouched", false, "Traceparent", clientParent, "Tracestate", "not a state", "Baggage", "user=x")
			got := front.last()
			if got.Get("Traceparent") != clientParent || got.Get("Tracestate") != "not a state" || got.Get("Baggage") != "user=x" {
				t.Errorf("the replica got %v", got)
			}
			p.awaitLog("msg=request request_id=untouched .*trace_id=" + clientTrace)
			if warned := strings.Contains(p.log.String(), "requests are not traced"); warned != strings.HasSuffix(variable, "=http/json") {
				t.Errorf("warned %v", warned)
			}
		})
	}
}

func TestCollectorDownDelaysNothing(t *testing.T) {
	t.Parallel()
	replica, _ := startSimReplica(t, sim.Config{Engine: engine.Config{Speed: 20}}, "127.0.0.1:0")
	hanging, err := net.Listen("tcp", "127.0.0.1:0") // takes connections into its queue, and says nothing
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { hanging.Close() })
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone.Close()
	for _, protocol := range []string{"http/protobuf", "grpc"} {
		for name, address := range map[string]string{"away": gone.Addr().String(), "hangs": hanging.Addr().String()} {
			t.Run(protocol+" "+name, func(t *testing.T) {
				t.Parallel()
				const room, spans = 16, 15*2 + 15*3 // a whole answer has two, a stream one for its first token as well
				env := []string{
					"OTEL_EXPORTER_OTLP_ENDPOINT=http://" + address, "OTEL_EXPORTER_OTLP_PROTOCOL=" + protocol,
					"OTEL_BSP_SCHEDULE_DELAY=5", "OTEL_BSP_MAX_QUEUE_SIZE=" + strconv.Itoa(room),
				}
				p := startTraced(t, env, "timeouts: {serve_after_term: 0}\n", replica)
				for i := range 30 {
					p.read("sim", fmt.Sprint("r", i), i%2 == 0)
				}
				// A batch is on its way, as large as the queue, and the queue is full.
				p.eventually("what is lost is counted", func() bool {
					lost := metricSum(t, p.admin, "warmroute_trace_spans_total", "failed") + metricSum(t, p.admin, "warmroute_trace_spans_total",
						"dropped")
					return lost >= spans-2*room && lost <= spans
				})
				if name == "hangs" && metricSum(t, p.admin, "warmroute_trace_spans_total", "dropped") < spans-2*room {
					t.Error("none was dropped")
				}
				p.signal(syscall.SIGTERM)
				if status := p.exit(); status != 0 {
					t.Errorf("status %d", status)
				}
				lost, err := strconv.Atoi(p.awaitLog("unsent_spans=([0-9]+)"))
				if n := strings.Count(p.log.String(), "sending traces failed"); n != 1 {
					t.Errorf("said %d times", n)
				}
				if least := map[string]int{"away": 1, "hangs": spans - 2*room}[name]; err != nil || lost < least || lost > spans {
					t.Errorf("it says %d of %d lost", lost, spans)
				}
			})
		}
	}
}

func TestSpansFlushedAtShutdown(t *testing.T) {
	t.Parallel()
	c := startCollector(t, "http/protobuf")
	env := append(c.env, "OTEL_BSP_SCHEDULE_DELAY="+fmt.Sprint(time.Hour.Milliseconds()))
	replica, _ := startSimReplica(t, sim.Config{Engine: engine.Config{Speed: 20}}, "127.0.0.1:0")
	p := startTraced(t, env, "timeouts: {serve_after_term: 0}\n", replica)
	p.read("sim", "last", false)
	if n := len(c.all()); n != 0 {
		t.Fatalf("%d spans came early: the test shows nothing", n)
	}
	p.signal(syscall.SIGTERM)
	p.exit()
	c.trace(p.program, "last")
}

// collector is a receiver of OpenTelemetry's own protocol.
type collector struct {
	collectorpb.UnimplementedTraceServiceServer

	env []string // of programs that send their spans here

	mu       sync.Mutex
	spans    []*tracepb.Span
	resource *resourcepb.Resource
	header   http.Header // of the last request, over HTTP
}

// startCollector listens for the protocol.
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
	c.env = []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL=" + protocol, "OTEL_BSP_SCHEDULE_DELAY=20"}
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
func (c *collector) Export(_ context.Context, request *collectorpb.ExportTraceServiceRequest) (*collectorpb.ExportTraceServiceResponse,
	error) {
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
		case *commonpb.AnyValue_ArrayValue: // of strings
			var list []string
			for _, each := range v.ArrayValue.Values {
				list = append(list, each.GetStringValue())
			}
			return strings.Join(list, " ")
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
	if string(s.ParentSpanId) != string(parent.SpanId) || s.StartTimeUnixNano < parent.StartTimeUnixNano ||
		s.EndTimeUnixNano > parent.EndTimeUnixNano || s.EndTimeUnixNano < s.StartTimeUnixNano {
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
