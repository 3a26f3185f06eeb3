package estimate

// What a handover takes while nothing is known of it: 0.1 s, and for each token 128 KiB at 10 GB/s.
const (
	defaultHandoverBase  = 0.1
	defaultHandoverToken = 13e-6
	handoverTrust        = 4      // in the defaults, as samples of each of two sizes
	handoverDecay        = 0.98   // of earlier samples, by each one
	maxHandoverSeconds   = 60     // of a sample
	maxHandoverTokens    = 1e7    // likewise
	handoverPriorTokens  = 20_000 // of the larger ones of the defaults' samples
)

// handovers learns how long a replica takes until it generates, from prompts whose KV cache it reads from another one:
// a constant and a time for each token, for which the weighted sum of the squares of the errors is least.
type handovers struct {
	weight, tokens, squares, seconds, products float64 // weighted sums
}

func newHandovers() (h handovers) {
	for range handoverTrust {
		h.addSample(0, defaultHandoverBase)
		h.addSample(handoverPriorTokens, defaultHandoverBase+handoverPriorTokens*defaultHandoverToken)
	}
	return h
}

func (h *handovers) addSample(tokens, seconds float64) {
	h.weight++
	h.tokens += tokens
	h.squares += tokens * tokens
	h.seconds += seconds
	h.products += tokens * seconds
}

// add learns from a handover.
func (h *handovers) add(tokens, seconds float64) {
	if !(tokens >= 0 && tokens <= maxHandoverTokens && seconds >= 0 && seconds <= maxHandoverSeconds) {
		return
	}
	for _, sum := range []*float64{&h.weight, &h.tokens, &h.squares, &h.seconds, &h.products} {
		*sum *= handoverDecay
	}
	h.addSample(tokens, seconds)
}

// predict returns how long the handover of so many tokens takes. Neither the constant nor the time of a token is below 0.
func (h *handovers) predict(tokens float64) (seconds float64) {
	mean, meanTokens := h.seconds/h.weight, h.tokens/h.weight
	variance := h.squares/h.weight - meanTokens*meanTokens
	perToken := 0.0
	if variance > 0 {
		perToken = max(0, (h.products/h.weight-mean*meanTokens)/variance)
	}
	if base := mean - perToken*meanTokens; base > 0 {
		return base + perToken*tokens
	}
	return mean * tokens / meanTokens
}

// HandoverSeconds returns how long a backend takes to generate after another replica has done the prefill, about, if it
// reads so many tokens from that one's KV cache.
func (f *Estimates) HandoverSeconds(slot int, tokens float64) float64 {
	return f.backends[slot].handovers.predict(tokens)
}

// RecordHandover records how long a handover of so many tokens to a backend took.
func (f *Estimates) RecordHandover(slot int, tokens, seconds float64) {
	if !f.disabled {
		f.backends[slot].handovers.add(tokens, seconds)
	}
}
