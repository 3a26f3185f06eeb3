package sim

import (
	"math"
	"math/rand/v2"
)

// words make up every answer. Plain ASCII, so that they need no escaping in
// JSON and a token never splits a character.
var words = [...]string{
	"the", "of", "and", "a", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his",
	"they", "at", "be", "this", "from", "have", "or", "one", "had", "by", "word", "but", "what", "some", "we", "can",
	"out", "other", "were", "all", "there", "when", "up", "use", "your", "how", "said", "each", "she", "which", "their", "time",
	"will", "way", "about", "many", "then", "them", "would", "write", "like", "these", "long", "make", "thing", "see", "him", "two",
	"has", "look", "more", "day", "could", "go", "come", "did", "my", "sound", "no", "most", "number", "who", "over", "know",
	"water", "than", "call", "first", "people", "may", "down", "side", "been", "now", "find", "any", "new", "work", "part", "take",
	"get", "place", "made", "live", "where", "after", "back", "little", "only", "round", "man", "year", "came", "show", "every", "good",
	"me", "give", "our", "under", "name", "very", "through", "just", "form", "much", "great", "think", "say", "help", "low", "line",
}

// answerText returns English-like text of exactly n bytes, the same for the
// same seed.
func answerText(seed uint64, n int) []byte {
	random := rand.New(rand.NewPCG(seed, 1))
	text := make([]byte, 0, n+16)
	for len(text) < n {
		word := words[random.IntN(len(words))]
		text = append(text, word...)
		if random.IntN(12) == 0 {
			text = append(text, '.')
		}
		text = append(text, ' ')
	}
	return text[:n]
}

// answerLength draws the length in tokens of an answer that the client leaves
// to the model: lognormal around 250, the same for the same seed.
func answerLength(seed uint64) int {
	random := rand.New(rand.NewPCG(seed, 2))
	return 1 + int(250*math.Exp(0.5*random.NormFloat64()))
}
