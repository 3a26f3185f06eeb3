package sim

import (
	"bytes"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"strconv"
	"unicode/utf8"

	"github.com/tidwall/gjson"
)

// fields are the members of a request's body. Of duplicate keys the last one counts.
type fields map[string]gjson.Result

// maxNesting is the depth up to which gjson, which recurses, may parse a body.
const maxNesting = 10_000

// readBody reads a JSON object. Its errors are vLLM's.
func readBody(r *http.Request) (fields, error) {
	var buf bytes.Buffer
	if r.ContentLength > 0 {
		buf.Grow(int(min(r.ContentLength, 64<<20)) + bytes.MinRead)
	}
	_, err := buf.ReadFrom(r.Body)
	raw := buf.Bytes()
	mediaType, _, typeErr := mime.ParseMediaType(r.Header.Get("Content-Type"))
	switch {
	case err != nil:
		return nil, apiError{status: http.StatusBadRequest, detail: "There was an error parsing the body"}
	case typeErr != nil || mediaType != "application/json":
		return nil, apiError{status: http.StatusBadRequest, kind: "Bad Request",
			message: "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"}
	case len(raw) == 0:
		return nil, validationError("body", "Field required")
	case !utf8.Valid(raw):
		return nil, apiError{status: http.StatusBadRequest, detail: "There was an error parsing the body"}
	case bytes.Count(raw, []byte("["))+bytes.Count(raw, []byte("{")) > maxNesting || !gjson.ValidBytes(raw):
		return nil, validationError("body", "JSON decode error")
	}
	body := gjson.ParseBytes(raw)
	if !body.IsObject() {
		return nil, validationError("body", "Input should be a valid dictionary or object to extract fields from")
	}
	in := make(fields)
	body.ForEach(func(key, value gjson.Result) bool {
		in[key.Str] = value
		return true
	})
	return in, nil
}

// has reports whether key is present and not null.
func (in fields) has(key string) bool { return in[key].Type != gjson.Null }

// validateTypes checks that the required fields are present, and the types of fields
// that several endpoints share.
func (in fields) validateTypes(required ...string) error {
	for _, key := range required {
		if !in.has(key) {
			return validationError("body."+key, "Field required")
		}
	}
	for _, key := range [...]string{"model", "cache_salt"} {
		if in.has(key) && in[key].Type != gjson.String {
			return validationError("body."+key, "Input should be a valid string")
		}
	}
	for _, key := range [...]string{"max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n"} {
		if _, err := strconv.Atoi(in[key].Str); in.has(key) && in[key].Type != gjson.Number && err != nil {
			return validationError("body."+key, "Input should be a valid integer")
		}
	}
	return nil
}

// validateMessages checks messages of a chat.
func (in fields) validateMessages() error {
	if !in["messages"].IsArray() {
		return validationError("body.messages", "Input should be a valid list")
	}
	for i, m := range in["messages"].Array() {
		switch at := "body.messages." + strconv.Itoa(i); {
		case !m.IsObject():
			return validationError(at, "Input should be a valid dictionary")
		case m.Get("role").Type != gjson.String:
			return validationError(at+".role", "Field required")
		}
	}
	return nil
}

// hasLoneSurrogate reports whether a JSON string has half of a surrogate pair among
// its escapes, which Python decodes to something that tokenizers refuse.
func hasLoneSurrogate(raw string) bool {
	for i := 0; i+5 < len(raw); i++ {
		if raw[i] != '\\' {
			continue
		}
		if raw[i+1] != 'u' {
			i++ // an escape of two bytes, perhaps of a backslash
			continue
		}
		v, _ := strconv.ParseUint(raw[i+2:i+6], 16, 16)
		i += 5
		if v < 0xD800 || v > 0xDFFF {
			continue
		}
		if v >= 0xDC00 || i+6 >= len(raw) || raw[i+1] != '\\' || raw[i+2] != 'u' {
			return true
		}
		low, _ := strconv.ParseUint(raw[i+3:i+7], 16, 16)
		if low < 0xDC00 || low > 0xDFFF {
			return true
		}
		i += 6
	}
	return false
}

// apiError is an error in the form that vLLM has for OpenAI's clients.
type apiError struct {
	status  int
	kind    string
	message string
	param   string // empty: null

	detail string // FastAPI's own form, in place of kind, message and param
}

func (e apiError) Error() string { return e.message }

func (e apiError) body() []byte {
	if e.detail != "" {
		return append(appendQuoted([]byte(`{"detail":`), e.detail), '}')
	}
	b := appendQuoted([]byte(`{"error":{"message":`), e.message)
	b = appendQuoted(append(b, `,"type":`...), e.kind)
	b = append(b, `,"param":`...)
	if e.param == "" {
		b = append(b, "null"...)
	} else {
		b = appendQuoted(b, e.param)
	}
	b = append(b, `,"code":`...)
	b = strconv.AppendInt(b, int64(e.status), 10)
	return append(b, "}}"...)
}

// asAPIError returns err as an apiError: one with status 500 unless it is one.
func asAPIError(err error) apiError {
	var e apiError
	if !errors.As(err, &e) {
		e = apiError{status: http.StatusInternalServerError, kind: "InternalServerError", message: err.Error()}
	}
	return e
}

// writeError responds with err: a 500 unless it is an apiError.
func writeError(w http.ResponseWriter, err error) {
	e := asAPIError(err)
	writeJSON(w, e.status, e.body())
}

// badRequest is an error of vLLM's serving layer.
func badRequest(param, message string) apiError {
	return apiError{status: http.StatusBadRequest, kind: "BadRequestError", message: message, param: param}
}

// badParam is a badRequest that names its parameter.
func badParam(param, format string, args ...any) apiError {
	return badRequest(param, fmt.Sprintf(format, args...)+" (parameter="+param+")")
}

func unknownModel(name, validModels string) apiError {
	return apiError{status: http.StatusNotFound, kind: "NotFoundError",
		message: fmt.Sprintf("The model `%s` does not exist. Valid aliases: %s.", name, validModels), param: "model"}
}

func promptTooLong(maxTokens int) apiError {
	return badRequest("input_tokens", fmt.Sprintf("This model's maximum context length is %d tokens. "+
		"However, your prompt contains at least %d input tokens, which exceeds this limit even without any output tokens. "+
		"Please reduce the length of the input prompt. (parameter=input_tokens, value=%d)", maxTokens, maxTokens+1, maxTokens+1))
}

// outputTooLong is the error for a maximum of the output that is beyond the context length.
func outputTooLong(param string, tokens, maxTokens int) apiError {
	return badRequest(param, fmt.Sprintf("%s=%d cannot be greater than max_model_len=%d. Please request fewer output tokens. "+
		"(parameter=%[1]s, value=%d)",
		param, tokens, maxTokens, tokens))
}

// validationError is the 400 of FastAPI and pydantic. Its message is only similar
// to theirs.
func validationError(param, message string) apiError {
	return apiError{status: http.StatusBadRequest, kind: "Bad Request", message: "1 validation error:\n  " + param + ": " + message,
		param: param}
}

//lint:ignore ST1005 the wording is vLLM's
var errEngineDead = errors.New("EngineCore encountered an issue. See stack trace (above) for the root cause.")

// errQueueFull is the refusal of vLLM's --max-num-queued-reqs.
var errQueueFull = apiError{status: http.StatusServiceUnavailable, kind: "Service Unavailable",
	message: "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."}

//lint:ignore ST1005 the wording is vLLM's
var errTransferFailed = errors.New("Internal server error")

// appendErrorEvent appends the end of a stream that fails. It has vLLM's spaces, unlike all its other JSON.
func appendErrorEvent(b []byte, e apiError) []byte {
	b = appendQuoted(append(b, `data: {"error": {"message": `...), e.message)
	b = appendQuoted(append(b, `, "type": `...), e.kind)
	return append(b, `, "param": null, "code": `+strconv.Itoa(e.status)+"}}\n\ndata: [DONE]\n\n"...)
}
