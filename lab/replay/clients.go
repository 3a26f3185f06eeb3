package replay

import (
	"cmp"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// Clients is an open loop of clients that each send in bursts, at a rate that changes. The distributions are those of
// the 387 clients of four traces of alibaba/ServeGen (Apache-2.0), which has a rate, a coefficient of variation and a
// fitted distribution of the gaps for each ten minutes:
//
//	mean rate of a client        log-normal, sigma 2: ten clients send 0.63 to 0.93 of all requests
//	rate, from window to window  log-normal, sigma 0.45 around the mean rate
//	gaps                         gamma, squared coefficient of variation from 0.8 to 20, one of each client
//
// All requests of a client begin with one prompt. Lengths vary between clients more than between the requests of one.
type Clients struct {
	Clients                         int
	PromptTokens, OwnTokens, Output float64       // medians over the clients: of the common prompt, of the rest, and of the output
	Rate                            float64       // requests a second of all clients, on average
	For                             time.Duration // from the first arrival to the last
}

const (
	clientsRateSigma   = 2
	clientsWindowSigma = 0.45
	clientsWindow      = 10 * time.Minute // after which the rates change

	minSquaredVariation, maxSquaredVariation = 0.8, 20

	clientsLengthSigma  = 0.8 // between clients
	clientsRequestSigma = 0.5 // between the requests of a client
	maxClientPrompt     = 32_000
)

// client is one of Clients. It depends on the seed and its number alone.
type client struct {
	draw             *rand.Rand
	rate             float64 // mean, requests a second
	squaredVariation float64 // of its gaps, at a constant rate
	promptTokens     int
	own, output      float64 // medians
}

// Requests generates the arrivals.
func (w Clients) Requests(_ int, seed uint64) (*Requests, error) {
	if w.Clients < 1 || w.PromptTokens < 1 || w.OwnTokens < 1 || w.Output < 1 || w.Rate <= 0 || w.For <= 0 {
		return nil, errors.New("clients workload: number of clients, a length, rate or duration is not above 0")
	}
	clients, weights := make([]client, w.Clients), 0.0
	for i := range clients {
		clients[i] = w.newClient(rand.New(rand.NewPCG(seed, uint64(i))))
		weights += clients[i].rate
	}
	r := &Requests{BlockTokens: generatedBlockTokens}
	for i := range clients {
		c := &clients[i]
		c.rate *= w.Rate / weights
		lengths := SharedPrompts{Prompts: w.Clients, PromptTokens: c.promptTokens, Output: c.output}
		for _, at := range c.arrivals(w.For) {
			lengths.OwnTokens = roundTokens(c.own*drawLognormal(c.draw, 0, clientsRequestSigma), maxAgenticContext)
			r.Open = append(r.Open, lengths.newJob(at, uint64(len(r.Open)), uint64(i), c.draw))
		}
	}
	slices.SortStableFunc(r.Open, func(a, b *Job) int { return cmp.Compare(a.At, b.At) })
	r.Total = len(r.Open)
	return r, nil
}

// newClient draws a client. Its rate is a weight, relative to the others.
func (w Clients) newClient(draw *rand.Rand) client {
	length := func(median float64) float64 { return median * drawLognormal(draw, 0, clientsLengthSigma) }
	return client{
		draw:             draw,
		rate:             drawLognormal(draw, 0, clientsRateSigma),
		squaredVariation: minSquaredVariation * math.Pow(maxSquaredVariation/minSquaredVariation, draw.Float64()),
		promptTokens:     roundTokens(length(w.PromptTokens), maxClientPrompt),
		own:              length(w.OwnTokens),
		output:           length(w.Output),
	}
}

// arrivals draws the times at which the client sends, from 0 to last. A gap is drawn in mean gaps, and lasts as long as
// the rate takes for so many requests, also over a change of the rate.
func (c *client) arrivals(last time.Duration) []time.Duration {
	shape := 1 / c.squaredVariation
	// The run begins at any time of a gap, and in a longer one more likely.
	gap := c.draw.Float64() * drawGamma(c.draw, shape+1) / shape
	var all []time.Duration
	for begin := time.Duration(0); begin < last; begin += clientsWindow {
		rate := c.rate * drawLognormal(c.draw, -clientsWindowSigma*clientsWindowSigma/2, clientsWindowSigma)
		passed := 0.0 // of the window, in mean gaps
		window := rate * min(clientsWindow, last-begin).Seconds()
		for passed+gap < window {
			passed += gap
			all = append(all, begin+time.Duration(passed/rate*float64(time.Second)))
			gap = drawGamma(c.draw, shape) / shape
		}
		gap -= window - passed
	}
	return all
}

// drawGamma draws from a gamma distribution with scale 1, by the method of Marsaglia and Tsang.
func drawGamma(draw *rand.Rand, shape float64) float64 {
	if shape < 1 {
		return drawGamma(draw, shape+1) * math.Pow(draw.Float64(), 1/shape)
	}
	d := shape - 1.0/3
	for {
		x := draw.NormFloat64()
		v := math.Pow(1+x/math.Sqrt(9*d), 3)
		if v > 0 && math.Log(1-draw.Float64()) < x*x/2+d-d*v+d*math.Log(v) {
			return d * v
		}
	}
}
