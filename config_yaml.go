package main

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// addYAMLFaults reports what the YAML parser found in a file of that content.
func (f *faults) addYAMLFaults(file string, data []byte, known []string, err error) {
	var several *yaml.TypeError
	if !errors.As(err, &several) {
		f.add(file, "%s", explainYAMLError(strings.TrimPrefix(err.Error(), "yaml: "), data, known))
		return
	}
	for _, one := range several.Errors {
		line, message, _ := strings.Cut(one, ": ")
		// The value is all of the file, or of one of its keys.
		f.add(file+": "+line, "%s", regexp.MustCompile("(?s) `.*`").ReplaceAllString(message, ""))
	}
}

// explainYAMLError adds to a message of the YAML parser the line and the setting, where
// it leaves them out, and takes out the value that it quotes, unless that is
// surely no secret.
func explainYAMLError(message string, data []byte, known []string) string {
	if before, _, found := strings.Cut(message, "invalid map key: "); found {
		return before + "invalid map key: ***; put text with braces in quotes"
	}
	quoted := regexp.MustCompile("(?s)(anchor '|cannot decode \\S+ `)(.*)(['`])").FindStringSubmatchIndex(message)
	if quoted == nil {
		for _, start := range []string{"found ", "did not find ", "could not find ", "mapping values "} {
			if strings.HasPrefix(message, start) {
				return "line 1: " + message // the parser leaves out the number of the first line
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
		message += "; put text that begins with * in quotes"
	}
	return where + message
}

// locateValue returns the line and the key of the first match of value in a YAML file,
// each followed by a colon, and whether all matches are values of settings that are not secret.
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

// isPublicKey reports whether key is the last part of a setting's path whose value
// is not secret and holds no secrets.
func isPublicKey(key string, known []string) bool {
	secret := []string{"admin_token", "keys", "backends"}
	return !slices.Contains(secret, key) && slices.ContainsFunc(known, func(path string) bool {
		return path == key || strings.HasSuffix(path, "."+key)
	})
}
