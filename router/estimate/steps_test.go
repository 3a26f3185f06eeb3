package estimate

import (
	"math"
	"math/rand/v2"
	"testing"

	"warmroute/router/step"
)

// engineSamples returns samples of an engine with a model: a request's prefill and an output after another.
func engineSamples(m *step.Model, n int, random *rand.Rand) []StepSample {
	between := func(low, high float64) float64 { return low * math.Exp(random.Float64()*math.Log(high/low)) }
	samples := make([]StepSample, n)
	for i := range samples {
		s := &samples[i]
		sequences, context := between(1, 64), between(100, 30_000)
		if s.Steps = between(8, 1000); i%2 == 0 {
			s.Steps, s.Prompt = 2, between(2000, 100_000)
			cached := s.Prompt * random.Float64()
			s.Tokens = s.Prompt - cached
			s.Attended = s.Tokens * (cached + s.Tokens/2)
		}
		s.Sequences, s.Context = s.Steps*sequences, s.Steps*sequences*context
		s.Seconds = s.Tokens/m.Rate + s.Attended*m.Attention/m.Rate + m.PromptToken*s.Prompt + s.Steps*m.DecodeSeconds(sequences,
			sequences*context)
	}
	return samples
}

func isWithin(share, got, want float64) bool { return math.Abs(got-want) <= share*want }

func TestLearnedSteps(t *testing.T) {
	gpu := step.Default()
	for name, m := range map[string]step.Model{
		"as guessed": gpu,
		"CPU":        {Base: 0.05, Rate: 300, Attention: 1e-5, Sequence: 2e-3, Context: 2e-7, PromptToken: 3e-6},
		"large":      {Base: 0.03, Rate: 4000, Attention: 1e-4, Sequence: 1e-4, Context: 1e-7, PromptToken: 2e-6},
		"fast":       {Base: 0.003, Rate: 200_000, Attention: 1e-5, Sequence: 1e-5, Context: 1e-8, PromptToken: 1e-6},
	} {
		f := newTestEstimates(1)
		for i, s := range engineSamples(&m, 500, rand.New(rand.NewPCG(1, 1))) {
			f.LearnSteps(0, &s)
			if got := f.Step(0); i == 40 && !isWithin(0.25, got.PrefillSeconds(20_000, 20_000), m.PrefillSeconds(20_000, 20_000)) {
				t.Errorf("%s: %.3g s after a few samples, want %.3g s", name, got.PrefillSeconds(20_000, 20_000), m.PrefillSeconds(20_000, 20_000))
			}
		}
		got := f.Step(0)
		for parameter, values := range map[string][2]float64{
			"base": {got.Base, m.Base}, "rate": {got.Rate, m.Rate}, "attention": {got.Attention, m.Attention},
			"sequence": {got.Sequence, m.Sequence}, "context": {got.Context, m.Context},
		} {
			if !isWithin(0.1, values[0], values[1]) {
				t.Errorf("%s: %s is %.3g, want %.3g", name, parameter, values[0], values[1])
			}
		}
	}
}

// Backends of one model have one model of a step, but for one that is slower.
func TestStepsOfEqualBackends(t *testing.T) {
	f := newTestEstimates(4)
	fast, slow := step.Default(), step.Default()
	slow.Base, slow.Rate = 2*fast.Base, fast.Rate/2
	for slot := range 3 {
		f.SetModel(slot, "m")
	}
	models := []*step.Model{&fast, &fast, &slow}
	if f.KnowsPrefillRate(0) || f.IsPrefillRateKnown(0) {
		t.Error("a rate is known before the first sample")
	}
	random := rand.New(rand.NewPCG(2, 2))
	for range 200 {
		for slot, m := range models {
			for _, s := range engineSamples(m, 2, random) {
				s.Seconds *= 0.9 + 0.2*random.Float64()
				f.LearnSteps(slot, &s)
			}
		}
	}
	if *f.Step(0) != *f.Step(1) {
		t.Errorf("%+v and %+v, want the same", *f.Step(0), *f.Step(1))
	}
	if a, b := f.PrefillRate(0), f.PrefillRate(2); !isWithin(0.2, a/b, 2) {
		t.Errorf("the rates are %.0f and %.0f, want twice as much", a, b)
	}
	f.SetModel(3, "m")
	if !f.KnowsPrefillRate(3) || f.IsPrefillRateKnown(3) || *f.Step(3) != *f.Step(0) {
		t.Error("a new backend does not have what was learned of the others")
	}
	f.ForgetLearned(2)
	if *f.Step(2) != *f.Step(0) || f.IsPrefillRateKnown(2) {
		t.Error("something is left of what was learned of one backend")
	}
	for slot := range 2 {
		f.ForgetLearned(slot)
	}
	if *f.Step(0) != step.Default() || f.KnowsPrefillRate(0) {
		t.Errorf("%+v is left", *f.Step(0))
	}
}

func TestStepsByModel(t *testing.T) {
	f := newTestEstimates(2)
	f.SetModel(0, "large")
	m := step.Default()
	m.Rate = 1000
	for _, s := range engineSamples(&m, 100, rand.New(rand.NewPCG(3, 3))) {
		f.LearnSteps(0, &s)
		f.LearnSteps(1, &s) // before its model is known
	}
	f.SetModel(1, "small")
	if !isWithin(0.1, f.Step(1).Rate, 1000) {
		t.Errorf("%.0f tokens a second, want what was learned before the model was known", f.Step(1).Rate)
	}
	f.SetModel(1, "another")
	if *f.Step(1) != step.Default() {
		t.Errorf("%+v, where the backend serves another model now", *f.Step(1))
	}
}

func TestGuessedSteps(t *testing.T) {
	for name, billions := range map[string]float64{
		"meta-llama/Llama-3.1-8B-Instruct": 8, "Qwen/Qwen2.5-0.5B": 0.5, "gemma-3-27b-it": 27, "/models/Llama-3-70B": 70, "405b": 405,
		"m": 8, "0b": 0.1, "a8bit": 8, "9999b": 1000,
	} {
		if got := guessSteps(name); !isWithin(1e-9, got.Rate, 38_500*8/billions) || !isWithin(1e-9, got.Base, 5.07e-3*billions/8) {
			t.Errorf("%s: %+v, want %v billion parameters", name, got, billions)
		}
	}
}

func TestImplausibleStepSamples(t *testing.T) {
	f := newTestEstimates(1)
	good := StepSample{Seconds: 1, Steps: 2, Tokens: 1000, Attended: 5e5, Sequences: 2, Context: 1000, Prompt: 1000}
	for i, change := range []func(*StepSample, float64){
		func(s *StepSample, x float64) { s.Seconds = x }, func(s *StepSample, x float64) { s.Steps = x },
		func(s *StepSample, x float64) { s.Tokens = x }, func(s *StepSample, x float64) { s.Attended = x },
		func(s *StepSample, x float64) { s.Sequences = x }, func(s *StepSample, x float64) { s.Context = x },
		func(s *StepSample, x float64) { s.Prompt = x },
		func(s *StepSample, x float64) { s.Known = x },
	} {
		for _, x := range []float64{-1, math.NaN(), math.Inf(1), math.Inf(-1), math.MaxFloat64} {
			s := good
			change(&s, x)
			if f.LearnSteps(0, &s); *f.Step(0) != step.Default() {
				t.Fatalf("learned from field %d of %v", i, x)
			}
		}
	}
	f.SetLearningDisabled(true)
	if f.LearnSteps(0, &good); *f.Step(0) != step.Default() {
		t.Error("learned while learning is disabled")
	}
}

// Whatever the samples are, the coefficients stay within their bounds.
func FuzzLearnSteps(f *testing.F) {
	f.Add(1.0, 10.0, 1000.0, 1e6, 100.0, 1e5, 2000.0, 0.5, uint8(3))
	f.Add(1e-9, 1e12, 1e12, 1e12, 1e12, 1e12, 1e12, 0.0, uint8(200))
	f.Fuzz(func(t *testing.T, seconds, steps, tokens, attended, sequences, context, prompt, known float64, n uint8) {
		e := newTestEstimates(1)
		m := step.Default()
		for i, s := range engineSamples(&m, int(n), rand.New(rand.NewPCG(4, 4))) {
			if e.LearnSteps(0, &s); i%3 == 0 {
				e.LearnSteps(0, &StepSample{seconds, steps, tokens, attended, sequences, context, prompt, known})
			}
			if learned := &e.regressionOf(0).learned; !learned.isPlausible() || !(e.PrefillRate(0) > 0) || math.IsInf(e.PrefillRate(0), 0) {
				t.Fatalf("learned %v, %v tokens a second", learned, e.PrefillRate(0))
			}
		}
	})
}

func TestRestoredSteps(t *testing.T) {
	f := newTestEstimates(1)
	m := step.Default()
	m.Rate = 5000
	for _, s := range engineSamples(&m, 100, rand.New(rand.NewPCG(5, 5))) {
		f.LearnSteps(0, &s)
	}
	restored := newTestEstimates(2)
	restored.SetModel(0, "m")
	restored.SetModel(1, "m")
	if !restored.RestoreBackend(0, f.AppendBackend(nil, 0)) {
		t.Fatal("not restored")
	}
	if *restored.Step(0) != *f.Step(0) || *restored.Step(1) != *f.Step(0) || !restored.IsPrefillRateKnown(0) {
		t.Errorf("restored %+v, want %+v", *restored.Step(0), *f.Step(0))
	}
}

// TestLearnRequest has requests that are too short to learn from how long steps take, of which some wait for long.
func TestLearnRequest(t *testing.T) {
	f := newTestEstimates(2)
	f.SetModel(0, "m")
	f.SetModel(1, "m")
	m := *f.Step(0)
	sample := StepSample{Steps: 1, Tokens: 16, Prompt: 1000}
	steps := m.Base + 16/m.Rate
	for i := range 50 {
		sample.Seconds = steps + m.PromptToken*1000 + 0.004
		if i%10 == 0 {
			sample.Seconds += 0.2
		}
		f.LearnRequest(0, &sample)
	}
	if *f.Step(0) != m {
		t.Errorf("the steps have changed from %+v to %+v", m, *f.Step(0))
	}
	for slot := range 2 { // both serve the model
		if got, want := f.RequestSeconds(slot, 1000), m.PromptToken*1000+0.004; got < want*0.9 || got > want*1.5 {
			t.Errorf("backend %d: %v s beside its steps, want about %v", slot, got, want)
		}
	}
	f.SetLearningDisabled(true)
	if got, want := f.RequestSeconds(0, 1000), m.PromptToken*1000+m.Base; got != want {
		t.Errorf("nothing is learned: %v s beside its steps, want %v", got, want)
	}
}
