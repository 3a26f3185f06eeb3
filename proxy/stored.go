package proxy

import (
	"errors"
	"net/http"
	"slices"
	"syscall"

	"github.com/tidwall/gjson"

	"warmroute/backends"
	"warmroute/backends/vllm"
	"warmroute/metrics"
	"warmroute/proxy/api"
	"warmroute/proxy/apikey"
	"warmroute/proxy/fault"
	"warmroute/proxy/httpheader"
	"warmroute/proxy/stored"
	"warmroute/router/responseindex"
)

// Replicas keep the responses of /v1/responses in memory. A request that refers to one can be served by that replica alone.

// routeToStoredResponse has a request that refers to a stored response routed to the backend that holds it. It may wait for the
// backends to say which one does.
func (r *request) routeToStoredResponse() *fault.Error {
	s := &r.input.stored
	if !s.Refers() {
		return nil
	}
	b, result := r.proxy.findStored(s, r.account)
	if result == metrics.ResponseUnknown && r.proxy.maySearchStored(s, r.account) {
		b, result = r.proxy.searchStored(s, r.httpReq, r.backendsOfName())
	}
	r.proxy.metrics.CountResponseLookup(result)
	if apiErr := r.useModelOfStored(b); apiErr != nil {
		return apiErr
	}
	return r.pinTo(b, result)
}

// findStored returns the backend that is known to hold the response to which the request refers, or nil.
func (p *Proxy) findStored(s *stored.Input, holder *apikey.Account) (b *backends.Backend, result metrics.ResponseLookup) {
	s.ReplicaID = s.Scope + s.RefersTo
	e, known := p.responses.Index.Find(s.ReplicaID)
	if !known && s.Scope != "" { // then the replica has chosen the id
		s.ReplicaID = s.RefersTo
		e, known = p.responses.Index.Find(s.ReplicaID)
	}
	switch {
	case !known:
		return nil, metrics.ResponseUnknown
	case holder != nil && e.Owner != holder.Name:
		return nil, metrics.ResponseOfOtherKey
	}
	p.responses.Index.RecordUse(s.ReplicaID)
	if b = p.registry.FindAtServer(e.Backend); b == nil {
		return nil, metrics.ResponseLost
	}
	return b, metrics.ResponseKnown
}

// pinTo has the request routed to b alone, or returns the error that result is.
func (r *request) pinTo(b *backends.Backend, result metrics.ResponseLookup) *fault.Error {
	switch {
	case result == metrics.ResponseLost:
		return lostResponseError(&r.input.stored, r.endpoint, "the replica that held it was removed")
	case b == nil:
		return lostResponseError(&r.input.stored, r.endpoint, "no replica is known to hold it")
	}
	req := &r.input.request
	if !req.NoEngine && !slices.Contains(req.Backends, b) {
		return lostResponseError(&r.input.stored, r.endpoint, "the replica that holds it does not serve the model of this request")
	}
	r.input.stored.Backend = b
	req.Backends, req.Stored = []*backends.Backend{b}, true
	return nil
}

// storedResponseLostError returns the error for a request whose response cannot be reached any more, else nil.
func (r *request) storedResponseLostError() *fault.Error {
	b, h := r.input.stored.Backend, &r.history
	if b == nil || h.end != notEnded {
		return nil
	}
	refused := len(h.attempts) > 0 && errors.Is(h.latestAttempt().failure.Err, syscall.ECONNREFUSED)
	switch {
	case refused, b.State() == backends.Down && b.RefusesConnections():
		r.proxy.forgetStored(&r.input.stored)
		return lostResponseError(&r.input.stored, r.endpoint, "the replica that held it has ended")
	case (b.Drained() || b.Retiring()) && !r.input.request.NoEngine: // not if it is only suspended
		return lostResponseError(&r.input.stored, r.endpoint, "the replica that holds it is about to be removed")
	}
	return nil
}

// forgetStored forgets where the response was, since its replica has lost it.
func (p *Proxy) forgetStored(s *stored.Input) {
	p.responses.Index.Remove(s.ReplicaID)
	p.metrics.CountResponseLookup(metrics.ResponseLost)
}

// isResponseLost reports whether a replica says that it does not have the response to which the request refers.
func (a *attempt) isResponseLost(status int, body []byte) bool {
	return status == http.StatusNotFound && a.req.input.stored.Backend != nil && vllm.IsResponseNotFound(body)
}

// sendLostResponse sends the error for a request of which isResponseLost is true.
func (a *attempt) sendLostResponse() {
	a.req.proxy.forgetStored(&a.req.input.stored)
	a.req.history.replaceBest(nil, &a.req.proxy.buffers)
	a.req.sendError(lostResponseError(&a.req.input.stored, a.req.endpoint, "the replica that held it was restarted, or has dropped it"))
}

// lostResponseError returns the API's error for a response that does not exist, for a reason.
func lostResponseError(s *stored.Input, e *api.Endpoint, reason string) *fault.Error {
	lost := fault.New(http.StatusNotFound, fault.CodeResponseNotFound, "")
	lost.Param = "response_id"
	id := s.RefersTo
	if !responseindex.IsValidID(id) {
		id = "…"
	}
	lost.Message = "Response with id '" + id + "' not found: " + reason + "."
	if !e.IsAboutResponse() {
		lost.Param, lost.Code = "previous_response_id", fault.CodePreviousResponseNotFound
		lost.Message += " Send the whole conversation as input, without previous_response_id."
	}
	return lost
}

// maySearchStored reports whether the backends may be asked for the response. With keys configured a response is known to the key
// that made it or to none.
func (p *Proxy) maySearchStored(s *stored.Input, holder *apikey.Account) bool {
	id, known := s.RefersTo, &p.responses
	return holder == nil && responseindex.IsValidID(id) && known.Index.Enabled() && !known.Index.IsAbsent(id)
}

// searchStored asks the backends that may hold the response, and remembers what they say. It blocks as stored.Responses.Search does.
func (p *Proxy) searchStored(s *stored.Input, r *http.Request, list []*backends.Backend) (b *backends.Backend,
	result metrics.ResponseLookup) {
	id := s.RefersTo
	passed := http.Header{backends.InstanceHeader: r.Header[backends.InstanceHeader]}
	p.instance.AppendTo(passed) // so that no search goes round in circles
	b, allResponded := p.responses.Search(r.Context(), p.panics, id, list, httpheader.First(passed, backends.InstanceHeader))
	switch {
	case b != nil:
		p.responses.Index.Add(id, responseindex.Entry{Backend: b.Address()})
		return b, metrics.ResponseFound
	case allResponded:
		p.responses.Index.AddAbsent(id)
	}
	return nil, metrics.ResponseUnknown
}

// rememberBody remembers the response that a body is, or begins with, unless it is not stored.
func (a *attempt) rememberBody(body []byte) {
	if a.req.endpoint.Format == api.ResponsesFormat && !a.req.input.stored.Unstored {
		a.remember(&a.req.input.stored, gjson.GetBytes(body, "id").Str)
	}
}

// rememberResponse remembers the response that is streamed, before the client has its id. One whose id the client has chosen is
// remembered when it is complete: until then a replica may have an earlier one of that id.
func (s *streamRelay) rememberResponse() {
	if s.unsaved == nil || s.events.ResponseID == "" || s.unsaved.ChosenID != "" && !s.events.Finished {
		return
	}
	s.attempt.remember(s.unsaved, s.events.ResponseID)
	s.unsaved = nil
}

// remember remembers that the attempt's backend holds the response to a request, whose id is the client's.
func (a *attempt) remember(in *stored.Input, responseID string) {
	e := responseindex.Entry{Backend: a.decision.Backend.Address()}
	if a.req.account != nil {
		e.Owner = a.req.account.Name
	}
	id := a.replicaResponseID(in, responseID)
	a.req.proxy.responses.Index.Add(id, e)
	if n := &a.req.named; n.name != nil {
		a.req.proxy.models.RememberResponse(id, n.name, n.choice.Model)
	}
}
