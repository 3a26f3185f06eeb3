package proxy

import (
	"errors"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/zeebo/xxh3"

	"warmroute/backends"
	"warmroute/metrics"
	"warmroute/proxy/apikey"
	"warmroute/proxy/recorder"
	"warmroute/proxy/tracing"
	"warmroute/router"
	"warmroute/router/prompt"
)

// exchange is one request and its answer.
type exchange struct {
	p        *Proxy
	settings *Settings // of its arrival
	endpoint *endpoint
	w        client
	r        *http.Request
	id       string
	arrived  time.Time // before the body was read
	whole    time.Time // the whole body was there

	input    input // freed as soon as no further attempt can need it
	tried    []*backends.Backend
	refused  []*backends.Backend // of those tried, that refused the connection
	full     []*backends.Backend // of those tried, that refused the request with a 503
	fallen   []fallen            // of those tried, that failed as one does that dies, or stops
	outage   bool                // allowed one more attempt because all backends were down
	stale    []*backends.Backend // that were reached over a stale connection, once for each time
	waited   bool                // for a place on those that are full
	moved    bool                // from a backend that did nothing
	queued   time.Duration       // waited for the retry budget
	recheck  time.Duration       // waited last to ask again those that refused the connection
	wait     *wait               // of the attempt under way
	first    wait                // of the first: no allocation of its own
	held     time.Duration       // waited for a backend to have room
	gone     bool                // counts in flight no more
	waiting  bool                // counted by the router among those that wait
	crowded  bool                // no more may wait
	spoken   time.Time           // when one of them first had words for the client
	speaker  *backends.Backend   // that had them; see hasWords
	kept     *failure            // the latest in which a replica gave words for the client, else the latest; nil: there is none
	torn     bool                // the client did not get its answer to the end
	opened   bool                // the client has the header of a stream, and keep-alive comments
	attempts int                 // made so far
	spent    int                 // of them, failed connects left out, and those that follow
	stopped  int                 // of them, ended by a replica that was about to stop

	holder    *apikey.Holder // nil: no keys are configured
	visit     apikey.Visit   // its holder's
	query     string         // the client's, fit for replicas
	tokensIn  int            // of the prompt, as the key is charged; 0: no engine worked on it
	tokensOut int            // of the answer, as far as it came

	outcome  metrics.Request
	presence presence          // among those that operators see
	recorded *recorder.Request // nil: traffic is not recorded, or not this request
	story    story
	spans    *tracing.Request // nil: requests are not traced
}

// input is what the client sent and what routing made of it.
type input struct {
	body    []byte
	scratch *scratch
	request router.Request
}

// scratch is memory that requests hand on to each other.
type scratch struct {
	prompt prompt.Prompt
	blocks []prompt.Block
}

// serve takes one request from its arrival to its end. What stands on its stack
// while a stream is open, here and down to the relay, is kept small: a few hundred
// bytes more, and each stream has a stack of 16 KB instead of 8.
func (p *Proxy) serve(e *endpoint, w http.ResponseWriter, r *http.Request) {
	x := p.arrival(e, w, r)
	defer x.end()
	if fault := x.enter(); fault != nil {
		if x.cancelled() {
			fault = x.cutFault()
		}
		x.refuse(fault)
		return
	}
	x.note()
	x.run()
	if x.torn {
		// Should the connection live after all, the server would end on it what is no
		// answer, or make an empty one.
		panic(http.ErrAbortHandler)
	}
}

func (p *Proxy) arrival(e *endpoint, w http.ResponseWriter, r *http.Request) *exchange {
	s := p.settings.Load()
	x := &exchange{p: p, settings: s, endpoint: e, w: newClient(w, r, s.WriteIdle), r: r, arrived: time.Now(), id: first(r.Header, "X-Request-Id")}
	x.w.ended = &x.presence.cancelled
	x.outcome.Endpoint = e.path
	x.spans = p.traces.Begin(r, e.path, x.arrived)
	p.inFlight.Add(1)
	p.present.enter(x)
	return x
}

// enter sees whether the request may come in, reads and understands it.
func (x *exchange) enter() *apiError {
	fault := x.p.checkLoop(x.r.Header)
	if fault == nil {
		fault = x.checkLimits()
	}
	if fault == nil {
		fault = x.admit()
	}
	if fault == nil {
		fault = x.steer()
	}
	if fault == nil {
		fault = x.checkBatchLimit()
	}
	if fault == nil {
		fault = x.prepare()
	}
	if fault == nil {
		fault = x.charge()
	}
	return fault
}

// end frees and records, whichever way the request ended.
func (x *exchange) end() {
	x.freeInput()
	x.leave()
	now := time.Now()
	x.outcome.Duration = now.Sub(x.arrived)
	x.p.metrics.Ended(&x.outcome, x.id, now)
	x.p.present.pulse.ended(x.presence.backend, x.arrived, &x.outcome, x.story.cachedKnown)
	x.record()
	x.tellStory()
}

// leave counts the request in flight no more, if that was not done before.
func (x *exchange) leave() {
	if x.gone {
		return
	}
	x.gone = true
	x.p.inFlight.Add(-1)
	x.p.present.leave(&x.presence)
	x.endLastWords()
	x.visit.End(x.tokensIn, x.tokensOut)
}

func (x *exchange) freeInput() {
	in := &x.input
	x.p.bodies.release(in.body)
	if in.scratch != nil {
		in.scratch.prompt.Reset() // what one huge prompt needed must not stay for good
		x.p.scratch.Put(in.scratch)
	}
	*in = input{}
}

// refuse answers with an error of ours.
func (x *exchange) refuse(e *apiError) {
	x.outcome.Code = e.status
	if x.opened {
		x.w.send(e.event(x.endpoint.format))
		return
	}
	x.tellRefused()
	if !x.whole.IsZero() {
		e.write(&x.w, x.endpoint.anthropic())
		return
	}
	x.refuseUnread(e)
}

// prepare reads and understands the request.
func (x *exchange) prepare() *apiError {
	var err error
	upload := paced{body: x.r.Body, conn: &x.w.conn, idle: x.settings.BodyIdle, began: x.arrived, cut: &x.presence.cancelled}
	x.p.present.reads(&x.presence)
	x.input.body, err = x.p.bodies.read(&upload, x.r.ContentLength, bodyBounds{x.settings.BodyBytes, x.limitForPriority(x.settings.BodyBytesTotal)})
	cut := x.p.present.hasRead(&x.presence)
	upload.end()
	if err != nil || cut {
		return x.bodyFault(err)
	}
	x.whole = time.Now()
	x.story.bytesIn = len(x.input.body)
	_ = x.r.Body.Close() // or net/http would look for more of it, in vain, with the answer's header
	return x.understand()
}

// understand makes of the client's body what routing needs.
func (x *exchange) understand() *apiError {
	x.input.scratch = x.p.scratch.Get().(*scratch)
	if x.endpoint.form {
		return x.readForm()
	}
	return x.readJSON()
}

// bodyFault is what a body that could not be read is answered with.
func (x *exchange) bodyFault(err error) *apiError {
	x.w.Header().Set("Connection", "close") // the rest of it is not read
	var socket *net.OpError
	switch {
	case x.cancelled():
		return x.cutFault()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return &apiError{status: http.StatusRequestTimeout, kind: "timeout", code: "body_timeout",
			message: "the rest of the request body did not come (timeouts.body_idle)"}
	case errors.Is(err, errBodyTooLarge):
		return &apiError{status: http.StatusRequestEntityTooLarge, kind: "invalid_request_error", code: "body_too_large",
			message: bodyTooLarge(x.settings.BodyBytes)}
	case errors.Is(err, errBodiesTooLarge):
		e := unavailable("the bodies of the requests under way take all the memory that they may (limits.body_bytes_total)")
		e.code = "bodies_too_large"
		return e
	// The client is gone, where one whose body ends too soon may still read: over HTTP/1.1 it has closed its half.
	case errors.As(err, &socket), x.r.ProtoMajor > 1 && x.clientLeft():
		x.story.phase = metrics.AbortInUpload
		x.p.metrics.Aborted(metrics.AbortInUpload)
		return &apiError{status: statusClientLeft, kind: "client_left", message: "the client left"}
	}
	return invalid("", "the request body ended before its end: "+err.Error())
}

func (x *exchange) readJSON() *apiError {
	in := &x.input
	pr := &in.scratch.prompt
	if err := pr.Parse(x.endpoint.kind, in.body); err != nil {
		var fault *prompt.Error
		if errors.As(err, &fault) {
			return invalid(fault.Param, fault.Message)
		}
		return invalid("", err.Error())
	}
	if pr.PreviousResponse {
		return invalid("previous_response_id",
			"previous_response_id cannot be routed: the earlier response lives in one replica's memory; send the whole conversation as input instead")
	}
	engine, fault := x.resolve(pr.Model)
	if fault != nil {
		return fault
	}
	engine = x.seed(engine)
	if pr.Cacheable && x.endpoint.kind != prompt.Other {
		in.scratch.blocks = pr.Blocks(in.scratch.blocks[:0], engine, x.p.blockBytes)
		in.request.Blocks = in.scratch.blocks
	}
	if in.request.NoEngine = x.endpoint.instant; !in.request.NoEngine {
		in.request.Bytes = len(pr.Text) + pr.ExtraBytes
		in.request.Streams = pr.Stream
	}
	in.request.Sequences = pr.Sequences
	in.request.Media = pr.HasMedia()
	in.request.MaxAnswerTokens = pr.MaxTokens
	in.request.BodyBytes = cap(in.body) + len(pr.Text) + 8*len(in.request.Blocks)
	if pr.Opening != 0 {
		in.request.PromptKey = nonzero(xxh3.HashStringSeed(engine, pr.Opening))
	}
	return nil
}

// resolve finds the backends that serve the model, and the name that seeds its
// prompts' blocks.
func (x *exchange) resolve(model string) (engine string, fault *apiError) {
	catalog := x.p.registry.Catalog()
	if model == "" {
		if model, fault = x.onlyModel(catalog); fault != nil {
			return "", fault
		}
	}
	entry, ok := find(catalog, model, x.holder)
	if !ok {
		return "", x.p.unknownModel(model, x.holder)
	}
	x.outcome.Model = entry.ID
	req := &x.input.request
	req.Backends, req.CatalogID = entry.Backends, entry.ID
	req.NonGenerative = x.endpoint.format == plainFormat
	if entry.Adapter {
		req.Adapter = entry.ID
	}
	req.Model = catalog.EngineModel(entry.ID)
	req.MaxPromptTokens = catalog.MaxTokens(entry.ID)
	return req.Model, nil
}
