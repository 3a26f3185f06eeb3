package replay

import (
	"cmp"
	"errors"
	"math/rand/v2"
	"slices"
	"time"
)

// Documents is an open loop of long documents that are asked about a few times
// each: the first question arrives at random, each later one a while after it.
type Documents struct {
	Load float64       // prompt tokens over what the fleet could prefill without a cache
	For  time.Duration // within which documents appear; 0: 10 minutes
}

const (
	documentTokens   = 20_000
	documentQuestion = 100              // tokens
	documentAnswer   = 200              // tokens, median; lognormal with a sigma of 0.5
	documentPause    = 30 * time.Second // between two questions, mean

	// A document is asked about so many times, each number as likely.
	documentFewest, documentMost = 2, 6
)

// Requests draws the documents and their questions.
func (w Documents) Requests(backends int, seed uint64) (*Requests, error) {
	if w.Load <= 0 {
		return nil, errors.New("documents need a load above 0")
	}
	const size, asked = documentTokens + documentQuestion, (documentFewest + documentMost) / 2.0
	rate := w.Load * float64(backends) * nominalRate / (size * asked)
	draw := rand.New(rand.NewPCG(seed, 4))
	r := &Requests{BlockTokens: generatedBlock}
	last := cmp.Or(w.For, 10*time.Minute)
	for at, document := time.Duration(0), uint64(1); at < last; at, document = at+gap(draw, rate), document+1 {
		times := documentFewest + draw.IntN(documentMost-documentFewest+1)
		for asked, k := at, 0; k < times; k++ {
			r.Open = append(r.Open, documentJob(asked, document, uint64(len(r.Open)), draw))
			asked += gap(draw, 1/documentPause.Seconds())
		}
	}
	slices.SortStableFunc(r.Open, func(a, b *Job) int { return cmp.Compare(a.At, b.At) })
	r.Total = len(r.Open)
	return r, nil
}

func documentJob(at time.Duration, document, number uint64, draw *rand.Rand) *Job {
	const size = documentTokens + documentQuestion
	answer := tokens(documentAnswer*lognormal(draw, 0, 0.5), maxTraceAnswer)
	var c chain
	for len(c.cache) < documentTokens/generatedBlock {
		c.add(document)
	}
	for len(c.cache) < (size+answer)/generatedBlock {
		c.add(mix(number))
	}
	j := c.job(at, size, answer, generatedBlock)
	j.Head = mix(document)
	j.Session = j.Head
	return j
}
