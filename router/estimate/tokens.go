package estimate

const (
	defaultBytesPerToken = 4 // of English text
	priorTokens          = 1000
	maxRatioTokens       = 1 << 20 // above which older prompts count half
	maxModels            = 1024    // that have a ratio of their own

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

// modelRatios are the token ratios by model.
type modelRatios struct {
	all    tokenRatio
	models map[string]*tokenRatio
}

func newModelRatios() modelRatios {
	return modelRatios{all: newTokenRatio(), models: map[string]*tokenRatio{}}
}

// bytesPerToken returns the ratio of a model, or that of all models for an unknown one.
func (m *modelRatios) bytesPerToken(model string) float64 {
	if q := m.models[model]; q != nil {
		return q.bytesPerToken()
	}
	return m.all.bytesPerToken()
}

func (m *modelRatios) addPrompt(model string, bytes, tokens int) {
	m.all.addPrompt(bytes, tokens)
	q := m.models[model]
	if q == nil {
		if len(m.models) >= maxModels {
			return
		}
		ratio := newTokenRatio()
		q = &ratio
		m.models[model] = q
	}
	q.addPrompt(bytes, tokens)
}

// isPlausibleRatio reports whether a tokenizer can make so many tokens of so many bytes.
func isPlausibleRatio(bytes, tokens int) bool {
	q := float64(bytes) / float64(tokens)
	return bytes < minTextBytes || q >= MinBytesPerToken && q <= maxBytesPerToken
}
