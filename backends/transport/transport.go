// Package transport carries requests to one replica: an http.RoundTripper over
// the connection pool of fasthttp.HostClient.
//
// It does what net/http's transport does for a reverse proxy, for about half
// the CPU, and says more: whether the replica can have seen a failed request
// (ConnectError), or worked on it (StaleError), and whether more of a streamed
// answer is readable yet (Body.WaitReadable). It sends a request once: whether to
// send it again is the caller's decision. It speaks HTTP/1.1 only, follows no redirects, undoes no
// compression, adds no header of its own but Host, Content-Length and
// "Connection: close", and honours no HTTP_PROXY: a replica is a neighbour.
package transport

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/valyala/fasthttp"
)

// Options configure a Transport. Only URL is needed.
type Options struct {
	URL *url.URL // http or https, and the host; its path is not used

	// ConnectTimeout bounds name lookup, TCP and TLS handshakes together. 0: 2 s.
	ConnectTimeout time.Duration

	// IdleTimeout closes a connection that nobody used for so long. It has to
	// be shorter than the replica's own: vLLM closes after 5 s. 0: 4 s.
	IdleTimeout time.Duration

	MaxConns       int // connections open at once, idle ones included; 0: no limit
	MaxHeaderBytes int // of an answer, interim ones included; 0: 128 KiB

	// HeaderTimeout bounds the time from the first byte of an answer's header to its
	// last. The wait for the first byte has no bound here. 0: 10 s.
	HeaderTimeout time.Duration

	// StaleTimeout is how long after a request was written the end of a reused
	// connection still counts as a StaleError. 0: 100 ms.
	StaleTimeout time.Duration

	TLS *tls.Config // for https; nil: the system's roots
}

// Transport is an http.RoundTripper for one replica. Safe for concurrent use.
type Transport struct {
	pool           *fasthttp.HostClient
	dialer         net.Dialer
	connectTimeout time.Duration
	maxHeaderBytes int
	headerTimeout  time.Duration
	staleTimeout   time.Duration
	maxConns       int         // 0: no limit
	addr           string      // host:port to dial, and what errors call the replica
	host           string      // value of the Host header
	tls            *tls.Config // nil for http
	heads          sync.Pool   // of *[]byte: request heads being written
	open           open
}

// ErrInvalidRequest says that a request was refused before it was sent, or cut
// off while it was: a header that would break the framing, a body that is not
// as long as its ContentLength. Not the replica's fault.
var ErrInvalidRequest = errors.New("invalid request")

// ConnectError says that no connection to the replica could be had: refused,
// timed out, a bad certificate, or MaxConns reached (fasthttp.ErrNoFreeConns).
// Nothing was sent, so the engine never saw the request.
type ConnectError struct {
	Addr string
	Err  error
}

// Error names the address that was dialed only where it is not Addr, but one that
// Addr's host was looked up as: logs have the backend beside the error.
func (e *ConnectError) Error() string {
	dial, ok := errors.AsType[*net.OpError](e.Err)
	if !ok || dial.Op != "dial" {
		return "connect: " + e.Err.Error()
	}
	text := "connect: "
	if dial.Addr != nil && dial.Addr.String() != e.Addr {
		text = "connect to " + dial.Addr.String() + ": "
	}
	if call, ok := errors.AsType[*os.SyscallError](dial.Err); ok {
		return text + call.Err.Error()
	}
	return text + dial.Err.Error()
}

func (e *ConnectError) Unwrap() error { return e.Err }

// Busy reports whether it was for MaxConns, and so says nothing of the replica.
func (e *ConnectError) Busy() bool { return errors.Is(e.Err, fasthttp.ErrNoFreeConns) }

// OutOfDescriptors reports whether it was for want of a file descriptor, and so says
// nothing of the replica.
func (e *ConnectError) OutOfDescriptors() bool { return IsOutOfDescriptors(e.Err) }

// StaleError says that a connection which had carried a request before ended
// before the first byte of an answer: while the next request was being written, or
// within StaleTimeout of it. Most likely the replica closed it because it was idle,
// and has not worked on the request. To send the request again, set Request.Close:
// then no other kept-alive connection is risked.
type StaleError struct{ Err error }

func (e *StaleError) Error() string { return "stale connection: " + e.Err.Error() }
func (e *StaleError) Unwrap() error { return e.Err }

// New makes a Transport. It connects when the first request comes.
func New(o Options) *Transport {
	t := &Transport{
		connectTimeout: o.ConnectTimeout,
		maxHeaderBytes: o.MaxHeaderBytes,
		headerTimeout:  o.HeaderTimeout,
		staleTimeout:   o.StaleTimeout,
		maxConns:       o.MaxConns,
	}
	if t.connectTimeout <= 0 {
		t.connectTimeout = 2 * time.Second
	}
	if t.maxHeaderBytes <= 0 {
		t.maxHeaderBytes = 128 << 10
	}
	if t.headerTimeout <= 0 {
		t.headerTimeout = 10 * time.Second
	}
	if t.staleTimeout <= 0 {
		t.staleTimeout = 100 * time.Millisecond
	}
	port := "80"
	if o.URL.Scheme == "https" {
		port = "443"
		t.tls = &tls.Config{}
		if o.TLS != nil {
			t.tls = o.TLS.Clone()
		}
		t.tls.NextProtos = []string{"http/1.1"}
		if t.tls.ServerName == "" {
			t.tls.ServerName = o.URL.Hostname()
		}
	}
	t.host = o.URL.Host
	if zone, end := strings.IndexByte(t.host, '%'), strings.IndexByte(t.host, ']'); 0 < zone && zone < end {
		t.host = t.host[:zone] + t.host[end:] // an IPv6 zone means nothing to the replica
	}
	if p := o.URL.Port(); p != "" {
		port = p
	}
	t.addr = net.JoinHostPort(o.URL.Hostname(), port)

	t.pool = &fasthttp.HostClient{
		Addr:                t.addr,
		MaxConns:            o.MaxConns,
		MaxIdleConnDuration: o.IdleTimeout,
		// Every open stream has one. Longer bodies are read past it.
		ReadBufferSize: 2 << 10,
		// The connection used last is the least likely to be stale.
		ConnPoolStrategy: fasthttp.LIFO,
		// AcquireConn dials without a context, so Dial only makes the place:
		// RoundTrip connects it. TLS is ours for the same reason.
		Dial: func(string) (net.Conn, error) { return new(conn), nil },
	}
	if o.MaxConns <= 0 {
		t.pool.MaxConns = math.MaxInt32 // fasthttp's 0 means 512
	}
	if o.IdleTimeout <= 0 {
		t.pool.MaxIdleConnDuration = 4 * time.Second
	}
	return t
}

// CloseIdleConnections closes the connections that carry no request. The pool's
// cleaner, a goroutine, ends within the idle timeout once none is open.
func (t *Transport) CloseIdleConnections() { t.pool.CloseIdleConnections() }

// Close closes all connections, which ends the requests under way on them, and
// refuses new ones.
func (t *Transport) Close() {
	t.open.close()
	t.CloseIdleConnections()
}

// Open is the number of connections to the replica, idle ones included.
func (t *Transport) Open() int { return t.open.len() }

// RoundTrip sends req to the replica, with req.URL's path and query as they are,
// and returns the answer once its header is read. Response.Body is a *Body.
//
// req.Body needs a known ContentLength. It is written from the memory it lies in
// when it has a WriteTo, as bytes.Reader does, and is not touched again after
// RoundTrip failed or Body.Close returned. A request with Close set has a
// connection of its own, made for it and closed after it; idle ones stay as they are.
//
// Cancelling the request's context closes the socket at once, in any phase; the
// error is then context.Cause. There is no other limit on the wait for the header to
// begin: cancel the context with a cause of your own when it has been too long.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := t.send(req)
	if err != nil {
		if why := context.Cause(req.Context()); why != nil {
			return nil, why
		}
		return nil, err
	}
	return resp, nil
}

// send sends req over one connection. It sees to it that the body is closed.
func (t *Transport) send(req *http.Request) (*http.Response, error) {
	ctx := req.Context()
	b := &Body{ctx: ctx, t: t}
	if err := b.up.begin(t, req, req.Body); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		b.up.end()
		return nil, err
	}
	c, err := t.acquire(ctx, req.Close)
	if err != nil {
		b.up.end()
		return nil, err
	}
	b.c, b.br, b.stop = c, t.pool.AcquireReader(c), context.AfterFunc(ctx, c.abort)
	b.up.start(c)
	if _, err = b.br.Peek(1); err != nil {
		ended := time.Now()
		b.letGo()
		if errors.Is(b.up.err, ErrInvalidRequest) {
			return nil, b.up.err
		}
		err = fmt.Errorf("%s to %s: no answer: %w", req.Method, t.addr, err)
		// With an error of the upload, no engine can have seen the whole request.
		if c.reused && (b.up.err != nil || ended.Sub(b.up.written) <= t.staleTimeout) {
			err = &StaleError{err}
		}
		return nil, err
	}
	resp, err := b.response(req)
	if err != nil {
		b.letGo()
		return nil, fmt.Errorf("%s to %s: header of the answer: %w", req.Method, t.addr, err)
	}
	return resp, nil
}
