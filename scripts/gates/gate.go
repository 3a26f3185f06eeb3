package main

import (
	"math"

	"warmroute/replay"
)

// gate is one figure of a row and what it must be.
type gate struct {
	what    string
	must    float64 // 0: it is only to be known
	atLeast bool    // must is the least; else the most
	// figure returns the value and whom it is measured against, or false when
	// that one was not played. NaN says that a mistake to be mended cost nothing.
	figure func(replay.Report) (value float64, against string, ok bool)
}

func (g gate) sign() string {
	if g.atLeast {
		return "≥"
	}
	return "≤"
}

// measure is one quantity of a result.
type measure struct {
	name string
	of   func(replay.Summary) float64
}

func ttft() measure {
	return measure{"mean TTFT", func(s replay.Summary) float64 { return s.TTFTMean }}
}
func p99() measure { return measure{"p99 TTFT", func(s replay.Summary) float64 { return s.TTFTP99 }} }
func e2e() measure { return measure{"end to end", func(s replay.Summary) float64 { return s.E2EMean }} }
func hits() measure {
	return measure{"hit ratio", func(s replay.Summary) float64 { return s.HitRatio }}
}

// ttftFrom50ms keeps very short times from being compared by their ratio.
func ttftFrom50ms() measure {
	return measure{"mean TTFT + 50 ms", func(s replay.Summary) float64 { return s.TTFTMean + 0.05 }}
}

// toBest is prefix over the best other policy, at most must; 0: only to be known.
func toBest(m measure, must float64) gate {
	return gate{what: m.name + " / best other", must: must, figure: func(r replay.Report) (float64, string, bool) {
		us, found := r.Find(ours)
		best, ok := r.BestOther(ours, m.of)
		return m.of(us) / m.of(best), best.Policy, ok && found
	}}
}

// toPooled is prefix over the reference.
func toPooled(m measure, must float64, atLeast bool) gate {
	return gate{what: m.name + " / pooled", must: must, atLeast: atLeast, figure: func(r replay.Report) (float64, string, bool) {
		us, found := r.Find(ours)
		reference, ok := r.Find(replay.Pooled)
		return m.of(us) / m.of(reference), "", ok && found
	}}
}

// own is a figure of prefix alone.
func own(what string, of func(replay.Summary) float64, must float64, atLeast bool) gate {
	return gate{what: what, must: must, atLeast: atLeast, figure: func(r replay.Report) (float64, string, bool) {
		us, ok := r.Find(ours)
		return of(us), "", ok
	}}
}

func work(must float64) gate {
	return own("prefill work, most loaded / mean", func(s replay.Summary) float64 { return s.WorkMaxOverMean }, must, false)
}

func inFlight(must float64) gate {
	return own("in flight, most loaded / mean", func(s replay.Summary) float64 { return s.InFlightMaxOverMean }, must, false)
}

// The variants of a row about learning, beside prefix as it learns.
const (
	unlearned = "unlearned" // the same mistake, and nothing is learned
	told      = "told"      // no mistake, so there is nothing to learn
)

// cost is what a mistake costs where nothing is learned.
func cost(m measure) gate {
	return gate{what: m.name + ", unlearned / told the truth", figure: func(r replay.Report) (float64, string, bool) {
		wrong, ok := r.Find(unlearned)
		right, found := r.Find(told)
		return m.of(wrong) / m.of(right), "", ok && found
	}}
}

// wonBack is the share of that cost which learning saves; NaN where there is
// none, as some mistakes happen to do no harm.
func wonBack(m measure, must float64) gate {
	return gate{what: "won back by learning", must: must, atLeast: true, figure: func(r replay.Report) (float64, string, bool) {
		us, _ := r.Find(ours)
		wrong, ok := r.Find(unlearned)
		right, found := r.Find(told)
		if m.of(wrong) <= 1.02*m.of(right) {
			return math.NaN(), "", ok && found
		}
		return (m.of(wrong) - m.of(us)) / (m.of(wrong) - m.of(right)), "", ok && found
	}}
}

// noneLost says that every request was answered: a rule must not look good by
// turning the hard ones away.
func noneLost() gate {
	return own("answered, of all", func(s replay.Summary) float64 {
		return float64(s.Requests) / float64(max(1, s.Requests+s.Lost))
	}, 1, true)
}
