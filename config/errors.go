package config

import (
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"syscall"
	"unicode"
)

// Errors lists the errors of a configuration, one per line: the path of the
// setting, what is wrong with it, and what to do.
type Errors []string

func (e Errors) Error() string { return strings.Join(e, "\n") }

// ErrorLines returns the lines of err if it is an Errors, else its text alone.
func ErrorLines(err error) []string {
	var list Errors
	if errors.As(err, &list) {
		return list
	}
	return []string{err.Error()}
}

// errorList collects the errors of a configuration, so that one run reports all of them.
type errorList struct {
	origin map[string]string // setting → the variable or flag that gave its value
	lines  []string
	paths  map[string]bool // settings that have an error
}

// add records an error of the setting at path. It keeps only the first one of
// each setting, since a value that cannot be read would break further rules.
func (e *errorList) add(path, format string, args ...any) {
	if e.hasAny(path) {
		return
	}
	if e.paths == nil {
		e.paths = map[string]bool{}
	}
	e.paths[path] = true
	line := quoteIfUnprintable(path)
	setting, _, _ := strings.Cut(path, "[") // the elements of a list come from where the list does
	if from := e.origin[setting]; from != "" {
		line += " (from " + from + ")"
	}
	e.lines = append(e.lines, line+": "+quoteIfUnprintable(fmt.Sprintf(format, args...)))
}

// addUnknown records that there is no setting at path, and that near was probably meant; near is empty if no setting is similar.
// The setting near counts as one with an error: what is wrong with its default follows from the name.
func (e *errorList) addUnknown(path, near, format string, args ...any) {
	e.add(path, format, args...)
	if near != "" {
		e.paths[near] = true
	}
}

func (e *errorList) hasAny(paths ...string) bool {
	for _, p := range paths {
		if e.paths[p] {
			return true
		}
	}
	return false
}

// err returns the list as an Errors, or nil when it is empty.
func (e *errorList) err() error {
	if len(e.lines) == 0 {
		return nil
	}
	return Errors(e.lines)
}

// quoteIfUnprintable quotes text that contains line breaks or control
// characters: keys and values come from a file.
func quoteIfUnprintable(s string) string {
	if strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return strconv.Quote(s)
	}
	return s
}

func explainReadError(source, path string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s %s: no such file", source, path)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s %s: permission denied", source, path)
	case errors.Is(err, syscall.EISDIR):
		return fmt.Errorf("%s %s is a directory, expected a file", source, path)
	}
	return err
}

// nearestWord returns the known word that s most likely stands for: the nearest one within two edits, or "".
func nearestWord(s string, known []string) string {
	best, bestDistance := "", 3
	for _, k := range known {
		if d := editDistance(s, k); d < bestDistance && d < len(k) {
			best, bestDistance = k, d
		}
	}
	return best
}

func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			substitute := diagonal
			if a[i] != b[j] {
				substitute++
			}
			diagonal = row[j+1]
			row[j+1] = min(substitute, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
