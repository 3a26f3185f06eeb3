package main

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
)

const (
	explainColumns = 96 // that a sentence is broken at, and beyond which a row's last cell has a line of its own
	longestName    = 20 // of a backend, in the table
)

// printExplanation prints a table of the backends, and the sentence.
func printExplanation(out io.Writer, e *proxy.Explanation) error {
	var s strings.Builder
	fmt.Fprintf(&s, "%s tokens of prompt, about, in %d blocks of %d bytes; model %s, policy %s\n\n",
		thousands(float64(e.PromptTokens)), e.Blocks, e.BlockBytes, cmp.Or(printable(e.Model), "-"), printable(e.Policy))
	score := "SCORE"
	if slices.ContainsFunc(e.Backends, func(b router.BackendExplanation) bool { return b.Terms != nil }) {
		score = "COST"
	}
	rows := [][]string{{"", "BACKEND", "MATCHED", "u", "W", "n", "KV", "TOKENS/S", "TTFT", score, ""}}
	for _, b := range inOrder(e) {
		rows = append(rows, explainRow(&b, b.Candidate && b.Name == e.Choice))
	}
	writeColumns(&s, rows)
	s.WriteString(costLines(e))
	s.WriteString("\n")
	for _, line := range wrap(printable(e.Sentence), explainColumns) {
		s.WriteString(line + "\n")
	}
	s.WriteString("\nMATCHED: prompt tokens it likely holds. u: those it would compute. W: tokens to compute before\n" +
		"them. n: in flight there. TTFT: time to first token, in seconds, as predicted.\n")
	_, err := io.WriteString(out, s.String())
	return err
}

// maxCostLines is how many backends costLines explains.
const maxCostLines = 2

// costLines returns the terms of the lowest costs, a line for each backend.
func costLines(e *proxy.Explanation) string {
	var s strings.Builder
	for n, b := range inOrder(e) {
		if n == maxCostLines || b.Terms == nil || b.Score == nil {
			break
		}
		var terms []string
		for _, term := range b.Terms {
			if term.Tokens != 0 {
				terms = append(terms, printable(term.Name)+" "+thousands(term.Tokens))
			}
		}
		fmt.Fprintf(&s, "\nCOST of %s: %s", shortened(printable(b.Name), longestName), strings.Join(terms, " + "))
		if b.Weight != 1 {
			fmt.Fprintf(&s, ", over its weight %g", b.Weight)
		}
	}
	if s.Len() > 0 {
		s.WriteString("\n")
	}
	return s.String()
}

// inOrder are the backends, the best first, those that are no candidates last.
func inOrder(e *proxy.Explanation) []router.BackendExplanation {
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

func explainRow(b *router.BackendExplanation, chosen bool) []string {
	mark, kv, score, note := "", "-", "-", printable(b.WhyNot)
	if chosen {
		mark = ">"
	}
	if b.KVUsage >= 0 {
		kv = thousands(100*b.KVUsage) + " %"
	}
	if b.Score != nil {
		score = thousands(*b.Score)
		if *b.Score != math.Trunc(*b.Score) && *b.Score < 100 {
			score = decimals(*b.Score, 2)
		}
	}
	switch {
	case b.Queued != "":
		note = "wait: " + printable(b.Queued)
	case b.Loading > 0 && note == "":
		note = "has to load the adapter"
	}
	return []string{
		mark, shortened(printable(b.Name), longestName), thousands(b.MatchedTokens), thousands(b.Uncached), thousands(b.Pending),
		thousands(b.InFlight), kv, thousands(b.Rate), decimals(b.FirstToken, 3), score, note,
	}
}

// writeColumns aligns the first two columns and the last one to the left, and the
// numbers between them to the right.
func writeColumns(s *strings.Builder, rows [][]string) {
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
		if utf8.RuneCountInString(cells+note) > explainColumns {
			cells, note = strings.TrimRight(cells, " ")+"\n", "    "+note
		}
		s.WriteString(strings.TrimRight(cells+note, " ") + "\n")
	}
}

func shortened(s string, most int) string {
	if utf8.RuneCountInString(s) <= most {
		return s
	}
	return string([]rune(s)[:most-1]) + "…"
}

// printable is a text of the other end's, which may be anybody's, without what a
// terminal would do instead of showing it.
func printable(s string) string {
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

// mostDigits is a number from which on three digits and an exponent say more.
const mostDigits = 1e12

// decimals writes a number with so many digits of its fraction.
func decimals(x float64, digits int) string {
	if math.Abs(x) >= mostDigits {
		return fmt.Sprintf("%.3g", x)
	}
	return strconv.FormatFloat(x, 'f', digits, 64)
}

// thousands writes a number without its fraction, 1984.2 as 1,984.
func thousands(x float64) string {
	s := decimals(x, 0)
	if math.Abs(x) >= mostDigits {
		return s
	}
	for at := len(s) - 3; at > 0 && s[at-1] != '-'; at -= 3 {
		s = s[:at] + "," + s[at:]
	}
	return s
}

// wrap breaks a text into lines between words.
func wrap(text string, columns int) (lines []string) {
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > columns {
			lines, line = append(lines, line), ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}
