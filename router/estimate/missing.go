package estimate

const (
	missingDecay       = 0.875 // per response
	minMissingHits     = 0.02  // share of the expected tokens; less is the error of bytes as a measure of tokens
	maxRecomputedShare = 0.9
	expectedPrior      = 1000 // tokens that are assumed to have been expected and found
)

// missingHits is how much of what a backend was expected to have in its cache it lacked, over
// its last responses. It reacts within a few responses, before capacity does: a cache that
// holds a little less than its conversations need loses a part of each before its next turn.
type missingHits struct {
	expected, missing, computed float64 // tokens, decaying
}

// addResponse adds a response: tokens that were expected in the cache, those that were there, and all of
// its prompt.
func (m *missingHits) addResponse(expected, cached, prompt float64) {
	m.expected = missingDecay*m.expected + expected
	m.missing = missingDecay*m.missing + max(0, expected-cached)
	m.computed = missingDecay*m.computed + prompt - cached
}

// missingShares returns which share of the expected tokens was missing, and which share of the computed
// ones that was.
func (m *missingHits) missingShares() (ofExpected, ofComputed float64) {
	if m.missing <= minMissingHits*(m.expected+expectedPrior) {
		return 0, 0
	}
	return m.missing / (m.expected + expectedPrior), min(maxRecomputedShare, m.missing/m.computed)
}

// MissingHits returns which share of the tokens that a backend was expected to have in its cache
// was missing lately, and which share of what it computed that was; 0 without learning.
func (f *Estimates) MissingHits(slot int) (ofExpected, ofComputed float64) {
	if f.disabled {
		return 0, 0
	}
	return f.backends[slot].missing.missingShares()
}
