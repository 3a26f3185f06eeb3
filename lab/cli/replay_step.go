package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"warmroute/lab/sim/engine"
	"warmroute/router/step"
)

// readStep returns a copy of an engine that takes the times of its steps from a file with a step.Model.
func readStep(path string, e engine.Config) (engine.Config, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return e, err
	}
	var m step.Model
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&m); err != nil {
		return e, fmt.Errorf("%s is not a JSON object of a step: %w", path, err)
	}
	if e, err = engineWithStep(m, e); err != nil {
		return e, fmt.Errorf("%s: %w", path, err)
	}
	return e, nil
}

// engineWithStep returns a copy of an engine that takes the times of its steps from m.
func engineWithStep(m step.Model, e engine.Config) (engine.Config, error) {
	const minRate, maxRate, maxSeconds = 1, 1e7, 100
	if !(m.Rate >= minRate && m.Rate <= maxRate) {
		return e, fmt.Errorf("prompt_tokens_per_second %g is not between 1 and 10,000,000", m.Rate)
	}
	for _, x := range []float64{m.Base, m.Attention, m.Sequence, m.Context, m.PromptToken} {
		if !(x > 0 && x <= maxSeconds) {
			return e, fmt.Errorf("%g is not above 0 and at most 100", x)
		}
	}
	duration := func(seconds float64) time.Duration { return max(1, time.Duration(seconds*float64(time.Second))) }
	e.StepTime, e.PrefillRate, e.QuadraticDepth = duration(m.Base), m.Rate, min(1, m.Attention)
	e.DecodeTime, e.ContextTime, e.PromptTokenTime = duration(m.Sequence), duration(m.Context), duration(m.PromptToken)
	return e, nil
}
