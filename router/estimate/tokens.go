package estimate

const (
	defaultBytesPerToken = 4 // of English text
	priorTokens          = 1000
	maxRatioTokens       = 1 << 20 // above which older prompts count half

	// MinBytesPerToken and maxBytesPerToken bound what a tokenizer can make of a text.
	MinBytesPerToken = 0.5
	maxBytesPerToken = 32
	minTextBytes     = 256 // of a prompt; in a shorter one the chat template's own tokens dominate
)

// tokenRatio is how many bytes of text make a token.
type tokenRatio struct{ bytes, tokens float64 }

func newTokenRatio() tokenRatio {
	return tokenRatio{defaultBytesPerToken * priorTokens, priorTokens}
}

// bytesPerToken returns the ratio.
func (q *tokenRatio) bytesPerToken() float64 { return q.bytes / q.tokens }

// addPrompt learns from a prompt, unless it is short.
func (q *tokenRatio) addPrompt(bytes, tokens int) {
	if bytes < minTextBytes {
		return
	}
	q.bytes += float64(bytes)
	q.tokens += float64(tokens)
	if q.tokens > maxRatioTokens {
		q.bytes, q.tokens = q.bytes/2, q.tokens/2
	}
}

// isPlausibleRatio reports whether a tokenizer can make so many tokens of so many bytes.
func isPlausibleRatio(bytes, tokens int) bool {
	q := float64(bytes) / float64(tokens)
	return bytes < minTextBytes || q >= MinBytesPerToken && q <= maxBytesPerToken
}
