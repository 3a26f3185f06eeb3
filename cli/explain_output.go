package cli

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"warmroute/proxy"
	"warmroute/router"
	"warmroute/router/estimate"
	"warmroute/router/policy"
	"warmroute/router/step"
)

const (
	explainColumns    = 96 // text is wrapped here, and a longer row's note gets its own line
	maxBackendName    = 20 // characters of a backend's name in the table
	minExponentNumber = 1e12
)

// writeExplanation writes a table of the backends and the reason for the choice.
func writeExplanation(out io.Writer, e *proxy.Explanation) error {
	var s strings.Builder
	fmt.Fprintf(&s, "about %s prompt tokens in %d blocks of %d bytes; model %s, policy %s",
		formatIntegerWithCommas(float64(e.PromptTokens)), e.Blocks, e.BlockBytes, cmp.Or(stripUnprintable(e.Model), "-"),
		stripUnprintable(e.Policy))
	if e.Conversation != "" {
		fmt.Fprintf(&s, ", conversation from %s", stripUnprintable(e.Conversation))
	}
	s.WriteString("\n\n")
	list := backendsBestFirst(e)
	score := "SCORE"
	if slices.ContainsFunc(list, func(b router.BackendExplanation) bool { return b.Terms != nil }) {
		score = "COST"
	}
	rows := [][]string{{"", "BACKEND", "PREDICTED", "UNCACHED", "IN-FLIGHT", "KV", "TOKENS/S", "WAIT", "STEP", "TTFT", score, ""}}
	for _, b := range list {
		rows = append(rows, formatBackendRow(&b, b.Candidate && b.Name == e.Choice))
	}
	writeAlignedColumns(&s, rows)
	meanings := writeLowestCosts(&s, list)
	hasSteps := writeSteps(&s, list)
	legend := fmt.Sprintf("PREDICTED: prompt tokens predicted to be cached there. UNCACHED: those to compute, at least %d. "+
		"IN-FLIGHT: sequences on it. KV: use of its cache, as last reported. TOKENS/S: at which UNCACHED are computed. WAIT: seconds "+
		"before that, for what is computed before them, tokens to fetch, an adapter to load and room in the cache. STEP: seconds that "+
		"the steps and the network take beside that. TTFT: predicted seconds to the first token, WAIT + UNCACHED / TOKENS/S + STEP.",
		estimate.MinUncachedTokens)
	switch {
	case len(meanings) > 0:
		legend += " COST: the sum of its terms, in seconds. " + strings.Join(meanings, " ")
	case e.ScoreIs != "" && e.HighestWins:
		legend += " " + score + ": " + stripUnprintable(e.ScoreIs) + "; the highest wins."
	case e.ScoreIs != "":
		legend += " " + score + ": " + stripUnprintable(e.ScoreIs) + "; the lowest wins."
	}
	if hasSteps {
		legend += " STEP of a backend: what a step of its engine takes at least, and for what is computed in it."
	}
	for _, text := range []string{stripUnprintable(e.Sentence), legend} {
		s.WriteString("\n" + strings.Join(wrapWords(text, explainColumns), "\n") + "\n")
	}
	_, err := io.WriteString(out, s.String())
	return err
}

// maxCostLines is the number of backends whose cost is explained.
const maxCostLines = 2

// writeLowestCosts writes the terms of the lowest costs, one line per backend. It returns what these terms
// mean.
func writeLowestCosts(s *strings.Builder, bestFirst []router.BackendExplanation) (meanings []string) {
	var lines []string
	for n, b := range bestFirst {
		if n == maxCostLines || b.Terms == nil || b.Score == nil {
			break
		}
		var terms []string
		for _, term := range b.Terms {
			if term.Seconds == 0 {
				continue
			}
			terms = append(terms, stripUnprintable(term.Name)+" "+formatDecimal(term.Seconds, 3))
			meaning := term.Name + ": " + policy.TermMeaning(term.Name) + "."
			if policy.TermMeaning(term.Name) != "" && !slices.Contains(meanings, meaning) {
				meanings = append(meanings, meaning)
			}
		}
		line := "COST of " + truncate(stripUnprintable(b.Name), maxBackendName) + ": " + strings.Join(terms, " + ")
		if b.Weight != 1 {
			line += fmt.Sprintf(", divided by weight %g", b.Weight)
		}
		lines = append(lines, line)
	}
	if len(lines) > 0 {
		s.WriteString("\n" + strings.Join(lines, "\n") + "\n")
	}
	return meanings
}

// writeSteps writes how long the steps of the first backends take, a line for each that differs from the one before. It
// reports whether there is one.
func writeSteps(s *strings.Builder, bestFirst []router.BackendExplanation) (written bool) {
	var last step.Model
	for n, b := range bestFirst {
		if n == maxCostLines || !b.Candidate {
			break
		}
		if m := b.Step; m != last {
			written = true
			fmt.Fprintf(s, "STEP of %s: %.3g ms, %.3g µs a sequence, %.3g ns a token of context, 1 s for %s prompt tokens\n",
				truncate(stripUnprintable(b.Name), maxBackendName), 1e3*m.Base, 1e6*m.Sequence, 1e9*m.Context, formatIntegerWithCommas(m.Rate))
		}
		last = b.Step
	}
	return written
}

// backendsBestFirst returns the backends: the choice, the other candidates from best to worst, and the others.
func backendsBestFirst(e *proxy.Explanation) []router.BackendExplanation {
	all := slices.Clone(e.Backends)
	rank := func(b *router.BackendExplanation) int {
		switch {
		case !b.Candidate:
			return 2
		case b.Name == e.Choice:
			return 0
		}
		return 1
	}
	slices.SortStableFunc(all, func(a, b router.BackendExplanation) int {
		if c := cmp.Compare(rank(&a), rank(&b)); c != 0 || a.Score == nil || b.Score == nil {
			return c
		}
		if e.HighestWins {
			a, b = b, a
		}
		return cmp.Compare(*a.Score, *b.Score)
	})
	return all
}

func formatBackendRow(b *router.BackendExplanation, chosen bool) []string {
	mark, kv, score, note := "", "-", "-", stripUnprintable(b.WhyNot)
	if chosen {
		mark = ">"
	}
	if b.KVUsage >= 0 {
		kv = formatIntegerWithCommas(100*b.KVUsage) + " %"
	}
	if b.Score != nil {
		score = formatIntegerWithCommas(*b.Score)
		if *b.Score != math.Trunc(*b.Score) && *b.Score < 100 {
			score = formatDecimal(*b.Score, 3)
		}
	}
	switch {
	case b.Queued != "":
		note = "wait: " + stripUnprintable(b.Queued)
	case b.AdapterSeconds > 0 && note == "":
		note = "must load the adapter"
	}
	return []string{
		mark, truncate(stripUnprintable(b.Name), maxBackendName), formatIntegerWithCommas(b.MatchedTokens),
		formatIntegerWithCommas(b.UncachedTokens),
		formatIntegerWithCommas(b.InFlight), kv, formatIntegerWithCommas(b.PrefillRate),
		formatDecimal(b.WaitSeconds, 3), formatDecimal(b.StepSeconds, 3), formatDecimal(b.TTFTSeconds, 3), score, note,
	}
}

// writeAlignedColumns aligns the first two columns and the last one to the left, and the
// numbers between them to the right.
func writeAlignedColumns(s *strings.Builder, rows [][]string) {
	widths := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	last := len(rows[0]) - 1
	for _, row := range rows {
		var line strings.Builder
		for i, cell := range row[:last] {
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
			if i > 1 {
				line.WriteString(pad + cell + "  ")
			} else {
				line.WriteString(cell + pad + strings.Repeat(" ", 1+i))
			}
		}
		cells, note := line.String(), row[last]
		if note != "" && utf8.RuneCountInString(cells+note) > explainColumns {
			cells, note = strings.TrimRight(cells, " ")+"\n", "    "+note
		}
		s.WriteString(strings.TrimRight(cells+note, " ") + "\n")
	}
}

// truncate shortens s to at most maxRunes characters.
func truncate(s string, maxRunes int) string {
	if utf8.RuneCountInString(s) <= maxRunes {
		return s
	}
	return string([]rune(s)[:maxRunes-1]) + "…"
}

// stripUnprintable removes control characters from text of unknown origin, which a terminal would interpret.
func stripUnprintable(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsPrint(r):
			return r
		case unicode.IsSpace(r):
			return ' '
		}
		return -1
	}, s)
}

// formatDecimal formats a number with the given digits after the point, or from 1e12 on with an exponent.
func formatDecimal(x float64, digits int) string {
	if math.Abs(x) >= minExponentNumber {
		return fmt.Sprintf("%.3g", x)
	}
	return strconv.FormatFloat(x, 'f', digits, 64)
}

// formatIntegerWithCommas formats a number rounded to an integer, such as 1,234.
func formatIntegerWithCommas(x float64) string {
	s := formatDecimal(x, 0)
	if math.Abs(x) >= minExponentNumber {
		return s
	}
	for at := len(s) - 3; at > 0 && s[at-1] != '-'; at -= 3 {
		s = s[:at] + "," + s[at:]
	}
	return s
}

// wrapWords breaks text into lines of at most the given length, unless a word is longer.
func wrapWords(text string, maxColumns int) (lines []string) {
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > maxColumns {
			lines, line = append(lines, line), ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}
