package replay

import (
	"errors"
	"math/rand/v2"
	"time"
)

// SharedPrompts is an open loop of single questions, each behind one of a few
// prompts: requests arrive at random, at a constant rate.
type SharedPrompts struct {
	Prompts      int // how many there are
	PromptTokens int // length of each
	Zipf         float64
	OwnTokens    int           // of each request, behind its prompt
	Answer       float64       // median of the answers' tokens, lognormal with a sigma of 0.5
	Rate         float64       // requests a second; 0: as Load says
	Load         float64       // prompt tokens over what the fleet could prefill without a cache
	For          time.Duration // from the first arrival to the last, about
	KVTokens     int           // of each replica; 0: whatever the scenario has
}

// Hot is a short prompt, or a few, that everybody sends, with long answers: a
// rule that goes by the prefix alone puts all of it on one backend.
func Hot(prompts int, rate float64) SharedPrompts {
	return SharedPrompts{
		Prompts: prompts, PromptTokens: 2048, Zipf: 0.8, OwnTokens: 40,
		Answer: 300, Rate: rate, For: 5 * time.Minute,
	}
}

// OpenChats is many chat prompts on small caches, under a load that no fleet
// could carry without a cache.
func OpenChats() SharedPrompts {
	return SharedPrompts{
		Prompts: 200, PromptTokens: 1536, Zipf: 1, OwnTokens: 200,
		Answer: 250, Load: 1.5, For: 5 * time.Minute, KVTokens: 153_600,
	}
}

// LoadOn is what the workload offers so many backends.
func (w SharedPrompts) LoadOn(backends int) float64 {
	if w.Rate == 0 {
		return w.Load
	}
	return w.Rate * float64(w.PromptTokens+w.OwnTokens) / (float64(backends) * nominalRate)
}

// Requests draws the arrivals.
func (w SharedPrompts) Requests(backends int, seed uint64) (*Requests, error) {
	size := w.PromptTokens + w.OwnTokens
	if w.Prompts < 1 || w.PromptTokens < 1 || size < 1 || w.For <= 0 {
		return nil, errors.New("shared prompts need a number of prompts, their length, and how long to go on")
	}
	rate := w.Rate
	if rate == 0 {
		rate = w.Load * float64(backends) * nominalRate / float64(size)
	}
	if rate <= 0 {
		return nil, errors.New("shared prompts need a rate or a load above 0")
	}
	draw := rand.New(rand.NewPCG(seed, 3))
	which := NewZipf(w.Prompts, w.Zipf)
	r := &Requests{BlockTokens: generatedBlock, KVTokens: w.KVTokens}
	for at := time.Duration(0); at < w.For; at += gap(draw, rate) {
		r.Open = append(r.Open, w.job(at, uint64(len(r.Open)), uint64(which.Draw(draw)), draw))
	}
	r.Total = len(r.Open)
	return r, nil
}

func (w SharedPrompts) job(at time.Duration, number, which uint64, draw *rand.Rand) *Job {
	size := w.PromptTokens + w.OwnTokens
	answer := tokens(w.Answer*lognormal(draw, 0, 0.5), maxTraceAnswer)
	var c chain
	for len(c.cache) < w.PromptTokens/generatedBlock {
		c.add(which)
	}
	for len(c.cache) < (size+answer)/generatedBlock {
		c.add(uint64(w.Prompts) + number)
	}
	j := c.job(at, size, answer, generatedBlock)
	j.Head = mix(which)
	j.Session = j.Head
	return j
}

// gap draws the time between two arrivals of a Poisson process.
func gap(draw *rand.Rand, rate float64) time.Duration {
	return time.Duration(draw.ExpFloat64() / rate * float64(time.Second))
}
