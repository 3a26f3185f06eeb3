package admit

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"strings"

	"warmroute/prompt"
)

// formOutputLimit is the field of a form that limits the output tokens.
const formOutputLimit = "max_completion_tokens"

// ErrFormCharset is the error for values that the charset of a form may not have.
var ErrFormCharset = errors.New("the multipart form needs the charset utf-8, or none")

// FormEdits returns the edits that change a form, in its order: the fields are set as the members of a JSON body are, to the
// string, or else to the JSON, that is the member's value. A field that is missing becomes the first. Nothing is edited in
// a form that ParseForm does not accept.
func FormEdits(contentType []string, body []byte, c *prompt.Changes) (edits []prompt.Edit, err error) {
	boundary, isUTF8, err := parseFormContentType(contentType)
	if err != nil {
		return nil, err
	}
	values := make([]string, len(c.Set))
	for i, m := range c.Set {
		values[i] = formValue(m.Value)
		switch {
		case !isUTF8 && !isASCII([]byte(values[i])):
			return nil, ErrFormCharset
		case strings.Contains("\r\n"+values[i], "\r\n--"+boundary):
			return nil, errAmbiguous
		}
	}
	found := make([]bool, len(c.Set))
	limit, hasLimit := strconv.Itoa(c.MaxOutputTokens), c.MaxOutputTokens == 0
	err = readParts(boundary, body, func(name string, data []byte, at int, encoded bool) error {
		edit := prompt.Edit{Start: at, End: at + len(data)}
		switch i := slices.IndexFunc(c.Set, func(m prompt.Member) bool { return m.Name == name }); {
		case i >= 0:
			found[i], edit.Text = true, values[i]
		case name != formOutputLimit || c.MaxOutputTokens == 0:
			return nil
		default:
			hasLimit = true
			if prompt.IsAtMost(string(bytes.TrimSpace(data)), c.MaxOutputTokens) {
				return nil
			}
			edit.Text = limit
		}
		if encoded {
			return errAmbiguous
		}
		edits = append(edits, edit)
		return nil
	})
	if err != nil {
		return nil, err
	}
	var inserted strings.Builder
	insert := func(name, value string) {
		inserted.WriteString("--" + boundary + "\r\nContent-Disposition: form-data; name=\"" + name + "\"\r\n\r\n" + value + "\r\n")
	}
	for i, m := range c.Set {
		if !found[i] {
			insert(m.Name, values[i])
		}
	}
	if !hasLimit {
		insert(formOutputLimit, limit)
	}
	if inserted.Len() > 0 {
		at := len(body) - len(trimLeadingEmptyLines(body))
		edits = slices.Insert(edits, 0, prompt.Edit{Start: at, End: at, Text: inserted.String()})
	}
	return edits, nil
}

// formValue returns a member's value as that of a form's field: a string without its quotes, and any other value as JSON.
func formValue(value string) string {
	var text string
	if strings.HasPrefix(value, `"`) && json.Unmarshal([]byte(value), &text) == nil {
		return text
	}
	return value
}
