//go:build !race

package e2e

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// The corpus: what clients and replicas send to the proxy, byte by byte, and what it sends to them. A file of testdata/wire has
// the cases of one subject, which one proxy serves one after the other. A change of such a file is a change of what users get.
//
//	go test ./e2e -run TestWire -update

// wireSubject is the cases of one file.
type wireSubject struct {
	name     string // of the file
	config   string // YAML, beside what all subjects have
	replicas []wireReplica
	normal   []string // regular expressions, each followed by what replaces its matches
	unready  bool     // cases may leave replicas that are not ready
	cases    []wireCase
}

// wireReplica is a replica of a subject. Requests go to the first that may take them, since each seems busier than the one before.
type wireReplica struct {
	name     string
	settings string            // YAML, a flow mapping's members
	models   []string          // "m" when empty; "adapter<base" is a LoRA adapter
	metrics  string            // beside what all replicas have
	answers  map[string]string // bodies for paths of checks, beside those of /v1/models and others
	unlisted bool              // it is not in the configuration
	idle     bool              // it reports no load
}

// wireCase is what a client does on its connections, and what the replicas do.
type wireCase struct {
	name     string
	client   []wireStep
	replicas map[string][]wireReply // by name: a reply for each request; "" is any replica. Requests without one get wireWhole
	down     []string               // replicas whose listeners are closed; to be found by the request, no failure may precede it
	borders  bool                   // the chunks of the response are shown
	shape    bool                   // of the response's JSON, only the keys and types are shown
	names    bool                   // of a response that is an exposition, only the names are shown
	headers  bool                   // the body of the response is not shown
	unsorted bool                   // requests to replicas come in any order
	settles  bool                   // requests to replicas may follow the last response
	checks   []string               // paths of checks and polls, of which the latest to the first replica are shown
	fresh    bool                   // a new proxy serves this case
}

// wireStep is one thing that a client or a replica does with its connection.
type wireStep struct {
	kind wireStepKind
	data string
}

// wireReply is what a replica does with one request.
type wireReply []wireStep

type wireStepKind int

const (
	wireSend         wireStepKind = iota
	wireAwait                     // of a replica and its client: that the client has received data
	wireReceive                   // a response; of clients
	wireDial                      // a new connection to the listener that data names; of clients
	wireHalfClose                 // no more is sent
	wireClose                     // the socket is closed
	wireReset                     // the same, with a reset
	wireAwaitClosed               // the other side closes the connection
	wireAwaitServed               // the client has the response, and the proxy has served another request after it; of replicas
	wireAwaitReplica              // the replica that data names has got a request; of replicas
	wireEarly                     // the body of the request is not read; of replicas
)

func say(data ...string) wireStep       { return wireStep{wireSend, strings.Join(data, "")} }
func awaitText(text string) wireStep    { return wireStep{wireAwait, text} }
func awaitReplica(name string) wireStep { return wireStep{wireAwaitReplica, name} }
func dialListener(name string) wireStep { return wireStep{wireDial, name} }

var (
	receive     = wireStep{kind: wireReceive}
	receiveNext = wireStep{wireReceive, "of several"} // the connection is not probed after it
	halfClose   = wireStep{kind: wireHalfClose}
	closeSocket = wireStep{kind: wireClose}
	resetSocket = wireStep{kind: wireReset}
	awaitClosed = wireStep{kind: wireAwaitClosed}
	awaitServed = wireStep{kind: wireAwaitServed}
	beforeBody  = wireStep{kind: wireEarly}
)

func (s wireStep) String() string {
	switch s.kind {
	case wireAwait:
		return fmt.Sprintf("[the client has received %q]", s.data)
	case wireReceive:
		return "[a response is read]"
	case wireDial:
		return "[connection to the " + s.data + " listener]"
	case wireHalfClose:
		return "[sends no more]"
	case wireClose:
		return "[closes the connection]"
	case wireReset:
		return "[resets the connection]"
	case wireAwaitClosed:
		return "[waits until the connection is closed]"
	case wireAwaitReplica:
		return "[" + s.data + " has responded]"
	case wireAwaitServed:
		return "[the client has the response]"
	case wireEarly:
		return "[does not read the body]"
	}
	return s.data
}

const wireConfig = `
poll: {interval: 1h, fast_interval: 1h, timeout: 20s}
health: {interval: 1h, down_interval: 20ms, timeout: 20s}
routing: {learn: false}
retry: {per_second: 1000}
timeouts: {connect: 10s, serve_after_term: 0s, shutdown: 1s}
log: {level: debug}
`

// maxPlays is how often a subject is played until it is as recorded: on a busy machine a connection may end at another moment.
const maxPlays = 3

func TestWire(t *testing.T) {
	for _, s := range wireSubjects() {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join("e2e", "testdata", "wire", s.name+".txt")
			if *update {
				if err := os.WriteFile(path, []byte(s.play(t)), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			difference := ""
			for range maxPlays {
				if difference = firstDifference(string(want), s.play(t)); difference == "" {
					return
				}
				t.Log(difference)
			}
			t.Errorf("%s differs; where that is intended, go test ./e2e -run TestWire -update writes it\n%s", path, difference)
		})
	}
}

// play returns what the cases of a subject write.
func (s *wireSubject) play(t *testing.T) string {
	t.Helper()
	var out strings.Builder
	out.WriteString(s.header())
	var f *wireFleet
	for i := range s.cases {
		c := &s.cases[i]
		if f == nil || c.fresh {
			if f != nil {
				f.stop()
			}
			f = startWireFleet(t, s)
		}
		out.WriteString(f.play(c))
	}
	f.stop()
	return out.String()
}

// firstDifference returns the first lines in which two texts differ, with the case that they are of.
func firstDifference(want, got string) string {
	a, b := strings.Split(want, "\n"), strings.Split(got, "\n")
	of, n := "", 0
	for n < min(len(a), len(b)) && a[n] == b[n] {
		if strings.HasPrefix(a[n], wireCaseMark) {
			of = a[n]
		}
		n++
	}
	if n == len(a) && n == len(b) {
		return ""
	}
	const shown = 12
	part := func(lines []string) string {
		return strings.Join(lines[min(n, len(lines)):min(n+shown, len(lines))], "\n\t")
	}
	return fmt.Sprintf("%s\nline %d, want:\n\t%s\ngot:\n\t%s", of, n+1, part(a), part(b))
}

const wireCaseMark = "################ "

func (s *wireSubject) header() string {
	var b strings.Builder
	b.WriteString("# Written by go test ./e2e -run TestWire -update.\n")
	if s.config != "" {
		for line := range strings.Lines(strings.TrimSpace(s.config) + "\n") {
			b.WriteString("# " + line)
		}
	}
	for _, r := range s.replicas {
		b.WriteString("# " + strings.TrimSpace(fmt.Sprintf("replica %s %s %s", r.name, r.settings, strings.Join(r.models, " "))) + "\n")
	}
	return b.String()
}

// wireFleet is a proxy and the replicas of a subject.
type wireFleet struct {
	*program
	subject  *wireSubject
	replicas []*wireServer
	written  map[string]string // replies that were written to the file, and their cases
	listed   int               // replicas in the configuration, which come first
	hosts    map[string]string // addresses to what stands for them, which is as long

	mu       sync.Mutex
	current  *wireCase
	client   *wireConn       // of the current case
	served   chan struct{}   // closed when the client has the response of the current exchange
	requests []*wireExchange // that replicas got since the last response
}

// wireExchange is a request that a replica got, and what it did.
type wireExchange struct {
	replica string
	reused  bool // the connection carried a request before it
	request []byte
	reply   wireReply
	isUsual bool // the case has no reply
	conn    *wireConn
	ended   chan struct{} // closed when the reply was played
	end     string
}

func startWireFleet(t *testing.T, s *wireSubject) *wireFleet {
	t.Helper()
	f := &wireFleet{subject: s, hosts: map[string]string{}, written: map[string]string{}}
	var list strings.Builder
	for i := range s.replicas {
		r := &wireServer{wireReplica: s.replicas[i], fleet: f, number: i}
		r.listen(t, "127.0.0.1:0")
		t.Cleanup(r.close)
		f.replicas = append(f.replicas, r)
		f.hosts[r.address] = "replica-" + r.name + ".local"
		if r.unlisted {
			continue
		}
		f.listed++
		fmt.Fprintf(&list, "- {name: %s, url: \"http://%s\"", r.name, r.address)
		if !strings.Contains(r.settings, "kv_events") {
			list.WriteString(", kv_events: off")
		}
		if !strings.Contains(r.settings, "ranks") {
			list.WriteString(", ranks: off")
		}
		if r.settings != "" {
			list.WriteString(", " + r.settings)
		}
		list.WriteString("}\n")
	}
	config := wireConfig
	for line := range strings.Lines(strings.TrimSpace(s.config) + "\n") { // a section replaces that of all subjects
		name, _, _ := strings.Cut(line, ":")
		config = regexp.MustCompile(`(?m)^`+regexp.QuoteMeta(name)+`:.*\n`).ReplaceAllString(config, "")
	}
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte(registrationToken), 0o600); err != nil {
		t.Fatal(err)
	}
	config = strings.ReplaceAll(config+s.config, tokenFile, token)
	file := (&simFleet{}).configFile(t, config+"\nbackends:\n"+list.String())
	f.program = startProgram(t, "--config", file.path)
	f.hosts[strings.TrimPrefix(f.url, "http://")], f.hosts[strings.TrimPrefix(f.admin, "http://")] = "proxy-pub.local", "proxy-adm.local"
	running := 0
	for _, r := range f.replicas[:f.listed] {
		running += r.running()
	}
	f.eventually("all replicas are ready and polled", func() bool {
		return int(metricSum(t, f.admin, "warmroute_backend_running")) == running && f.ready() == f.listed
	})
	return f
}

func (f *wireFleet) ready() int { return int(metricSum(f.t, f.admin, "warmroute_backend_ready")) }

// tokenFile stands for a file with registrationToken in the configuration of a subject.
const (
	tokenFile         = "TOKEN_FILE"
	registrationToken = "a-registration-token-of-the-corpus"
)

// withAddresses returns text with the addresses of what replica-a.local and others stand for, which are as long.
func (f *wireFleet) withAddresses(text string) string {
	for address, name := range f.hosts {
		text = strings.ReplaceAll(text, name, address)
	}
	return text
}

// stop ends the proxy.
func (f *wireFleet) stop() {
	f.cmd.Process.Kill()
	<-f.ended
	for _, r := range f.replicas {
		r.close()
	}
}

// wireServer is a replica that plays the replies of the current case.
type wireServer struct {
	wireReplica
	fleet   *wireFleet
	number  int // in the fleet
	address string

	mu       sync.Mutex
	listener net.Listener
	conns    map[*wireConn]bool // whether it has carried more than checks
	played   int                // replies of the current case
	checks   map[string][]byte  // the latest check or poll of each path
	open     sync.WaitGroup
}

func (r *wireServer) running() int {
	if r.idle {
		return 0
	}
	return 1 + 100*r.number
}

func (r *wireServer) listen(t *testing.T, address string) {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	r.mu.Lock()
	r.listener, r.address = l, l.Addr().String()
	if r.conns == nil {
		r.conns, r.checks = map[*wireConn]bool{}, map[string][]byte{}
	}
	r.mu.Unlock()
	r.open.Go(func() {
		for {
			socket, err := l.Accept()
			if err != nil {
				return
			}
			c := newWireConn(socket)
			r.mu.Lock()
			r.conns[c] = false
			r.mu.Unlock()
			r.open.Go(func() {
				r.serve(c)
				r.mu.Lock()
				delete(r.conns, c)
				r.mu.Unlock()
				c.Close()
				<-c.ended
			})
		}
	})
}

// close closes the listener and all connections.
func (r *wireServer) close() {
	r.mu.Lock()
	r.listener.Close()
	for c := range r.conns {
		c.Close()
	}
	r.mu.Unlock()
	r.open.Wait()
}

// endCase closes the connections that the case has used.
func (r *wireServer) endCase() {
	r.mu.Lock()
	r.played = 0
	var used []*wireConn
	for c, isUsed := range r.conns {
		if isUsed {
			used = append(used, c)
		}
	}
	r.mu.Unlock()
	for _, c := range used {
		c.closeNow()
	}
}

// serve reads requests until the connection is closed.
func (r *wireServer) serve(c *wireConn) {
	for {
		head, ok := c.awaitHead()
		if !ok {
			return
		}
		if _, path, _ := strings.Cut(string(head), " "); true {
			path, _, _ = strings.Cut(path, " ")
			if body, isCheck := r.checkBody(path); isCheck {
				r.mu.Lock()
				r.checks[path] = bytes.Clone(head)
				r.mu.Unlock()
				c.consume(len(head))
				status := "200 OK"
				if body == "" {
					status, body = "404 Not Found", `{"detail":"Not Found"}`
				}
				io.WriteString(c, httpResponse(status, body, "content-type: application/json"))
				continue
			}
		}
		x := &wireExchange{replica: r.name, conn: c, ended: make(chan struct{})}
		r.mu.Lock()
		x.reused = r.conns[c]
		r.conns[c] = true
		r.mu.Unlock()
		reply, known := r.nextReply()
		isEarly := len(reply) > 0 && reply[0].kind == wireEarly
		if isEarly {
			x.request = bytes.Clone(head)
		} else if x.request, ok = c.awaitRequest(); !ok {
			x.request = c.take()
		}
		if !known {
			reply, x.isUsual = wireReply{say(wireAnswer(x.request))}, true
		}
		x.reply = reply
		r.fleet.mu.Lock()
		r.fleet.requests = append(r.fleet.requests, x)
		client, served := r.fleet.client, r.fleet.served
		r.fleet.mu.Unlock()
		isOpen := r.playReply(x, client, served)
		close(x.ended)
		if !isOpen || isEarly {
			<-c.ended
			return
		}
	}
}

// nextReply returns the reply to the next request; known is false if the case has none.
func (r *wireServer) nextReply() (reply wireReply, known bool) {
	r.fleet.mu.Lock()
	c := r.fleet.current
	r.fleet.mu.Unlock()
	list, ok := c.replicas[r.name]
	if !ok {
		list = c.replicas[""]
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.played == len(list) {
		return nil, false
	}
	r.played++
	return list[r.played-1], true
}

// playReply does what a reply says, and reports whether the connection is open still.
func (r *wireServer) playReply(x *wireExchange, client *wireConn, served <-chan struct{}) (isOpen bool) {
	for _, step := range x.reply {
		switch step.kind {
		case wireSend:
			if _, err := io.WriteString(x.conn, r.fleet.withAddresses(step.data)); err != nil {
				return false
			}
		case wireAwait:
			if client != nil {
				client.awaitText(step.data)
			}
		case wireAwaitServed:
			<-served
		case wireAwaitReplica:
			r.fleet.awaitResponded(step.data)
		case wireHalfClose:
			x.conn.Conn.(*net.TCPConn).CloseWrite()
		case wireClose:
			x.conn.closeNow()
			x.end = "closed by the replica"
			return false
		case wireReset:
			x.conn.resetNow()
			x.end = "reset by the replica"
			return false
		case wireAwaitClosed:
			<-x.conn.ended
			return false
		}
	}
	return true
}

// awaitResponded waits until a replica has responded to the first request of the case.
func (f *wireFleet) awaitResponded(name string) {
	for ; ; time.Sleep(time.Millisecond) {
		f.mu.Lock()
		i := slices.IndexFunc(f.requests, func(x *wireExchange) bool { return x.replica == name })
		var ended chan struct{}
		if i >= 0 {
			ended = f.requests[i].ended
		}
		f.mu.Unlock()
		if ended != nil {
			<-ended
			return
		}
	}
}

// checkBody returns the response to a check or a poll. An empty body stands for a 404.
func (r *wireServer) checkBody(path string) (body string, isCheck bool) {
	if body, ok := r.answers[path]; ok {
		return body, true
	}
	switch path {
	case "/health":
		return "{}", true
	case "/v1/models":
		var cards []string
		models := r.models
		if models == nil {
			models = []string{"m"}
		}
		for _, m := range models {
			id, parent, _ := strings.Cut(m, "<")
			quoted := "null"
			if parent != "" {
				quoted = strconv.Quote(parent)
			}
			cards = append(cards, fmt.Sprintf(
				`{"id": %q,  "object":"model","created":1764000000,"owned_by":"vllm","root":%q,"parent":%s,"max_model_len":4096}`,
				id, cmp.Or(parent, id), quoted))
		}
		return `{"object":"list","data":[` + strings.Join(cards, ",") + `]}`, true
	case "/version":
		return `{"version":"0.33.0"}`, true
	case "/metrics":
		return fmt.Sprintf("process_start_time_seconds 1.764e9\n"+
			"vllm:num_requests_running{engine=\"0\",model_name=\"m\"} %d\n"+
			"vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 0\n"+
			"vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0\n"+
			"vllm:cache_config_info{engine=\"0\",block_size=\"16\",num_gpu_blocks=\"100000\",cache_dtype=\"auto\"} 1\n%s",
			r.running(), r.metrics), true
	case "/is_paused", "/kv_event_sources", "/server_info":
		return "", true
	}
	return "", false
}

// wireConn is a connection whose received bytes are kept.
type wireConn struct {
	net.Conn
	ended chan struct{} // closed when nothing more is received

	mu       sync.Mutex
	changed  chan struct{} // closed when more is received, or nothing any more
	received []byte
	consumed int
	begun    int   // what was consumed when the current exchange began
	err      error // why nothing more is received
}

func newWireConn(socket net.Conn) *wireConn {
	c := &wireConn{Conn: socket, ended: make(chan struct{}), changed: make(chan struct{})}
	go func() {
		chunk := make([]byte, 64<<10)
		for {
			n, err := socket.Read(chunk)
			c.mu.Lock()
			c.received = append(c.received, chunk[:n]...)
			c.err = err
			close(c.changed)
			c.changed = make(chan struct{})
			c.mu.Unlock()
			if err != nil {
				close(c.ended)
				return
			}
		}
	}()
	return c
}

// closeNow closes the socket, and returns when the other side's kernel knows, which on a busy machine is later than it may seem.
func (c *wireConn) closeNow() {
	const finWait1, lastAck = 4, 9 // states of TCP
	tcp := c.Conn.(*net.TCPConn)
	_ = tcp.CloseWrite()
	if raw, err := tcp.SyscallConn(); err == nil && runtime.GOOS == "linux" {
		const tcpInfo = 11 // whose first byte is the state
		for end := time.Now().Add(wireTimeout); time.Now().Before(end); time.Sleep(time.Millisecond) {
			state := 0
			_ = raw.Control(func(fd uintptr) {
				info, _ := syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpInfo)
				state = info & 0xff
			})
			if state != finWait1 && state != lastAck {
				break
			}
		}
	}
	c.Close()
	<-c.ended
}

// resetNow closes the socket with a reset.
func (c *wireConn) resetNow() {
	_ = c.Conn.(*net.TCPConn).SetLinger(0)
	c.Close()
	<-c.ended
}

// wireTimeout is longer than any step takes.
const wireTimeout = 30 * time.Second

// await waits until is returns true for what was received and not consumed, or nothing more is received.
func (c *wireConn) await(is func(received []byte, ended bool) bool) (ok bool) {
	timeout := time.NewTimer(wireTimeout)
	defer timeout.Stop()
	for {
		c.mu.Lock()
		received, changed, ended := c.received[c.consumed:], c.changed, c.err != nil
		c.mu.Unlock()
		if is(received, ended) {
			return true
		}
		if ended {
			return false
		}
		select {
		case <-changed:
		case <-timeout.C:
			return false
		}
	}
}

// awaitText waits until text was received in the current exchange.
func (c *wireConn) awaitText(text string) (ok bool) {
	return c.await(func([]byte, bool) bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return bytes.Contains(c.received[c.begun:], []byte(text))
	})
}

// beginExchange begins an exchange with what has not been consumed.
func (c *wireConn) beginExchange() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.begun = c.consumed
}

func (c *wireConn) consume(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.consumed += n
}

// take consumes all that was received.
func (c *wireConn) take() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := bytes.Clone(c.received[c.consumed:])
	c.consumed = len(c.received)
	return all
}

// awaitHead waits for the head of a request, which it does not consume.
func (c *wireConn) awaitHead() (head []byte, ok bool) {
	ok = c.await(func(received []byte, _ bool) bool {
		n := bytes.Index(received, []byte("\r\n\r\n"))
		if n >= 0 {
			head = received[:n+4]
		}
		return n >= 0
	})
	return head, ok
}

// awaitRequest waits for a request, and consumes it.
func (c *wireConn) awaitRequest() (request []byte, ok bool) {
	ok = c.await(func(received []byte, ended bool) bool {
		n := messageEnd(received, true)
		if n > 0 {
			request = bytes.Clone(received[:n])
		}
		return n > 0
	})
	c.consume(len(request))
	return request, ok
}

// awaitResponse waits for a response to a request with that method, or the end of the connection, and consumes it.
func (c *wireConn) awaitResponse(method string) (response []byte, complete bool) {
	complete = c.await(func(received []byte, _ bool) bool {
		n := responseEnd(received, method)
		if n > 0 {
			response = bytes.Clone(received[:n])
		}
		return n > 0
	})
	if !complete {
		return c.take(), false
	}
	c.consume(len(response))
	return response, true
}

// responseEnd returns where a response ends, interim ones before it included; 0 if it is incomplete, or ends with the connection.
func responseEnd(b []byte, method string) int {
	for at := 0; ; {
		n := bytes.Index(b[at:], []byte("\r\n\r\n"))
		if n < 0 || len(b[at:]) < len("HTTP/1.1 200") {
			return 0
		}
		switch status := string(b[at+len("HTTP/1.1 "):][:3]); {
		case status[0] == '1':
			at += n + 4
			continue
		case method == http.MethodHead, status == "204", status == "304":
			return at + n + 4
		}
		if end := messageEnd(b[at:], false); end > 0 {
			return at + end
		}
		return 0
	}
}

// messageEnd returns where a message with a known end ends, 0 if it is incomplete. isRequest: without framing it has no body.
func messageEnd(b []byte, isRequest bool) int {
	n := bytes.Index(b, []byte("\r\n\r\n"))
	if n < 0 {
		return 0
	}
	head, body := string(b[:n+2]), b[n+4:]
	length, isChunked := wireFraming(head)
	switch {
	case isChunked:
		end, _ := scanChunks(body)
		if end < 0 {
			return 0
		}
		return n + 4 + end
	case length >= 0 && len(body) >= length:
		return n + 4 + length
	case length < 0 && isRequest:
		return n + 4
	}
	return 0
}

// wireFraming returns the Content-Length of a head, -1 without one.
func wireFraming(head string) (length int, isChunked bool) {
	length = -1
	for line := range strings.SplitSeq(head, "\r\n") {
		name, value, _ := strings.Cut(line, ":")
		switch strings.ToLower(name) {
		case "content-length":
			length, _ = strconv.Atoi(strings.TrimSpace(value))
		case "transfer-encoding":
			isChunked = strings.EqualFold(strings.TrimSpace(value), "chunked")
		}
	}
	return length, isChunked
}

// scanChunks returns where a chunked body ends, -1 if it is incomplete, and the chunks so far. The last one has the trailer.
func scanChunks(b []byte) (end int, chunks []string) {
	for at := 0; ; {
		n := bytes.Index(b[at:], []byte("\r\n"))
		if n < 0 {
			return -1, chunks
		}
		size, err := strconv.ParseUint(strings.TrimSpace(string(b[at:at+n])), 16, 31)
		if err != nil {
			return -1, append(chunks, string(b[at:]))
		}
		at += n + 2
		if size == 0 {
			trailer := b[at:]
			if bytes.HasPrefix(trailer, []byte("\r\n")) {
				return at + 2, append(chunks, "")
			}
			n := bytes.Index(trailer, []byte("\r\n\r\n"))
			if n < 0 {
				return -1, chunks
			}
			return at + n + 4, append(chunks, string(trailer[:n+2]))
		}
		if len(b[at:]) < int(size)+2 {
			return -1, append(chunks, string(b[at:]))
		}
		chunks = append(chunks, string(b[at:at+int(size)]))
		at += int(size) + 2
	}
}

// play plays a case and returns its part of the file.
func (f *wireFleet) play(c *wireCase) string {
	f.t.Helper()
	for _, r := range f.replicas {
		if slices.Contains(c.down, r.name) {
			r.mu.Lock()
			r.listener.Close()
			conns := slices.Collect(maps.Keys(r.conns))
			r.mu.Unlock()
			for _, c := range conns {
				c.closeNow()
			}
		}
	}
	f.mu.Lock()
	f.current, f.client, f.requests = c, nil, nil
	f.mu.Unlock()
	p := &wirePlayer{f: f, c: c, number: map[string]int{}}
	fmt.Fprintf(&p.out, "\n%s%s\n", wireCaseMark, c.name)
	if len(c.down) > 0 {
		fmt.Fprintf(&p.out, "[nothing listens at %s]\n", strings.Join(c.down, ", "))
	}
	steps := c.client
	for _, step := range steps {
		p.do(step)
	}
	p.end()
	for _, r := range f.replicas {
		r.endCase()
		if slices.Contains(c.down, r.name) {
			r.listen(f.t, r.address)
		}
	}
	if p.relayed || len(c.down) > 0 {
		f.resetBackends()
	}
	return p.out.String()
}

// resetBackends has the proxy forget what it has learned from a case.
func (f *wireFleet) resetBackends() {
	f.t.Helper()
	for _, r := range f.replicas[:f.listed] {
		req, err := http.NewRequest(http.MethodPost, f.admin+"/api/backends/"+r.name+"/reset", nil)
		if err != nil {
			f.t.Fatal(err)
		}
		req.Header = http.Header{"Content-Type": {"application/json"}, "Authorization": {"Bearer " + adminTokenOfCorpus}}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			f.t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	if !f.subject.unready {
		f.eventually("all replicas are ready", func() bool { return f.ready() == f.listed })
	}
}

const adminTokenOfCorpus = "an-admin-token-of-the-corpus"

// wirePlayer plays a case and writes what happens.
type wirePlayer struct {
	f      *wireFleet
	c      *wireCase
	out    strings.Builder
	conn   *wireConn
	method string // of the latest request
	number map[string]int
	wrote  bool          // something of the current exchange was written
	served chan struct{} // that of the fleet

	relayed bool // a replica got a request
}

// maxUnread is how much the proxy's socket takes although nobody reads.
const maxUnread = 16 << 10

func (p *wirePlayer) do(step wireStep) {
	f := p.f
	f.t.Helper()
	if step.kind == wireDial || p.conn == nil {
		p.dial(step)
		if step.kind == wireDial {
			return
		}
	}
	if step.kind == wireReceive {
		p.receive(step.data == "")
		return
	}
	if !p.wrote {
		p.out.WriteString(">>>> client\n")
		p.wrote = true
		p.beginExchange()
	}
	switch step.kind {
	case wireSend:
		if method, _, ok := strings.Cut(step.data, " "); ok && method != "" && strings.Trim(method, "ABCDEFGHIJKLMNOPQRSTUVWXYZ") == "" {
			p.method = method
		}
		if data := f.withAddresses(step.data); len(data) <= maxUnread {
			io.WriteString(p.conn, data)
		} else {
			go io.WriteString(p.conn, data) // the proxy may respond before it has read all
		}
		p.writeMessage([]byte(step.data), false)
	case wireAwait:
		p.out.WriteString(step.String() + "\n")
		if !p.conn.awaitText(step.data) {
			p.out.WriteString("[it has not]\n")
		}
	case wireHalfClose:
		p.out.WriteString(step.String() + "\n")
		p.conn.Conn.(*net.TCPConn).CloseWrite()
	case wireClose:
		p.out.WriteString(step.String() + "\n")
		p.conn.closeNow()
	case wireReset:
		p.out.WriteString(step.String() + "\n")
		p.conn.resetNow()
	}
}

func (p *wirePlayer) beginExchange() {
	p.conn.beginExchange()
	p.served = make(chan struct{})
	p.f.mu.Lock()
	p.f.served = p.served
	p.f.mu.Unlock()
}

func (p *wirePlayer) dial(step wireStep) {
	if p.conn != nil {
		p.end()
	}
	address := strings.TrimPrefix(p.f.url, "http://")
	if step.kind == wireDial && step.data == "admin" {
		address = strings.TrimPrefix(p.f.admin, "http://")
	}
	socket, err := net.Dial("tcp", address)
	if err != nil {
		p.f.t.Fatal(err)
	}
	p.conn = newWireConn(socket)
	p.f.mu.Lock()
	p.f.client = p.conn
	p.f.mu.Unlock()
	if step.kind == wireDial {
		p.out.WriteString(step.String() + "\n")
	}
}

// receive waits for a response and writes it after what the replicas have got.
func (p *wirePlayer) receive(probe bool) {
	response, complete := p.conn.awaitResponse(p.method)
	end := "kept"
	switch {
	case !complete, saysClose(response):
		end = p.closedBy()
	case probe && !p.isKept():
		end = "closed"
	}
	close(p.served)
	if p.c.settles {
		p.awaitSettled()
	}
	if probe { // else the replica may have the next request already
		p.writeReplicas()
	}
	p.out.WriteString("<<<< proxy\n")
	if len(response) == 0 {
		p.out.WriteString("[nothing]\n")
	} else {
		p.writeMessage(response, true)
	}
	p.out.WriteString("[connection " + end + "]\n")
	p.wrote = false
	p.served = make(chan struct{}) // of a response that follows without a request
}

// saysClose reports whether a response is the last one of its connection by its header.
func saysClose(response []byte) bool {
	head, _, _ := strings.Cut(string(response), "\r\n\r\n")
	return strings.Contains(head, "\r\nConnection: close") || strings.HasPrefix(head, "HTTP/1.0 ") && !strings.Contains(head, "keep-alive")
}

// closedBy says how the proxy ended the connection.
func (p *wirePlayer) closedBy() string {
	select {
	case <-p.conn.ended:
	case <-time.After(wireTimeout):
		return "open, without a complete response"
	}
	p.conn.mu.Lock()
	defer p.conn.mu.Unlock()
	if errors.Is(p.conn.err, io.EOF) {
		return "closed"
	}
	if errors.Is(p.conn.err, syscall.ECONNRESET) {
		return "reset"
	}
	return p.conn.err.Error()
}

// isKept reports whether the proxy serves another request on the connection, which it does when it has ended the one before.
func (p *wirePlayer) isKept() bool {
	path := "/livez"
	if p.conn.RemoteAddr().String() == strings.TrimPrefix(p.f.admin, "http://") {
		path = "/nothing"
	}
	if _, err := io.WriteString(p.conn, "GET "+path+" HTTP/1.1\r\nHost: localhost\r\n\r\n"); err != nil {
		<-p.conn.ended
		return false
	}
	_, complete := p.conn.awaitResponse(http.MethodGet)
	return complete
}

// end ends the connection of the client, and writes what replicas got after the last response.
func (p *wirePlayer) end() {
	p.conn.closeNow()
	if p.wrote || p.c.settles {
		p.awaitSettled()
		p.writeReplicas()
		p.wrote = false
	}
	p.conn = nil
}

func (p *wirePlayer) awaitSettled() {
	p.f.eventually("no request is in flight", func() bool { return metricSum(p.f.t, p.f.admin, "warmroute_requests_in_flight") == 0 })
}

// writeReplicas writes what the replicas have got since the last call, and what they did.
func (p *wirePlayer) writeReplicas() {
	f := p.f
	f.mu.Lock()
	list := f.requests
	f.requests = nil
	f.mu.Unlock()
	if p.c.unsorted {
		slices.SortStableFunc(list, func(a, b *wireExchange) int { return cmp.Compare(a.replica, b.replica) })
	}
	p.relayed = p.relayed || len(list) > 0
	for _, x := range list {
		select {
		case <-x.ended:
		case <-time.After(wireTimeout):
			f.t.Fatalf("case %s: replica %s has not ended its reply", p.c.name, x.replica)
		}
		reused := ""
		if x.reused {
			reused = ", over a connection that was used before"
		}
		fmt.Fprintf(&p.out, "---- proxy to %s%s\n", x.replica, reused)
		p.writeMessage(sortHeader(x.request), false)
		fmt.Fprintf(&p.out, "---- %s\n", x.replica)
		p.writeReply(x)
		if x.end == "" {
			x.end = "kept"
			if x.conn.isClosed() {
				x.end = "closed by the proxy"
			}
		}
		p.out.WriteString("[connection " + x.end + "]\n")
	}
	for _, path := range p.c.checks {
		r := f.replicas[0]
		var head []byte
		f.eventually("a check of "+path, func() bool {
			r.mu.Lock()
			defer r.mu.Unlock()
			head = r.checks[path]
			return head != nil
		})
		fmt.Fprintf(&p.out, "---- proxy to %s\n", r.name)
		p.writeMessage(sortHeader(head), false)
	}
}

// minRepeatedReply is the length from which a reply is written once.
const minRepeatedReply = 300

// writeReply writes what a replica sent, chunk by chunk.
func (p *wirePlayer) writeReply(x *wireExchange) {
	if x.isUsual {
		status, _, _ := strings.Cut(x.reply[0].data, "\r\n")
		p.out.WriteString("[the usual response, " + status + "]\n")
		return
	}
	key := fmt.Sprint(x.reply)
	if before := p.f.written[key]; before != "" && len(key) > minRepeatedReply {
		fmt.Fprintf(&p.out, "[as in the case %q]\n", before)
		return
	}
	p.f.written[key] = p.c.name
	isChunked := false
	for _, step := range x.reply {
		if step.kind != wireSend {
			p.out.WriteString(step.String() + "\n")
			continue
		}
		head, body, hasHead := "", step.data, false
		for strings.HasPrefix(body, "HTTP/") && strings.Contains(body, "\r\n\r\n") {
			head, body, hasHead = strings.Cut(body, "\r\n\r\n")
			p.writeHead(p.normalize(head) + "\r\n")
		}
		if hasHead {
			_, isChunked = wireFraming(head)
		}
		end, chunks := scanChunks([]byte(body))
		if !isChunked || body == "" || end < 0 && !isWholeChunks(body, chunks) {
			if body != "" {
				p.writeBody(p.normalize(body))
			}
			continue
		}
		for i, chunk := range chunks {
			if end >= 0 && i == len(chunks)-1 {
				p.out.WriteString("[last chunk]" + shorten(chunk) + "\n")
				if rest := body[end:]; rest != "" {
					p.writeBody(rest)
				}
				break
			}
			p.out.WriteString("[chunk]\n")
			p.writeBody(p.normalize(chunk))
		}
	}
}

// isWholeChunks reports whether a body is these chunks, none of which is incomplete.
func isWholeChunks(body string, chunks []string) bool {
	var all strings.Builder
	for _, data := range chunks {
		all.WriteString(chunk(data))
	}
	return all.String() == body
}

// closeGrace is how long the end of a connection may take to arrive.
const closeGrace = 20 * time.Millisecond

// isClosed reports whether the other side has closed the connection. If it has, it did so before the call.
func (c *wireConn) isClosed() bool {
	select {
	case <-c.ended:
		return true
	case <-time.After(closeGrace):
	}
	raw, err := c.Conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		return true
	}
	closed := false
	err = raw.Control(func(fd uintptr) { // the goroutine that reads may not have run
		n, _, err := syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		closed = err == nil && n == 0 || errors.Is(err, syscall.ECONNRESET)
	})
	return err != nil || closed
}

// sortHeader returns a message with the lines of its header sorted: the proxy writes those to replicas in any order.
func sortHeader(message []byte) []byte {
	head, body, ok := strings.Cut(string(message), "\r\n\r\n")
	if !ok {
		return message
	}
	lines := strings.Split(head, "\r\n")
	slices.SortStableFunc(lines[1:], func(a, b string) int {
		nameA, _, _ := strings.Cut(a, ":")
		nameB, _, _ := strings.Cut(b, ":")
		return cmp.Compare(strings.ToLower(nameA), strings.ToLower(nameB))
	})
	return []byte(strings.Join(lines, "\r\n") + "\r\n\r\n" + body)
}

// wireDate is that of the replicas' responses.
const wireDate = "Sat, 21 Nov 2026 05:00:00 GMT"

var (
	generatedID  = regexp.MustCompile(`wr-[0-9a-f]{32}`)
	attemptToken = regexp.MustCompile(`-wr[0-9a-f]{24}`)
	dateLine     = regexp.MustCompile(`\r\nDate: [^\r\n]*`)
	instance     = regexp.MustCompile(`\b[A-Z2-7]{26}\b`)
	variableLine = regexp.MustCompile(`(\r\nX-(?:Warmroute-(?:Overhead-Us|Queue-Ms)|` +
		`Ratelimit-(?:Reset-(?:Requests|Tokens)|Remaining-Tokens)):) [^\r\n]*`)
	lengthLine    = regexp.MustCompile(`\r\nContent-Length: [0-9]+`)
	retryLine     = regexp.MustCompile(`\r\nRetry-After: [0-9]+`)
	tryAgain      = regexp.MustCompile(`([Tt]ry again in) [0-9]+s`)
	localAddress  = regexp.MustCompile(`127\.0\.0\.1(:|%3A)[0-9]{4,5}`)
	rfc3339       = regexp.MustCompile(`"20[0-9]{2}-[0-9]{2}-[0-9]{2}T[0-9:.]+(?:Z|[+-][0-9:]+)"`)
	sameBytes     = regexp.MustCompile(`a{60,}|x{60,}|y{60,}`)
	numberedLines = regexp.MustCompile(`(?:\nX-Many-[0-9]+: v){3,}`)
	keepAlives    = regexp.MustCompile(`(?:: keep-alive\n)+`)
	pings         = regexp.MustCompile(`(?:event: ping\n(data: [^\n]*\n)\n)+`)
)

// normalize replaces what differs between two runs.
func (p *wirePlayer) normalize(text string) string {
	number := func(name string) func(string) string {
		return func(id string) string {
			n := p.number[id]
			if n == 0 {
				p.number[name]++
				n = p.number[name]
				p.number[id] = n
			}
			return fmt.Sprint(name, n)
		}
	}
	text = generatedID.ReplaceAllStringFunc(text, number("wr-ID"))
	text = attemptToken.ReplaceAllStringFunc(text, number("-wrTOKEN"))
	text = localAddress.ReplaceAllStringFunc(text, func(address string) string {
		return cmp.Or(p.f.hosts[strings.Replace(address, "%3A", ":", 1)], "127.0.0.1:PORT")
	})
	text = instance.ReplaceAllString(text, "INSTANCE")
	text = tryAgain.ReplaceAllString(text, "$1 Ns")
	text = rfc3339.ReplaceAllString(text, `"TIME"`)
	for pair := range slices.Chunk(p.f.subject.normal, 2) {
		text = regexp.MustCompile(pair[0]).ReplaceAllString(text, pair[1])
	}
	return text
}

// writeMessage writes a message, or a part of one, line by line: its head as it is, its body with a mark before each line.
func (p *wirePlayer) writeMessage(message []byte, isResponse bool) {
	text := string(message)
	for isResponse && len(text) > len("HTTP/1.1 100") && text[len("HTTP/1.1 ")] == '1' { // an interim response
		head, rest, ok := strings.Cut(text, "\r\n\r\n")
		if !ok {
			break
		}
		p.writeHead(head + "\r\n")
		text = rest
	}
	head, body, ok := strings.Cut(text, "\r\n\r\n")
	if !ok || strings.HasPrefix(text, "data:") {
		p.writeBody(p.normalize(text))
		return
	}
	_, isChunked := wireFraming(head)
	if !isResponse {
		p.writeHead(p.normalize(head + "\r\n"))
		if body != "" {
			p.writeBody(p.normalize(body))
		}
		return
	}
	var chunks []string
	note := ""
	if isChunked {
		var end int
		if end, chunks = scanChunks([]byte(body)); end < 0 {
			note = "[no last chunk]"
		} else {
			if trailer := chunks[len(chunks)-1]; trailer != "" {
				note = "[trailer] " + strings.TrimSuffix(trailer, "\r\n")
			}
			chunks = chunks[:len(chunks)-1]
		}
		body = strings.Join(chunks, "")
	}
	shown := p.normalize(body)
	head = dateLine.ReplaceAllStringFunc(p.normalize(head+"\r\n"), func(line string) string {
		if strings.HasSuffix(line, wireDate) {
			return line
		}
		return "\r\nDate: DATE"
	})
	head = variableLine.ReplaceAllString(head, "$1 N")
	if shown != body || p.c.shape || p.c.names || p.c.headers {
		head = lengthLine.ReplaceAllString(head, "\r\nContent-Length: N")
	}
	if tryAgain.MatchString(body) || strings.Contains(body, "no replica") || p.method == http.MethodHead {
		head = retryLine.ReplaceAllString(head, "\r\nRetry-After: N")
	}
	p.writeHead(head)
	switch {
	case p.c.headers:
		fmt.Fprintf(&p.out, "[body]\n")
	case p.c.shape && strings.HasPrefix(body, "{"):
		p.out.WriteString(jsonShape(body))
	case p.c.names:
		for line := range strings.Lines(body) {
			if name, ok := strings.CutPrefix(line, "# TYPE "); ok && !strings.HasPrefix(name, "go_") && !strings.HasPrefix(name, "process_") {
				p.out.WriteString("| " + name)
			}
		}
	case p.c.borders && isChunked:
		for _, chunk := range chunks {
			p.out.WriteString("[chunk]\n")
			p.writeBody(p.normalize(chunk))
		}
	case body != "":
		p.writeBody(shown)
	}
	if note != "" {
		p.out.WriteString(note + "\n")
	}
}

func (p *wirePlayer) writeHead(head string) {
	head = strings.ReplaceAll(head, "\r\n", "\n")
	head = numberedLines.ReplaceAllStringFunc(head, func(lines string) string {
		return fmt.Sprintf("\n[%d lines as X-Many-1: v]", strings.Count(lines, "\n"))
	})
	p.out.WriteString(shorten(head))
}

func (p *wirePlayer) writeBody(body string) {
	body = keepAlives.ReplaceAllString(body, ": keep-alive (one or more)\n")
	body = pings.ReplaceAllString(body, "event: ping (one or more)\n$1\n")
	for line := range strings.SplitSeq(body, "\n") {
		p.out.WriteString("| " + shorten(line) + "\n")
	}
}

// shorten makes control characters visible, and runs of one letter short.
func shorten(text string) string {
	text = sameBytes.ReplaceAllStringFunc(text, func(run string) string { return fmt.Sprintf("[%d times %c]", len(run), run[0]) })
	var b strings.Builder
	for _, c := range text {
		switch {
		case c == '\n' || c >= ' ' && c != 0x7f && c != '\uFFFD':
			b.WriteRune(c)
		case c == '\r':
			b.WriteString(`\r`)
		default:
			fmt.Fprintf(&b, `\x%02x`, c)
		}
	}
	return b.String()
}
