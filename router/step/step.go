// Package step models how long the steps of an inference engine take.
package step

// Model has the times that a step of one engine consists of. A step that computes tokens of prompts and generates one
// token of each sequence takes
//
//	Base + Σ tokens·(1 + Attention·depth)/Rate + Sequence·sequences + Context·context
//
// seconds, where depth is the number of tokens before the computed ones, on average, and context that of all tokens in
// the KV cache which the sequences attend to. Before the first step of a request, the API server takes PromptToken for
// each token of the prompt.
type Model struct {
	Base        float64 `json:"base_seconds"`             // of a step without work
	Rate        float64 `json:"prompt_tokens_per_second"` // of those at the beginning of a prompt
	Attention   float64 `json:"attention"`                // share by which each token before it makes a prompt token take longer
	Sequence    float64 `json:"sequence_seconds"`         // for each sequence that decodes
	Context     float64 `json:"context_token_seconds"`    // for each token of their contexts
	PromptToken float64 `json:"prompt_token_seconds"`     // of the API server for each prompt token, cached or not
}

// Default is the model of Llama 3.1 8B in bf16 on an H200, as measured with vLLM 0.26.
func Default() Model {
	return Model{Base: 5.07e-3, Rate: 38_500, Attention: 2.8e-5, Sequence: 5e-6, Context: 22.5e-9, PromptToken: 1.7e-6}
}

// PrefillSeconds returns how long tokens of a prompt take to compute that follow cached ones.
func (m *Model) PrefillSeconds(cached, tokens float64) float64 {
	return m.PrefillSecondsOf(tokens, tokens*(cached+tokens/2))
}

// PrefillSecondsOf returns how long tokens of prompts take to compute that attend to attended tokens, all together.
func (m *Model) PrefillSecondsOf(tokens, attended float64) float64 {
	return (tokens + m.Attention*attended) / m.Rate
}

// DecodeSeconds returns how long a step takes that only decodes.
func (m *Model) DecodeSeconds(sequences, context float64) float64 {
	return m.Base + m.Sequence*sequences + m.Context*context
}

// Work is what an engine did in some steps.
type Work struct {
	Steps, Sequences, Context float64 // of Sequences and Context the sums over the steps
	Tokens, Attended          float64 // of prompts that were computed, and to which these attended
}

// Seconds returns how long the steps take that do the work.
func (m *Model) Seconds(w *Work) float64 {
	return m.Base*w.Steps + m.Sequence*w.Sequences + m.Context*w.Context + m.PrefillSecondsOf(w.Tokens, w.Attended)
}
