package engine

// Stats are the engine's counters and gauges, in vLLM's units.
type Stats struct {
	Running, Waiting int
	Arriving         int     // at the API server, in neither of them
	Loading          int     // of those waiting, from the host tier or another engine
	Pinned           int     // requests that have ended and whose blocks are pinned
	KVUsage          float64 // blocks in use or pinned over all blocks, 0 to 1

	// PrefixQueries and PrefixHits are tokens of admitted prompts. Those of preempted
	// requests count once.
	PrefixQueries, PrefixHits int64
	HostHits                  int64 // tokens that were loaded from the host tier
	RemoteHits                int64 // tokens of transfers that were begun
	Preemptions               int64
	ExpiredLeases             int64

	// PromptTokens and CachedPromptTokens count prompts with their first token: all tokens,
	// those that were cached, and of these those that were loaded from the host tier or another engine.
	PromptTokens, CachedPromptTokens, LoadedPromptTokens int64
	GenerationTokens                                     int64

	Gaps       int64 // between two tokens of a response
	GapSeconds float64

	// StepTokens counts steps with output in StepBuckets; the last one counts those above
	// all bounds. A step's tokens are those generated and the uncached part of each prompt
	// that got its first token, also of those that took several steps.
	StepTokens    [len(StepBuckets) + 1]int64
	StepTokensSum int64
}

// Add adds the counters and gauges of another engine. KVUsage becomes the higher one.
func (s *Stats) Add(o Stats) {
	s.Running += o.Running
	s.Waiting += o.Waiting
	s.Arriving += o.Arriving
	s.Loading += o.Loading
	s.Pinned += o.Pinned
	s.KVUsage = max(s.KVUsage, o.KVUsage)
	s.PrefixQueries += o.PrefixQueries
	s.PrefixHits += o.PrefixHits
	s.HostHits += o.HostHits
	s.RemoteHits += o.RemoteHits
	s.Preemptions += o.Preemptions
	s.ExpiredLeases += o.ExpiredLeases
	s.PromptTokens += o.PromptTokens
	s.CachedPromptTokens += o.CachedPromptTokens
	s.LoadedPromptTokens += o.LoadedPromptTokens
	s.GenerationTokens += o.GenerationTokens
	s.Gaps += o.Gaps
	s.GapSeconds += o.GapSeconds
	for i, n := range o.StepTokens {
		s.StepTokens[i] += n
	}
	s.StepTokensSum += o.StepTokensSum
}

// StepBuckets are the upper bounds of vllm:iteration_tokens_total.
var StepBuckets = [...]float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}

func (e *Engine) countStep(done *StepResult) {
	s := &e.stats
	generated := done.Decoded + len(done.First)
	if generated == 0 {
		return
	}
	s.GenerationTokens += int64(generated)
	tokens := generated
	for _, r := range done.First {
		s.PromptTokens += int64(r.Prompt)
		s.CachedPromptTokens += int64(r.Cached + r.Transferred)
		s.LoadedPromptTokens += int64(r.hostCached + r.Transferred)
		tokens += r.Prompt - r.Cached - r.Transferred
	}
	s.StepTokensSum += int64(tokens)
	i := 0
	for i < len(StepBuckets) && float64(tokens) > StepBuckets[i] {
		i++
	}
	s.StepTokens[i]++
}

func (e *Engine) setTimes(done *StepResult) {
	for _, r := range done.First {
		r.FirstToken = done.End
	}
	for _, r := range done.Finished {
		r.Finished, r.leaseEnd = done.End, done.End+e.cfg.Lease
	}
}

// Stats returns the counters and gauges after the last step.
func (e *Engine) Stats() Stats {
	s := e.stats
	for _, r := range e.prefilling {
		if r.state == loading || r.state == transferring {
			s.Loading++
		}
	}
	s.Arriving, s.Pinned = len(e.arriving), len(e.pinned)
	s.Running, s.Waiting = e.running()-s.Loading, len(e.waiting)+s.Loading
	s.KVUsage = float64(len(e.pool.refs)-e.pool.free) / float64(len(e.pool.refs))
	return s
}
