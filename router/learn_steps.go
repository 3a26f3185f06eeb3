package router

// fullSteps is how many prompts that would fill it a replica must have taken
// until the largest step that it has made counts as its scheduler's budget: a
// young one has made small steps only because it was asked for no others.
const fullSteps = 3

// steps is a scheduler's token budget, as far as it shows.
type steps struct {
	largest int // step that the replica has made
	filled  int // prompts of twice that since it is known
	budget  int // 0: not known
}

// prefilled notes that a prompt with so many uncached tokens is done.
func (s *steps) prefilled(uncached float64) {
	if s.largest > 0 && uncached >= 2*float64(s.largest) {
		s.filled++
	}
}

// polled takes in the largest step of a scrape.
func (s *steps) polled(largest int) {
	if largest != s.largest { // also a smaller one: the replica started anew
		s.largest, s.filled = largest, 0
	}
	if largest >= stepTokens || largest > 0 && s.filled >= fullSteps {
		s.budget = largest
	}
}
