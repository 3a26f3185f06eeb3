package replay

import (
	"math"
	"time"

	"warmroute/lab/sim/engine"
)

// gapResolution is the ratio of the limits of a class of gaps.
const gapResolution = 1.005

// gapHistogram counts the gaps between the tokens of outputs, by classes of their length.
type gapHistogram struct {
	counts []int64 // of class k: those of about gapResolution^k microseconds
	total  int64
}

// addStep adds the gaps that end with a step of so long: one for each output, and those of outputs that were preempted.
func (h *gapHistogram) addStep(step *engine.StepResult, took, now time.Duration) {
	h.add(took, step.Decoded-len(step.Resumed))
	for _, q := range step.Resumed {
		h.add(now-q.Preempted, 1)
	}
}

func (h *gapHistogram) add(gap time.Duration, count int) {
	if count == 0 {
		return
	}
	class := max(0, int(math.Round(math.Log(max(1, float64(gap.Microseconds())))/math.Log(gapResolution))))
	for len(h.counts) <= class {
		h.counts = append(h.counts, 0)
	}
	h.counts[class] += int64(count)
	h.total += int64(count)
}

// quantile returns the gap, in seconds, that a share of the gaps does not exceed; 0 without any.
func (h *gapHistogram) quantile(share float64) (seconds float64) {
	below := int64(0)
	for class, n := range h.counts {
		if below += n; float64(below) >= share*float64(h.total) && n > 0 {
			return math.Pow(gapResolution, float64(class)) / 1e6
		}
	}
	return 0
}
