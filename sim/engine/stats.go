package engine

// Stats are the engine's counters and gauges, in vLLM's units.
type Stats struct {
	Running, Waiting int
	KVUsage          float64 // blocks in use over all blocks, 0 to 1

	PrefixQueries, PrefixHits      int64 // tokens
	PromptTokens, GenerationTokens int64
	Steps                          int64
	// StepTokens counts steps by the tokens computed in them, in the buckets of
	// vllm:iteration_tokens_total; the last one is for everything above.
	StepTokens    [len(StepBuckets) + 1]int64
	StepTokensSum int64
}

// StepBuckets are the upper bounds of vllm:iteration_tokens_total.
var StepBuckets = [...]float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}

func (e *Engine) count(decodes, prefilled, first int) {
	s := &e.stats
	s.Steps++
	s.GenerationTokens += int64(decodes + first)
	tokens := decodes + prefilled
	s.StepTokensSum += int64(tokens)
	i := 0
	for i < len(StepBuckets) && float64(tokens) > StepBuckets[i] {
		i++
	}
	s.StepTokens[i]++
}

func (e *Engine) stamp(done *StepResult) {
	for _, r := range done.First {
		r.FirstToken = done.End
		e.stats.PromptTokens += int64(r.Prompt)
	}
	for _, r := range done.Finished {
		r.Finished = done.End
	}
}

// Stats returns the counters and gauges as they are after the last step.
func (e *Engine) Stats() Stats {
	s := e.stats
	s.Running, s.Waiting = e.running(), len(e.waiting)
	s.KVUsage = float64(len(e.pool.refs)-e.pool.free) / float64(len(e.pool.refs))
	return s
}

// LargestStep is the upper bound of the highest bucket of StepTokens that a
// step fell into, or the highest bound when a step was beyond all of them.
func (s *Stats) LargestStep() int {
	for i := len(s.StepTokens) - 1; i >= 0; i-- {
		if s.StepTokens[i] > 0 {
			return int(StepBuckets[min(i, len(StepBuckets)-1)])
		}
	}
	return 0
}
