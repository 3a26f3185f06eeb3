package proxy

import (
	"bytes"
	"io"
	"mime"
	"mime/multipart"
)

const (
	mostFormParts   = 64
	longestFormName = 1 << 10
	// uploadTokens is what an upload counts in the load, whatever its bytes:
	// a window of audio is a fixed number of positions for its encoder.
	uploadTokens = 1500
)

// readForm finds the model of a multipart upload. The upload itself is passed
// on as it is; a form that cannot be read is the replica's to refuse.
func (x *exchange) readForm() *apiError {
	_, fault := x.resolve(formModel(x.r.Header.Get("Content-Type"), x.input.body))
	x.input.request.Tokens = uploadTokens
	x.input.request.Sequences = 1
	return fault
}

func formModel(contentType string, body []byte) string {
	_, params, err := mime.ParseMediaType(contentType)
	if err != nil || params["boundary"] == "" {
		return ""
	}
	form := multipart.NewReader(bytes.NewReader(body), params["boundary"])
	for range mostFormParts {
		part, err := form.NextRawPart()
		if err != nil {
			return ""
		}
		if part.FormName() == "model" {
			value, _ := io.ReadAll(io.LimitReader(part, longestFormName))
			return string(bytes.TrimSpace(value))
		}
	}
	return ""
}
