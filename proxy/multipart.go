package proxy

import (
	"bytes"
	"errors"
	"mime"
	"net/textproto"
	"strings"

	"warmroute/router/prompt"
)

const (
	maxFormNameBytes   = 1 << 10
	maxPartHeaderBytes = 8 << 10
	// maxFormParts is the limit of starlette, which vLLM parses forms with.
	maxFormParts = 2000
	// uploadPromptBytes is the load of an upload, in bytes of prompt. It does not depend on the
	// size: a window of audio is a fixed number of positions (1,500) for the encoder.
	uploadPromptBytes = 6000
)

var (
	errNotMultipart = errors.New("not a multipart form")
	errAmbiguous    = errors.New("the multipart form is ambiguous: each part needs one line Content-Disposition: form-data; name=\"...\"," +
		" lines end in CRLF, and the boundary is given once")
	errTwoModels = errors.New(`"model" is given twice`) // the replica would take the last one, and another reader the first
	errTwoXArgs  = errors.New(`"vllm_xargs" is given twice`)
)

// formFields are the fields of a form that are read here; empty if absent.
type formFields struct {
	model string
	xargs []byte // vllm_xargs, which vLLM parses as JSON
}

// parseForm finds the model of a multipart upload, which is forwarded unchanged. What is not a form at
// all is left to the replica to refuse.
func (r *request) parseForm() *apiError {
	if len(r.input.body) == 0 {
		return invalidRequestError("", "the request body is empty: a multipart form was expected")
	}
	fields, err := parseFormFields(r.httpReq.Header["Content-Type"], r.input.body)
	limited := r.account != nil && r.account.Models != nil
	switch {
	case err == errTwoModels:
		return invalidRequestError("model", err.Error())
	case err == errTwoXArgs:
		return invalidRequestError("vllm_xargs", err.Error())
	case err == errAmbiguous:
		return invalidRequestError("", err.Error())
	case err != nil && limited: // the replica could find a model in it that this key may not use
		return invalidRequestError("", "the request body must be a multipart form, since this API key is limited to some models")
	}
	if apiErr := r.checkFormTransferParams(fields.xargs); apiErr != nil {
		return apiErr
	}
	_, apiErr := r.setModelBackends(fields.model)
	r.input.request.Bytes = uploadPromptBytes
	r.input.request.Sequences = 1
	r.input.request.BodyBytes = cap(r.input.body)
	return apiErr
}

// checkFormTransferParams is checkTransferParams for a form's vllm_xargs. JSON that is not understood here is
// refused, since vLLM might understand it.
func (r *request) checkFormTransferParams(xargs []byte) *apiError {
	if len(xargs) == 0 || r.allowsTransferParams() {
		return nil
	}
	pr := &r.input.scratch.prompt
	if err := pr.Parse(prompt.Other, xargs); err != nil {
		return invalidRequestError("vllm_xargs", "vllm_xargs must be a JSON object: "+err.Error())
	}
	return r.checkTransferParams(pr)
}

// parseFormFields returns the fields of a form that are read here. Parsers of forms differ, and a client
// that can make the replica read another model than is read here gets around the models of its key.
// So this accepts only what all of them read alike, and what the usual clients write. It is not
// mime/multipart, which accepts preambles, folded and LF-ended lines, blanks behind a boundary and,
// silently, a Content-Disposition that it cannot parse.
func parseFormFields(contentType []string, body []byte) (fields formFields, err error) {
	boundary, err := parseFormBoundary(contentType)
	if err != nil {
		return formFields{}, err
	}
	between := []byte("\r\n--" + boundary)
	rest, ok := bytes.CutPrefix(body, between[2:])
	hasModel, hasXArgs := false, false
	for range maxFormParts {
		if !ok {
			return formFields{}, errAmbiguous
		}
		if after, ended := bytes.CutPrefix(rest, []byte("--")); ended && (len(after) == 0 || bytes.HasPrefix(after, []byte("\r\n"))) {
			return fields, nil // the rest is ignored by all parsers
		}
		head, data, whole := bytes.Cut(rest, []byte("\r\n\r\n"))
		if !whole || len(head) > maxPartHeaderBytes || !bytes.HasPrefix(head, between[:2]) || bytes.Contains(head, between) || bytes.HasPrefix(data, between[2:]) {
			return formFields{}, errAmbiguous
		}
		name, readable := parsePartName(string(head[2:]))
		if !readable {
			return formFields{}, errAmbiguous
		}
		data, rest, ok = bytes.Cut(data, between)
		switch name {
		case "model":
			if hasModel {
				return formFields{}, errTwoModels
			}
			fields.model, hasModel = string(bytes.TrimSpace(data[:min(len(data), maxFormNameBytes)])), true
		case "vllm_xargs":
			if hasXArgs {
				return formFields{}, errTwoXArgs
			}
			fields.xargs, hasXArgs = data, true
		}
	}
	return formFields{}, errAmbiguous
}

// parseFormBoundary returns the boundary of a form.
func parseFormBoundary(contentType []string) (boundary string, err error) {
	if len(contentType) == 0 {
		return "", errNotMultipart
	}
	kind, params, err := mime.ParseMediaType(contentType[0])
	lower := strings.ToLower(strings.Join(contentType, ","))
	switch {
	case !strings.Contains(lower, "multipart/"):
		return "", errNotMultipart
	case len(contentType) > 1, err != nil, kind != "multipart/form-data", params["boundary"] == "",
		strings.ContainsAny(lower, `*\`), // boundary* is one for some readers, and \ is read in several ways
		strings.TrimSpace(params["boundary"]) != params["boundary"],
		params["charset"] != "" && !strings.EqualFold(params["charset"], "utf-8"): // starlette reads names and values by it
		return "", errAmbiguous
	}
	return params["boundary"], nil
}

// parsePartName returns the name of a field from the header of its part. ok is false if parsers may differ.
func parsePartName(header string) (name string, ok bool) {
	disposition := ""
	for line := range strings.SplitSeq(header, "\r\n") {
		key, value, isHeader := strings.Cut(line, ":")
		if !isHeader || !isToken(key) || strings.ContainsAny(value, "\r\n\x00") {
			return "", false // a folded line, or one that ends elsewhere for other readers
		}
		switch value = textproto.TrimString(value); strings.ToLower(key) {
		case "content-disposition":
			if disposition != "" {
				return "", false
			}
			disposition = value
		case "content-transfer-encoding":
			if value = strings.ToLower(value); value != "7bit" && value != "8bit" && value != "binary" {
				return "", false // some decode it
			}
		}
	}
	kind, params, err := mime.ParseMediaType(disposition)
	name, named := params["name"]
	lower := strings.ToLower(disposition)
	ok = err == nil && kind == "form-data" && named && !strings.ContainsAny(name, `\"`) &&
		strings.Count(lower, "name*") == strings.Count(lower, "filename*") && // name* is a name for some
		!strings.Contains(disposition, `\\"`) // does the quotation end here? Python finds not
	return name, ok
}

// isToken reports whether s is valid as the name of a header.
func isToken(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(c rune) bool {
		return c <= ' ' || c >= 0x7f || strings.ContainsRune(`()<>@,;:\"/[]?={}`, c)
	})
}
