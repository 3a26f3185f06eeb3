package vllm

import (
	"bytes"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/tidwall/gjson"
)

// ErrorMeaning is what an error of a server says about the server and the request.
type ErrorMeaning int

const (
	// ErrorOfRequest is about the request itself: any server would send it.
	ErrorOfRequest ErrorMeaning = iota
	// ErrorQueueFull means that the server takes no more requests for now.
	ErrorQueueFull
	// ErrorShutdown means that the server is shutting down: no engine has seen the request.
	ErrorShutdown
	// ErrorScaling means that the server is changing the number of its engines: no engine has seen the request.
	ErrorScaling
	// ErrorOfEngine means that the engine failed, perhaps by the request.
	ErrorOfEngine
	// ErrorOfGateway means that a proxy in front of the server did not get its response.
	ErrorOfGateway
)

// ClassifyError returns what an error means, by its status and its body. It is the same whether the error came as an HTTP response
// or as an event of a stream, which stands for the status that ErrorEventStatus returns.
func ClassifyError(status int, body []byte) ErrorMeaning {
	switch {
	case IsScalingError(status, body):
		return ErrorScaling
	case status == http.StatusTooManyRequests && hasQueueFullMessage(body) && ErrorObject(body).Get("type").Str == http.StatusText(status):
		return ErrorQueueFull
	case status == http.StatusInternalServerError || status == http.StatusServiceUnavailable:
		switch {
		case hasMessage(body, shutdownMessages[:]):
			return ErrorShutdown
		case status == http.StatusServiceUnavailable || hasQueueFullMessage(body):
			return ErrorQueueFull
		}
		return ErrorOfEngine
	case status == http.StatusBadGateway || status == http.StatusGatewayTimeout:
		return ErrorOfGateway
	}
	return ErrorOfRequest
}

// shutdownMessages are the beginnings of the messages with which vLLM refuses new
// requests while it finishes those it has (--shutdown-timeout) and still passes
// its checks: of its thread pools, and of its engine.
var shutdownMessages = [...]string{"cannot schedule new futures after ", "Server shutting down"}

// queueFullMessages are the beginnings of the messages with which vLLM refuses new requests
// because of --max-num-queued-reqs and --max-num-queued-tokens.
var queueFullMessages = [...]string{
	"The engine is currently busy and cannot accept new requests.", "The engine has reached its prefill token backlog limit.",
}

func hasQueueFullMessage(body []byte) bool { return hasMessage(body, queueFullMessages[:]) }

// hasMessage reports whether body is an error whose message begins with one of these. Only its beginning counts, since an error may
// quote its request.
func hasMessage(body []byte, beginnings []string) bool {
	if !gjson.ValidBytes(body) { // gjson finds objects in any text
		return false
	}
	e := ErrorObject(body)
	isInner := e.Index > 0
	if message := e.Get("message"); isInner || e.Get("type").Str == "error" || e.Get("object").Str == "error" {
		return message.Type == gjson.String && slices.ContainsFunc(beginnings, func(start string) bool {
			return strings.HasPrefix(message.Str, start)
		})
	}
	return false
}

// ErrorObject returns the object with the message, type and code of an error, whether it is the body of a response or an event
// of a stream, in any dialect.
func ErrorObject(body []byte) gjson.Result {
	all := gjson.ParseBytes(body)
	for _, path := range [...]string{"error", "response.error"} {
		if object := all.Get(path); object.IsObject() {
			return object
		}
	}
	return all
}

// errorNames are the statuses of errors that have a name in place of a code: the types of Anthropic's and vLLM's errors, and the
// codes of OpenAI's responses that failed.
var errorNames = map[string]int{
	"overloaded_error":        http.StatusServiceUnavailable,
	"ServiceUnavailableError": http.StatusServiceUnavailable,
	"timeout_error":           http.StatusGatewayTimeout,
	"rate_limit_error":        http.StatusTooManyRequests,
	"rate_limit_exceeded":     http.StatusTooManyRequests,
	"request_too_large":       http.StatusRequestEntityTooLarge,
	"not_found_error":         http.StatusNotFound,
	"NotFoundError":           http.StatusNotFound,
	"permission_error":        http.StatusForbidden,
	"authentication_error":    http.StatusUnauthorized,
	"invalid_request_error":   http.StatusBadRequest,
	"BadRequestError":         http.StatusBadRequest,
	"context_length_exceeded": http.StatusBadRequest,
	"invalid_prompt":          http.StatusBadRequest,
}

// ErrorEventStatus returns the HTTP status that an error event of a stream stands for: 500 if it names none.
func ErrorEventStatus(event []byte) int {
	if IsScalingError(http.StatusServiceUnavailable, event) {
		return http.StatusServiceUnavailable
	}
	e := ErrorObject(event)
	for _, code := range [...]int64{e.Get("code").Int(), quotedErrorCode(e.Get("message").Str)} {
		if code >= 400 && code <= 599 {
			return int(code)
		}
	}
	for _, name := range [...]string{e.Get("code").Str, e.Get("type").Str} {
		if status, ok := errorNames[name]; ok {
			return status
		}
		if strings.Contains(name, "image") { // vLLM's own error names have none
			return http.StatusBadRequest
		}
	}
	return http.StatusInternalServerError
}

// quotedErrorCode returns the code of the error of a chat that the message of an error on /v1/messages quotes, else 0. vLLM makes
// its messages from the events of a chat, and reports an error among them as an event that it cannot read:
//
//	2 validation errors for ChatCompletionStreamResponse … input_value={'error': {'message': 'Th...', 'code': 503}}, input_type=dict] …
func quotedErrorCode(message string) int64 {
	count, rest, found := strings.Cut(message, " validation error")
	if _, err := strconv.Atoi(count); !found || err != nil || !strings.Contains(rest, "for ChatCompletionStreamResponse") {
		return 0
	}
	_, rest, _ = strings.Cut(rest, " input_value={'error': {")
	_, code, _ := strings.Cut(rest, "'code': ")
	code, _, _ = strings.Cut(code, "}")
	status, _ := strconv.ParseInt(code, 10, 64) // 0 if there is none
	return status
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

// lengthMessages are the beginnings of the messages with which vLLM refuses a prompt, or a prompt and its output, as longer
// than max_model_len. testdata/context-length.txt has the errors and the versions. After "max_tokens must be at least 1" the
// prompt may have left no room for an output.
var lengthMessages = [...]string{
	"This model's maximum context length is ", "this model's maximum context length is ",
	"'max_tokens' or 'max_completion_tokens' is too large: ",
	"Input length (", "Prompt length of ", "The prompt (total length ", "The decoder prompt (length ", "The engine prompt length ",
	"max_tokens must be at least 1, got ",
}

// outputLengthMessage is in the message about an output that alone is longer than max_model_len, after its parameter.
const outputLengthMessage = " cannot be greater than max_model_len="

// outputLengthParams are the parameters that such a message begins with.
var outputLengthParams = [...]string{"max_tokens=", "max_completion_tokens=", "max_output_tokens="}

// IsContextLengthError reports whether body is the error of a server whose max_model_len is too small for the request,
// with status 400 or as an event of a stream. Only the beginning of its message counts, since an error may quote its
// request.
func IsContextLengthError(body []byte) bool {
	if !gjson.ValidBytes(body) {
		return false
	}
	message := gjson.GetBytes(body, "error.message")
	if !message.Exists() { // before vLLM 0.10
		message = gjson.GetBytes(body, "message")
	}
	hasPrefix := func(start string) bool { return strings.HasPrefix(message.Str, start) }
	if slices.ContainsFunc(outputLengthParams[:], hasPrefix) {
		param, _, found := strings.Cut(message.Str, outputLengthMessage)
		return found && !strings.ContainsRune(param, ' ')
	}
	return message.Type == gjson.String && slices.ContainsFunc(lengthMessages[:], hasPrefix)
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

// ResponseEnd is what a complete response says about its end.
type ResponseEnd int

const (
	// EndExplained has a reason, other than an abort.
	EndExplained ResponseEnd = iota
	// EndUnexplained has none, or one that vLLM also has for other ends: the engine may have aborted the response.
	EndUnexplained
	// EndAborted is that of a response which the engine aborted.
	EndAborted
)

// EndOfResponse returns how an object of /v1/responses ended. vLLM marks an abort only where the model is gpt-oss, by the status, or
// where no token came. Any other aborted response looks complete.
func EndOfResponse(response gjson.Result) ResponseEnd {
	hasOutput := response.Get("output.0").Exists()
	switch response.Get("status").Str {
	case "cancelled":
		if hasOutput {
			return EndUnexplained
		}
		return EndAborted
	case "completed", "incomplete":
		if response.Get("usage.output_tokens").Raw == "0" && response.Get("output").IsArray() && !hasOutput {
			return EndAborted
		}
	}
	return EndExplained
}

// IsFailedResponse reports whether a complete object of /v1/responses has failed without output, and not by an error of the request.
func IsFailedResponse(body []byte) bool {
	if !bytes.Contains(body, []byte(`"failed"`)) {
		return false
	}
	r := gjson.ParseBytes(body)
	return r.Get("status").Str == "failed" && r.Get("output.0").Raw == "" && ClassifyError(ErrorEventStatus(body), body) != ErrorOfRequest
}

// IsEmptyCompletion reports whether a complete chat or completion has neither choices nor usage, as where the engine has failed.
func IsEmptyCompletion(body []byte) bool {
	_, value, _ := bytes.Cut(body, []byte(`"choices"`))
	if value = bytes.TrimLeft(value, ": \t\r\n["); len(value) == 0 || value[0] != ']' { // most are not parsed
		return false
	}
	choices, usage := gjson.GetBytes(body, "choices"), gjson.GetBytes(body, "usage")
	return choices.IsArray() && choices.Get("#").Int() == 0 && !usage.IsObject()
}

// IsResponseNotFound reports whether the body of a 404 says that a stored response does not
// exist, rather than its model or the endpoint.
func IsResponseNotFound(body []byte) bool {
	return gjson.GetBytes(body, "error.param").Str == "response_id"
}

// EndOfMessage returns how a complete Anthropic message ended. It has no stop_reason if the engine aborted it, and if it ended for a
// reason that vLLM has no name for there, as a repetition.
func EndOfMessage(body []byte) ResponseEnd {
	switch {
	case gjson.GetBytes(body, "type").Str != "message" || gjson.GetBytes(body, "stop_reason").Type == gjson.String:
		return EndExplained
	case gjson.GetBytes(body, "usage.output_tokens").Raw == "0":
		return EndAborted
	}
	return EndUnexplained
}
