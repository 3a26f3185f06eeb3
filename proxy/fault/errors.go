package fault

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"

	"github.com/tidwall/gjson"

	"warmroute/backends/vllm"
	"warmroute/metrics"
	"warmroute/proxy/api"
)

// Error is an error response of the proxy's own. A dialect gives it the shape of the API
// that was called. Replicas' errors are relayed as they are and become one only as the last
// event of a stream.
type Error struct {
	Status      int
	Kind        string // OpenAI's "type"
	Code        string
	Param       string
	Message     string
	RetryAfter  int  // seconds; 0: no such header
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

// New returns an error whose Kind is that of its status.
func New(status int, code, message string) *Error {
	return &Error{Status: status, Kind: cmp.Or(errorKinds[status], "invalid_request_error"), Code: code, Message: message}
}

// InvalidRequest returns a 400 about a parameter; "": about none.
func InvalidRequest(param, message string) *Error {
	e := New(http.StatusBadRequest, "", message)
	e.Param = param
	return e
}

// Unavailable returns an error after which the client may try again in a second.
func Unavailable(code, message string) *Error {
	e := New(http.StatusServiceUnavailable, code, message)
	e.RetryAfter = 1
	return e
}

// FirstByteTimeout returns the error for a stream whose first event was late.
func FirstByteTimeout() *Error {
	return New(http.StatusGatewayTimeout, codeFirstByteTimeout, "the replica sent no event in time (timeouts.first_byte)")
}

// sourceUnlessReplica returns "warmroute" for an error of the proxy's, "" for a replica's own.
func (e *Error) sourceUnlessReplica() string {
	if e.fromReplica {
		return ""
	}
	return "warmroute"
}

// Body returns an error as JSON. Strings always marshal.
func Body(d api.Dialect, e *Error) []byte {
	if d == api.Anthropic {
		type inner struct {
			Type    string `json:"type"`
			Message string `json:"message"`
			Src     string `json:"src,omitempty"`
		}
		out, _ := json.Marshal(struct {
			Type  string `json:"type"`
			Error inner  `json:"error"`
		}{"error", inner{cmp.Or(anthropicErrorTypes[e.Status], "api_error"), e.Message, e.sourceUnlessReplica()}})
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

func (e *Error) openAIError() openAIError {
	orNull := func(s string) *string {
		if s == "" {
			return nil
		}
		return &s
	}
	return openAIError{e.Message, e.Kind, orNull(e.Param), orNull(e.Code), e.sourceUnlessReplica()}
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

// Write sends an error as the whole response.
func Write(w http.ResponseWriter, d api.Dialect, e *Error) {
	body := Body(d, e)
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	if e.Status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", "Bearer")
	}
	if e.RetryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(e.RetryAfter))
	}
	w.WriteHeader(e.Status)
	w.Write(body)
}

// Event returns an error as the last events of a stream: what clients of that format
// raise as an error. The events of responses are numbered.
func Event(f api.Format, e *Error, sequenceNumber int64) []byte {
	switch f {
	case api.MessagesFormat:
		return fmt.Appendf(nil, "event: error\ndata: %s\n\n", Body(api.Anthropic, e))
	case api.ResponsesFormat, api.StoredFormat:
		// The SDKs raise an error only if there is an "error"; the rest is the event that OpenAI documents.
		event := map[string]any{
			"type": "error", "code": e.Code, "message": e.Message, "param": nil, "sequence_number": sequenceNumber, "error": e.openAIError(),
		}
		if !e.fromReplica {
			event["src"] = e.sourceUnlessReplica()
		}
		data, _ := json.Marshal(event)
		return fmt.Appendf(nil, "event: error\ndata: %s\n\n", data)
	}
	return fmt.Appendf(nil, "data: %s\n\ndata: [DONE]\n\n", Body(api.OpenAI, e))
}

// ReplicaError returns the error of a replica, to be sent as an event of a stream.
func ReplicaError(status int, body []byte) *Error {
	if status < 400 {
		return New(http.StatusBadGateway, CodeReplicaFailed, "the replica did not respond with a stream")
	}
	e := New(status, CodeReplicaFailed, "the replica responded: "+http.StatusText(status))
	e.Kind = "bad_gateway"
	object := vllm.ErrorObject(body)
	if message := object.Get("message"); message.Type == gjson.String {
		e.Message, e.fromReplica = message.Str, true
	}
	if kind := object.Get("type"); kind.Type == gjson.String && kind.Str != "error" { // of an event
		e.Kind = kind.Str
	}
	return e
}

// AttemptsError returns the error for attempts that failed without a response.
func AttemptsError(best *Failure) *Error {
	switch {
	case best.Reason == metrics.RetryStalled:
		return New(http.StatusGatewayTimeout, codeReplicaStalled, "the replica is stalled, and no other could serve the request")
	case best.Reason == metrics.RetryResponse:
		return New(http.StatusGatewayTimeout, codeResponseTimeout,
			"the replica sent no response and made no progress in time (timeouts.response)")
	case best.Reason == metrics.RetryFirstByte:
		return FirstByteTimeout()
	}
	message := "no replica could serve the request: " + string(best.Reason)
	switch best.Reason {
	case metrics.RetryRedirect:
		message += " (a backend's URL must be that of the replica itself; the proxy's log says where it redirects to)"
	case metrics.RetryInvalid:
		message += " (what a replica sent is not valid HTTP/1; the proxy's log says why)"
	}
	e := New(http.StatusBadGateway, CodeReplicaFailed, message)
	e.RetryAfter = 1
	return e
}

// Overloaded returns a 429 whose message says to wait for so many seconds. The caller sets RetryAfter.
func Overloaded(code, message string, wait int) *Error {
	return New(http.StatusTooManyRequests, code, fmt.Sprintf("%s; try again in %ds", message, wait))
}

// ShuttingDown returns the error for requests that the end of the proxy has ended.
func ShuttingDown() *Error {
	return Unavailable(codeShuttingDown, "this proxy is shutting down; try again")
}
