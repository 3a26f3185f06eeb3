// Package transport carries requests to one replica: an http.RoundTripper over
// the connection pool of fasthttp.HostClient.
//
// It does what net/http's transport does for a reverse proxy, for about half
// the CPU, and says more: whether the replica can have seen a failed request
// (ConnectError), and whether more of a streamed answer is readable yet
// (Body.WaitReadable). It speaks HTTP/1.1 only, follows no redirects, undoes no
// compression, adds no header of its own but Host, Content-Length and
// "Connection: close", and honours no HTTP_PROXY: a replica is a neighbour.
package transport

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"warmroute/backends/ending"
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

	TLS *tls.Config // for https; nil: the system's roots
}

// Transport is an http.RoundTripper for one replica. Safe for concurrent use.
type Transport struct {
	pool           *fasthttp.HostClient
	dialer         net.Dialer
	connectTimeout time.Duration
	maxHeaderBytes int
	headerTimeout  time.Duration
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

func (e *ConnectError) Error() string { return "connect to " + e.Addr + ": " + e.Err.Error() }
func (e *ConnectError) Unwrap() error { return e.Err }

// Busy reports whether it was for MaxConns, and so says nothing of the replica.
func (e *ConnectError) Busy() bool { return errors.Is(e.Err, fasthttp.ErrNoFreeConns) }

// New makes a Transport. It connects when the first request comes.
func New(o Options) *Transport {
	t := &Transport{
		connectTimeout: o.ConnectTimeout,
		maxHeaderBytes: o.MaxHeaderBytes,
		headerTimeout:  o.HeaderTimeout,
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
// RoundTrip failed or Body.Close returned. With GetBody, a request that finds
// its kept-alive connection closed is sent once more, on a new one.
//
// Cancelling the request's context closes the socket at once, in any phase; the
// error is then context.Cause, or what a context with a method Cause says. There is no other limit on the wait for the
// header to begin: cancel the context with a cause of your own when it has been
// too long.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, stale, err := t.attempt(req, req.Body, false)
	if stale && req.Context().Err() == nil {
		resp, err = t.again(req, err)
	}
	if err != nil {
		if why := ending.Cause(req.Context()); why != nil {
			return nil, why
		}
		return nil, err
	}
	return resp, nil
}

// again sends req a second time, on a new connection, after first ended the
// attempt on a stale one.
func (t *Transport) again(req *http.Request, first error) (*http.Response, error) {
	body := req.Body
	if body != nil && body != http.NoBody {
		if req.GetBody == nil {
			return nil, first
		}
		var err error
		if body, err = req.GetBody(); err != nil {
			return nil, fmt.Errorf("%w: body for a second attempt: %w", ErrInvalidRequest, err)
		}
	}
	resp, _, err := t.attempt(req, body, true)
	if refused := (*ConnectError)(nil); errors.As(err, &refused) {
		// Not a ConnectError to the caller: the replica may have read the request
		// and died of it.
		return nil, fmt.Errorf("%w; then %v", first, refused)
	}
	return resp, err
}

// attempt sends req with body over one connection, a new one if fresh. It sees to
// it that body is closed. stale says that the connection had been used before and
// died without a byte of an answer, as it does when the replica closed it meanwhile.
func (t *Transport) attempt(req *http.Request, body io.ReadCloser, fresh bool) (_ *http.Response, stale bool, _ error) {
	ctx := req.Context()
	b := &Body{ctx: ctx, t: t}
	if err := b.up.begin(t, req, body); err != nil {
		return nil, false, err
	}
	if err := ctx.Err(); err != nil {
		b.up.end()
		return nil, false, err
	}
	c, err := t.acquire(ctx, fresh)
	if err != nil {
		b.up.end()
		return nil, false, err
	}
	b.c, b.br, b.stop = c, t.pool.AcquireReader(c), ending.AfterFunc(ctx, c.abort)
	b.up.start(c)
	if _, err = b.br.Peek(1); err != nil {
		b.letGo()
		if errors.Is(b.up.err, ErrInvalidRequest) {
			return nil, false, b.up.err
		}
		return nil, c.reused, fmt.Errorf("%s to %s: no answer: %w", req.Method, t.addr, err)
	}
	resp, err := b.response(req)
	if err != nil {
		b.letGo()
		return nil, false, fmt.Errorf("%s to %s: header of the answer: %w", req.Method, t.addr, err)
	}
	return resp, false, nil
}
