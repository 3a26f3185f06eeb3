package proxy

import (
	"bufio"
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/lab/policies"
	"warmroute/metrics"
	"warmroute/proxy/clientconn"
	"warmroute/router"
)

// failsafe is longer than any step of a test takes.
const failsafe = 20 * time.Second

// TestMain looks for goroutines left behind. The transports' cleaners end on
// their own, an idle timeout after the last connection. Parallel tests wait most of
// the time, so that more of them run than there are processors.
func TestMain(m *testing.M) {
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == strconv.Itoa(runtime.GOMAXPROCS(0)) {
		_ = f.Value.Set("8")
	}
	code := m.Run()
	if code == 0 {
		err := goleak.Find()
		for end := time.Now().Add(failsafe); err != nil && time.Now().Before(end); {
			err = goleak.Find()
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// fleet is a Proxy behind a real listener, and the replicas behind it.
type fleet struct {
	t        testing.TB
	url      string
	addr     string
	proxy    *Proxy
	router   *router.Router
	metrics  *metrics.Metrics
	backends []*backends.Backend
	client   *http.Client
	log      *lockedBuffer
}

// serve starts a Proxy in front of the replicas. A request goes to the first
// replica that it can go to, since each seems busier than the one before.
func serve(t testing.TB, change func(*Options), replicas ...*replica) *fleet {
	t.Helper()
	return serveWithQueue(t, router.QueueSettings{}, change, replicas...)
}

// serveWithQueue is serve with an admission queue.
func serveWithQueue(t testing.TB, hold router.QueueSettings, change func(*Options), replicas ...*replica) *fleet {
	t.Helper()
	var list []*backends.Backend
	for i, r := range replicas {
		if r.name == "" {
			r.name = fmt.Sprintf("r%d", i)
		}
		r.start(t)
		t.Cleanup(r.stop)
		list = append(list, backendAt(t, r.name, "http://"+r.listener.Addr().String(), r.key))
	}
	f := newFleet(t, list, "prefix", hold, change)
	for i, r := range replicas {
		f.backends[i].SetModels(cards(r.models))
		f.backends[i].SetLoad(&backends.Load{QueuesKnown: true, Running: 100 * i, PolledAt: time.Now()})
	}
	return f
}

func backendAt(t testing.TB, name, address, key string) *backends.Backend {
	u, err := backends.ParseURL(address)
	if err != nil {
		t.Fatal(err)
	}
	tr := transport.New(transport.Options{URL: u, IdleTimeout: 2 * time.Second})
	t.Cleanup(tr.CloseIdleConnections)
	return backends.New(name, u, key, tr)
}

// cards are models as a replica would list them.
func cards(names []string) (out []backends.Model) {
	if len(names) == 0 {
		names = []string{"m"}
	}
	for _, n := range names {
		id, parent, _ := strings.Cut(n, "<")
		out = append(out, backends.Model{
			ID: id, Root: id, Parent: parent, Card: fmt.Appendf(nil, `{"id": %q,  "object":"model","root":%q}`, id, id),
		})
	}
	return out
}

func newFleet(t testing.TB, list []*backends.Backend, policy string, hold router.QueueSettings, change func(*Options)) *fleet {
	t.Helper()
	registry, err := backends.NewRegistry(list)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range list {
		b.SetModels(cards(nil))
		b.SetState(backends.Ready)
	}
	r, err := router.New(router.Options{
		Settings: router.Settings{
			Policy: policy, Queue: hold,
			PollInterval: time.Hour, // what serve says of load does not fade
			// where there are replicas for prefill, it is used
			Disaggregation: router.DisaggregationSettings{Lease: 30 * time.Second, MinUncachedTokens: 1},
		},
		Policies: policies.All(), Backends: registry.All(), Catalog: registry.Catalog, BlockBytes: 256, IndexMaxBytes: 64 << 20,
		Now: time.Now, Rand: rand.NewPCG(1, 2),
	})
	if err != nil {
		t.Fatal(err)
	}
	f := &fleet{t: t, router: r, metrics: metrics.New(registry, r, "test"), backends: list, log: new(lockedBuffer)}
	o := Options{
		Registry: registry, Router: r, Metrics: f.metrics, Version: "1.2.3",
		Log:           slog.New(slog.NewTextHandler(f.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		RecheckHealth: func(*backends.Backend) {},
		BlockBytes:    256,
		Settings: Settings{
			KVLease:  30 * time.Second,
			Attempts: 3, QueueTimeouts: hold.Timeouts(), RouteHeaders: true,
			Retry:    RetrySettings{Share: 0.2, PerSecond: 10, Stalled: true},
			Limits:   Limits{InFlight: 10_000, Connections: 10_000, QueryBytes: 4 << 10, BodyBytes: 1 << 20, BodyBytesTotal: 1 << 30},
			Timeouts: Timeouts{FirstByte: time.Minute, Idle: time.Minute},
		},
	}
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { r.Run(ctx) })
	if change != nil {
		change(&o)
	}
	f.proxy = New(o)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{
		Handler: f.proxy, ConnState: f.proxy.TrackAndLimitConnections, DisableGeneralOptionsHandler: true,
		ErrorLog: slog.NewLogLogger(o.Log.Handler(), slog.LevelDebug),
	}
	running.Go(func() { server.Serve(clientconn.NewListener(l, true)) })
	f.url, f.addr = "http://"+l.Addr().String(), l.Addr().String()
	f.client = &http.Client{Transport: &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 64}}
	t.Cleanup(func() {
		f.client.CloseIdleConnections()
		f.awaitIdle()
		server.Shutdown(ctx)
		f.proxy.Close()
		stop()
		running.Wait()
	})
	return f
}

// awaitIdle waits until nothing is in flight, queued or buffered.
func (f *fleet) awaitIdle() {
	f.t.Helper()
	for _, b := range f.backends {
		eventually(f.t, "in flight on "+b.Name+" is 0", func() bool { return b.InFlight.Load() == 0 })
	}
	eventually(f.t, "no request waits", func() bool { return f.router.CountWaiting() == 0 })
	eventually(f.t, "no body is in memory", func() bool { return f.proxy.tenants.BodyBytesInUse() == 0 })
	eventually(f.t, "no response is buffered", func() bool { return f.proxy.buffers.Reserved.Load() == 0 })
}

// eventually waits for something that must come, however slow the machine.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(failsafe); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// post sends body to an endpoint and reads the whole answer.
func (f *fleet) post(path, body string, headers ...string) (*http.Response, string) {
	f.t.Helper()
	resp, answer, err := f.try(path, body, headers...)
	if err != nil {
		f.t.Fatalf("POST %s: %v", path, err)
	}
	return resp, answer
}

func (f *fleet) try(path, body string, headers ...string) (*http.Response, string, error) {
	req, err := http.NewRequest(http.MethodPost, f.url+path, strings.NewReader(body))
	if err != nil {
		return nil, "", err
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := f.client.Do(req)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	return resp, string(answer), err
}

// get asks for a path as it is written.
func (f *fleet) get(path string) (*http.Response, string) {
	f.t.Helper()
	resp, err := f.client.Get(f.url + path)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		f.t.Fatal(err)
	}
	return resp, string(answer)
}

// dial opens a connection to the proxy for bytes that no HTTP client would send.
func (f *fleet) dial() *net.TCPConn {
	f.t.Helper()
	c, err := net.Dial("tcp", f.addr)
	if err != nil {
		f.t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(failsafe))
	f.t.Cleanup(func() { c.Close() })
	return c.(*net.TCPConn)
}

// raw sends bytes and reads the answer to them.
func (f *fleet) raw(request string) (*http.Response, string) {
	f.t.Helper()
	c := f.dial()
	defer c.Close()
	go io.WriteString(c, request) // the proxy may answer before it has read all
	method, _, _ := strings.Cut(request, " ")
	resp, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: method})
	if err != nil {
		f.t.Fatalf("no answer to %.80q: %v", request, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		f.t.Fatal(err)
	}
	return resp, string(body)
}

// blocks is how many blocks each backend is thought to hold.
func (f *fleet) blocks() (out []int) {
	parts, _ := f.router.IndexStats()
	for _, p := range parts {
		out = append(out, p.Blocks)
	}
	return out
}

// exposition is the metrics as Prometheus would read them.
func (f *fleet) exposition() string {
	w := httptest.NewRecorder()
	f.metrics.Handler().ServeHTTP(w, &http.Request{Method: http.MethodGet, URL: &url.URL{Path: "/metrics"}, Header: http.Header{}})
	return w.Body.String()
}

// awaitMetric waits until the exposition has a line.
func (f *fleet) awaitMetric(line string) {
	f.t.Helper()
	eventually(f.t, "metric "+line, func() bool { return strings.Contains(f.exposition(), "\n"+line+"\n") })
}

// lockedBuffer is a log that many goroutines write to.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// replica is one server that the proxy may choose, misbehaving as it likes.
type replica struct {
	name   string
	key    string   // the API key that the proxy has for it
	models []string // "m" when empty; "adapter<base" is a LoRA adapter of base
	script func(*session)

	listener net.Listener
	open     sync.WaitGroup
	over     chan struct{} // closed when the test ends

	mu    sync.Mutex
	seen  []seen
	conns []net.Conn
}

// seen is a request as a replica got it.
type seen struct {
	*http.Request
	body string
}

// session is one connection as a replica sees it.
type session struct {
	net.Conn
	br      *bufio.Reader
	replica *replica
	n       int // 1 for the first connection that the replica accepted
}

// request reads one request whole. ok is false when the proxy closed instead.
func (s *session) request() (r seen, ok bool) {
	req, err := http.ReadRequest(s.br)
	if err != nil {
		return seen{}, false
	}
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return seen{}, false
	}
	r = seen{req, string(body)}
	s.replica.mu.Lock()
	s.replica.seen = append(s.replica.seen, r)
	s.replica.mu.Unlock()
	return r, true
}

// say writes; an error shows at the other end.
func (s *session) say(parts ...string) {
	for _, p := range parts {
		io.WriteString(s.Conn, p)
	}
}

// closed waits for the proxy to close the connection.
func (s *session) closed() { io.Copy(io.Discard, s.br) }

// reset closes the connection the hard way.
func (s *session) reset() {
	s.Conn.(*net.TCPConn).SetLinger(0)
	s.Conn.Close()
}

// always answers every request with the same bytes.
func always(answer ...string) func(*session) {
	return func(s *session) {
		for {
			if _, ok := s.request(); !ok {
				return
			}
			s.say(answer...)
		}
	}
}

// once answers one request and closes the connection.
func once(answer ...string) func(*session) {
	return func(s *session) {
		s.request()
		s.say(answer...)
	}
}

// requests is what the replica has seen so far.
func (r *replica) requests() []seen {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]seen(nil), r.seen...)
}

func (r *replica) start(t testing.TB) { r.startAt(t, "127.0.0.1:0") }

func (r *replica) startAt(t testing.TB, address string) {
	var err error
	if r.listener, err = net.Listen("tcp", address); err != nil {
		t.Fatal(err)
	}
	r.over = make(chan struct{})
	r.open.Go(func() {
		for n := 1; ; n++ {
			c, err := r.listener.Accept()
			if err != nil {
				return
			}
			r.mu.Lock()
			r.conns = append(r.conns, c)
			r.mu.Unlock()
			r.open.Go(func() {
				defer c.Close()
				r.script(&session{c, bufio.NewReader(c), r, n})
			})
		}
	})
}

func (r *replica) stop() {
	close(r.over)
	r.listener.Close()
	r.mu.Lock()
	for _, c := range r.conns {
		c.Close()
	}
	r.mu.Unlock()
	r.open.Wait()
}

// What replicas in tests say, in vLLM's bytes.
const (
	sseHead = "HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 05:00:00 GMT\r\nserver: uvicorn\r\ncontent-type: text/event-stream; " +
		"charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
	sseToEnd  = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
	lastChunk = "0\r\n\r\n"

	role = `data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"role":"assistant",` +
		`"content":""},"logprobs":null,"finish_reason":null}]}` + "\n\n"
	hello = `data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"content":"Hello"},` +
		`"logprobs":null,"finish_reason":null}]}` + "\n\n"
	world = `data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"content":" world"},` +
		`"logprobs":null,"finish_reason":null}]}` + "\n\n"
	stop = `data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"content":""},"logprobs":null,` +
		`"finish_reason":"stop"}]}` + "\n\n"
	abort = `data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"content":""},"logprobs":null,` +
		`"finish_reason":"abort"}]}` + "\n\n"
	counted = `data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[],"usage":{"prompt_tokens":12,"total_tokens":15,` +
		`"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}}` + "\n\n"
	doneLine = "data: [DONE]\n\n"
	dead     = `data: {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "param": null, "code": 500}}` +
		"\n\n"
	tooLong = `data: {"error": {"message": "This model's maximum context length is 8 tokens.", "type": "BadRequestError", "param": null, ` +
		`"code": 400}}` + "\n\n"

	whole = `{"id":"c","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"Hello"},` +
		`"finish_reason":"stop"}],"usage":{"prompt_tokens":12,"total_tokens":15,"completion_tokens":3,` +
		`"prompt_tokens_details":{"cached_tokens":8}}}`
	wholeAbort = `{"id":"c","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":""},` +
		`"finish_reason":"abort"}],"usage":{"prompt_tokens":12,"total_tokens":12,"completion_tokens":0}}`
)

// What clients in tests say. The prompts are a few blocks long.
var (
	question       = strings.Repeat("What do you make of this? ", 40)
	askWhole       = `{"model":"m","messages":[{"role":"user","content":"` + question + `"}]}`
	askStream      = `{"model":"m","stream":true,"messages":[{"role":"user","content":"` + question + `"}]}`
	questionBlocks = 4

	goodStream = role + hello + world + stop + counted + doneLine
)

// chunk is one chunk of a chunked body.
func chunk(data string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(data), data) }

// streamed is a whole streamed answer, one event a chunk.
func streamed(events ...string) string {
	var b strings.Builder
	b.WriteString(sseHead)
	for _, e := range events {
		b.WriteString(chunk(e))
	}
	return b.String() + lastChunk
}

// answered is a whole answer with a length.
func answered(status, body string, headers ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n", status, len(body))
	for _, h := range headers {
		b.WriteString(h + "\r\n")
	}
	return b.String() + "\r\n" + body
}
