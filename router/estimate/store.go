package estimate

const (
	storeDecay     = 0.97   // per response
	minStoreTokens = 1024   // that only other backends hold, of a response
	storePrior     = 20_000 // tokens that are assumed to have been expected and not found
	minStoreShare  = 0.3    // below which a replica may have had the tokens for another reason
)

// sharedStore is how much of what only other backends of a model hold was found on a backend nevertheless: all of it, if they share a
// store.
type sharedStore struct{ expected, found float64 } // tokens, decaying

// StoreShare returns which share of the tokens that only other backends hold a backend can fetch from a store; 0 as far as is known.
func (f *Estimates) StoreShare(slot int) float64 {
	if !f.Offloads(slot) {
		return 0
	}
	s := &f.backends[slot].steps.group.store
	if share := s.found / (s.expected + storePrior); share >= minStoreShare {
		return share
	}
	return 0
}

// learnStore learns from a response how much was cached beyond the tokens that the backend holds, give or take margin.
func (f *Estimates) learnStore(slot int, p *Prediction, held, cached, margin float64) {
	if !f.Offloads(slot) || p.Elsewhere < max(minStoreTokens, 2*margin) || cached < held-margin {
		return
	}
	s := &f.backends[slot].steps.group.store
	s.expected = storeDecay*s.expected + p.Elsewhere
	s.found = storeDecay*s.found + min(max(0, cached-held), p.Elsewhere)
}
