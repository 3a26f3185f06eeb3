package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"warmroute/backends"
	"warmroute/router"
)

// learned reads what the router has learned of its backends when it is scraped.
type learned struct {
	fleet  *backends.Registry
	router *router.Router
}

// lesson is one figure of what is learned of a backend.
type lesson struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	of   func(*router.BackendEstimates) float64
}

var lessons = []lesson{
	{perBackend("learned_capacity_factor", "Size of the KV cache as answers and polls show it, over the size that the replica reports."),
		prometheus.GaugeValue, func(l *router.BackendEstimates) float64 { return l.CapacityFactor }},
	{perBackend("learned_bytes_per_token", "Bytes of prompt text that make a token."),
		prometheus.GaugeValue, func(l *router.BackendEstimates) float64 { return l.BytesPerToken }},
	{perBackend("learned_answer_tokens", "Mean length of an answer."),
		prometheus.GaugeValue, func(l *router.BackendEstimates) float64 { return l.AnswerTokens }},
	{perBackend("learned_prefill_tokens_per_second", "Rate at which the replica computes prompts."),
		prometheus.GaugeValue, func(l *router.BackendEstimates) float64 { return l.PrefillRate }},
	{perBackend("learned_step_tokens", "Tokens that the replica works on in one step at most; the hold queue sends it up to so many."),
		prometheus.GaugeValue, func(l *router.BackendEstimates) float64 { return float64(l.StepTokens) }},
	{perBackend("compared_prompt_tokens_total", "Prompt tokens of the answers for which the replica told how many were cached."),
		prometheus.CounterValue, func(l *router.BackendEstimates) float64 { return l.PromptTokens }},
	{perBackend("compared_predicted_tokens_total", "Cached tokens as predicted, of the answers for which the replica told as well."),
		prometheus.CounterValue, func(l *router.BackendEstimates) float64 { return l.PredictedTokens }},
	{perBackend("compared_observed_tokens_total", "Cached tokens as the replica told, of the same answers."),
		prometheus.CounterValue, func(l *router.BackendEstimates) float64 { return l.ObservedTokens }},
	{perBackend("saved_prefill_seconds_total", "Seconds of the replica's work that the observed cached tokens saved, at the rate at which it computes prompts."),
		prometheus.CounterValue, func(l *router.BackendEstimates) float64 { return l.SavedSeconds }},
}

func (c *learned) Describe(ch chan<- *prometheus.Desc) {
	for _, l := range lessons {
		ch <- l.desc
	}
}

func (c *learned) Collect(ch chan<- prometheus.Metric) {
	all := c.router.Estimates()
	for _, b := range shown(c.fleet) {
		if b.Slot >= len(all) || all[b.Slot].Backend != b {
			continue
		}
		for _, l := range lessons {
			ch <- prometheus.MustNewConstMetric(l.desc, l.kind, l.of(&all[b.Slot]), b.Name)
		}
	}
}
