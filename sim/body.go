package sim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/tidwall/gjson"
)

// fields are the members of a request's body. Of equal keys the last one counts.
type fields map[string]gjson.Result

// readBody reads a JSON object, or says what vLLM says about anything else.
func readBody(r *http.Request) (fields, error) {
	var buf bytes.Buffer
	if r.ContentLength > 0 {
		buf.Grow(int(min(r.ContentLength, 64<<20)) + bytes.MinRead)
	}
	if _, err := buf.ReadFrom(r.Body); err != nil {
		return nil, apiError{status: http.StatusBadRequest, detail: "There was an error parsing the body"}
	}
	raw := buf.Bytes()
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		return nil, apiError{status: http.StatusBadRequest, kind: "Bad Request",
			message: "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"}
	}
	if len(raw) == 0 {
		return nil, validation(invalid{kind: "missing", at: "body", message: "Field required", input: "None"})
	}
	if !utf8.Valid(raw) {
		return nil, apiError{status: http.StatusBadRequest, detail: "There was an error parsing the body"}
	}
	if err := syntax(raw); err != nil {
		return nil, err
	}
	whole := gjson.ParseBytes(raw)
	if !whole.IsObject() {
		return nil, validation(invalid{kind: "model_attributes_type", at: "body",
			message: "Input should be a valid dictionary or object to extract fields from", input: repr(whole)})
	}
	in := make(fields)
	whole.ForEach(func(key, value gjson.Result) bool {
		in[key.Str] = value
		return true
	})
	return in, nil
}

// deepest is the nesting up to which gjson, which recurses, may look at a body.
const deepest = 10_000

// syntax reports where raw stops being JSON, in the words of Python's decoder.
func syntax(raw []byte) error {
	if bytes.Count(raw, []byte("["))+bytes.Count(raw, []byte("{")) <= deepest && gjson.ValidBytes(raw) {
		return nil
	}
	var any json.RawMessage
	err := json.Unmarshal(raw, &any)
	if err == nil {
		return nil
	}
	at, why := len(raw), "Expecting value"
	var bad *json.SyntaxError
	if errors.As(err, &bad) && !strings.Contains(bad.Error(), "unexpected end") {
		at = int(bad.Offset) - 1
		switch text := bad.Error(); {
		case strings.Contains(text, "in literal"):
			// Python points at the literal's first letter.
			for at > 0 && raw[at-1] >= 'a' && raw[at-1] <= 'z' {
				at--
			}
		case strings.Contains(text, "after object key:value pair"), strings.Contains(text, "after array element"):
			why = "Expecting \\',\\' delimiter"
		case strings.Contains(text, "after object key"):
			why = "Expecting \\':\\' delimiter"
		case strings.Contains(text, "beginning of object key"):
			why = "Expecting property name enclosed in double quotes"
		case strings.Contains(text, "after top-level value"):
			why = "Extra data"
		}
	}
	return validation(invalid{"json_invalid", "body." + strconv.Itoa(at), "JSON decode error", "<dict of 0 items>", why})
}

// repr shows a value as vLLM's validation errors do.
func repr(v gjson.Result) string {
	switch {
	case v.IsObject():
		return fmt.Sprintf("<dict of %d items>", len(v.Map()))
	case v.IsArray():
		return fmt.Sprintf("<list of %d items>", len(v.Array()))
	case v.Type == gjson.Null:
		return "None"
	case v.Type == gjson.True:
		return "True"
	case v.Type == gjson.False:
		return "False"
	case v.Type == gjson.String:
		return v.Str
	}
	return v.Raw
}

// has reports whether key is there and not null.
func (in fields) has(key string) bool { return in[key].Type != gjson.Null }

// missing is the complaint about a field that is required.
func (in fields) missing(key string) invalid {
	return invalid{kind: "missing", at: "body." + key, message: "Field required", input: fmt.Sprintf("<dict of %d items>", len(in))}
}

// checkTypes finds fields of a type that pydantic would refuse.
func (in fields) checkTypes() []invalid {
	var found []invalid
	for _, key := range [...]string{"model", "cache_salt"} {
		if v := in[key]; in.has(key) && v.Type != gjson.String {
			found = append(found, invalid{kind: "string_type", at: "body." + key, message: "Input should be a valid string", input: repr(v)})
		}
	}
	for _, key := range [...]string{"max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n"} {
		v := in[key]
		if !in.has(key) || v.Type == gjson.Number {
			continue
		}
		if v.Type != gjson.String {
			found = append(found, invalid{kind: "int_type", at: "body." + key, message: "Input should be a valid integer", input: repr(v)})
		} else if _, err := strconv.Atoi(v.Str); err != nil {
			found = append(found, invalid{kind: "int_parsing", at: "body." + key,
				message: "Input should be a valid integer, unable to parse string as an integer", input: v.Str})
		}
	}
	return found
}

// checkMessages finds entries of messages that pydantic would refuse.
func checkMessages(messages gjson.Result) []invalid {
	var found []invalid
	for i, m := range messages.Array() {
		at := "body.messages." + strconv.Itoa(i) + "."
		switch {
		case !m.IsObject():
			for _, kind := range messageKinds {
				found = append(found, invalid{kind: "dict_type", at: at + kind, message: "Input should be a valid dictionary", input: repr(m)})
			}
			found = append(found, invalid{kind: "model_attributes_type", at: at + "Message",
				message: "Input should be a valid dictionary or object to extract fields from", input: repr(m)})
		case m.Get("role").Type != gjson.String:
			for _, field := range roleless {
				found = append(found, invalid{kind: "missing", at: at + field, message: "Field required", input: repr(m)})
			}
		}
	}
	return found
}

// roleless are the fields that each of those types misses when there is no role.
var roleless = [...]string{
	"ChatCompletionDeveloperMessageParam.role", "ChatCompletionSystemMessageParam.role", "ChatCompletionUserMessageParam.role",
	"ChatCompletionAssistantMessageParam.role", "ChatCompletionToolMessageParam.role", "ChatCompletionToolMessageParam.tool_call_id",
	"ChatCompletionFunctionMessageParam.name", "ChatCompletionFunctionMessageParam.role", "CustomChatCompletionMessageParam.role",
	"Message.author", "Message.role",
}

// messageKinds are the types of a message that vLLM tries in turn.
var messageKinds = [...]string{
	"ChatCompletionDeveloperMessageParam", "ChatCompletionSystemMessageParam", "ChatCompletionUserMessageParam",
	"ChatCompletionAssistantMessageParam", "ChatCompletionToolMessageParam", "ChatCompletionFunctionMessageParam",
	"CustomChatCompletionMessageParam",
}

// loneSurrogate reports half of a surrogate pair among the escapes of a JSON
// string: Python decodes it to something that no tokenizer takes.
func loneSurrogate(raw string) bool {
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
