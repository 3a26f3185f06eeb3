package cli

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strings"

	"warmroute/lab/loadgen"
)

// benchReport is the output of bench. docs/reference/commands.md describes its JSON.
type benchReport struct {
	Interrupted   bool    `json:"interrupted,omitempty"`
	Duration      float64 `json:"for_s,omitzero"` // measured time of each URL, as requested
	Conversations int     `json:"conversations,omitzero"`
	Warmup        float64 `json:"warmup_s"`
	Rounds        int     `json:"rounds"`
	Concurrency   int     `json:"concurrency"`
	Turns         int     `json:"turns"`
	SystemPrompts int     `json:"system_prompts"`
	SystemTokens  int     `json:"system_tokens"`
	UserTokens    int     `json:"user_tokens"`
	OutputTokens  int     `json:"output_tokens"`
	Think         float64 `json:"think_s"`
	Seed          uint64  `json:"seed"`

	Results []benchResult `json:"results"`
}

// benchResult has the results of one URL. Times are in seconds, of the requests
// completed. A value is null if the server does not report it or
// nothing was measured.
type benchResult struct {
	Name  string `json:"name"`
	URL   string `json:"url"`
	Model string `json:"model"`

	Requests int      `json:"requests"` // completed
	HitRatio *float64 `json:"hit_ratio"`
	TTFTMean *float64 `json:"ttft_mean_s"`
	TTFTP50  *float64 `json:"ttft_p50_s"`
	TTFTP90  *float64 `json:"ttft_p90_s"`
	TTFTP99  *float64 `json:"ttft_p99_s"`
	ITLMean  *float64 `json:"itl_mean_s"`
	TPOTMean *float64 `json:"tpot_mean_s"`
	E2EMean  *float64 `json:"e2e_mean_s"`

	Elapsed          float64  `json:"elapsed_s"` // measured
	Throughput       *float64 `json:"throughput_rps"`
	PromptTokens     *int     `json:"prompt_tokens"`
	CompletionTokens *int     `json:"completion_tokens"`
	PromptRate       *float64 `json:"prompt_tokens_per_s"`
	CompletionRate   *float64 `json:"completion_tokens_per_s"`
	InvalidUsage     int      `json:"invalid_usage,omitzero"` // responses with a contradictory usage, which is ignored

	Lost   int          `json:"lost"`
	Errors []benchError `json:"errors,omitempty"`
}

// benchError counts the requests lost for one cause.
type benchError struct {
	Cause  string `json:"cause"`
	Code   string `json:"code,omitempty"` // the server's error code, of the first
	Count  int    `json:"count"`
	Advice string `json:"advice"`
}

func (r *benchRun) report(interrupted bool) benchReport {
	o := r.o
	b := benchReport{
		Interrupted: interrupted, Duration: o.duration.Seconds(), Conversations: o.conversations, Warmup: o.warmup.Seconds(),
		Rounds: o.rounds, Concurrency: o.concurrency, Turns: o.turns, SystemPrompts: o.systemPrompts, SystemTokens: o.systemTokens,
		UserTokens: o.userTokens, OutputTokens: o.outputTokens, Think: o.think.Seconds(), Seed: o.seed,
	}
	if o.conversations > 0 {
		b.Duration = 0
	}
	for _, t := range r.targets {
		b.Results = append(b.Results, t.result(o))
	}
	return b
}

func (t *benchTarget) result(o *benchOptions) benchResult {
	s := t.stats.Summary("", t.stats.elapsed)
	r := benchResult{
		Name: t.name, URL: t.url, Model: t.model,
		Requests: s.Requests, TTFTMean: nilIfZero(s.TTFTMean), TTFTP50: nilIfZero(s.TTFTP50), TTFTP90: nilIfZero(s.TTFTP90),
		TTFTP99: nilIfZero(s.TTFTP99),
		ITLMean: nilIfZero(s.ITLMean), E2EMean: nilIfZero(s.E2EMean), InvalidUsage: s.InvalidUsage,
		Elapsed: t.stats.elapsed.Seconds(), Lost: s.Lost, Errors: t.stats.errorsByFrequency(s.Errors, o),
	}
	if r.Elapsed > 0 && s.Requests+s.Lost > 0 {
		r.Throughput = &s.Throughput
	}
	if s.HitKnown && s.PromptTokens > 0 {
		r.HitRatio = &s.HitRatio
	}
	if s.PromptTokens > 0 && r.Elapsed > 0 {
		rate := float64(s.PromptTokens) / r.Elapsed
		r.PromptTokens, r.PromptRate = &s.PromptTokens, &rate
	}
	if s.CompletionTokens > 0 && r.Elapsed > 0 {
		rate := float64(s.CompletionTokens) / r.Elapsed
		r.CompletionTokens, r.CompletionRate, r.TPOTMean = &s.CompletionTokens, &rate, nilIfZero(s.TPOTMean)
	}
	return r
}

// nilIfZero returns nil for a time of 0, which means that none was measured.
func nilIfZero(seconds float64) *float64 {
	if seconds == 0 {
		return nil
	}
	return &seconds
}

// errorsByFrequency returns the causes of failure, the most frequent first.
func (s *benchStats) errorsByFrequency(countByCause map[string]int, o *benchOptions) []benchError {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []benchError
	for cause, n := range countByCause {
		all = append(all, benchError{Cause: cause, Code: s.codes[cause], Count: n, Advice: errorAdvice(cause, o)})
	}
	slices.SortFunc(all, func(x, y benchError) int {
		if x.Count != y.Count {
			return y.Count - x.Count
		}
		return strings.Compare(x.Cause, y.Cause)
	})
	return all
}

// errorAdvice says what to do about a cause of failure.
func errorAdvice(cause string, o *benchOptions) string {
	switch {
	case cause == loadgen.NoConnection:
		return "connection refused, or closed before the response: check that the server still runs"
	case cause == loadgen.Timeout:
		return "no complete response within --timeout: raise it, or lower --concurrency"
	case cause == "status 401", cause == "status 403":
		return "the API key is not accepted: check --api-key-file or --api-key-env"
	case cause == "status 404":
		return "no such model, or no /v1/chat/completions: check --model"
	case cause == "status 400" && !o.plain:
		return "ignore_eos may be unknown (use --plain), or the chats exceed the context length (lower --turns or --system-tokens)"
	case cause == "status 400", cause == "status 413":
		return "the chats may exceed the context length or the size limit: lower --turns or --system-tokens"
	case cause == "status 429", cause == "status 503":
		return "the server is overloaded: lower --concurrency (Retry-After was respected, up to 30 s)"
	case strings.HasPrefix(cause, "status 5"):
		return "the server failed: see its log"
	case cause == loadgen.NotStream:
		return "the server does not stream, or a proxy in between buffers the response"
	case cause == loadgen.StreamTruncated, cause == loadgen.StreamError, cause == loadgen.ResponseAborted:
		return "a replica failed during the response, or a proxy in between closes long responses"
	case cause == loadgen.TooLong:
		return "an event exceeded 1 MiB, or the text 4 MiB"
	case cause == loadgen.NoContent:
		return "the stream had no content"
	}
	return "see the server's log"
}

// benchRow is one figure of the table; its value is nil if it is unknown.
type benchRow struct {
	label    string
	decimals int
	value    func(benchResult) *float64
}

func benchRows() []benchRow {
	count := func(f func(benchResult) int) func(benchResult) *float64 {
		return func(r benchResult) *float64 {
			v := float64(f(r))
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
		{"requests completed", 0, count(func(r benchResult) int { return r.Requests })},
		{"requests lost", 0, count(func(r benchResult) int { return r.Lost })},
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
		{"output tokens/s", 0, func(r benchResult) *float64 { return r.CompletionRate }},
	}
}

func (row benchRow) format(r benchResult) string {
	v := row.value(r)
	if v == nil {
		return "-"
	}
	return fmt.Sprintf("%.*f", row.decimals, *v)
}

func (row benchRow) formatRatio(r, first benchResult) string {
	v, base := row.value(r), row.value(first)
	if v == nil || base == nil || *base == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", *v / *base)
}

// writeTable writes the figures side by side, with their ratios to the first
// column, and notes below.
func (b benchReport) writeTable(w io.Writer) error {
	var out bytes.Buffer
	b.writeHeader(&out)
	first := b.Results[0]
	writeRow := func(label string, cell func(benchResult) string, ratio func(benchResult) string) {
		fmt.Fprintf(&out, "%-18s%10s", label, cell(first))
		for _, r := range b.Results[1:] {
			fmt.Fprintf(&out, "%11s%6s", cell(r), ratio(r))
		}
		fmt.Fprintln(&out)
	}
	writeRow("", func(r benchResult) string { return r.Name }, func(r benchResult) string { return r.Name + "/" + first.Name })
	for _, row := range benchRows() {
		writeRow(row.label, row.format, func(r benchResult) string { return row.formatRatio(r, first) })
	}
	b.writeErrors(&out)
	b.writeTokenUsageNotes(&out)
	_, err := w.Write(out.Bytes())
	return err
}

func (b benchReport) writeHeader(w io.Writer) {
	fmt.Fprintf(w, "%d concurrent chats of %d turns; %d system prompts of about %d tokens,\nuser messages of %d and outputs of %d tokens "+
		"on average; seed %d.\n",
		b.Concurrency, b.Turns, b.SystemPrompts, b.SystemTokens, b.UserTokens, b.OutputTokens, b.Seed)
	amount := fmt.Sprintf("%.0f s measured per URL", b.Duration)
	if b.Conversations > 0 {
		amount = fmt.Sprintf("%d conversations per URL", b.Conversations)
	}
	if b.Rounds > 1 {
		amount += fmt.Sprintf(", in %d rounds", b.Rounds)
	}
	if b.Warmup > 0 {
		amount += fmt.Sprintf(", after %g s of warm-up", b.Warmup)
		if b.Rounds > 1 {
			amount += " in each"
		}
	}
	fmt.Fprintf(w, "%s.\n", amount)
	if len(b.Results) > 1 {
		fmt.Fprintln(w, "All URLs get the same chats, but prompts that start with different nonces, so\nthat none is served from caches that "+
			"another filled.")
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

// writeTokenUsageNotes says which servers report no usable usage, and how to change that.
func (b benchReport) writeTokenUsageNotes(w io.Writer) {
	names := func(isMissing func(benchResult) bool) string {
		var missing []string
		for _, r := range b.Results {
			if r.Requests > 0 && isMissing(r) {
				missing = append(missing, r.Name)
			}
		}
		return strings.Join(missing, ", ")
	}
	if of := names(func(r benchResult) bool { return r.PromptTokens == nil && r.InvalidUsage == 0 }); of != "" {
		fmt.Fprintf(w, "\n%s: no usage at the end of the streams, despite stream_options.include_usage:\n   token counts and hit ratio are "+
			"unknown.\n", of)
	}
	for _, r := range b.Results {
		if r.InvalidUsage > 0 {
			fmt.Fprintf(w, "\n%s: the usage of %d responses is contradictory, such as more cached than prompt\n   tokens, and is ignored: does a "+
				"proxy in between rewrite it?\n", r.Name, r.InvalidUsage)
		}
	}
	if of := names(func(r benchResult) bool { return r.PromptTokens != nil && r.HitRatio == nil }); of != "" {
		fmt.Fprintf(w, "\n%s: no hit ratio, since usage has no prompt_tokens_details.cached_tokens;\n   start vLLM with "+
			"--enable-prompt-tokens-details.\n", of)
	}
}
