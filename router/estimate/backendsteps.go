package estimate

import (
	"math"
	"regexp"
	"slices"
	"strconv"

	"warmroute/router/step"
)

// stepGroup is what was learned of all backends that serve one model: of their steps, and of a store that they share.
type stepGroup struct {
	guess stepRegression // without samples
	all   stepRegression // from the samples of all of them

	request Average // of all of them; see LearnRequest
	fetches fetchTimes
	store   sharedStore
}

func newStepGroup(guess step.Model) *stepGroup {
	r := newStepRegression(guess)
	return &stepGroup{guess: r, all: r}
}

// backendSteps is what was learned of the steps of one backend.
type backendSteps struct {
	group *stepGroup
	own   stepRegression // from its samples alone; the zero value: none so far

	// By how much own's relative errors of predictions are less than those of the group's model: the mean, and that of
	// its square. Equal backends have the group's model, so that noise does not make one of them seem the faster one:
	// own is used only where it certainly predicts better.
	advantage, advantageSquare float64
	compared                   int // samples of these
	usesOwn                    bool

	request Average // seconds that a request takes beside its steps and its prompt; see LearnRequest
}

// compareModels counts by how much own's error was less than that of the group's model, and updates usesOwn.
func (b *backendSteps) compareModels(advantage float64) {
	b.compared++
	b.advantage += advantageGain * (advantage - b.advantage)
	b.advantageSquare += advantageGain * (advantage*advantage - b.advantageSquare)
	deviation := math.Sqrt(max(0, b.advantageSquare-b.advantage*b.advantage))
	b.usesOwn = b.compared >= minOwnSamples && b.advantage > minAdvantage+minDeviations*deviation
}

// SetModel says which model a backend serves. Backends of one model learn from each other how long their steps take.
func (f *Estimates) SetModel(slot int, model string) {
	g := f.groups[model]
	if g == nil {
		if len(f.groups) == maxModels {
			return
		}
		g = newStepGroup(guessSteps(model))
		f.groups[model] = g
	}
	b := &f.backends[slot].steps
	switch b.group {
	case g:
		return
	case f.unknown:
		if g.all.samples == 0 && b.own.samples > 0 {
			g.all = b.own
		}
		b.group = g
	default: // its engine is another one
		*b = backendSteps{group: g}
	}
	f.updateMedianPrefillRate()
}

// parameters matches the number of a model's parameters in its name, in billions.
var parameters = regexp.MustCompile(`(?i)(?:^|[-_/ ])(\d{1,4}(?:\.\d{1,3})?)b(?:$|[-_/ .:])`)

// guessSteps returns what is expected of the steps of a model, before one was seen: those of an H200, by the number of
// parameters in its name.
func guessSteps(model string) step.Model {
	guess := step.Default()
	if m := parameters.FindStringSubmatch(model); m != nil {
		const defaultSize, minSize, maxSize = 8, 0.1, 1000
		billions, _ := strconv.ParseFloat(m[1], 64) // it is a number
		size := min(max(billions, minSize), maxSize) / defaultSize
		guess.Base *= size
		guess.Rate /= size
	}
	return guess
}

// regressionOf returns the regression that is used for a backend.
func (f *Estimates) regressionOf(slot int) *stepRegression {
	b := &f.backends[slot].steps
	switch {
	case f.disabled:
		return &b.group.guess
	case b.usesOwn:
		return &b.own
	}
	return &b.group.all
}

// Step returns how long the steps of a backend take; of one of its engines, if it has several. It is valid until the
// next call of a method that learns. Backends of one model have the same, unless the samples of one tell that it is
// another.
func (f *Estimates) Step(slot int) *step.Model { return &f.regressionOf(slot).model }

// RequestSeconds returns how long a request takes on a backend beside its steps: it waits for the end of one, the API server
// reads its prompt, and the network takes its time.
func (f *Estimates) RequestSeconds(slot int, promptTokens float64) float64 {
	learned, b := &f.regressionOf(slot).learned, &f.backends[slot].steps
	request := learned[termRequest]
	switch {
	case f.disabled:
	case b.request.count >= minOwnSamples:
		request = b.request.Value
	case b.group.request.count > 0:
		request = b.group.request.Value
	}
	return max(0, request+learned[termPrompt]*promptTokens)
}

// LearnRequest learns from the time to the first token of a request how long that is, also from times that are too short to
// learn from how long steps take: most are, where prompts are cached.
func (f *Estimates) LearnRequest(slot int, s *StepSample) {
	x, _, ok := s.terms()
	if f.disabled || !ok || s.Seconds > maxRequestSampleSeconds {
		return
	}
	rest := s.Seconds
	for i, coefficient := range f.regressionOf(slot).learned {
		if i != termRequest {
			rest -= coefficient * x[i]
		}
	}
	b, base := &f.backends[slot].steps, f.Step(slot).Base
	for _, average := range []*Average{&b.request, &b.group.request} {
		if average.count == 0 {
			*average = NewAverage(base, 1)
		}
		average.Add(min(rest, maxRequestGrowth*max(average.Value, base))) // most, not the mean: some wait for long
	}
}

// LearnSteps learns from what an engine of a backend did in a time.
func (f *Estimates) LearnSteps(slot int, s *StepSample) {
	x, share, ok := s.relativeTerms()
	if f.disabled || !ok {
		return
	}
	b := &f.backends[slot].steps
	g := b.group
	if b.own.samples == 0 {
		b.own = newStepRegression(g.all.model)
	}
	if s.Seconds >= minComparedSeconds {
		own, all := math.Abs(b.own.residual(&x, share)), math.Abs(g.all.residual(&x, share))
		b.compareModels(min(1, all) - min(1, own))
	}
	b.own.add(x, share, &g.all.learned)
	g.all.add(x, share, &g.guess.learned)
	if s.Prompt > 0 && s.Tokens >= minPrefill {
		b.own.prefills++
		g.all.prefills++
	}
	if g.all.samples%medianInterval == 1 {
		f.updateMedianPrefillRate()
	}
}

// forgetStepsOfGroup forgets what was learned of the steps of a group without a backend that has learned any.
func (f *Estimates) forgetStepsOfGroup(g *stepGroup) {
	if !slices.ContainsFunc(f.backends, func(b backend) bool { return b.steps.group == g && b.steps.own.samples > 0 }) {
		g.all, g.fetches, g.store = g.guess, fetchTimes{}, sharedStore{}
	}
	f.updateMedianPrefillRate()
}

// restoreSteps sets what was learned of a backend before.
func (f *Estimates) restoreSteps(slot int, learned coefficients) {
	b := &f.backends[slot].steps
	b.own = newStepRegression(b.group.guess.model)
	b.own.restore(&learned)
	if b.group.all.samples == 0 {
		b.group.all = b.own
	}
	f.updateMedianPrefillRate()
}

// PrefillRate returns how many tokens a backend prefills in a second, with contexts of the usual length. As long as it
// is not known, it is what most GPUs can do.
func (f *Estimates) PrefillRate(slot int) float64 {
	steps := f.regressionOf(slot)
	if !steps.isRateKnown() {
		return unknownRateShare * steps.rate
	}
	return float64(max(1, f.backends[slot].engines)) * steps.rate
}

// MedianPrefillRate returns the median of the backends' prefill rates that are known, in tokens a
// second.
func (f *Estimates) MedianPrefillRate() float64 { return f.rate }

// IsPrefillRateKnown reports whether the prefill rate was measured on the backend itself, and well enough to tell that
// it is stalled.
func (f *Estimates) IsPrefillRateKnown(slot int) bool {
	return f.backends[slot].steps.own.prefills >= minOwnPrefills
}

// KnowsPrefillRate reports whether PrefillRate was measured, if only roughly, on the backend or
// on another with the same model. Without learning the default is all there is.
func (f *Estimates) KnowsPrefillRate(slot int) bool {
	return f.disabled || f.regressionOf(slot).isRateKnown()
}

func (f *Estimates) updateMedianPrefillRate() {
	rates := f.scratch[:0]
	for slot := range f.backends {
		if f.KnowsPrefillRate(slot) {
			rates = append(rates, f.PrefillRate(slot))
		}
	}
	f.scratch = rates
	if len(rates) > 0 {
		slices.Sort(rates)
		f.rate = rates[len(rates)/2]
	}
}
