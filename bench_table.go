package main

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strings"
)

// benchRow is one figure of the table; value is nil where a server does not tell, or there
// is nothing to tell of.
type benchRow struct {
	label    string
	decimals int
	value    func(benchResult) *float64
}

func benchRows() []benchRow {
	known := func(f func(benchResult) float64) func(benchResult) *float64 {
		return func(r benchResult) *float64 {
			v := f(r)
			return &v
		}
	}
	ms := func(f func(benchResult) *float64) func(benchResult) *float64 {
		return func(r benchResult) *float64 {
			v := f(r)
			if v == nil {
				return nil
			}
			milliseconds := *v * 1000
			return &milliseconds
		}
	}
	return []benchRow{
		{"requests answered", 0, known(func(r benchResult) float64 { return float64(r.Requests) })},
		{"requests lost", 0, known(func(r benchResult) float64 { return float64(r.Lost) })},
		{"hit ratio", 3, func(r benchResult) *float64 { return r.HitRatio }},
		{"TTFT ms, mean", 1, ms(func(r benchResult) *float64 { return r.TTFTMean })},
		{"  p50", 1, ms(func(r benchResult) *float64 { return r.TTFTP50 })},
		{"  p90", 1, ms(func(r benchResult) *float64 { return r.TTFTP90 })},
		{"  p99", 1, ms(func(r benchResult) *float64 { return r.TTFTP99 })},
		{"ITL ms, mean", 2, ms(func(r benchResult) *float64 { return r.ITLMean })},
		{"TPOT ms, mean", 2, ms(func(r benchResult) *float64 { return r.TPOTMean })},
		{"E2E ms, mean", 0, ms(func(r benchResult) *float64 { return r.E2EMean })},
		{"requests/s", 2, func(r benchResult) *float64 { return r.Throughput }},
		{"prompt tokens/s", 0, func(r benchResult) *float64 { return r.PromptRate }},
		{"answer tokens/s", 0, func(r benchResult) *float64 { return r.CompletionRate }},
	}
}

// writeTable writes the figures side by side, each column but the first with its
// ratio to the first, and what is to be known about them.
func (b benchReport) writeTable(w io.Writer) error {
	var out bytes.Buffer
	b.writeHead(&out)
	first := b.Results[0]
	line := func(label string, cell func(benchResult) string, ratio func(benchResult) string) {
		fmt.Fprintf(&out, "%-18s%10s", label, cell(first))
		for _, r := range b.Results[1:] {
			fmt.Fprintf(&out, "%11s%6s", cell(r), ratio(r))
		}
		fmt.Fprintln(&out)
	}
	line("", func(r benchResult) string { return r.Name }, func(r benchResult) string { return r.Name + "/" + first.Name })
	for _, row := range benchRows() {
		line(row.label, row.show, func(r benchResult) string { return row.ratio(r, first) })
	}
	b.writeErrors(&out)
	b.writeUnknown(&out)
	_, err := w.Write(out.Bytes())
	return err
}

func (row benchRow) show(r benchResult) string {
	v := row.value(r)
	if v == nil {
		return "-"
	}
	return fmt.Sprintf("%.*f", row.decimals, *v)
}

func (row benchRow) ratio(r, first benchResult) string {
	v, base := row.value(r), row.value(first)
	if v == nil || base == nil || *base == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", *v / *base)
}

func (b benchReport) writeHead(w io.Writer) {
	fmt.Fprintf(w, "%d chats at a time of %d turns each; %d system prompts of about %d tokens,\nmessages of %d and answers of %d on average; seed %d.\n",
		b.Sessions, b.Turns, b.SystemPrompts, b.SystemTokens, b.UserTokens, b.AnswerTokens, b.Seed)
	amount := fmt.Sprintf("%.0f s measured of each URL", b.For)
	if b.Conversations > 0 {
		amount = fmt.Sprintf("%d conversations with each URL", b.Conversations)
	}
	if b.Rounds > 1 {
		amount += fmt.Sprintf(", in %d rounds by turns", b.Rounds)
	}
	if b.Warmup > 0 {
		amount += fmt.Sprintf(", after %g s of warm-up in each", b.Warmup)
		if b.Rounds == 1 {
			amount = strings.TrimSuffix(amount, " in each")
		}
	}
	fmt.Fprintf(w, "%s.\n", amount)
	if len(b.Results) > 1 {
		fmt.Fprintln(w, "The same chats for all, but each URL's prompts begin with a nonce of its own:\nnone profits from what another left in the caches of replicas that they share.")
	}
	fmt.Fprintln(w)
	for _, r := range b.Results {
		fmt.Fprintf(w, "%s  %s, model %.100q\n", r.Name, r.URL, r.Model)
	}
	fmt.Fprintln(w)
}

func (b benchReport) writeErrors(w io.Writer) {
	for _, r := range b.Results {
		for _, e := range r.Errors {
			cause := e.Cause
			if e.Code != "" {
				cause += " (" + e.Code + ")"
			}
			fmt.Fprintf(w, "\n%s lost %d: %s\n   %s\n", r.Name, e.Count, cause, e.Advice)
		}
	}
}

// writeUnknown says how to make a server tell what it does not.
func (b benchReport) writeUnknown(w io.Writer) {
	names := func(unknown func(benchResult) bool) string {
		var of []string
		for _, r := range b.Results {
			if r.Requests > 0 && unknown(r) {
				of = append(of, r.Name)
			}
		}
		return strings.Join(of, ", ")
	}
	if of := names(func(r benchResult) bool { return r.PromptTokens == nil && r.InvalidUsageUsage == 0 }); of != "" {
		fmt.Fprintf(w, "\n%s: no usage at the end of the streams, so neither tokens nor hits are known\n   (stream_options.include_usage was asked for).\n", of)
	}
	for _, r := range b.Results {
		if r.InvalidUsageUsage > 0 {
			fmt.Fprintf(w, "\n%s: the usage of %d answers cannot be true, like more tokens cached than prompted,\n   and counts as not told; what stands between that rewrites it?\n", r.Name, r.InvalidUsageUsage)
		}
	}
	if of := names(func(r benchResult) bool { return r.PromptTokens != nil && r.HitRatio == nil }); of != "" {
		fmt.Fprintf(w, "\n%s: no hit ratio, as usage has no prompt_tokens_details.cached_tokens;\n   start vLLM with --enable-prompt-tokens-details.\n", of)
	}
}

// errors are the causes, the most frequent first.
func (b *benchTally) errors(counts map[string]int, o *benchOptions) []benchError {
	b.mu.Lock()
	defer b.mu.Unlock()
	var all []benchError
	for cause, n := range counts {
		all = append(all, benchError{Cause: cause, Code: b.said[cause], Count: n, Advice: adviseOn(cause, o)})
	}
	slices.SortFunc(all, func(x, y benchError) int {
		if x.Count != y.Count {
			return y.Count - x.Count
		}
		return strings.Compare(x.Cause, y.Cause)
	})
	return all
}
