package step_test

import (
	"math"
	"testing"

	"warmroute/router/step"
)

// TestDefaultAgainstH200 compares the default with times measured on an H200 with vLLM 0.26 and Llama 3.1 8B.
func TestDefaultAgainstH200(t *testing.T) {
	m := step.Default()
	for _, p := range []struct{ cached, tokens, seconds float64 }{
		{0, 2048, 0.0545}, {0, 4096, 0.1085}, {0, 8192, 0.2317}, {0, 16384, 0.507}, {0, 30000, 1.1097},
	} {
		predicted := m.PrefillSeconds(p.cached, p.tokens) + m.PromptToken*(p.cached+p.tokens)
		if math.Abs(predicted/p.seconds-1) > 0.15 {
			t.Errorf("prefill of %g tokens takes %.4f s; measured: %.4f", p.tokens, predicted, p.seconds)
		}
	}
	for _, d := range []struct{ sequences, context, seconds float64 }{
		{1, 256, 0.00507}, {48, 256, 0.00525}, {16, 4096, 0.00662}, {48, 4096, 0.00977}, {1, 16384, 0.00549}, {16, 16384, 0.01098},
	} {
		if predicted := m.DecodeSeconds(d.sequences, d.sequences*d.context); math.Abs(predicted/d.seconds-1) > 0.15 {
			t.Errorf("a step of %g sequences of %g tokens takes %.5f s; measured: %.5f", d.sequences, d.context, predicted, d.seconds)
		}
	}
}
