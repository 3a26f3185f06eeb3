package estimate

import (
	"math"

	"warmroute/router/step"
)

// StepSample is what an engine did in a time. Sums are over the steps in it.
type StepSample struct {
	Seconds          float64
	Steps            float64
	Tokens, Attended float64 // computed of prompts, and tokens that these attend to
	Sequences        float64 // sum of the sequences that generate
	Context          float64 // sum of the tokens of their contexts
	Prompt           float64 // tokens of the request that was sent at its beginning, cached ones too; 0: none was
	Known            float64 // seconds for other work, from which nothing is learned
}

// The terms of a step's time. Their coefficients are seconds.
const (
	termBase = iota
	termTokens
	termAttended
	termSequences
	termContext
	termPrompt
	termRequest // for each request: it waits for the end of a step, and for the network
	stepTerms
)

const (
	minPrefillRate, maxPrefillRate = 10.0, 1e6

	// StepTokens is about how many tokens of prompts an engine computes in a step.
	StepTokens = 8192

	unknownRateShare = 0.2 // of the guessed rate, which is that of a fast GPU

	minPrefills    = 3    // below which the rate is not known
	minOwnPrefills = 8    // of a backend itself, to tell that it is stalled
	minPrefill     = 1024 // tokens; a shorter one says little about the rate

	minOwnSamples = 16   // of a backend's own model
	minAdvantage  = 0.05 // by which its error is less than that of the group's model, on average
	minDeviations = 0.5  // standard deviations of that, beside it: three standard errors of the mean
	advantageGain = 0.05 // of a sample in the mean

	stepDecay      = 0.995 // of information, by each sample
	solveSweeps    = 10
	initialNoise   = 0.5
	minNoise       = 0.02 // relative error of a sample, at least
	noiseGain      = 0.05
	maxExcess      = 10   // times the time of a sample that its predicted time counts for at most
	minMainShare   = 0.1  // of what the samples tell if all coefficients are in the expected proportion
	maxScale       = 1e4  // of expected coefficients
	minShare       = 0.03 // of the expected coefficient
	priorTrust     = 0.02 // in what is expected of a coefficient, as the weight of a sample without noise
	restoredTrust  = 100  // in coefficients of a snapshot, which may be a tenth off
	medianInterval = 16   // samples

	// In less time, the network and the proxy may take most of it. Backends are not compared by what is short.
	minSampleSeconds, minComparedSeconds = 0.02, 0.1
	maxSampleSeconds                     = 3600
	maxRequestSampleSeconds              = 0.25 // in more, the error of the prefill's time is the larger part
	maxRequestGrowth                     = 3    // times the average that a sample counts for at most
	maxSampleValue                       = 1e12
)

// coefficients are seconds for one unit of each term.
type coefficients [stepTerms]float64

// minCoefficients and maxCoefficients are beyond what any engine has.
var maxCoefficients = coefficients{termBase: 10, termTokens: 1 / minPrefillRate, termAttended: 1e-3, termSequences: 1, termContext: 1e-3,
	termPrompt: 1e-2, termRequest: 10}

var minCoefficients = coefficients{termBase: 1e-6, termTokens: 1 / maxPrefillRate}

// scaledBy is the term to which each one is in proportion, as long as nothing else is known. The API server is as fast
// beside a slow engine as beside a fast one.
var scaledBy = [stepTerms]int{termBase, termTokens, termTokens, termBase, termBase, unscaled, termBase}

const unscaled = -1

// coefficientsOf returns the coefficients of a model.
func coefficientsOf(m step.Model) coefficients {
	return coefficients{
		termBase: m.Base, termTokens: 1 / m.Rate, termAttended: m.Attention / m.Rate,
		termSequences: m.Sequence, termContext: m.Context, termPrompt: m.PromptToken, termRequest: m.Base,
	}
}

// model returns the model that has the coefficients.
func (c *coefficients) model() step.Model {
	return step.Model{
		Base: c[termBase], Rate: 1 / c[termTokens], Attention: c[termAttended] / c[termTokens],
		Sequence: c[termSequences], Context: c[termContext], PromptToken: c[termPrompt],
	}
}

// stepRegression learns a step.Model from samples: the coefficients for which the relative errors of the predicted
// times have the least weighted sum of squares, with what is expected of them as further samples.
//
// A sample replaces a share of the earlier ones in the direction in which it adds information, and only there. So what
// was learned of long contexts is kept while there are none.
type stepRegression struct {
	information [stepTerms][stepTerms]float64 // weighted sum of the products of terms
	evidence    coefficients                  // weighted sum of the terms, times the shares that they explain
	learned     coefficients
	noise       [2]float64 // mean relative error: of samples that do not begin with a request, and of those that do
	samples     int
	prefills    int // samples from which the rate is learned
	model       step.Model
	rate        float64 // prefill tokens a second at the usual depth
}

// isRateKnown reports whether the prefill rate was learned, or follows from steps that were.
func (r *stepRegression) isRateKnown() bool {
	return r.prefills >= minPrefills || r.prefills == 0 && r.samples >= minOwnSamples
}

func newStepRegression(expected step.Model) stepRegression {
	r := stepRegression{learned: coefficientsOf(expected), noise: [2]float64{initialNoise, initialNoise}}
	r.updateDerived()
	return r
}

// updateDerived sets what is derived from the coefficients.
func (r *stepRegression) updateDerived() {
	r.model = r.learned.model()
	depth := 0.0
	if products := &r.information[termTokens]; products[termTokens] > 0 {
		depth = products[termAttended] / products[termTokens]
	}
	r.rate = 1 / (r.learned[termTokens] + r.learned[termAttended]*depth)
}

// terms returns the terms of a sample, and the share of its time that they explain. It returns false if the sample is not
// plausible.
func (s *StepSample) terms() (x coefficients, share float64, ok bool) {
	if !(s.Seconds > 0 && s.Seconds <= maxSampleSeconds && s.Known >= 0 && s.Known < s.Seconds) {
		return x, 0, false
	}
	x = coefficients{s.Steps, s.Tokens, s.Attended, s.Sequences, s.Context, s.Prompt, min(1, s.Prompt)}
	for i := range x {
		if !(x[i] >= 0 && x[i] <= maxSampleValue) {
			return x, 0, false
		}
	}
	return x, 1 - s.Known/s.Seconds, true
}

// relativeTerms is terms, divided by the sample's time. It returns false, too, if the sample says little.
func (s *StepSample) relativeTerms() (x coefficients, share float64, ok bool) {
	if x, share, ok = s.terms(); !ok || s.Seconds < minSampleSeconds {
		return x, 0, false
	}
	for i := range x {
		x[i] /= s.Seconds
	}
	return x, share, true
}

// residual returns by which share of its time the predicted time of a sample is too short.
func (r *stepRegression) residual(x *coefficients, share float64) float64 {
	short := share
	for i := range x {
		short -= x[i] * r.learned[i]
	}
	return short
}

// add learns from the terms of a sample, which explain a share of its time. expected are the coefficients as far as nothing else is known.
func (r *stepRegression) add(x coefficients, share float64, expected *coefficients) {
	kind := 0
	if x[termRequest] > 0 {
		kind = 1
	}
	if excess := (1 - r.residual(&x, share)) / maxExcess; excess > 1 {
		for i := range x {
			x[i] /= excess
		}
		share /= excess
	}
	noise, miss := &r.noise[kind], math.Abs(r.residual(&x, share))
	weight := 1 / (*noise * max(*noise, miss)) // of Huber: outliers count, but by their size and not its square
	*noise = max(minNoise, *noise+max(noiseGain, 1/float64(r.samples+2))*(min(1, miss)-*noise))

	var along coefficients // the information in the direction of x
	inDirection, evidence := 0.0, 0.0
	for i := range x {
		for j := range x {
			along[i] += r.information[i][j] * x[j]
		}
		inDirection += along[i] * x[i]
		evidence += r.evidence[i] * x[i]
	}
	forget := 0.0
	if inDirection > 0 {
		forget = (1 - stepDecay) / inDirection
	}
	for i := range x {
		for j := range x {
			r.information[i][j] += weight*x[i]*x[j] - forget*along[i]*along[j]
		}
		r.evidence[i] += weight*x[i]*share - forget*along[i]*evidence
	}
	r.samples++
	r.solve(expected)
}

// solve updates the coefficients, beginning with those of before.
func (r *stepRegression) solve(expected *coefficients) {
	var prior coefficients
	least := minMainShare * r.scaleOf(expected)
	for i, main := range scaledBy {
		if main == termTokens && r.prefills == 0 {
			main = termBase
		}
		if prior[i] = expected[i]; main != unscaled {
			prior[i] *= max(r.learned[main]/expected[main], least)
		}
	}
	for range solveSweeps {
		for i := range prior {
			rest := r.evidence[i]
			for j := range prior {
				if j != i {
					rest -= r.information[i][j] * r.learned[j]
				}
			}
			trust := priorTrust / (prior[i] * prior[i])
			best := (rest + trust*prior[i]) / (r.information[i][i] + trust)
			r.learned[i] = min(max(best, minShare*prior[i], minCoefficients[i]), maxCoefficients[i])
		}
	}
	r.updateDerived()
}

// scaleOf returns the factor by which all of some coefficients fit best.
func (r *stepRegression) scaleOf(c *coefficients) float64 {
	const trust = 1e-3 // in a factor of 1
	numerator, denominator := trust, trust
	for i := range c {
		numerator += r.evidence[i] * c[i]
		for j := range c {
			denominator += r.information[i][j] * c[i] * c[j]
		}
	}
	return min(max(numerator/denominator, 1/maxScale), maxScale)
}

// isPlausible reports whether an engine can have the coefficients.
func (c *coefficients) isPlausible() bool {
	for i := range c {
		if !(c[i] > 0 && c[i] <= maxCoefficients[i]) {
			return false
		}
	}
	return c[termBase] >= minCoefficients[termBase] && c[termTokens] >= minCoefficients[termTokens]
}

// restore begins with coefficients that were learned before.
func (r *stepRegression) restore(learned *coefficients) {
	*r = stepRegression{learned: *learned, noise: r.noise, samples: minOwnSamples, prefills: minOwnPrefills}
	for i, c := range learned {
		r.information[i][i] = restoredTrust / (c * c)
		r.evidence[i] = restoredTrust / c
	}
	r.updateDerived()
}
