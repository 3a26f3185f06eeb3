package transport

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/valyala/fasthttp"
)

// callKey is the key of a request's user value that is its *call.
type callKey struct{}

// call is what Do tells callTransport about a request.
type call struct {
	ctx  context.Context
	read func(body io.Reader) error
}

// initCalls makes t.calls.host send requests.
func (t *Transport) initCalls() {
	h := &t.calls.host
	h.Transport = callTransport{t}
	h.NoDefaultUserAgentHeader = true
	h.DisablePathNormalizing = true
	h.SecureErrorLogMessage = true // with withoutResponse, errors do not quote the response
	h.MaxIdemponentCallAttempts = 2
	h.RetryIfErr = func(req *fasthttp.Request, _ int, _ error) (resetTimeout, retry bool) {
		req.SetConnectionClose() // use a new connection
		return false, true
	}
}

// Do sends a short request and sets the status and header of resp, without following a redirect. It then calls read with
// the body, as it arrives, and returns its error; nil: the body is not read. It sets the host; the request URI is a path.
// A request with Connection: close is sent once, over a new connection. Another one may be sent again, over a new
// connection, where an idle one is found to have been closed by the replica.
//
// Canceling ctx closes the socket at once, in any phase; the error is then context.Cause. Nothing else bounds the wait.
func (t *Transport) Do(ctx context.Context, req *fasthttp.Request, resp *fasthttp.Response, read func(body io.Reader) error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	req.UseHostHeader = true
	req.Header.SetHost(t.host)
	req.SetUserValue(callKey{}, &call{ctx, read})
	resp.StreamBody = true
	err := t.calls.host.Do(req, resp)
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// callTransport sends the requests of Do. It differs from fasthttp's own in that the context of a request ends it, and in
// that an idle connection is used only if it is open and nothing is readable on it.
type callTransport struct{ t *Transport }

// RoundTrip implements fasthttp.RoundTripper.
func (r callTransport) RoundTrip(host *fasthttp.HostClient, req *fasthttp.Request, resp *fasthttp.Response) (retry bool, err error) {
	call := req.UserValue(callKey{}).(*call)
	c, err := r.t.calls.acquire(call.ctx, req.ConnectionClose())
	if err != nil {
		return false, err
	}
	stop := context.AfterFunc(call.ctx, c.closeSocket)
	br := host.AcquireReader(c)
	defer host.ReleaseReader(br)
	complete := false
	defer func() { // also where call.read panics
		if stop() && complete && br.Buffered() == 0 && !req.ConnectionClose() && !resp.ConnectionClose() {
			c.release()
		} else {
			c.discard()
		}
	}()
	if err = r.sendAndAwait(host, c, br, req); err == nil {
		complete, err = r.readResponse(br, c, resp, call.read)
	}
	_, stale := errors.AsType[*StaleError](err)
	return stale, err
}

// sendAndAwait writes the request, and waits for the first byte of the response.
func (r callTransport) sendAndAwait(host *fasthttp.HostClient, c *conn, br *bufio.Reader, req *fasthttp.Request) error {
	w := host.AcquireWriter(c)
	defer host.ReleaseWriter(w)
	err := req.Write(w)
	if err == nil {
		err = w.Flush()
	}
	written := time.Now()
	sent := err == nil
	if sent {
		_, err = br.Peek(1)
	}
	if err == nil {
		return nil
	}
	err = fmt.Errorf("%s to %s: no response: %w", req.Header.Method(), r.t.addr, err)
	if c.reused && (!sent || time.Since(written) <= r.t.options.StaleTimeout) {
		err = &StaleError{err}
	}
	return err
}

// readResponse reads a response, of which a byte has arrived. complete is true if the body was read to its end.
func (r callTransport) readResponse(br *bufio.Reader, c *conn, resp *fasthttp.Response, read func(io.Reader) error) (complete bool,
	err error) {
	err = resp.Read(br) // the header, since resp.StreamBody is set
	if _, small := errors.AsType[*fasthttp.ErrSmallBuffer](err); small {
		head, _ := br.Peek(br.Buffered()) // nothing is consumed
		br = bufio.NewReaderSize(io.MultiReader(bytes.NewReader(head), c), r.t.options.MaxHeaderBytes)
		err = resp.Read(br)
	}
	if _, small := errors.AsType[*fasthttp.ErrSmallBuffer](err); small {
		err = errHeaderTooLong
	}
	if err == nil && resp.StatusCode() == http.StatusSwitchingProtocols {
		err = errSwitching
	}
	if err != nil {
		return false, fmt.Errorf("response header of %s: %w", r.t.addr, withoutResponse(err))
	}
	defer resp.CloseBodyStream()
	body := &callBody{from: resp.BodyStream()}
	if body.from == nil { // as with status 204
		body.from, body.ended = http.NoBody, true
	}
	if read != nil {
		err = read(body)
	}
	return body.ended && err == nil, err
}

// withoutResponse returns an error of the library's parser, or the one for an invalid header in its place: those of the parser may
// quote the response.
func withoutResponse(err error) error {
	_, own := errors.AsType[invalidResponse](err)
	_, network := errors.AsType[net.Error](err)
	if own || network || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return err
	}
	return errHeaderLine
}

// callBody is the body of a response to Do.
type callBody struct {
	from  io.Reader
	ended bool // read to its end
}

// Read implements io.Reader.
func (b *callBody) Read(p []byte) (n int, err error) {
	n, err = b.from.Read(p)
	if err == io.EOF {
		b.ended = true
	}
	return n, err
}
