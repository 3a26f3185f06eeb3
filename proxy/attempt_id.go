package proxy

import (
	"net/http"
	"strings"

	"github.com/tidwall/gjson"

	"warmroute/metrics"
	"warmroute/proxy/fault"
	"warmroute/proxy/relay"
	"warmroute/proxy/upstream"
)

// setRequestIDHeader names the attempt in the header for the replica.
func (a *attempt) setRequestIDHeader() {
	a.token = a.req.proxy.tokens.SetRequestID(a.req.httpReq.Header, a.req.inFlight.ID)
}

// checkResponseHeaderID returns the failure of a response whose header names another attempt, else nil. vLLM repeats the
// header of the request with --enable-request-id-headers.
func (a *attempt) checkResponseHeaderID(h http.Header) *fault.Failure {
	for _, id := range h[upstream.RequestIDHeader] {
		if a.req.proxy.tokens.FindOthers(id, a.token) != nil {
			return a.recordWrongResponse()
		}
	}
	return nil
}

// checkBodyID is checkResponseHeaderID for a body, or the beginning of one.
func (a *attempt) checkBodyID(body []byte) *fault.Failure {
	return a.checkResponseID(relay.ReadBodyID(body[:min(len(body), upstream.MaxIDSearchBytes)]))
}

// checkResponseID is checkResponseHeaderID for the id of a response. Tokens that the client has sent as part of the response's
// id do not count: it has them from an earlier response. The request's input must not be released yet.
func (a *attempt) checkResponseID(id string) *fault.Failure {
	others := a.req.proxy.tokens.FindOthers(id, a.token)
	if others == nil {
		return nil
	}
	requested := a.req.requestedResponseID()
	for _, token := range others {
		if !strings.Contains(requested, upstream.TokenMark+token) {
			return a.recordWrongResponse()
		}
	}
	return nil
}

// requestedResponseID returns the id that the client wants the response to have, or to begin or end with: that of the stored
// response which the request is about, or the request_id in the body. It is "" where replicas read neither.
func (r *request) requestedResponseID() string {
	switch {
	case r.endpoint.IsAboutResponse():
		return r.input.stored.refersTo
	case r.endpoint.ReadsRequestID():
		return gjson.GetBytes(r.input.body, "request_id").Str
	}
	return ""
}

// recordWrongResponse counts and returns the failure of a response to another attempt.
func (a *attempt) recordWrongResponse() *fault.Failure {
	a.decision.Backend.WrongResponses.Add(1)
	return &fault.Failure{Reason: metrics.RetryWrongResponse, Err: upstream.ErrWrongResponse}
}
