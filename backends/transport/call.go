package transport

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/valyala/fasthttp"
)

// callKey is the key of a request's user value that is its *call.
type callKey struct{}

// call is what Do tells callTransport about a request.
type call struct {
	ctx          context.Context
	maxBodyBytes int // of the response
}

// initCalls makes t.calls.host send requests.
func (t *Transport) initCalls() {
	h := &t.calls.host
	h.Transport = callTransport{t}
	h.NoDefaultUserAgentHeader = true
	h.DisablePathNormalizing = true
	h.SecureErrorLogMessage = true // errors do not quote the response
	h.MaxIdemponentCallAttempts = 2
	h.RetryIfErr = func(req *fasthttp.Request, _ int, _ error) (resetTimeout, retry bool) {
		req.SetConnectionClose() // use a new connection
		return false, true
	}
}

// Do sends a short request and reads the complete response, without following a redirect. It sets the host; the
// request URI is a path. A request with Connection: close is sent once, over a new connection. Another one may be sent
// again, over a new connection, where an idle one is found to have been closed by the replica.
//
// The error of a body of more than maxBodyBytes is fasthttp.ErrBodyTooLarge; resp has the status and the header then.
// If maxBodyBytes is 0, the body is not read. Canceling ctx closes the socket at once, in any phase; the error is then
// context.Cause. Nothing else bounds the wait.
func (t *Transport) Do(ctx context.Context, req *fasthttp.Request, resp *fasthttp.Response, maxBodyBytes int) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	req.UseHostHeader = true
	req.Header.SetHost(t.host)
	req.SetUserValue(callKey{}, &call{ctx, maxBodyBytes})
	resp.SkipBody = maxBodyBytes == 0
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
	stop := context.AfterFunc(call.ctx, c.abort)
	br := host.AcquireReader(c)
	defer host.ReleaseReader(br)
	if err = r.sendAndAwait(host, c, br, req); err == nil {
		err = r.readResponse(br, c, resp, call.maxBodyBytes)
	}
	if stop() && err == nil && !resp.SkipBody && br.Buffered() == 0 && !req.ConnectionClose() && !resp.ConnectionClose() {
		c.release()
	} else {
		c.discard()
	}
	if err == nil || err == fasthttp.ErrBodyTooLarge {
		return false, err
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

// readResponse reads a response, of which a byte has arrived.
func (r callTransport) readResponse(br *bufio.Reader, c *conn, resp *fasthttp.Response, maxBodyBytes int) error {
	err := resp.ReadLimitBody(br, maxBodyBytes)
	if _, small := errors.AsType[*fasthttp.ErrSmallBuffer](err); small { // for the header, of which nothing is consumed
		head, _ := br.Peek(br.Buffered())
		br = bufio.NewReaderSize(io.MultiReader(bytes.NewReader(head), c), r.t.options.MaxHeaderBytes)
		err = resp.ReadLimitBody(br, maxBodyBytes)
	}
	if _, small := errors.AsType[*fasthttp.ErrSmallBuffer](err); small {
		err = errHeaderTooLong
	}
	if err == nil || err == fasthttp.ErrBodyTooLarge || err == io.ErrUnexpectedEOF {
		return err
	}
	return fmt.Errorf("response of %s: %w", r.t.addr, err)
}
