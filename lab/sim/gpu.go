package sim

import (
	"sync/atomic"

	"warmroute/lab/sim/engine"
)

// GPU is shared by the engines of all servers that have it in their Config: a step takes as many times as long as
// engines compute when it begins, this one included. A nil GPU has one engine. Its methods are safe for concurrent use.
type GPU struct{ computing atomic.Int32 }

// countComputing returns how many engines compute.
func (g *GPU) countComputing() int {
	if g == nil {
		return 0
	}
	return int(g.computing.Load())
}

// startStep counts the engine of a step that computes something.
func (g *GPU) startStep(step *engine.StepResult) { g.add(1, step) }

// endStep reverts startStep.
func (g *GPU) endStep(step *engine.StepResult) { g.add(-1, step) }

func (g *GPU) add(engines int32, step *engine.StepResult) {
	if g != nil && step.Decoded+step.Prefilled > 0 {
		g.computing.Add(engines)
	}
}
