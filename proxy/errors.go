package proxy

import (
	"encoding/json"
	"net/http"
	"strconv"
)

// apiError is an answer of the proxy's own, in the shape of the API that was called:
// Anthropic's or OpenAI's. Replicas' errors pass through as they are and never become one.
type apiError struct {
	status      int
	kind        string // OpenAI's "type"
	code        string
	param       string
	message     string
	retryAfter  int  // seconds; 0: no such header
	fromReplica bool // the message is a replica's
}

func invalidRequestError(param, message string) *apiError {
	return &apiError{status: http.StatusBadRequest, kind: "invalid_request_error", param: param, message: message}
}

func unavailableError(message string) *apiError {
	return &apiError{status: http.StatusServiceUnavailable, kind: "service_unavailable", code: "no_replica", message: message, retryAfter: 1}
}

func firstByteTimeoutError() *apiError {
	return &apiError{status: http.StatusGatewayTimeout, kind: "timeout", code: "first_byte_timeout",
		message: "the replica produced nothing in time (timeouts.first_byte)"}
}

func responseTimeoutError() *apiError {
	return &apiError{status: http.StatusGatewayTimeout, kind: "timeout", code: "response_timeout",
		message: "the replica sent no response and made no progress in time (timeouts.response)"}
}

// source tells an error of the proxy's from a replica's own.
func (e *apiError) source() string {
	if e.fromReplica {
		return ""
	}
	return "warmroute"
}

// body is the error as JSON, in Anthropic's shape or OpenAI's.
func (e *apiError) body(anthropic bool) []byte {
	if anthropic {
		return e.anthropicBody()
	}
	type inner struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    *string `json:"code"`
		Src     string  `json:"src,omitempty"`
	}
	orNull := func(s string) *string {
		if s == "" {
			return nil
		}
		return &s
	}
	// Strings always marshal.
	out, _ := json.Marshal(map[string]inner{"error": {e.message, e.kind, orNull(e.param), orNull(e.code), e.source()}})
	return out
}

func (e *apiError) anthropicBody() []byte {
	type inner struct {
		Type    string `json:"type"`
		Message string `json:"message"`
		Src     string `json:"src,omitempty"`
	}
	// Strings always marshal.
	out, _ := json.Marshal(struct {
		Type  string `json:"type"`
		Error inner  `json:"error"`
	}{"error", inner{anthropicErrorType(e.status), e.message, e.source()}})
	return out
}

// anthropicErrorType is what Anthropic calls an error of that status.
func anthropicErrorType(status int) string {
	switch status {
	case http.StatusBadRequest:
		return "invalid_request_error"
	case http.StatusUnauthorized:
		return "authentication_error"
	case http.StatusForbidden:
		return "permission_error"
	case http.StatusNotFound:
		return "not_found_error"
	case http.StatusRequestEntityTooLarge:
		return "request_too_large"
	case http.StatusTooManyRequests:
		return "rate_limit_error"
	case http.StatusServiceUnavailable:
		return "overloaded_error"
	}
	return "api_error"
}

// write sends the error as the whole answer.
func (e *apiError) write(w http.ResponseWriter, anthropic bool) {
	body := e.body(anthropic)
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

// event is the error as the last events of a stream of the given format: what
// that format's clients raise as an error.
func (e *apiError) event(f format) []byte {
	switch f {
	case messagesFormat:
		return append(append([]byte("event: error\ndata: "), e.body(true)...), "\n\n"...)
	case responsesFormat:
		all := map[string]any{"type": "error", "code": e.code, "message": e.message, "param": nil}
		if !e.fromReplica {
			all["src"] = e.source()
		}
		data, _ := json.Marshal(all)
		return append(append([]byte("event: error\ndata: "), data...), "\n\n"...)
	}
	return append(append([]byte("data: "), e.body(false)...), "\n\ndata: [DONE]\n\n"...)
}
