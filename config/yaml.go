package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
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
	var several *yaml.TypeError
	if !errors.As(err, &several) {
		e.add(file, "%s", redactAndLocateError(strings.TrimPrefix(err.Error(), "yaml: "), data, known))
		return
	}
	for _, one := range several.Errors {
		line, message, _ := strings.Cut(one, ": ")
		// The parser quotes the value, which may be the whole file.
		e.add(file+": "+line, "%s", regexp.MustCompile("(?s) `.*`").ReplaceAllString(message, ""))
	}
}

// redactAndLocateError removes from a message of the YAML parser the value that it quotes,
// unless that is certainly not a secret, and adds the line and the setting where it lacks them.
func redactAndLocateError(message string, data []byte, known []string) string {
	if before, _, found := strings.Cut(message, "invalid map key: "); found {
		return before + "invalid map key: ***; put strings that contain braces in quotes"
	}
	quoted := regexp.MustCompile("(?s)(anchor '|cannot decode \\S+ `)(.*)(['`])").FindStringSubmatchIndex(message)
	if quoted == nil {
		for _, start := range []string{"found ", "did not find ", "could not find ", "mapping values "} {
			if strings.HasPrefix(message, start) {
				return "line 1: " + message // the parser omits the number of the first line
			}
		}
		return message
	}
	value := message[quoted[4]:quoted[5]]
	pattern := regexp.QuoteMeta(value)
	if strings.Contains(message, "anchor ") {
		pattern = `\*` + pattern + `(?:[^\w-]|$)`
	}
	where, public := locateValue(data, regexp.MustCompile(pattern), known)
	if !public {
		message = message[:quoted[4]] + "***" + message[quoted[5]:]
	}
	if strings.HasPrefix(message, "unknown anchor") {
		message += "; put strings that begin with * in quotes"
	}
	return where + message
}

// locateValue returns the line and the key of the first match of value in a YAML
// file, each followed by a colon, and whether all matches are values of settings
// that are not secret.
func locateValue(data []byte, value *regexp.Regexp, known []string) (where string, public bool) {
	keyBefore := regexp.MustCompile(`([\w-]+)["']?\s*:\s+(?:[!&]\S+\s+)*["']?$`)
	number := 0
	for line := range bytes.Lines(data) {
		number++
		if bytes.HasPrefix(bytes.TrimSpace(line), []byte("#")) {
			continue
		}
		for _, at := range value.FindAllIndex(line, -1) {
			key := ""
			if m := keyBefore.FindSubmatch(line[:at[0]]); m != nil {
				key = string(m[1])
			}
			if where == "" {
				where, public = fmt.Sprintf("line %d: ", number), true
				if key != "" {
					where += key + ": "
				}
			}
			public = public && isPublicKey(key, known)
		}
	}
	return where, public
}

// isPublicKey reports whether key is the last part of the path of a setting whose
// value neither is a secret nor contains one.
func isPublicKey(key string, known []string) bool {
	secret := []string{"admin_token", "keys", "backends", "url"}
	return !slices.Contains(secret, key) && slices.ContainsFunc(known, func(path string) bool {
		return path == key || strings.HasSuffix(path, "."+key)
	})
}
