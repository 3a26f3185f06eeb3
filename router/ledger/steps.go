package ledger

import (
	"time"

	"warmroute/backends"
	"warmroute/router/estimate"
	"warmroute/router/step"
)

const (
	// maxStepSpread is within which time the first events of streams come whose prefills ended in one step.
	maxStepSpread = time.Millisecond
	// minLearnedOutput is below which the end of an output says little about the time of a step.
	minLearnedOutput = 8
	// minPolledGaps is how many gaps between tokens tell the time of a step, and minNotStreamed for how long nothing was
	// streamed where they are needed: streams tell more.
	minPolledGaps  = 16
	minNotStreamed = time.Minute
	// measuredTime is over which time the speed of a backend is measured, and maxMeasuredTime over which it is at most.
	measuredTime    = 5 * time.Second
	maxMeasuredTime = 4 * measuredTime
	// minMeasuredSeconds is the sum of the gaps that tells the speed.
	minMeasuredSeconds = 1
	// maxStepTokens is how many tokens of prompts an engine computes in a step at most, unless it is configured otherwise.
	maxStepTokens = 2 * estimate.StepTokens
)

// workDone is what a backend has done up to a moment, since its account began.
type workDone struct {
	at                                time.Time
	tokens, attended                  float64 // of prompts
	steps, stepSequences, stepContext float64 // see kvAccount
	waited                            bool    // requests wait there for room in the KV cache
}

// polledGaps is the state at a poll.
type polledGaps struct {
	done          workDone // by then
	gaps, seconds float64
	computed      float64 // tokens of prompts, by the engine's counters
	generated     float64 // tokens; 0: not known
}

// prefillEnd is the end of a step in which prefills ended.
type prefillEnd struct {
	workDone
	last *Entry // the one of these that was sent last
}

// entrySteps records the work of a backend when a request was sent and when its prefill ended.
type entrySteps struct {
	sent        workDone
	queuedSince time.Time // up to when time had been counted as work when it was sent
	tokens      float64   // to prefill since then, its own included
	attended    float64   // by these
	prefilled   *prefillEnd
}

// addGrowth adds the steps up to now to the sums over outputs that grow. It comes before every change of these. While
// there is more context, there are fewer steps.
func (l *Ledger) addGrowth(a *account, now time.Time) {
	k, sinceStart := &a.kv, now.Sub(l.start)
	passed := sinceStart - k.summedAt
	sequences := float64(k.sequences - a.prefill.wholeSequences)
	context := k.prompts - a.prefill.wholePrompts + k.outputTokensInFlight(sinceStart-passed/2)
	if load := a.backend.Load(); load != nil && load.QueuesKnown && int64(load.Running) > load.OwnInFlight { // other clients' too
		sequences += float64(int64(load.Running) - load.OwnInFlight)
		context += max(0, k.external)
	}
	steps := passed.Seconds() / l.estimates.Step(a.backend.Slot).DecodeSeconds(sequences, context)
	k.steps += steps
	k.stepSequences += sequences * steps
	k.stepContext += context * steps
	k.summedAt = sinceStart
}

// workDone returns what the backend of an account has done so far.
func (l *Ledger) workDone(a *account, slot int, now time.Time) workDone {
	l.addGrowth(a, now)
	w := workDone{at: now, steps: a.kv.steps, stepSequences: a.kv.stepSequences, stepContext: a.kv.stepContext}
	rate := l.estimates.PrefillRate(slot)
	if w.waited = a.kv.waiting > 0; w.waited { // prompts wait for room: they make no progress
		rate = 0
	}
	w.tokens, w.attended = a.prefill.computedTokens(now, rate)
	return w
}

// recordPrefillEnd records that the prefill of a stream is over. The prefills that end in one step share a record, since
// their first events come one after another.
func (l *Ledger) recordPrefillEnd(a *account, e *Entry, now time.Time) {
	if a.lastEnd == nil || now.Sub(a.lastEnd.at) > maxStepSpread {
		a.lastEnd = &prefillEnd{}
	}
	end := a.lastEnd
	e.steps.prefilled, end.workDone = end, l.workDone(a, e.Slot, now)
	if end.last == nil || !e.SentAt.Before(end.last.SentAt) {
		end.last = e
	}
}

// learnSteps learns how long the steps of a backend take, from a response that was complete. uncached are the tokens
// that were computed of its prompt.
func (l *Ledger) learnSteps(e *Entry, o *Outcome, uncached float64, now time.Time) {
	p, s := &e.Prediction, &e.steps
	engines := 1.0
	if load := e.account.backend.Load(); load != nil {
		engines = float64(max(1, load.Engines))
	}
	done := l.workDone(e.account, e.Slot, now)
	cached := max(0, p.PromptTokens-uncached)
	first, prefillSteps := s.prefilled, s.tokens/engines/estimate.StepTokens
	if e.Streams && p.TTFT > 0 && e.RequestKind != DecodeRequest && first != nil && first.last == e && !s.sent.waited && !first.waited {
		// Of the others' tokens each engine computes its share.
		sample := sampleBetween(&s.sent, &first.workDone, 1+prefillSteps, engines)
		sample.Seconds = e.SentAt.Add(p.TTFT).Sub(s.queuedSince).Seconds()
		sample.Tokens = (s.tokens-p.Uncached)/engines + uncached
		sample.Attended = (s.attended-e.attendedTokens())/engines + uncached*(cached+uncached/2)
		sample.Prompt = p.PromptTokens
		switch {
		case p.Offloaded == 0:
			l.estimates.LearnRequest(e.Slot, &sample)
			l.estimates.LearnSteps(e.Slot, &sample)
		case s.tokens <= p.Uncached: // nothing was sent before it that is not prefilled
			if fetched := p.Offloaded - max(0, uncached-p.Uncached); 4*fetched >= p.PromptTokens && 2*fetched >= p.Offloaded {
				l.estimates.LearnFetch(e.Slot, &sample, fetched, now)
			}
		}
	}
	if o.OutputTokens < minLearnedOutput || p.Sequences > 1 {
		return
	}
	switch {
	case s.sent.waited && !e.Streams:
	case !e.Streams:
		sample := sampleBetween(&s.sent, &done, float64(o.OutputTokens)+prefillSteps, engines)
		sample.Prompt = 1 // longer prompts wait longer: this is not the API server's time
		l.removePrefill(e.Slot, &sample)
		sample.Known += l.estimates.FetchSeconds(e.Slot) * p.Offloaded
		l.estimates.LearnSteps(e.Slot, &sample)
	case (p.TTFT > 0 || e.RequestKind == DecodeRequest) && first != nil:
		sample := sampleBetween(&first.workDone, &done, float64(o.OutputTokens-1), engines)
		l.estimates.LearnSteps(e.Slot, &sample)
	}
}

// learnFromGaps learns from a poll how long the steps since the poll before took, unless there are streams.
func (l *Ledger) learnFromGaps(a *account, slot int, load *backends.Load, now time.Time) {
	done, before := l.workDone(a, slot, now), a.polled
	a.polled = polledGaps{done, load.Gaps, load.GapSeconds, load.PromptTokens - load.PrefixHits, load.GenerationTokens}
	if a.lastEnd != nil && now.Sub(a.lastEnd.at) < minNotStreamed {
		return
	}
	if sample, ok := before.sampleUntil(&a.polled, load.Engines); ok && sample.Steps >= minPolledGaps {
		l.removePrefill(slot, &sample)
		l.estimates.LearnSteps(slot, &sample)
	}
}

// sampleUntil returns what an engine did between two polls and how long it took, as the sum over the gaps between tokens.
func (from *polledGaps) sampleUntil(to *polledGaps, engines int) (s estimate.StepSample, ok bool) {
	gaps, seconds := to.gaps-from.gaps, to.seconds-from.seconds
	if from.done.at.IsZero() || gaps <= 0 || seconds <= 0 {
		return s, false
	}
	sequences := seconds / to.done.at.Sub(from.done.at).Seconds() // that generate at a time, on average
	s = sampleBetween(&from.done, &to.done, gaps, float64(max(1, engines)))
	s.Seconds = seconds
	s.Tokens *= sequences
	s.Attended *= sequences
	return s, true
}

// Speed is how long the steps of a backend took between two times, and what work they did at most.
type Speed struct {
	From, To time.Time
	Seconds  float64 // the sum over the gaps between tokens, or the time in which prompts were computed and nothing was generated
	Work     step.Work
}

// measurement is a measurement of a backend's speed that has begun.
type measurement struct {
	from, last polledGaps // at the poll at which it began, and at the last one
	silent     float64    // seconds between polls in which nothing was generated and a prompt was to be computed
	longest    float64    // tokens of the longest of the prompts that were to be computed then or were sent since
}

// addPrompt adds a prompt.
func (m *measurement) addPrompt(tokens float64) { m.longest = max(m.longest, tokens) }

// addPoll adds a poll.
func (m *measurement) addPoll(poll *polledGaps, p *requestAccount) {
	waited := len(p.pending) > 0 && p.pending[0].SentAt.Before(m.last.done.at)
	if waited && poll.generated > 0 && poll.generated == m.last.generated {
		m.silent += poll.done.at.Sub(m.last.done.at).Seconds()
	}
	m.last = *poll
}

// MeasureSpeed returns the speed of a backend over the last measuredTime or more, up to its last poll, which was recorded. It
// returns false at other polls, if it did too little, and if other clients have requests there.
func (l *Ledger) MeasureSpeed(slot int, load *backends.Load) (v Speed, ok bool) {
	a, to := l.accounts[slot], l.accounts[slot].polled
	a.measured.addPoll(&to, &a.prefill)
	m, unseen := a.measured, a.prefill.unseen
	external := load.QueuesKnown && int64(load.Running+load.Waiting) > load.OwnInFlight
	passed := to.done.at.Sub(m.from.done.at)
	s, _ := m.from.sampleUntil(&to, load.Engines)
	ok = s.Seconds >= minMeasuredSeconds || passed >= maxMeasuredTime && m.silent > 0
	if !external && (passed < measuredTime || !ok && unseen > 0 && passed < maxMeasuredTime) {
		return v, false
	}
	a.measured = measurement{from: to, last: to, longest: m.longest}
	if unseen == 0 {
		a.measured.longest = 0
	}
	if !ok || external || passed > 2*maxMeasuredTime {
		return v, false
	}
	// Engines count a prompt when its prefill is over, and what of it was cached when it begins. They compute prompts in the order
	// of arrival: each computes at most one in part, beside those of its current step.
	engines := float64(max(1, load.Engines))
	computed := max(0, to.computed-m.from.computed) + min(unseen, engines*(m.longest+maxStepTokens))
	tokens := computed * max(1, s.Seconds/passed.Seconds()/engines) // as the sum over the sequences, too
	if s.Seconds >= m.silent {
		tokens = min(tokens, s.Steps*maxStepTokens)
	}
	work := step.Work{Steps: s.Steps, Sequences: s.Sequences, Context: s.Context, Tokens: tokens, Attended: tokens * m.longest / 2}
	return Speed{m.from.done.at, to.done.at, max(s.Seconds, m.silent), work}, true
}

// removePrefill removes the prefill from a sample, whose expected time is known then: where nothing is streamed, it is not
// known when a prefill ended.
func (l *Ledger) removePrefill(slot int, s *estimate.StepSample) {
	s.Known = l.estimates.Step(slot).PrefillSecondsOf(s.Tokens, s.Attended)
	s.Tokens, s.Attended = 0, 0
}

// sampleBetween returns what each of a backend's engines has done between two moments, in so many steps.
func sampleBetween(from, to *workDone, steps, engines float64) estimate.StepSample {
	share := 1 / ((to.steps - from.steps) * engines) // of the sums in a step; not a number if no time has passed
	return estimate.StepSample{
		Seconds: to.at.Sub(from.at).Seconds(), Steps: steps,
		Tokens: max(0, to.tokens-from.tokens) / engines, Attended: max(0, to.attended-from.attended) / engines,
		Sequences: steps * share * (to.stepSequences - from.stepSequences), Context: steps * share * (to.stepContext - from.stepContext),
	}
}
