package estimate

const (
	missingDecay   = 0.875 // per response
	minMissingHits = 0.02  // share of the expected tokens; less is the error of bytes as a measure of tokens
	expectedPrior  = 1000  // tokens that are assumed to have been expected and found
)

// missingHits is how much of what a backend was expected to have in its cache it lacked, over
// its last responses. It reacts within a few responses, before capacity does: a cache that
// holds a little less than its conversations need loses a part of each before its next turn.
type missingHits struct {
	expected, missing float64 // tokens, decaying
}

// addResponse adds a response: tokens that were expected in the cache, and those that were there.
func (m *missingHits) addResponse(expected, cached float64) {
	m.expected = missingDecay*m.expected + expected
	m.missing = missingDecay*m.missing + max(0, expected-cached)
}

// share returns which share of the expected tokens was missing.
func (m *missingHits) share() float64 {
	if m.missing <= minMissingHits*(m.expected+expectedPrior) {
		return 0
	}
	return m.missing / (m.expected + expectedPrior)
}

// MissingHits returns which share of the tokens that a backend was expected to have in its cache
// was missing lately; 0 without learning.
func (f *Estimates) MissingHits(slot int) float64 {
	if f.disabled {
		return 0
	}
	return f.backends[slot].missing.share()
}
