package proxy

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net/http"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/tidwall/gjson"
	"github.com/valyala/fasthttp"
	"golang.org/x/sync/errgroup"

	"warmroute/backends"
	"warmroute/backends/vllm"
	"warmroute/metrics"
	"warmroute/prompt"
	"warmroute/proxy/api"
	"warmroute/proxy/fault"
	"warmroute/proxy/httpheader"
	"warmroute/recovery"
	"warmroute/router/responseindex"
)

// Replicas keep the responses of /v1/responses in memory. A request that refers to one can be served by that replica alone.

const (
	// maxSearched is how many backends one search asks at a time, maxSearches how many searches there are: a client can name any id.
	maxSearched = 4
	maxSearches = 16
	// searchTimeout bounds a search. A replica responds from memory.
	searchTimeout = 3 * time.Second
)

// storedResponses finds the backends that hold stored responses.
type storedResponses struct {
	Index    *responseindex.Index
	searches chan struct{} // capacity maxSearches: those that run
}

// storedInput is what a request says of stored responses.
type storedInput struct {
	refersTo   string            // id of the response that it continues or is about; empty: none
	refersToAt int               // index of that string in the body; 0: it is not there
	replicaID  string            // by which the replica knows that response
	backend    *backends.Backend // that holds that one; nil: not known yet
	chosenID   string            // that the client gives to the new response; empty: none
	chosenIDAt int               // index of that string in the body; 0: there is none
	scope      string            // of the ids that the key's clients choose; empty: none concern the request
	unstored   bool              // the new response is not to be stored
}

// refers reports whether the request continues a stored response or is about one.
func (s *storedInput) refers() bool {
	return s.refersTo != "" || s.scope != "" && s.refersToAt > 0 // with keys, an empty id refers to one as well
}

// routeToStoredResponse has a request that refers to a stored response routed to the backend that holds it. It may wait for the
// backends to say which one does.
func (r *request) routeToStoredResponse() *fault.Error {
	if !r.input.stored.refers() {
		return nil
	}
	b, result := r.findStoredResponse()
	if result == metrics.ResponseUnknown && r.maySearchResponse() {
		b, result = r.searchStoredResponse()
	}
	r.proxy.metrics.CountResponseLookup(result)
	return r.pinTo(b, result)
}

// findStoredResponse returns the backend that is known to hold the response to which the request refers, or nil.
func (r *request) findStoredResponse() (b *backends.Backend, result metrics.ResponseLookup) {
	p, s := r.proxy, &r.input.stored
	s.replicaID = s.scope + s.refersTo
	e, known := p.responses.Index.Find(s.replicaID)
	if !known && s.scope != "" { // then the replica has chosen the id
		s.replicaID = s.refersTo
		e, known = p.responses.Index.Find(s.replicaID)
	}
	switch {
	case !known:
		return nil, metrics.ResponseUnknown
	case r.account != nil && e.Owner != r.account.Name:
		return nil, metrics.ResponseOfOtherKey
	}
	p.responses.Index.RecordUse(s.replicaID)
	if b = p.registry.FindAtServer(e.Backend); b == nil {
		return nil, metrics.ResponseLost
	}
	return b, metrics.ResponseKnown
}

// pinTo has the request routed to b alone, or returns the error that result is.
func (r *request) pinTo(b *backends.Backend, result metrics.ResponseLookup) *fault.Error {
	switch {
	case result == metrics.ResponseLost:
		return r.lostResponseError("the replica that held it was removed")
	case b == nil:
		return r.lostResponseError("no replica is known to hold it")
	}
	req := &r.input.request
	if !req.NoEngine && !slices.Contains(req.Backends, b) {
		return r.lostResponseError("the replica that holds it does not serve the model of this request")
	}
	r.input.stored.backend = b
	req.Backends, req.Stored = []*backends.Backend{b}, true
	return nil
}

// checkStoredResponse returns the error for a request whose response cannot be reached any more, else nil.
func (r *request) checkStoredResponse() *fault.Error {
	b, h := r.input.stored.backend, &r.history
	if b == nil || h.end != notEnded {
		return nil
	}
	refused := len(h.attempts) > 0 && errors.Is(h.latestAttempt().failure.Err, syscall.ECONNREFUSED)
	switch {
	case refused, b.State() == backends.Down && b.RefusesConnections():
		r.forgetStoredResponse()
		return r.lostResponseError("the replica that held it has ended")
	case (b.Drained() || b.Retiring()) && !r.input.request.NoEngine: // not if it is only suspended
		return r.lostResponseError("the replica that holds it is about to be removed")
	}
	return nil
}

// forgetStoredResponse forgets where the response was, since its replica has lost it.
func (r *request) forgetStoredResponse() {
	r.proxy.responses.Index.Remove(r.input.stored.replicaID)
	r.proxy.metrics.CountResponseLookup(metrics.ResponseLost)
}

// isResponseLost reports whether a replica says that it does not have the response to which the request refers.
func (a *attempt) isResponseLost(status int, body []byte) bool {
	return status == http.StatusNotFound && a.req.input.stored.backend != nil && vllm.IsResponseNotFound(body)
}

// sendLostResponse sends the error for a request of which isResponseLost is true.
func (a *attempt) sendLostResponse() {
	a.req.forgetStoredResponse()
	a.req.replaceBestFailure(nil)
	a.req.sendError(a.req.lostResponseError("the replica that held it was restarted, or has dropped it"))
}

// lostResponseError returns the API's error for a response that does not exist, for a reason.
func (r *request) lostResponseError(reason string) *fault.Error {
	e := fault.New(http.StatusNotFound, fault.CodeResponseNotFound, "")
	e.Param = "response_id"
	id := r.input.stored.refersTo
	if !responseindex.IsValidID(id) {
		id = "…"
	}
	e.Message = "Response with id '" + id + "' not found: " + reason + "."
	if !r.endpoint.IsAboutResponse() {
		e.Param, e.Code = "previous_response_id", fault.CodePreviousResponseNotFound
		e.Message += " Send the whole conversation as input, without previous_response_id."
	}
	return e
}

// maySearchResponse reports whether the backends may be asked for the response. With keys configured a response is known to the key
// that made it or to none.
func (r *request) maySearchResponse() bool {
	id, known := r.input.stored.refersTo, &r.proxy.responses
	return r.account == nil && responseindex.IsValidID(id) && known.Index.Enabled() && !known.Index.IsAbsent(id)
}

// searchStoredResponse asks the backends that may hold the response, and remembers what they say. It blocks for searchTimeout at
// most, and while other searches run.
func (r *request) searchStoredResponse() (b *backends.Backend, result metrics.ResponseLookup) {
	p, id := r.proxy, r.input.stored.refersTo
	select {
	case p.responses.searches <- struct{}{}:
		defer func() { <-p.responses.searches }()
	case <-r.httpReq.Context().Done():
		return nil, metrics.ResponseUnknown
	}
	passed := http.Header{backends.InstanceHeader: r.httpReq.Header[backends.InstanceHeader]}
	p.appendInstanceID(passed) // so that no search goes round in circles
	b, allResponded := searchBackends(r.httpReq.Context(), p.panics, id, r.input.request.Backends, httpheader.First(passed, backends.InstanceHeader))
	switch {
	case b != nil:
		p.responses.Index.Add(id, responseindex.Entry{Backend: b.Address()})
		return b, metrics.ResponseFound
	case allResponded:
		p.responses.Index.AddAbsent(id)
	}
	return nil, metrics.ResponseUnknown
}

// searchBackends asks backends for a stored response, maxSearched at a time, and returns one that has it, or nil. allResponded is
// false if some did not respond. proxyInstances names the proxies that the request has passed.
func searchBackends(ctx context.Context, panics recovery.Reporter, id string, list []*backends.Backend, proxyInstances string) (holder *backends.Backend, allResponded bool) {
	ctx, cancel := context.WithTimeout(ctx, searchTimeout)
	defer cancel()
	var unresponsive atomic.Int64
	var found atomic.Pointer[backends.Backend]
	var searches errgroup.Group
	searches.SetLimit(maxSearched)
	asked := map[*backends.Backend]bool{} // servers: the ranks of one have the same responses
	for _, b := range list {
		if asked[b.Server()] {
			continue
		}
		asked[b.Server()] = true
		searches.Go(func() error {
			var has bool
			err := errSearchPanicked
			panics.CallAndRecover(recovery.Handler, func() { has, err = hasResponse(ctx, b, id, proxyInstances) })
			switch {
			case err != nil:
				unresponsive.Add(1)
			case has:
				found.Store(b)
				cancel() // the other searches
			}
			return nil
		})
	}
	_ = searches.Wait()
	return found.Load(), unresponsive.Load() == 0
}

var (
	errUnavailable    = errors.New("replica is unavailable")
	errSearchPanicked = errors.New("search panicked")
)

// hasResponse asks a replica for a stored response. One that is down is not asked.
func hasResponse(ctx context.Context, b *backends.Backend, id, proxyInstances string) (bool, error) {
	if b.State() == backends.Down {
		return false, errUnavailable
	}
	resp, err := b.Get(ctx, "/v1/responses/"+id, "application/json", proxyInstances, 0)
	if err != nil {
		return false, err
	}
	defer fasthttp.ReleaseResponse(resp)
	switch resp.StatusCode() {
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return false, errUnavailable
	}
	return resp.StatusCode() == http.StatusOK, nil
}

// rememberBody remembers the response that a body is, or begins with, unless it is not stored.
func (a *attempt) rememberBody(body []byte) {
	if a.req.endpoint.Format == api.ResponsesFormat && !a.req.input.stored.unstored {
		a.remember(&a.req.input.stored, gjson.GetBytes(body, "id").Str)
	}
}

// rememberResponse remembers the response that is streamed, before the client has its id. One whose id the client has chosen is
// remembered when it is complete: until then a replica may have an earlier one of that id.
func (s *streamRelay) rememberResponse() {
	if s.unsaved == nil || s.events.ResponseID == "" || s.unsaved.chosenID != "" && !s.events.Finished {
		return
	}
	s.attempt.remember(s.unsaved, s.events.ResponseID)
	s.unsaved = nil
}

// remember remembers that the attempt's backend holds the response to a request, whose id is the client's.
func (a *attempt) remember(in *storedInput, responseID string) {
	e := responseindex.Entry{Backend: a.decision.Backend.Address()}
	if a.req.account != nil {
		e.Owner = a.req.account.Name
	}
	a.req.proxy.responses.Index.Add(a.replicaResponseID(in, responseID), e)
}

// scopeOf returns the scope of the ids that clients with the key of that name choose. JSON and URLs leave its characters as they
// are, and it begins with resp_, which vLLM before its pull request 25428 requires of an id.
func scopeOf(keyName string) string {
	hash := sha256.Sum256([]byte(keyName))
	return "resp_wr-" + hex.EncodeToString(hash[:16]) + "-"
}

// scopeEdits returns the edits that insert the scope before each id in the body that has one at the replica.
func (s *storedInput) scopeEdits() (edits []prompt.Edit) {
	if s.scope == "" {
		return nil
	}
	if s.chosenIDAt > 0 {
		edits = append(edits, prompt.Edit{Start: s.chosenIDAt, End: s.chosenIDAt, Text: s.scope})
	}
	if s.refersToAt > 0 && s.replicaID != s.refersTo {
		edits = append(edits, prompt.Edit{Start: s.refersToAt, End: s.refersToAt, Text: s.scope})
	}
	return edits
}
