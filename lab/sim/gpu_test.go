package sim

import (
	"testing"

	"warmroute/lab/sim/engine"
)

// While an engine on the same GPU computes, the steps of a replica take twice as long.
func TestSharedGPU(t *testing.T) {
	gpu := &GPU{}
	s := start(t, Config{GPU: gpu})
	sum := 0.0
	meanGap := func() float64 {
		t.Helper()
		ask(t, s, `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":20,"ignore_eos":true}`)
		s.engineMu.Lock()
		defer s.engineMu.Unlock()
		before := sum
		sum = s.ranks[0].counters.itl.sum
		return (sum - before) / 19
	}
	if mean := meanGap(); mean < 0.005 || mean > 0.0055 {
		t.Errorf("%v s between tokens, want 5 to 5.5 ms", mean)
	}
	decode := engine.StepResult{Decoded: 1}
	gpu.startStep(&decode)
	if mean := meanGap(); mean < 0.01 || mean > 0.011 {
		t.Errorf("%v s between tokens beside another engine, want 10 to 11 ms", mean)
	}
	gpu.endStep(&decode)
	until(t, "no engine computes", func() bool { return gpu.countComputing() == 0 })
}

func TestComputingEngines(t *testing.T) {
	gpu := &GPU{}
	empty, decode := engine.StepResult{}, engine.StepResult{Decoded: 1}
	for i, c := range []struct {
		change func(*engine.StepResult)
		step   *engine.StepResult
		want   int
	}{{gpu.startStep, &decode, 1}, {gpu.startStep, &empty, 1}, {gpu.startStep, &decode, 2}, {gpu.endStep, &empty, 2},
		{gpu.endStep, &decode, 1}} {
		if c.change(c.step); gpu.countComputing() != c.want {
			t.Errorf("after change %d %d engines compute, want %d", i, gpu.countComputing(), c.want)
		}
	}
}
