package proxy

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"

	"github.com/tidwall/gjson"

	"warmroute/backends/vllm"
	"warmroute/metrics"
	"warmroute/proxy/api"
)

// apiError is an error response of the proxy's own. A dialect gives it the shape of the API
// that was called. Replicas' errors are relayed as they are and become one only as the last
// event of a stream.
type apiError struct {
	status      int
	kind        string // OpenAI's "type"
	code        string
	param       string
	message     string
	retryAfter  int  // seconds; 0: no such header
	fromReplica bool // the message is a replica's
}

// errorKinds are OpenAI's types of errors, by status; others are an invalid_request_error.
var errorKinds = map[int]string{
	http.StatusForbidden:           "cancelled",
	http.StatusRequestTimeout:      "timeout",
	http.StatusTooManyRequests:     "overloaded",
	metrics.StatusClientClosed:     "client_disconnected",
	http.StatusInternalServerError: "internal_error",
	http.StatusBadGateway:          "bad_gateway",
	http.StatusServiceUnavailable:  "service_unavailable",
	http.StatusGatewayTimeout:      "timeout",
	http.StatusLoopDetected:        "loop",
}

func newError(status int, code, message string) *apiError {
	return &apiError{status: status, kind: cmp.Or(errorKinds[status], "invalid_request_error"), code: code, message: message}
}

func invalidRequestError(param, message string) *apiError {
	e := newError(http.StatusBadRequest, "", message)
	e.param = param
	return e
}

// unavailableError returns an error after which the client may try again in a second.
func unavailableError(code, message string) *apiError {
	e := newError(http.StatusServiceUnavailable, code, message)
	e.retryAfter = 1
	return e
}

func firstByteTimeoutError() *apiError {
	return newError(http.StatusGatewayTimeout, codeFirstByteTimeout, "the replica sent no event in time (timeouts.first_byte)")
}

// sourceUnlessReplica returns "warmroute" for an error of the proxy's, "" for a replica's own.
func (e *apiError) sourceUnlessReplica() string {
	if e.fromReplica {
		return ""
	}
	return "warmroute"
}

// errorBody returns an error as JSON. Strings always marshal.
func errorBody(d api.Dialect, e *apiError) []byte {
	if d == api.Anthropic {
		type inner struct {
			Type    string `json:"type"`
			Message string `json:"message"`
			Src     string `json:"src,omitempty"`
		}
		out, _ := json.Marshal(struct {
			Type  string `json:"type"`
			Error inner  `json:"error"`
		}{"error", inner{cmp.Or(anthropicErrorTypes[e.status], "api_error"), e.message, e.sourceUnlessReplica()}})
		return out
	}
	out, _ := json.Marshal(map[string]openAIError{"error": e.openAIError()})
	return out
}

// openAIError is an error in OpenAI's form.
type openAIError struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    *string `json:"code"`
	Src     string  `json:"src,omitempty"`
}

func (e *apiError) openAIError() openAIError {
	orNull := func(s string) *string {
		if s == "" {
			return nil
		}
		return &s
	}
	return openAIError{e.message, e.kind, orNull(e.param), orNull(e.code), e.sourceUnlessReplica()}
}

// anthropicErrorTypes are Anthropic's names of errors, by status; others are an api_error.
var anthropicErrorTypes = map[int]string{
	http.StatusBadRequest:            "invalid_request_error",
	http.StatusUnsupportedMediaType:  "invalid_request_error",
	http.StatusUnauthorized:          "authentication_error",
	http.StatusForbidden:             "permission_error",
	http.StatusNotFound:              "not_found_error",
	http.StatusRequestEntityTooLarge: "request_too_large",
	http.StatusTooManyRequests:       "rate_limit_error",
	http.StatusServiceUnavailable:    "overloaded_error",
}

// writeError sends an error as the whole response.
func writeError(w http.ResponseWriter, d api.Dialect, e *apiError) {
	body := errorBody(d, e)
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	if e.status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", "Bearer")
	}
	if e.retryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(e.retryAfter))
	}
	w.WriteHeader(e.status)
	w.Write(body)
}

// errorEvent returns an error as the last events of a stream: what clients of that format
// raise as an error. The events of responses are numbered.
func errorEvent(f api.Format, e *apiError, sequenceNumber int64) []byte {
	switch f {
	case api.MessagesFormat:
		return fmt.Appendf(nil, "event: error\ndata: %s\n\n", errorBody(api.Anthropic, e))
	case api.ResponsesFormat, api.StoredFormat:
		// The SDKs raise an error only if there is an "error"; the rest is the event that OpenAI documents.
		event := map[string]any{
			"type": "error", "code": e.code, "message": e.message, "param": nil, "sequence_number": sequenceNumber, "error": e.openAIError(),
		}
		if !e.fromReplica {
			event["src"] = e.sourceUnlessReplica()
		}
		data, _ := json.Marshal(event)
		return fmt.Appendf(nil, "event: error\ndata: %s\n\n", data)
	}
	return fmt.Appendf(nil, "data: %s\n\ndata: [DONE]\n\n", errorBody(api.OpenAI, e))
}

// truncatedError returns the error for a stream that the replica did not complete, and its
// cause.
func (s *streamRelay) truncatedError() (apiErr *apiError, cause error) {
	e := newError(http.StatusBadGateway, codeReplicaFailed, "the replica closed the response early")
	switch {
	case s.withheld:
		e.message = "the replica failed; its error is withheld, as it names the address of a KV transfer"
		return e, errQuotesHandover
	case s.events.aborted:
		e.code, e.message = codeReplicaAborted, "the replica aborted the request, so the response is incomplete"
		return e, errAborted
	case errors.Is(s.readErr, errFirstByte):
		return firstByteTimeoutError(), s.readErr
	case errors.Is(s.readErr, os.ErrDeadlineExceeded):
		return newError(http.StatusGatewayTimeout, codeIdleTimeout, "the replica stopped sending (timeouts.idle)"), s.readErr
	case isRemoval(s.readErr):
		e.message = "the replica was removed before the response was complete (timeouts.shutdown)"
	}
	if s.readErr == io.EOF {
		return e, errTruncated
	}
	return e, s.readErr
}

// sendErrorEvent ends the stream with an error, after the line ends that the last event lacks.
func (s *streamRelay) sendErrorEvent(e *apiError) {
	s.attempt.req.client.Write(append([]byte(s.out.missingLineEnds()), errorEvent(s.attempt.req.endpoint.Format, e, s.events.nextSequence)...))
}

// relayErrorAsEvent sends a response that is not a stream as an error event, to a client that has the
// header of a stream. It returns a failure if another backend may be asked.
func (a *attempt) relayErrorAsEvent(resp *http.Response, from replicaBody) *failure {
	body, err := a.readErrorBody(resp)
	defer a.req.proxy.buffers.release(int64(len(body)))
	if f := a.checkBodyID(body); f != nil {
		return f
	}
	from.AllowReuse()
	if a.isResponseLost(resp.StatusCode, body) {
		a.sendLostResponse()
		return nil
	}
	if err != nil && !errors.Is(err, errErrorBodyTooLong) && !errors.Is(err, errErrorBodyMemory) {
		return a.classifyOrEndRequest(err)
	}
	if a.quotesHandover(resp.StatusCode, body, true) {
		return a.newQuoteFailure(resp.StatusCode)
	}
	if err == nil && a.isRankRefused(resp, body) {
		return a.recordRefusedRank()
	}
	if err == nil && !isEncoded(resp.Header) && a.isRefusedAsTooLong(resp.StatusCode, body) {
		return a.newTooLongFailure(resp.Header, body)
	}
	if err == nil && !isEncoded(resp.Header) && vllm.IsMissingEndpoint(resp.StatusCode, body) {
		return a.recordMissingEndpoint(resp, body)
	}
	if f := a.checkQueueFull(resp, body); f != nil {
		return f
	}
	a.req.sendError(replicaError(resp.StatusCode, body))
	return nil
}

// replicaError returns the error of a replica, to be sent as an event of a stream.
func replicaError(status int, body []byte) *apiError {
	if status < 400 {
		return newError(http.StatusBadGateway, codeReplicaFailed, "the replica did not respond with a stream")
	}
	e := newError(status, codeReplicaFailed, "the replica responded: "+http.StatusText(status))
	e.kind = "bad_gateway"
	object := vllm.ErrorObject(body)
	if message := object.Get("message"); message.Type == gjson.String {
		e.message, e.fromReplica = message.Str, true
	}
	if kind := object.Get("type"); kind.Type == gjson.String && kind.Str != "error" { // of an event
		e.kind = kind.Str
	}
	return e
}
