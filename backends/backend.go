// Package backends keeps a record of each vLLM server that the router may use: its state, the
// models that it lists, its load, and what is in flight there. Health checks and polls of /metrics
// keep the records up to date. The package records no metrics and contains no HTTP handler.
package backends

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"warmroute/backends/vllm"
)

// Backend is our record of one vLLM server. Its counters are our own and always current;
// Load is the server's report, up to MaxPollInterval old. Safe for concurrent use.
type Backend struct {
	Name string
	URL  *url.URL // scheme, host and an optional path prefix without a trailing slash

	// Addr is the host:port to which connections go; "": that of URL. It is set where a name in URL
	// has several addresses, each of which is a Backend.
	Addr string

	// Slot is this backend's index in its Registry for as long as it is there; the
	// router keeps its per-backend data under it. Slots are reused: compare
	// Backends, never Slots, to tell one backend from another.
	Slot int

	Counters
	condition
	observed
	options atomic.Pointer[Options]
	rank    *rank                      // nil: the backend is a server, not a part of one
	parts   atomic.Pointer[[]*Backend] // see Parts

	ranksRejected atomic.Pointer[time.Time] // see StopSendingRankHeader; nil: it was not called

	// Set by the registry before anything runs; nil on a backend without one.
	registry       *Registry
	checkRequested chan struct{} // capacity 1: several requests are one check
	pollRequested  chan struct{} // likewise
}

// Address returns what no two backends have in common: the normalized URL of the replica, with Addr
// instead of the URL's host and port if that is set, and for a rank with "#" and its engine's label. It is "" for a
// backend without a URL, as in tests.
func (b *Backend) Address() string {
	switch {
	case b.URL == nil:
		return ""
	case b.rank != nil && b.rank.addressSuffix != "":
		return b.rank.server.Address() + b.rank.addressSuffix
	case b.Addr == "":
		return NormalizeURL(b.URL)
	}
	return b.URL.Scheme + "://" + b.Addr + b.URL.EscapedPath()
}

// Host returns the host of Addr, or of URL: a name or an IP address.
func (b *Backend) Host() string {
	if host, _, err := net.SplitHostPort(b.Addr); err == nil {
		return host
	}
	return b.URL.Hostname()
}

// Port returns the port of Addr, or of URL, or of its scheme.
func (b *Backend) Port() string {
	if _, port, err := net.SplitHostPort(b.Addr); err == nil {
		return port
	}
	return cmp.Or(b.URL.Port(), map[string]string{"http": "80", "https": "443"}[b.URL.Scheme])
}

// Counters are what proxies have sent to a backend.
type Counters struct {
	InFlight         atomic.Int64 // our sequences that have not ended
	PeerInFlight     atomic.Int64 // those of other proxies, as far as they report them
	NoEngineInFlight atomic.Int64 // our requests that no engine works on

	Aborted        atomic.Int64 // responses that its engine aborted
	WrongResponses atomic.Int64 // responses to other requests that its connections carried
}

// KnownInFlight returns how many sequences have not ended that this proxy or another one that
// reports them has sent.
func (c *Counters) KnownInFlight() int64 { return c.InFlight.Load() + c.PeerInFlight.Load() }

// Idle reports whether no request of this proxy is in flight there.
func (c *Counters) Idle() bool { return c.InFlight.Load() == 0 && c.NoEngineInFlight.Load() == 0 }

// Options are the settings of a backend that can change while requests run.
// Never modified once a Backend has them.
type Options struct {
	APIKey string // sent to the replica as "Authorization: Bearer"; empty: none

	EnginePriority bool // requests carry their priority for the engine's queue

	// KVEvents is where the replica publishes KV cache events: KVEventsAuto, KVEventsListen, KVEventsOff or a
	// ZeroMQ endpoint, with KVReplay as the endpoint of earlier events ("": none).
	KVEvents, KVReplay string

	RanksOff bool // the replica stays one backend whatever data-parallel ranks it has

	Source Source // what names the replica

	RefuseLocal bool // no connection for it goes to an address for which transport.IsLocal holds

	MaxInFlight int     // of our sequences; 0: no bound
	Weight      float64 // divides the cost of sending it a request; 0 is 1

	Device string // backends with the same one share their hardware; "": it has its own

	Role Role // part of requests that the replica is meant for

	Transport Transport // carries requests to this replica
}

// Transport carries requests to a replica, as transport.Transport does.
type Transport interface {
	http.RoundTripper // for requests that are relayed

	// Do is for short requests: checks, polls and actions. They need no free connection of RoundTrip, or a busy
	// replica would look dead.
	Do(ctx context.Context, req *fasthttp.Request, resp *fasthttp.Response, read func(body io.Reader) error) error
}

// Source is what names a replica.
type Source int

const (
	FromConfig       Source = iota // the configuration or the command line
	FromFile                       // backends_file
	FromRegistration               // a caller that registered it, or an operator who added it
)

func (s Source) String() string { return [...]string{"configuration", "file", "registration"}[s] }

// Values of Options.KVEvents that are not endpoints.
const (
	KVEventsAuto   = "auto"   // those that the replica lists, if any
	KVEventsListen = "listen" // the replica connects to the proxy
	KVEventsOff    = "off"
)

var defaultOptions = new(Options)

// New returns a backend that is Down until it has been checked. An empty name
// becomes DefaultName; u comes from ParseURL.
func New(name string, u *url.URL, apiKey string, transport Transport) *Backend {
	if name == "" {
		name = DefaultName(u)
	}
	b := &Backend{Name: name, URL: u}
	b.since = time.Now()
	b.SetOptions(Options{APIKey: apiKey, Transport: transport})
	return b
}

// Options returns the current options, which the caller must not change.
func (b *Backend) Options() *Options {
	if o := b.options.Load(); o != nil {
		return o
	}
	return defaultOptions
}

// SetOptions replaces the options, also those of the backend's ranks. Requests in flight keep those that they
// were sent with.
func (b *Backend) SetOptions(o Options) {
	b.options.Store(&o)
	if parts := b.separateParts(); len(parts) > 0 {
		setSharedOptions(parts, &o)
	}
}

// Drain lets the backend finish its requests and get no new ones, until Undrain. That of a server drains its ranks.
func (b *Backend) Drain() { b.whole().setFlagAndRequestCheck(drained, true) }

// Undrain ends a Drain, also of each of a server's ranks. The backend's state is that of its last check, and it is
// checked again at once. It does not end a Retire. A rank stays drained for as long as its server is.
func (b *Backend) Undrain() {
	b = b.whole()
	for _, part := range b.separateParts() {
		part.setFlag(drained, false)
	}
	b.setFlagAndRequestCheck(drained, false)
}

// Retire drains a backend that is no longer in the configuration. Its name and
// address are free for another.
func (b *Backend) Retire() { b.setFlagAndRequestCheck(retired, true) }

// Unretire ends a Retire: the backend is in the configuration again.
func (b *Backend) Unretire() { b.setFlagAndRequestCheck(retired, false) }

// SetSuspension keeps new requests from the backend, and all parts of its server, while an operator's action on
// the replica is in effect, until it is set to NotSuspended. It does not affect Drain and Retire.
func (b *Backend) SetSuspension(s Suspension) {
	b.Server().setSuspension(s)
	b.RequestCheck() // which reports the change
}

// setFlagAndRequestCheck sets or clears a flag and asks for a health check.
func (b *Backend) setFlagAndRequestCheck(flag int32, on bool) {
	b.setFlag(flag, on)
	b.RequestCheck() // which reports the change
}

// SetModels is for the health checks, and for tests that have none. The
// registry's catalog has the change when it returns.
func (b *Backend) SetModels(m []Model) {
	b.ofServer().models.Store(&m)
	if b.registry != nil {
		b.registry.updateCatalog()
	}
}

// RequestCheck asks for a health check soon, for instance because an attempt on the backend
// failed. It never blocks, and concurrent requests become one check.
func (b *Backend) RequestCheck() {
	select {
	case b.Server().checkRequested <- struct{}{}:
	default: // a check is already requested, or there is no checker
	}
}

// AwaitCheck has the backend checked, and blocks until a check that began after the call has finished.
// It returns the error of that check, or that of ctx.
func (b *Backend) AwaitCheck(ctx context.Context) error {
	b.mu.Lock()
	begun := b.begunChecks
	b.mu.Unlock()
	for {
		finished := b.finished.Next()
		b.mu.Lock()
		done, checkError := b.finishedLast > begun, b.checkError
		b.mu.Unlock()
		switch {
		case done && checkError != "":
			return errors.New(checkError)
		case done:
			return nil
		}
		b.RequestCheck()
		select {
		case <-finished:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// PollUntil blocks until a Load that was polled after a time fulfils a condition, or ctx is done.
func (b *Backend) PollUntil(ctx context.Context, after time.Time, fulfils func(*Load) bool) error {
	for {
		changed := b.loadChanged.Next()
		if l := b.Load(); l != nil && l.PolledAt.After(after) && fulfils(l) {
			return nil
		}
		b.RequestPoll()
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// RequestPoll has the backend polled after PollSettings.Interval from now at most, if its
// interval was longer because polls showed nothing new. The poll is not made at once, since
// it would delay the request that has just been sent. RequestPoll never blocks.
func (b *Backend) RequestPoll() {
	select {
	case b.Server().pollRequested <- struct{}{}:
	default: // a poll is already pending, or there is no poller
	}
}

// InstanceHeader names the proxies that a request has passed, each by a random id. In the response
// to a health check that has it, it names the proxy that responded.
const InstanceHeader = "X-Warmroute-Instance"

// Get requests a path below the backend's URL, without following redirects. A non-empty proxyInstances is sent in
// InstanceHeader. If the body has more than maxBodyBytes, the error is fasthttp.ErrBodyTooLarge, and the response has
// that many bytes of it. If maxBodyBytes is 0, the body is not read. The caller passes the response to
// fasthttp.ReleaseResponse when it does not use it any more; it is nil with another error.
func (b *Backend) Get(ctx context.Context, path, accept, proxyInstances string, maxBodyBytes int) (*fasthttp.Response, error) {
	req := fasthttp.AcquireRequest()
	defer fasthttp.ReleaseRequest(req)
	b.setGet(req, path, accept)
	if proxyInstances != "" {
		req.Header.Set(InstanceHeader, proxyInstances)
	}
	return b.doBuffered(ctx, req, maxBodyBytes)
}

// GetStream requests a path as Get does. It calls read with the status and the body, as that arrives, and returns its error.
func (b *Backend) GetStream(ctx context.Context, path, accept string, read func(status int, body io.Reader) error) error {
	req, resp := fasthttp.AcquireRequest(), fasthttp.AcquireResponse()
	defer fasthttp.ReleaseRequest(req)
	defer fasthttp.ReleaseResponse(resp)
	b.setGet(req, path, accept)
	return b.do(ctx, req, resp, func(body io.Reader) error { return read(resp.StatusCode(), body) })
}

// setGet makes req a GET of a path below the backend's URL.
func (b *Backend) setGet(req *fasthttp.Request, path, accept string) {
	req.Header.SetMethod(http.MethodGet)
	setURI(req, b.URL.JoinPath(path))
	req.Header.Set("Accept", accept)
}

// Post sends a call of vLLM's control API to the replica, once, over a new connection. The response is as that of Get.
func (b *Backend) Post(ctx context.Context, c vllm.Call, maxBodyBytes int) (*fasthttp.Response, error) {
	req := fasthttp.AcquireRequest()
	defer fasthttp.ReleaseRequest(req)
	u := b.URL.JoinPath(c.Path)
	u.RawQuery = c.Query.Encode()
	setPost(req, u, c.Body)
	req.SetConnectionClose()
	return b.doBuffered(ctx, req, maxBodyBytes)
}

// setURI sets the path and query of a request. A URL without a path and those joined to it have no slash at the beginning.
func setURI(req *fasthttp.Request, u *url.URL) {
	req.SetRequestURI("/" + strings.TrimPrefix(u.RequestURI(), "/"))
}

// setPost makes req a POST of JSON.
func setPost(req *fasthttp.Request, u *url.URL, body []byte) {
	req.Header.SetMethod(http.MethodPost)
	setURI(req, u)
	req.Header.SetContentType("application/json")
	req.SetBodyRaw(body)
}

// doBuffered sends a short request with the backend's key. The response is as that of Get.
func (b *Backend) doBuffered(ctx context.Context, req *fasthttp.Request, maxBodyBytes int) (*fasthttp.Response, error) {
	resp := fasthttp.AcquireResponse()
	var body []byte
	var read func(io.Reader) error
	if maxBodyBytes > 0 {
		read = func(r io.Reader) (err error) {
			body, err = io.ReadAll(io.LimitReader(r, int64(maxBodyBytes)+1))
			if len(body) > maxBodyBytes {
				body, err = body[:maxBodyBytes], fasthttp.ErrBodyTooLarge
			}
			return err
		}
	}
	err := b.do(ctx, req, resp, read)
	if err != nil && err != fasthttp.ErrBodyTooLarge {
		fasthttp.ReleaseResponse(resp)
		return nil, err
	}
	resp.SetBodyRaw(body)
	return resp, err
}

// do sends a short request with the backend's key, as Transport.Do does.
func (b *Backend) do(ctx context.Context, req *fasthttp.Request, resp *fasthttp.Response, read func(io.Reader) error) error {
	options := b.Options()
	req.Header.Set("Accept-Encoding", "identity") // compressing would cost the replica's event loop time
	if options.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+options.APIKey)
	}
	return options.Transport.Do(ctx, req, resp, read)
}
