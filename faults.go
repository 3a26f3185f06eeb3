package main

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
)

// faults collects what is wrong with a configuration, so that one run reports
// all of it and not the first thing found.
type faults struct {
	origin map[string]string // setting → the variable or flag that gave its value
	lines  []string
	blamed map[string]bool
}

// add records a fault of the setting at path; the message says what to do.
// Of one setting only the first is kept: a value that cannot be read would
// seem to break every rule.
func (f *faults) add(path, format string, args ...any) {
	if f.blames(path) {
		return
	}
	if f.blamed == nil {
		f.blamed = map[string]bool{}
	}
	f.blamed[path] = true
	line := onOneLine(path)
	setting, _, _ := strings.Cut(path, "[") // a list's elements come from where the list does
	if from := f.origin[setting]; from != "" {
		line += " (from " + from + ")"
	}
	f.lines = append(f.lines, line+": "+onOneLine(fmt.Sprintf(format, args...)))
}

// blames reports whether any of the settings has a fault already.
func (f *faults) blames(paths ...string) bool {
	for _, p := range paths {
		if f.blamed[p] {
			return true
		}
	}
	return false
}

// err returns nil when there was no fault.
func (f *faults) err() error {
	if len(f.lines) == 0 {
		return nil
	}
	return ConfigError(f.lines)
}

// ConfigError lists every fault of a configuration, each with the path of its
// setting and what to do.
type ConfigError []string

// Error puts each fault on a line.
func (e ConfigError) Error() string { return strings.Join(e, "\n") }

// onOneLine quotes text that would break out of its line or play with the
// terminal: keys come from a file.
func onOneLine(s string) string {
	if strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return strconv.Quote(s)
	}
	return s
}

// nearest returns the known word that s was probably meant to be, or "".
func nearest(s string, known []string) string {
	best, bestDistance := "", 3 // two slips at most: beyond that it is a guess
	for _, k := range known {
		if d := editDistance(s, k); d < bestDistance && d < len(k) {
			best, bestDistance = k, d
		}
	}
	return best
}

// editDistance counts the insertions, deletions and substitutions between two
// words, in bytes.
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
