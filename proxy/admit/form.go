package admit

import (
	"bytes"
	"errors"
	"net/textproto"
	"regexp"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/http/httpguts"
)

const (
	MaxFormNameBytes   = 1 << 10
	MaxPartHeaderBytes = 8 << 10
	// MaxFormParts is the limit of starlette, which vLLM parses forms with.
	MaxFormParts = 2000
	// UploadPromptBytes is the load of an upload, in bytes of prompt: a window of audio is 1,500 positions, whatever its size.
	UploadPromptBytes = 6000
)

var (
	ErrNotMultipart = errors.New("not a multipart form")
	errAmbiguous    = errors.New("the multipart form is ambiguous: each part needs one line Content-Disposition: form-data; name=\"...\"," +
		" lines end in CRLF, the boundary is given once, and the model is not encoded")
	errTwoModels = errors.New(`"model" is given twice`) // the replica would take the last one, and another reader the first
	errTwoXArgs  = errors.New(`"vllm_xargs" is given twice`)

	AmbiguousFields = map[error]string{errTwoModels: "model", errTwoXArgs: "vllm_xargs"} // constant
)

// Form has the fields of a multipart form that are read here; empty if absent.
type Form struct {
	Model string
	Xargs []byte // vllm_xargs, which vLLM parses as JSON
}

// ParseForm returns the fields of a form that are read here. A client that can make the replica read another model than is
// read here gets around the models of its key. So this accepts what vLLM's parser accepts, which is starlette's with
// python-multipart, unless another could find other fields. mime/multipart accepts preambles, folded and LF-ended lines, blanks
// behind a boundary and, silently, a Content-Disposition that it cannot parse.
func ParseForm(contentType []string, body []byte) (fields Form, err error) {
	boundary, isUTF8, err := parseFormContentType(contentType)
	if err != nil {
		return Form{}, err
	}
	hasModel, hasXArgs := false, false
	err = readParts(boundary, body, func(name string, data []byte, _ int, encoded bool) error {
		switch {
		case name != "model" && name != "vllm_xargs":
		case encoded, !isUTF8 && !isASCII(data):
			return errAmbiguous
		case name == "model" && hasModel:
			return errTwoModels
		case name == "model":
			fields.Model, hasModel = string(bytes.TrimSpace(data[:min(len(data), MaxFormNameBytes)])), true
		case hasXArgs:
			return errTwoXArgs
		default:
			fields.Xargs, hasXArgs = data, true
		}
		return nil
	})
	if err != nil {
		return Form{}, err
	}
	return fields, nil
}

// readParts calls read with each part of a form: its name, its data and their index in body, and whether some parsers decode
// them. It fails if parsers may differ about the parts, or with read's error.
func readParts(boundary string, body []byte, read func(name string, data []byte, at int, encoded bool) error) error {
	between := []byte("\r\n--" + boundary)
	rest, ok := bytes.CutPrefix(trimLeadingEmptyLines(body), between[2:])
	for range MaxFormParts {
		if !ok {
			return errAmbiguous
		}
		if isFormEnd(rest) {
			return nil // the rest is ignored by all parsers
		}
		head, data, whole := bytes.Cut(rest, []byte("\r\n\r\n"))
		if !whole || len(head) > MaxPartHeaderBytes || !bytes.HasPrefix(head, between[:2]) || bytes.Contains(head, between) ||
			bytes.HasPrefix(data, between[2:]) {
			return errAmbiguous
		}
		name, encoded, readable := parsePartHeader(string(head[2:]))
		if !readable {
			return errAmbiguous
		}
		at := len(body) - len(data)
		data, rest, ok = bytes.Cut(data, between)
		if err := read(name, data, at, encoded); err != nil {
			return err
		}
	}
	return errAmbiguous
}

// trimLeadingEmptyLines returns a form without the empty lines that it begins with.
func trimLeadingEmptyLines(form []byte) []byte {
	trimmed := bytes.TrimLeft(form, "\r\n")
	if n := len(form) - len(trimmed); n > 0 && form[n-1] != '\n' { // a CR ends no line
		return form
	}
	return trimmed
}

// isFormEnd reports whether a boundary that rest follows is the last one.
func isFormEnd(rest []byte) bool {
	after, ok := bytes.CutPrefix(rest, []byte("--"))
	after = bytes.TrimLeft(after, " \t")
	return ok && (len(after) == 0 || after[0] == '\n' || bytes.HasPrefix(after, []byte("\r\n")))
}

// asciiCharset matches charsets in which ASCII characters are single bytes of their own, by names that Python knows.
var asciiCharset = regexp.MustCompile(`^(?i:utf-?8|us-ascii|ascii|latin-?1|iso-?8859-[0-9]{1,2}|(windows-|cp)125[0-9])$`)

// parseFormContentType returns the boundary of a form, and whether its names and values are UTF-8, else in a charset that
// contains ASCII.
func parseFormContentType(contentType []string) (boundary string, isUTF8 bool, err error) {
	lower := strings.ToLower(strings.Join(contentType, ","))
	if !strings.Contains(lower, "multipart/") {
		return "", false, ErrNotMultipart
	}
	kind, params, ok := parseHeaderParams(contentType[0])
	boundary, charset := params["boundary"], params["charset"]
	if len(contentType) > 1 || !ok || kind != "multipart/form-data" || boundary == "" || !isASCII([]byte(boundary)) ||
		strings.ContainsAny(lower, `*\`) || // boundary* is one for some readers, and \ is read in several ways
		strings.TrimSpace(boundary) != boundary || charset != "" && !asciiCharset.MatchString(charset) {
		return "", false, errAmbiguous
	}
	return boundary, charset == "" || strings.EqualFold(charset, "utf-8") || strings.EqualFold(charset, "utf8"), nil
}

// isASCII reports whether all bytes of b are ASCII.
func isASCII(b []byte) bool {
	return !bytes.ContainsFunc(b, func(c rune) bool { return c >= utf8.RuneSelf })
}

// parsePartHeader returns the name of a field, and whether some parsers decode its value. ok is false if they may differ about
// the name.
func parsePartHeader(header string) (name string, encoded, ok bool) {
	disposition := ""
	for line := range strings.SplitSeq(header, "\r\n") {
		key, value, isHeader := strings.Cut(line, ":")
		if !isHeader || !httpguts.ValidHeaderFieldName(key) || strings.ContainsAny(value, "\r\n\x00") {
			return "", false, false // a folded line, or one that ends elsewhere for other readers
		}
		switch value = textproto.TrimString(value); strings.ToLower(key) {
		case "content-disposition":
			if disposition != "" {
				return "", false, false
			}
			disposition = value
		case "content-transfer-encoding":
			value = strings.ToLower(value)
			encoded = encoded || value != "7bit" && value != "8bit" && value != "binary"
		}
	}
	kind, params, ok := parseHeaderParams(disposition)
	name, named := params["name"]
	lower := strings.ToLower(disposition)
	return name, encoded, ok && kind == "form-data" && named && !strings.ContainsAny(name, `\"'`) &&
		strings.Count(lower, "name*") == strings.Count(lower, "filename*") // name* is a name for some
}

// headerParam matches a semicolon with the parameter that may follow it: its name, and its value in quotes or without. A value
// without them may be more than a token, as file names and boundaries are.
var headerParam = regexp.MustCompile(`^;[ \t]*(?:([\w!#$%&'*+.^|~-]+)[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|([^"\\;]*)))?[ \t]*`)

// parseHeaderParams returns the value of a header and its parameters, with names in lower case. ok is false if parsers may differ
// about them.
func parseHeaderParams(header string) (value string, params map[string]string, ok bool) {
	end := strings.IndexByte(header+";", ';')
	value, rest := strings.ToLower(strings.Trim(header[:end], " \t")), header[end:]
	params = map[string]string{}
	for rest != "" {
		m := headerParam.FindStringSubmatch(rest)
		if m == nil {
			return "", nil, false
		}
		rest = rest[len(m[0]):]
		name, unquoted := strings.ToLower(m[1]), strings.TrimRight(m[3], " \t")
		_, twice := params[name]
		if twice || strings.ContainsAny(unquoted, " \t") && strings.Contains(unquoted, "=") { // two parameters, for a lenient parser
			return "", nil, false
		}
		if name != "" {
			params[name] = m[2] + unquoted
		}
	}
	return value, params, !strings.Contains(header, `\\"`) // does the quotation end here? Python finds not
}
