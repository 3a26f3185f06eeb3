package vllm

import (
	"bytes"
	"net/http"
	"slices"
	"strings"

	"github.com/tidwall/gjson"
)

// shutdownMessages are the beginnings of the messages with which vLLM refuses new
// requests while it finishes those it has (--shutdown-timeout) and still passes
// its checks: of its thread pools, and of its engine.
var shutdownMessages = [...]string{"cannot schedule new futures after ", "Server shutting down"}

// IsShutdownError reports whether body is the error of a server that is shutting
// down: no engine has seen the request. Only the beginning of its message counts,
// since an error may quote its request.
func IsShutdownError(body []byte) bool {
	if !gjson.ValidBytes(body) { // gjson finds objects in any text
		return false
	}
	message := gjson.GetBytes(body, "error.message")
	return message.Type == gjson.String && slices.ContainsFunc(shutdownMessages[:], func(start string) bool {
		return strings.HasPrefix(message.Str, start)
	})
}

// scalingMessages are parts of the errors with which a server with elastic expert parallelism refuses all requests but
// health checks: while its engines change their number, and when it is not one of them any more.
var scalingMessages = [...]string{"The model is currently scaling", "has been retired and is awaiting shutdown"}

// maxScalingErrorBytes bounds the errors that IsScalingError reads.
const maxScalingErrorBytes = 1 << 10

// IsScalingError reports whether a response says that the number of the server's engines is changing: no engine has
// seen the request. The error is a string, unlike any that may quote a request.
func IsScalingError(status int, body []byte) bool {
	if status != http.StatusServiceUnavailable || len(body) > maxScalingErrorBytes || !gjson.ValidBytes(body) {
		return false
	}
	message := gjson.GetBytes(body, "error")
	return message.Type == gjson.String && slices.ContainsFunc(scalingMessages[:], func(part string) bool {
		return strings.Contains(message.Str, part)
	})
}

const (
	// missingPathDetail is the body of FastAPI's 404 of a path. The Rust front end has an
	// empty body.
	missingPathDetail = "Not Found"
	// disabledMessage is the beginning of the 403 of endpoints that need --enable-scale-out.
	disabledMessage = "Scale-out endpoints are disabled."
	// maxMissingEndpointBytes bounds the responses that IsMissingEndpoint reads.
	maxMissingEndpointBytes = 1 << 10
)

// IsMissingEndpoint reports whether a response means that the server does not serve the path:
// a 404 of the path, not of a model or a response id, or a 403 of a disabled endpoint.
func IsMissingEndpoint(status int, body []byte) bool {
	switch {
	case status != http.StatusNotFound && status != http.StatusForbidden || len(body) > maxMissingEndpointBytes:
		return false
	case len(bytes.TrimSpace(body)) == 0:
		return status == http.StatusNotFound
	case !gjson.ValidBytes(body):
		return false
	case status == http.StatusNotFound:
		return gjson.GetBytes(body, "detail").Str == missingPathDetail
	}
	return strings.HasPrefix(gjson.GetBytes(body, "error.message").Str, disabledMessage)
}

// FinishReasonAbort is the finish_reason of a choice that the engine aborted.
const FinishReasonAbort = "abort"

// HasAbortedChoice reports whether the engine aborted a choice of a complete chat
// or completion. Few of those contain the word, so that few are parsed.
func HasAbortedChoice(body []byte) bool {
	if !bytes.Contains(body, []byte(`"`+FinishReasonAbort+`"`)) {
		return false
	}
	found := false
	gjson.GetBytes(body, "choices").ForEach(func(_, choice gjson.Result) bool {
		found = choice.Get("finish_reason").Str == FinishReasonAbort
		return !found
	})
	return found
}

// IsAbortedResponse reports whether the engine aborted an object of /v1/responses, as far as vLLM
// tells: by its status where the model is gpt-oss, else only where it aborted before the first
// token, since nothing else makes a response of none. Any other aborted response looks complete.
func IsAbortedResponse(response gjson.Result) bool {
	switch response.Get("status").Str {
	case "cancelled":
		return true
	case "completed", "incomplete":
		return response.Get("usage.output_tokens").Raw == "0" && response.Get("output.#").Raw == "0"
	}
	return false
}

// IsResponseNotFound reports whether the body of a 404 says that a stored response does not
// exist, rather than its model or the endpoint.
func IsResponseNotFound(body []byte) bool {
	return gjson.GetBytes(body, "error.param").Str == "response_id"
}

// IsAbortedMessage reports whether the engine aborted a complete Anthropic
// message: it has no stop_reason then.
func IsAbortedMessage(body []byte) bool {
	return gjson.GetBytes(body, "type").Str == "message" && gjson.GetBytes(body, "stop_reason").Type != gjson.String
}
