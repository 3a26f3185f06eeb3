package main

import (
	"encoding/json"
	"io"
)

// benchReport is what bench prints. Its JSON is described in docs/operations.md.
type benchReport struct {
	Interrupted   bool    `json:"interrupted,omitempty"`
	For           float64 `json:"for_s,omitzero"` // measured time of each URL that was asked for
	Conversations int     `json:"conversations,omitzero"`
	Warmup        float64 `json:"warmup_s"`
	Rounds        int     `json:"rounds"`
	Sessions      int     `json:"sessions"`
	Turns         int     `json:"turns"`
	SystemPrompts int     `json:"system_prompts"`
	SystemTokens  int     `json:"system_tokens"`
	UserTokens    int     `json:"user_tokens"`
	AnswerTokens  int     `json:"answer_tokens"`
	Think         float64 `json:"think_s"`
	Seed          uint64  `json:"seed"`

	Results []benchResult `json:"results"`
}

// benchResult is one URL's figures. Times are in seconds and of the requests that
// were answered whole; null is what the server does not tell, and what there is
// nothing to tell of.
type benchResult struct {
	Name  string `json:"name"`
	URL   string `json:"url"`
	Model string `json:"model"`

	Requests int      `json:"requests"` // answered whole
	HitRatio *float64 `json:"hit_ratio"`
	TTFTMean *float64 `json:"ttft_mean_s"`
	TTFTP50  *float64 `json:"ttft_p50_s"`
	TTFTP90  *float64 `json:"ttft_p90_s"`
	TTFTP99  *float64 `json:"ttft_p99_s"`
	ITLMean  *float64 `json:"itl_mean_s"`
	TPOTMean *float64 `json:"tpot_mean_s"`
	E2EMean  *float64 `json:"e2e_mean_s"`

	Elapsed           float64  `json:"elapsed_s"` // measured
	Throughput        *float64 `json:"throughput_rps"`
	PromptTokens      *int     `json:"prompt_tokens"`
	CompletionTokens  *int     `json:"completion_tokens"`
	PromptRate        *float64 `json:"prompt_tokens_per_s"`
	CompletionRate    *float64 `json:"completion_tokens_per_s"`
	InvalidUsageUsage int      `json:"impossible_usage,omitzero"` // answers whose usage cannot be, and counts as none

	Lost   int          `json:"lost"`
	Errors []benchError `json:"errors,omitempty"`
}

// benchError is how often a request was lost for one cause.
type benchError struct {
	Cause  string `json:"cause"`
	Code   string `json:"code,omitempty"` // the error's own, of the first
	Count  int    `json:"count"`
	Advice string `json:"advice"`
}

func (r *benchRun) report(interrupted bool) benchReport {
	o := r.o
	b := benchReport{
		Interrupted: interrupted, For: o.length.Seconds(), Conversations: o.conversations, Warmup: o.warmup.Seconds(),
		Rounds: o.rounds, Sessions: o.sessions, Turns: o.turns, SystemPrompts: o.systemPrompts, SystemTokens: o.systemTokens,
		UserTokens: o.userTokens, AnswerTokens: o.answerTokens, Think: o.think.Seconds(), Seed: o.seed,
	}
	if o.conversations > 0 {
		b.For = 0
	}
	for _, t := range r.targets {
		b.Results = append(b.Results, t.result(o))
	}
	return b
}

func (t *benchTarget) result(o *benchOptions) benchResult {
	s := t.seen.Summary("", t.seen.elapsed)
	r := benchResult{
		Name: t.name, URL: t.url, Model: t.model,
		Requests: s.Requests, TTFTMean: measured(s.TTFTMean), TTFTP50: measured(s.TTFTP50), TTFTP90: measured(s.TTFTP90), TTFTP99: measured(s.TTFTP99),
		ITLMean: measured(s.ITLMean), E2EMean: measured(s.E2EMean), InvalidUsageUsage: s.InvalidUsage,
		Elapsed: t.seen.elapsed.Seconds(), Lost: s.Lost, Errors: t.seen.errors(s.Errors, o),
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
		r.CompletionTokens, r.CompletionRate, r.TPOTMean = &s.CompletionTokens, &rate, measured(s.TPOTMean)
	}
	return r
}

// measured is nil for a time of which there was none.
func measured(seconds float64) *float64 {
	if seconds == 0 {
		return nil
	}
	return &seconds
}

func (b benchReport) writeJSON(w io.Writer) error { return json.NewEncoder(w).Encode(b) }
