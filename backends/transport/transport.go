// Package transport carries requests to one replica, over connections of fasthttp's HostClient: an http.RoundTripper
// for requests that are relayed, and Do for short ones of the proxy's own.
//
// For a reverse proxy RoundTrip takes about half the CPU of net/http's transport, and reports more:
// whether the replica can have seen a failed request (ConnectError) or worked on it (StaleError),
// and whether more of a streamed response is readable (Body.WaitReadable). It sends a request once;
// retries are up to the caller. It speaks HTTP/1.1 only, follows no redirects, does not decompress,
// adds no headers but Host, Content-Length and "Connection: close", and ignores HTTP_PROXY.
package transport

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"
)

// Options configure a Transport. Only URL is needed.
type Options struct {
	URL *url.URL // scheme http or https, and host; the path is not used

	Addr     string        // host:port to connect to; "": that of URL
	Resolver *net.Resolver // looks up the host; nil: Go's default

	RefuseLocal bool // connects to no address for which IsLocal holds

	// ConnectTimeout bounds name lookup, TCP and TLS handshakes together. 0: 2 s.
	ConnectTimeout time.Duration

	// IdleTimeout closes idle connections. It must be shorter than the replica's,
	// which is 5 s for vLLM. 0: 4 s.
	IdleTimeout time.Duration

	MaxConns       int // open connections of RoundTrip, including idle ones; 0: no limit
	MaxHeaderBytes int // of a response, including interim ones; 0: 128 KiB

	// HeaderTimeout bounds the time from the first byte of a response's header to its
	// last. The wait for the first byte is not bounded. 0: 10 s.
	HeaderTimeout time.Duration

	// StaleTimeout is the time after the write of a request within which the end of a
	// reused connection is a StaleError. 0: 100 ms.
	StaleTimeout time.Duration

	TLS *tls.Config // for https; nil: the system's roots
}

// Transport carries requests to one replica. Safe for concurrent use.
type Transport struct {
	options Options // without zero values, but for MaxConns
	dialer  net.Dialer
	addr    string      // host:port
	host    string      // value of the Host header
	tls     *tls.Config // nil for http

	// The connections of RoundTrip and those of Do: separately, so that a short request has one also at MaxConns.
	requests, calls connections

	closed context.Context // done after Close
	close  context.CancelFunc

	readers sync.Pool // of *bufio.Reader, for RoundTrip
	heads   sync.Pool // of *[]byte, for request heads of RoundTrip
}

// New returns a Transport. It connects on the first request.
func New(o Options) *Transport {
	o.ConnectTimeout = cmp.Or(o.ConnectTimeout, 2*time.Second)
	o.IdleTimeout = cmp.Or(o.IdleTimeout, 4*time.Second)
	o.MaxHeaderBytes = cmp.Or(o.MaxHeaderBytes, 128<<10)
	o.HeaderTimeout = cmp.Or(o.HeaderTimeout, 10*time.Second)
	o.StaleTimeout = cmp.Or(o.StaleTimeout, 100*time.Millisecond)
	t := &Transport{options: o, host: o.URL.Host, dialer: net.Dialer{Resolver: o.Resolver}}
	if o.RefuseLocal {
		t.dialer.Control = RefuseLocal
	}
	port := "80"
	if o.URL.Scheme == "https" {
		port = "443"
		t.tls = &tls.Config{}
		if o.TLS != nil {
			t.tls = o.TLS.Clone()
		}
		t.tls.NextProtos = []string{"http/1.1"}
		t.tls.ServerName = cmp.Or(t.tls.ServerName, o.URL.Hostname())
	}
	if zone, end := strings.IndexByte(t.host, '%'), strings.IndexByte(t.host, ']'); 0 < zone && zone < end {
		t.host = t.host[:zone] + t.host[end:] // an IPv6 zone has no meaning to the replica
	}
	t.addr = cmp.Or(o.Addr, net.JoinHostPort(o.URL.Hostname(), cmp.Or(o.URL.Port(), port)))
	t.closed, t.close = context.WithCancel(context.Background())
	t.initConnections(&t.requests, o.MaxConns)
	t.initConnections(&t.calls, 0)
	t.initCalls()
	// Each open stream has such a buffer. Large reads bypass it.
	t.readers.New = func() any { return bufio.NewReaderSize(nil, 2<<10) }
	return t
}

// CloseIdleConnections closes idle connections.
func (t *Transport) CloseIdleConnections() {
	t.requests.host.CloseIdleConnections()
	t.calls.host.CloseIdleConnections()
}

// Close closes all connections, which ends the requests on them, and refuses new ones.
func (t *Transport) Close() {
	t.close()
	t.CloseIdleConnections()
}

// OpenConns returns the number of connections, including those that are idle or being made.
func (t *Transport) OpenConns() int { return int(t.requests.open.Load() + t.calls.open.Load()) }

func (t *Transport) acquireReader(c *conn) *bufio.Reader {
	br := t.readers.Get().(*bufio.Reader)
	br.Reset(c)
	return br
}

// RoundTrip sends req to the replica, with req.URL's path and query unchanged, and
// returns the response once its header is read. Response.Body is a *Body.
//
// req.Body needs a known ContentLength. If it has a WriteTo, as bytes.Reader does, it
// is written without a copy. It is not used after RoundTrip failed or Body.Close
// returned. A request with Close set gets a new connection that is closed after it.
//
// Canceling the request's context closes the socket at once, in any phase; the error
// is then context.Cause. Nothing else bounds the wait for the header.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := t.send(req)
	if err != nil {
		if cause := context.Cause(req.Context()); cause != nil {
			return nil, cause
		}
		return nil, err
	}
	return resp, nil
}

// send sends req over one connection. It closes the body.
func (t *Transport) send(req *http.Request) (*http.Response, error) {
	ctx := req.Context()
	b := &Body{ctx: ctx, t: t}
	if err := b.upload.prepareHead(t, req, req.Body); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		b.upload.close()
		return nil, err
	}
	c, err := t.requests.acquire(ctx, req.Close)
	if err != nil {
		b.upload.close()
		return nil, err
	}
	b.c, b.br, b.stop = c, t.acquireReader(c), context.AfterFunc(ctx, c.closeSocket)
	b.upload.start(c)
	if _, err = b.br.Peek(1); err != nil {
		ended := time.Now()
		b.releaseOrCloseConn()
		if errors.Is(b.upload.err, ErrInvalidRequest) {
			return nil, b.upload.err
		}
		err = fmt.Errorf("%s to %s: no response: %w", req.Method, t.addr, err)
		// After a failed upload no engine can have seen the complete request.
		if c.reused && (b.upload.err != nil || ended.Sub(b.upload.written) <= t.options.StaleTimeout) {
			err = &StaleError{err}
		}
		return nil, err
	}
	resp, err := b.readResponse(req)
	if err != nil {
		b.releaseOrCloseConn()
		return nil, fmt.Errorf("%s to %s: response header: %w", req.Method, t.addr, err)
	}
	return resp, nil
}
