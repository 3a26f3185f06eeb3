// Package fault has what a failure means, of a replica or of the proxy, from a status, a body, an event of a stream or a transport error:
// whether another backend is asked, and which error the client gets, in the form of the API that it uses.
package fault

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"time"

	"warmroute/backends/transport"
	"warmroute/backends/vllm"
	"warmroute/metrics"
	"warmroute/proxy/api"
	"warmroute/proxy/httpheader"
	"warmroute/router"
)

// Failure is an attempt that ended before anything was committed to the client, so that another
// backend may be asked.
type Failure struct {
	Reason        metrics.RetryReason
	Err           error
	IsFree        bool // does not count towards the limit: nothing was sent, or no engine was asked
	NoRetry       bool // no other backend may be asked
	QueueFull     bool // the replica refused the request, perhaps as its queue is full
	SuspectsCrash bool // the replica may have crashed by the request
	ShuttingDown  bool // the replica shuts down or scales in good order, and has dropped the request
	SameBackend   bool // it was about the KV transfer of a split request: the same backend may be asked again
	Done          bool // the client has disconnected, or has an error: nothing is left to do

	Split metrics.SplitResult // what the request counts as by it; empty: it was not split

	// The response, if there was one, and the decision.
	Status   int
	Header   http.Header
	Body     []byte
	Reserved int64 // bytes of Body that are reserved in relay.Buffers
	Decision *router.Reservation
}

// IsOfConnection reports whether a kept-alive connection failed, not the backend, which may be asked over a new one.
func (f *Failure) IsOfConnection() bool {
	return f.Reason == metrics.RetryStale || f.Reason == metrics.RetryWrongResponse
}

// IsMissingEndpoint reports whether the replica does not serve the endpoint, as it seems. No rank of its server is asked
// again, and its response is worth less than any other.
func (f *Failure) IsMissingEndpoint() bool { return f.Reason == metrics.RetryEndpoint }

// IsUnsuited reports whether the replica cannot serve the request, and says so, though others may: it lacks the endpoint, or
// its context is too short.
func (f *Failure) IsUnsuited() bool {
	return f.IsMissingEndpoint() || f.Reason == metrics.RetryContextLength
}

// ErrorBodyTimeout bounds the reading of the body of an error, before whose end no other backend is asked.
const ErrorBodyTimeout = 5 * time.Second

// Causes of failures.
var (
	ErrFirstByte = errors.New("no first event in time (timeouts.first_byte)")
	ErrResponse  = errors.New("no response and no progress in time (timeouts.response)")
	ErrStalled   = errors.New("backend stalled")

	ErrTruncated        = errors.New("response ended early")
	ErrNoOutput         = errors.New("response has no output")
	ErrAborted          = errors.New("replica aborted the request")
	ErrRankRefused      = errors.New("replica does not have the data-parallel rank: its ranks are read again")
	errScaling          = errors.New("replica is changing the number of its engines")
	ErrErrorBodyTooLong = errors.New("error body is too long")
	ErrErrorBodyTimeout = fmt.Errorf("error body did not end in %v: %w", ErrorBodyTimeout, os.ErrDeadlineExceeded)
	ErrErrorBodyMemory  = errors.New("no memory is left for the error body")
)

// IsRemoval reports whether a response ended with err because its backend was removed: then its transport is closed.
func IsRemoval(err error) bool { return errors.Is(err, net.ErrClosed) }

// OfHeader returns the failure that a response is which no engine sends, else nil.
func OfHeader(resp *http.Response) *Failure {
	switch {
	case resp.StatusCode >= 300 && resp.StatusCode < 400:
		// Followed or relayed, it would send the body and a key to wherever the response says.
		return &Failure{Reason: metrics.RetryRedirect, Err: fmt.Errorf("redirected (%d) to %s: set the backend to the URL of the replica itself",
			resp.StatusCode, formatRedirectOrigin(resp.Header.Get("Location")))}
	case resp.StatusCode == http.StatusLoopDetected:
		return &Failure{Reason: metrics.RetryLoop,
			Err: errors.New("status 508: the backend leads back to this proxy; remove it from the backends")}
	case httpheader.IsEventStream(resp.Header) && httpheader.IsEncoded(resp.Header): // neither its first event nor an error in it can be read
		return &Failure{Reason: metrics.RetryEncoded, Err: errors.New("stream is encoded although only identity was accepted: " +
			"disable compression in front of the replica")}
	}
	return nil
}

// formatRedirectOrigin returns the scheme and host that a redirect leads to, without what may hold the prompt.
func formatRedirectOrigin(location string) string {
	u, err := url.Parse(location)
	if err != nil || u.Host == "" {
		return "another path"
	}
	return u.Scheme + "://" + u.Host
}

// OfStatus returns the failure that a response is by its status, without its body.
func OfStatus(resp *http.Response) *Failure {
	return &Failure{
		Reason: metrics.RetryStatus(resp.StatusCode), Status: resp.StatusCode, Header: resp.Header,
		Err: fmt.Errorf("replica responded with status %d", resp.StatusCode), // its message may quote the prompt
	}
}

// SetMeaning sets what a failure means, from the replica's error, whose status f has.
func (f *Failure) SetMeaning(replicaError []byte) {
	switch vllm.ClassifyError(f.Status, replicaError) {
	case vllm.ErrorQueueFull:
		f.QueueFull = true
	case vllm.ErrorShutdown:
		f.ShuttingDown, f.IsFree = true, true
	case vllm.ErrorScaling:
		f.Reason, f.Err = metrics.RetryScaling, errScaling
		f.ShuttingDown, f.IsFree = true, true // like one that finishes what it has
	case vllm.ErrorOfEngine:
		f.SuspectsCrash = true
	}
}

// KeepBody makes body that of the response, if there is memory for it.
func (f *Failure) KeepBody(reserve func(bytes int64) bool, d api.Dialect, body []byte) {
	if n := int64(len(body)); reserve(n) {
		f.Body, f.Reserved = body, n
	} else {
		f.SetProxyErrorBody(d)
	}
}

// SetProxyErrorBody replaces a response that cannot be kept by an error of the proxy's own with its status.
func (f *Failure) SetProxyErrorBody(d api.Dialect) {
	f.Body, f.Header = Body(d, ReplicaError(f.Status, nil)), JSONHeader()
}

// JSONHeader returns a new header for a JSON body.
func JSONHeader() http.Header { return http.Header{"Content-Type": {"application/json"}} }

// NothingSent reports whether no connection could be made.
func (f *Failure) NothingSent() bool {
	_, ok := errors.AsType[*transport.ConnectError](f.Err)
	return ok
}

// OfTransport returns the failure of an attempt that has ended with err, without a complete response. afterStale says that an earlier
// attempt on the same backend found a stale connection: the replica may have crashed by the request at once.
func OfTransport(err error, retryTimeouts, afterStale bool) *Failure {
	var connect *transport.ConnectError
	var stale *transport.StaleError
	switch {
	case errors.Is(err, ErrFirstByte):
		return &Failure{Reason: metrics.RetryFirstByte, Err: err, NoRetry: !retryTimeouts}
	case errors.Is(err, ErrResponse):
		return &Failure{Reason: metrics.RetryResponse, Err: err, NoRetry: !retryTimeouts}
	case errors.Is(err, ErrStalled):
		return &Failure{Reason: metrics.RetryStalled, Err: err}
	case errors.As(err, &stale):
		return &Failure{Reason: metrics.RetryStale, Err: err}
	case errors.As(err, &connect) && connect.OutOfDescriptors():
		return &Failure{Reason: metrics.RetryDescriptors, Err: err, IsFree: true}
	case errors.As(err, &connect):
		return &Failure{Reason: metrics.RetryConnect, Err: err, IsFree: true, SuspectsCrash: afterStale && !connect.MaxConnsReached()}
	case errors.Is(err, transport.ErrInvalidResponse):
		return &Failure{Reason: metrics.RetryInvalid, Err: err}
	}
	late := errors.Is(err, os.ErrDeadlineExceeded)
	return &Failure{Reason: metrics.RetryTruncated, Err: err, SuspectsCrash: !late && !errors.Is(err, transport.ErrInvalidRequest)}
}
