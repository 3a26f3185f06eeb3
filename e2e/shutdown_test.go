package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// oneStream is a stream that is under way.
type oneStream struct{ ended chan error }

// startStream returns when the first event has come.
func (p *program) startStream(tokens int) *oneStream {
	p.t.Helper()
	s := &oneStream{ended: make(chan error, 1)}
	begun := make(chan struct{})
	go func() {
		client := &http.Client{Transport: &http.Transport{}}
		defer client.CloseIdleConnections()
		s.ended <- askStream(client, p.url, words(20), tokens, sync.OnceFunc(func() { close(begun) }))
	}()
	select {
	case <-begun:
	case err := <-s.ended:
		p.t.Fatalf("the stream ended before it began: %v", err)
	}
	return s
}

// get asks on a connection of its own.
func (p *program) get(path string) (*http.Response, error) {
	req, _ := http.NewRequest(http.MethodGet, p.url+path, nil)
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err == nil {
		resp.Body.Close()
	}
	return resp, err
}

// keptConnection is one of a client that sends requests on it when it likes.
type keptConnection struct {
	t *testing.T
	net.Conn
	in *bufio.Reader
}

// keepConnection connects and sends one request, so that the server takes the connection for idle.
func (p *program) keepConnection() *keptConnection {
	p.t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(p.url, "http://"))
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { conn.Close() })
	k := &keptConnection{p.t, conn, bufio.NewReader(conn)}
	if resp := k.get("/livez"); resp.StatusCode != http.StatusOK || resp.Close {
		p.t.Fatalf("/livez: %d, close %v", resp.StatusCode, resp.Close)
	}
	return k
}

// get sends a request and reads the response.
func (k *keptConnection) get(path string) *http.Response {
	k.t.Helper()
	k.SetDeadline(time.Now().Add(time.Minute))
	fmt.Fprintf(k, "GET %s HTTP/1.1\r\nHost: proxy\r\n\r\n", path)
	resp, err := http.ReadResponse(k.in, nil)
	if err != nil {
		k.t.Fatalf("%s: %v", path, err)
	}
	io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	return resp
}

func TestDrainFailsReadinessAndServesRequests(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 1, 200_000)
	p := startProgram(t, "--config", fleet.configFile(t, "timeouts: {serve_after_term: 1h}\nbackends: [{url: \""+fleet.urls[0]+
		"\", max_in_flight: 1}]").path)
	kept := p.keepConnection()
	stream := p.startStream(8000)
	p.signal(syscall.SIGTERM)
	p.awaitLog(`msg="readiness fails, still serving" for=1h0m0s`)
	for _, path := range []string{"/readyz", "/health"} {
		if resp, err := p.get(path); err != nil || resp.StatusCode != http.StatusServiceUnavailable {
			t.Errorf("%s: %v, %v", path, resp, err)
		}
	}
	if resp, err := p.get("/livez"); err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("/livez: %v, %v", resp, err)
	}
	// The replica has a request, so that this one waits in the admission queue.
	queued := make(chan error, 1)
	go func() {
		resp, err := http.Post(p.url+"/v1/chat/completions", "application/json",
			strings.NewReader(`{"model":"sim","max_tokens":4,"messages":[{"role":"user","content":"hi"}]}`))
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK || !resp.Close {
				err = fmt.Errorf("status %d, close %v", resp.StatusCode, resp.Close)
			}
		}
		queued <- err
	}()
	p.eventually("a request is queued", func() bool { return metricSum(t, p.admin, "warmroute_queue_requests") == 1 })
	if err := <-stream.ended; err != nil {
		t.Errorf("the stream: %v", err)
	}
	if err := <-queued; err != nil {
		t.Errorf("the queued request: %v", err)
	}
	if resp := kept.get("/v1/models"); resp.StatusCode != http.StatusOK || !resp.Close {
		t.Errorf("on a connection from before: %d, close %v", resp.StatusCode, resp.Close)
	}
}

func TestDrainEndsHTTP2Connections(t *testing.T) {
	t.Parallel()
	pair := newPEMPair(t)
	fleet := startSimFleet(t, 1, 200_000)
	p := startProgram(t, "--config", fleet.configFile(t, pair.yaml()+"timeouts: {serve_after_term: 1h}").path)
	client := &http.Client{Transport: pair.transport(true)}
	defer client.CloseIdleConnections()
	ask := func() (reused bool) {
		t.Helper()
		trace := &httptrace.ClientTrace{GotConn: func(c httptrace.GotConnInfo) { reused = c.Reused }}
		req, _ := http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), trace), http.MethodGet, p.url+"/v1/models", nil)
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK || resp.ProtoMajor != 2 {
			t.Errorf("status %d by %s", resp.StatusCode, resp.Proto)
		}
		return reused
	}
	ask()
	if !ask() {
		t.Error("connections are not reused before SIGTERM")
	}
	p.signal(syscall.SIGTERM)
	p.awaitLog(`msg="readiness fails`)
	ask() // is answered with a GOAWAY
	p.eventually("connections are not reused", func() bool { return !ask() })
}

// The listener is closed, and a stream is in flight.
func TestKeptConnectionServesUntilQuiet(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 1, 200_000)
	p := startProgram(t, "--config", fleet.configFile(t, "timeouts: {serve_after_term: 0}").path)
	kept := p.keepConnection()
	stream := p.startStream(8000)
	p.signal(syscall.SIGTERM)
	p.eventually("the listener is closed", func() bool { _, err := p.get("/livez"); return err != nil })
	select {
	case <-stream.ended:
		t.Fatal("the stream has ended: the test shows nothing")
	default:
	}
	if resp := kept.get("/v1/models"); resp.StatusCode != http.StatusOK || !resp.Close {
		t.Errorf("on a connection from before: %d, close %v", resp.StatusCode, resp.Close)
	}
	if err := <-stream.ended; err != nil {
		t.Errorf("the stream: %v", err)
	}
	if status := p.exit(); status != 0 {
		t.Errorf("status %d", status)
	}
}

// The stream lasts longer than serve_after_term.
func TestStreamsFinishAfterTerm(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 1, 200_000)
	snapshot := filepath.Join(t.TempDir(), "index")
	file := fleet.configFile(t, "timeouts: {serve_after_term: 100ms}\nindex: {snapshot: "+snapshot+"}")
	p := startProgram(t, "--config", file.path)
	stream := p.startStream(8000)
	p.signal(syscall.SIGTERM)
	p.awaitLog(`(?s)msg="readiness fails.*msg="shutting down"`)
	p.eventually("the listener is closed", func() bool { _, err := p.get("/livez"); return err != nil })
	if err := <-stream.ended; err != nil {
		t.Errorf("the stream: %v", err)
	}
	if status := p.exit(); status != 0 {
		t.Errorf("status %d", status)
	}
	if _, err := os.Stat(snapshot); err != nil {
		t.Errorf("no snapshot: %v", err)
	}
}

func TestInterruptSkipsServingAfterTerm(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 1, 200_000)
	p := startProgram(t, "--config", fleet.configFile(t, "timeouts: {serve_after_term: 1h}").path)
	p.signal(os.Interrupt)
	if status := p.exit(); status != 0 {
		t.Errorf("status %d", status)
	}
}

func TestSecondSignalKills(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 1, 200_000)
	p := startProgram(t, "--config", fleet.configFile(t, "timeouts: {serve_after_term: 1h}").path)
	p.signal(syscall.SIGTERM)
	p.awaitLog(`msg="readiness fails`)
	p.signal(syscall.SIGTERM)
	if status := p.exit(); status != -1 {
		t.Errorf("status %d of a process that is to die of the signal", status)
	}
}

// Streams and plain answers, none of which ends in time.
func TestRequestsInFlightAtShutdown(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 1, 2_000_000)
	file := fleet.configFile(t, "timeouts: {serve_after_term: 0, shutdown: 300ms}")
	p := startProgram(t, "--config", file.path)
	f := func(name, path, body, begun, want string) (check func()) {
		t.Helper()
		resp := make(chan *http.Response, 1)
		go func() {
			client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
			r, err := client.Post(p.url+path, "application/json", strings.NewReader(body))
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			resp <- r
		}()
		var lines *bufio.Scanner
		var r *http.Response
		if begun != "" {
			if r = <-resp; r == nil {
				return func() {}
			}
			for lines = bufio.NewScanner(r.Body); lines.Scan() && !strings.Contains(lines.Text(), begun); {
			}
		}
		return func() {
			if r == nil {
				if r = <-resp; r == nil {
					return
				}
				lines = bufio.NewScanner(r.Body)
			}
			defer r.Body.Close()
			last := fmt.Sprint(r.StatusCode, "\n")
			for lines.Scan() {
				last += lines.Text() + "\n"
			}
			if last = last[max(0, len(last)-600):]; lines.Err() != nil || !strings.Contains(last, want) {
				t.Errorf("%s: %v, the end is\n%s\nwant %s", name, lines.Err(), last, want)
			}
		}
	}
	chat := `{"model":"sim","ignore_eos":true,"max_tokens":100000,"messages":[{"role":"user","content":"hello"}]`
	checks := []func(){
		f("a stream", "/v1/chat/completions", chat+`,"stream":true}`, "content", `"code":"shutting_down"`),
		f("a stream of responses", "/v1/responses", `{"model":"sim","ignore_eos":true,"max_output_tokens":100000,"input":"hello","stream":true}`,
			"output_text.delta", `"code":"shutting_down"`),
		f("a plain request", "/v1/chat/completions", chat+`}`, "", "503\n"),
	}
	p.eventually("all are in flight", func() bool { return metricSum(t, p.admin, "warmroute_backend_in_flight") == float64(len(checks)) })
	p.signal(syscall.SIGTERM)
	for _, check := range checks {
		check()
	}
	if status := p.exit(); status != 1 {
		t.Errorf("status %d", status)
	}
	p.awaitLog(`still in flight after timeouts.shutdown 300ms were ended`)
}
