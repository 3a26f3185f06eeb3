package estimate

// What a KV transfer takes while nothing is known of it: 0.1 s, and for each token 128 KiB at 10 GB/s.
const (
	defaultKVTransferBase  = 0.1
	defaultKVTransferToken = 13e-6
	kvTransferTrust        = 4      // in the defaults, as samples of each of two sizes
	kvTransferDecay        = 0.98   // of earlier samples, by each one
	maxKVTransferSeconds   = 60     // of a sample
	maxKVTransferTokens    = 1e7    // likewise
	kvTransferPriorTokens  = 20_000 // of the larger ones of the defaults' samples
)

// kvTransferTimes learns how long a replica takes until it generates, from prompts whose KV cache it reads from another one:
// a constant and a time for each token, for which the weighted sum of the squares of the errors is least.
type kvTransferTimes struct {
	weight, tokens, squares, seconds, products float64 // weighted sums
}

func newKVTransferTimes() (h kvTransferTimes) {
	for range kvTransferTrust {
		h.addSample(0, defaultKVTransferBase)
		h.addSample(kvTransferPriorTokens, defaultKVTransferBase+kvTransferPriorTokens*defaultKVTransferToken)
	}
	return h
}

func (h *kvTransferTimes) addSample(tokens, seconds float64) {
	h.weight++
	h.tokens += tokens
	h.squares += tokens * tokens
	h.seconds += seconds
	h.products += tokens * seconds
}

// add learns from a KV transfer.
func (h *kvTransferTimes) add(tokens, seconds float64) {
	if !(tokens >= 0 && tokens <= maxKVTransferTokens && seconds >= 0 && seconds <= maxKVTransferSeconds) {
		return
	}
	for _, sum := range []*float64{&h.weight, &h.tokens, &h.squares, &h.seconds, &h.products} {
		*sum *= kvTransferDecay
	}
	h.addSample(tokens, seconds)
}

// predict returns how long the KV transfer of so many tokens takes. Neither the constant nor the time of a token is below 0.
func (h *kvTransferTimes) predict(tokens float64) (seconds float64) {
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

// KVTransferSeconds returns how long a backend takes to generate after another replica has done the prefill, about, if it
// reads so many tokens from that one's KV cache.
func (f *Estimates) KVTransferSeconds(slot int, tokens float64) float64 {
	return f.backends[slot].kvTransferTimes.predict(tokens)
}

// RecordKVTransferTime records how long a KV transfer of so many tokens to a backend took.
func (f *Estimates) RecordKVTransferTime(slot int, tokens, seconds float64) {
	if !f.disabled {
		f.backends[slot].kvTransferTimes.add(tokens, seconds)
	}
}
