package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"
)

// decodeYAML decodes a file, which must be a single document. The parser rejects
// a document that consists mostly of aliases, so that they cannot exhaust memory.
func decodeYAML(data []byte) (map[string]any, error) {
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	var given map[string]any
	if err := decoder.Decode(&given); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	var next yaml.Node
	if err := decoder.Decode(&next); err == nil {
		return nil, fmt.Errorf("line %d: a second document begins; only one is allowed", next.Line)
	} else if !errors.Is(err, io.EOF) {
		return nil, err
	}
	return given, nil
}

// addYAMLErrors adds the errors of the YAML parser about a file.
func (e *errorList) addYAMLErrors(file string, data []byte, known []string, err error) {
	var several *yaml.LoadErrors
	var one *yaml.LoadError
	switch {
	case errors.As(err, &several):
		for _, one := range several.Errors {
			e.addYAMLError(file, data, known, one)
		}
	case errors.As(err, &one):
		e.addYAMLError(file, data, known, one)
	default:
		e.add(file, "%v", err)
	}
}

func (e *errorList) addYAMLError(file string, data []byte, known []string, err *yaml.LoadError) {
	line, message := describeSyntaxError(data, err)
	if message == "" {
		line, message = redactYAMLError(data, known, err)
	}
	if line > 0 {
		file = fmt.Sprintf("%s: line %d", file, line)
	}
	e.add(file, "%s", message)
}

// describeSyntaxError returns the line of the mistake that the YAML parser reports, and what is
// wrong there; "" if it is not one of syntax. It quotes nothing of the file but one character.
func describeSyntaxError(data []byte, err *yaml.LoadError) (line int, message string) {
	at, start := err.Mark, err.ContextMark
	rest := textAt(data, at.Line, at.Column)
	switch {
	case err.Stage == yaml.ReaderStage:
		line, character := firstUnreadable(data)
		return line, fmt.Sprintf("%q is not allowed; write the file as UTF-8 text", character)
	case err.Stage == yaml.ScannerStage && indentedWithTab(data, at.Line, at.Column):
		return at.Line, "is indented with a tab; use spaces"
	case strings.HasPrefix(err.Message, "found character that cannot start") && len(rest) > 0:
		return at.Line, fmt.Sprintf("a value cannot begin with %q; put it in quotes", rest[0])
	case err.ContextMsg == "while scanning a quoted scalar":
		return start.Line, "a quoted value begins that does not end; add the closing quote"
	case err.ContextMsg == "while parsing a flow sequence":
		return start.Line, "a list in brackets begins that does not end; add the ] or the , that is missing"
	case err.ContextMsg == "while parsing a flow mapping":
		return start.Line, "a mapping in braces begins that does not end; add the } or the , that is missing"
	case strings.HasPrefix(err.Message, "did not find expected node content"):
		return at.Line, "a value is missing, or a list in brackets or a mapping in braces that begins before does not end"
	case strings.HasPrefix(err.Message, "could not find expected ':'"):
		return start.Line, `has no ":" after the name of the setting`
	case strings.HasPrefix(err.Message, "mapping values are not allowed"):
		return at.Line, `has an unexpected ":"; put a value that contains ": " in quotes, and check the indentation and that the line before ` +
			`it ends as intended`
	case strings.HasPrefix(err.Message, "did not find expected"):
		return at.Line, "does not continue the section or list above it; check the indentation and the quotes"
	case strings.Contains(err.Message, "map[string]interface {}") && err.Stage == yaml.ConstructorStage &&
		!strings.HasPrefix(err.Message, "cannot use"):
		return at.Line, `expected settings, such as "listen: :8080"`
	}
	return 0, ""
}

// textAt returns the rest of the line of a file from a column on; both count from 1.
func textAt(data []byte, line, column int) []rune {
	lines := bytes.Split(data, []byte("\n"))
	if line < 1 || line > len(lines) {
		return nil
	}
	text := []rune(string(lines[line-1]))
	return text[min(max(0, column-1), len(text)):]
}

// indentedWithTab reports whether there are only spaces and tabs, and at least one tab, in a line
// up to its first other character, and whether column is among them or before that character.
func indentedWithTab(data []byte, line, column int) bool {
	text := string(textAt(data, line, 1))
	indent := text[:len(text)-len(strings.TrimLeft(text, " \t"))]
	return strings.Contains(indent, "\t") && column <= len(indent)+1
}

// firstUnreadable returns the line and the text of the first character that is not allowed in YAML.
func firstUnreadable(data []byte) (line int, character string) {
	line = 1
	for len(data) > 0 {
		r, size := utf8.DecodeRune(data)
		switch {
		case r == utf8.RuneError && size == 1, unicode.IsControl(r) && !strings.ContainsRune("\t\n\r\u0085", r):
			return line, string(data[:size])
		case r == '\n':
			line++
		}
		data = data[size:]
	}
	return 0, ""
}

// redactYAMLError returns the line of an error and its message, without the value that it quotes
// unless that is certainly not a secret, and with the setting where it can be told.
func redactYAMLError(data []byte, known []string, err *yaml.LoadError) (line int, message string) {
	line, message = err.Mark.Line, err.Message
	if strings.HasPrefix(message, "cannot use '") {
		return line, "a mapping cannot be the name of a setting; put strings that contain braces in quotes"
	}
	quoted := regexp.MustCompile("(?s)(anchor '|cannot construct \\S+ `)(.*)(['`])").FindStringSubmatchIndex(message)
	if quoted == nil {
		return line, message
	}
	value := message[quoted[4]:quoted[5]]
	pattern := regexp.QuoteMeta(value)
	if strings.Contains(message, "anchor ") {
		pattern = `\*` + pattern + `(?:[^\w-]|$)`
	}
	found, key, public := locateValue(data, regexp.MustCompile(pattern), known)
	if !public {
		message = message[:quoted[4]] + "***" + message[quoted[5]:]
	}
	if strings.HasPrefix(message, "unknown anchor") {
		message += "; put strings that begin with * in quotes"
	}
	if key != "" && (line == 0 || line == found) {
		message = key + ": " + message
	}
	return cmp.Or(line, found), message
}

// locateValue returns the line and the key of the first match of value in a YAML
// file, and whether all matches are values of settings that are not secret.
func locateValue(data []byte, value *regexp.Regexp, known []string) (line int, key string, public bool) {
	keyBefore := regexp.MustCompile(`([\w-]+)["']?\s*:\s+(?:[!&]\S+\s+)*["']?$`)
	number := 0
	for text := range bytes.Lines(data) {
		number++
		if bytes.HasPrefix(bytes.TrimSpace(text), []byte("#")) {
			continue
		}
		for _, at := range value.FindAllIndex(text, -1) {
			before := ""
			if m := keyBefore.FindSubmatch(text[:at[0]]); m != nil {
				before = string(m[1])
			}
			if line == 0 {
				line, key, public = number, before, true
			}
			public = public && isPublicKey(before, known)
		}
	}
	return line, key, public
}

// isPublicKey reports whether key is the last part of the path of a setting whose
// value neither is a secret nor contains one.
func isPublicKey(key string, known []string) bool {
	secret := []string{"admin_token", "keys", "backends", "url"}
	return !slices.Contains(secret, key) && slices.ContainsFunc(known, func(path string) bool {
		return path == key || strings.HasSuffix(path, "."+key)
	})
}
