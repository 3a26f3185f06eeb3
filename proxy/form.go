package proxy

import (
	"bytes"
	"io"
	"mime"
	"mime/multipart"
)

const (
	longestFormName = 1 << 10
	// uploadBytes is what an upload counts in the load, in bytes of prompt and
	// whatever its own: a window of audio is a fixed number of positions (1,500)
	// for its encoder.
	uploadBytes = 6000
)

// readForm finds the model of a multipart upload. The upload itself is passed
// on as it is; a form that cannot be read is the replica's to refuse.
func (x *exchange) readForm() *apiError {
	if len(x.input.body) == 0 {
		return invalid("", "the request body is empty: a multipart form was expected")
	}
	model, twice, whole := formModel(x.r.Header.Get("Content-Type"), x.input.body)
	if twice {
		// The replica would take the last one, and another reader the first.
		return invalid("model", `"model" is given twice`)
	}
	if limited := x.holder != nil && x.holder.Models != nil; limited && (!whole || len(x.r.Header["Content-Type"]) > 1) {
		// The replica could find a model in it that this key is not for.
		return invalid("", "the multipart form cannot be read to its end, and this API key is not for every model")
	}
	_, fault := x.resolve(model)
	x.input.request.Bytes = uploadBytes
	x.input.request.Sequences = 1
	x.input.request.BodyBytes = cap(x.input.body)
	return fault
}

// formModel returns the form's field "model", "" when there is none, whether
// there is another, and whether the form could be read to its end.
func formModel(contentType string, body []byte) (model string, twice, whole bool) {
	_, params, err := mime.ParseMediaType(contentType)
	if err != nil || params["boundary"] == "" {
		return "", false, false
	}
	form := multipart.NewReader(bytes.NewReader(body), params["boundary"])
	for found := false; ; {
		part, err := form.NextRawPart()
		if err != nil {
			return model, false, err == io.EOF
		}
		if part.FormName() != "model" {
			continue
		}
		if found {
			return "", true, false
		}
		value, _ := io.ReadAll(io.LimitReader(part, longestFormName))
		model, found = string(bytes.TrimSpace(value)), true
	}
}
