package replay

import (
	"time"

	"warmroute/router"
)

// measures are what a run in virtual time notes of itself.
type measures struct {
	timeline *Timeline
	tally    Tally
	batch    Tally // of the requests with a priority above 0, which are not in tally

	held      mean // time between arrival and the attempt that was served
	decisions int
	spills    int
	matched   int // tokens, predicted, of promised
	promised  int
}

func (m *measures) decided(d *router.Decision) {
	m.decisions++
	if d.Reason == router.ReasonSpill {
		m.spills++
	}
	m.matched += d.MatchedTokens
	m.promised += d.PromptTokens
}

func (m *measures) served(f *flight, now time.Duration) {
	j := f.job
	m.held.add(f.sent - j.At)
	result := Result{
		TTFT: f.first - j.At, E2E: now - j.At,
		PromptTokens: j.Prompt, CachedTokens: f.engine.Cached, CompletionTokens: j.Answer,
	}
	result.ITL = result.tpot()
	m.tallyOf(j).Add(result)
}

func (m *measures) lost(j *Job, why string) { m.tallyOf(j).Add(Result{Err: why}) }

func (m *measures) tallyOf(j *Job) *Tally {
	if j.Priority > 0 {
		return &m.batch
	}
	return &m.tally
}

func (r *run) summary() Summary {
	m := &r.measured
	s := m.tally.Summary(r.Policy, r.last)
	if b := m.batch.Summary(r.Policy, r.last); b.Requests+b.Lost > 0 {
		s.Batch = &b
	}
	t := m.timeline
	for i := range r.fleet {
		t.inFlight(i, r.last, 0)
	}
	s.WorkMaxOverMean = MaxOverMean(t.middle(t.Work, r.last))
	s.InFlightMaxOverMean = MaxOverMean(t.middle(t.InFlight, r.last))
	s.JoinedShare = t.joinedShare(r.Changes)
	s.HoldMean = m.held.seconds()
	s.Spills = m.spills
	if m.promised > 0 {
		s.PredictedHitRatio = float64(m.matched) / float64(m.promised)
	}
	s.Timeline = t
	return s
}
