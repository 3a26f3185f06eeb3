package sim

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"
)

// apiError is an error as vLLM shows it to OpenAI's clients.
type apiError struct {
	status  int
	kind    string
	message string
	param   string // empty: null

	detail string // FastAPI's own form, which replaces all of the above but the status
}

func (e apiError) Error() string { return e.message }

func (e apiError) body() []byte {
	if e.detail != "" {
		return append(quote([]byte(`{"detail":`), e.detail), '}')
	}
	b := quote([]byte(`{"error":{"message":`), e.message)
	b = quote(append(b, `,"type":`...), e.kind)
	b = append(b, `,"param":`...)
	if e.param == "" {
		b = append(b, "null"...)
	} else {
		b = quote(b, e.param)
	}
	b = append(b, `,"code":`...)
	b = strconv.AppendInt(b, int64(e.status), 10)
	return append(b, "}}"...)
}

// writeError answers with err, which is a 500 unless it is an apiError.
func writeError(w http.ResponseWriter, err error) {
	var e apiError
	if !errors.As(err, &e) {
		e = apiError{status: http.StatusInternalServerError, kind: "InternalServerError", message: err.Error()}
	}
	writeJSON(w, e.status, e.body())
}

// badRequest is a request that parsed, but that vLLM's serving layer refuses.
func badRequest(param, message string) apiError {
	return apiError{status: http.StatusBadRequest, kind: "BadRequestError", message: message, param: param}
}

// badParam is the same, in the form of errors that name their parameter.
func badParam(param, format string, args ...any) apiError {
	return badRequest(param, fmt.Sprintf(format, args...)+" (parameter="+param+")")
}

func unknownModel(name, valid string) apiError {
	return apiError{status: http.StatusNotFound, kind: "NotFoundError",
		message: fmt.Sprintf("The model `%s` does not exist. Valid aliases: %s.", name, valid), param: "model"}
}

func tooLong(limit int) apiError {
	return badRequest("input_tokens", fmt.Sprintf("This model's maximum context length is %d tokens. "+
		"However, your prompt contains at least %d input tokens, which exceeds this limit even without any output tokens. "+
		"Please reduce the length of the input prompt. (parameter=input_tokens, value=%d)", limit, limit+1, limit+1))
}

// invalid is one entry of pydantic's complaint about a body.
type invalid struct{ kind, at, message, input, context string }

func (v invalid) String() string {
	text := fmt.Sprintf("{'type': '%s', 'loc': '%s', 'msg': '%s', 'input': '%s'", v.kind, v.at, v.message, v.input)
	if v.context != "" {
		text += ", 'ctx': {'error': '" + v.context + "'}"
	}
	return text + "}"
}

// mostShown bounds how many findings are written out.
const mostShown = 10

// validation is the 400 that FastAPI's and pydantic's findings become.
func validation(found ...invalid) apiError {
	message := "1 validation error:"
	if len(found) > 1 {
		message = fmt.Sprintf("%d validation errors:", len(found))
	}
	for i, v := range found {
		if i == mostShown {
			message += fmt.Sprintf("\n  ...and %d more errors", len(found)-i)
			break
		}
		message += "\n  " + v.String()
	}
	return apiError{status: http.StatusBadRequest, kind: "Bad Request", message: message, param: found[0].at}
}

const engineDead = "EngineCore encountered an issue. See stack trace (above) for the root cause."

//lint:ignore ST1005 the wording is vLLM's
var errEngineDead = errors.New(engineDead)

// engineDeadEvent is spaced as vLLM spaces it, unlike all its other JSON.
const engineDeadEvent = `data: {"error": {"message": "` + engineDead + `", "type": "InternalServerError", "param": null, "code": 500}}` +
	"\n\ndata: [DONE]\n\n"
