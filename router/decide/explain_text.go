package decide

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Describe returns the explanation in plain English.
func (e *Explanation) Describe() string {
	if e.Choice == "" {
		return e.noCandidateSentence() + " " + e.queueSentence()
	}
	c, others := e.splitCandidates()
	var s string
	switch {
	case e.Reason == ReasonStored:
		s = fmt.Sprintf("%s holds the stored response to which the request refers", c.Name)
	case e.Reason == ReasonOnly:
		s = fmt.Sprintf("%s is the only candidate, and holds %s", c.Name, e.describeMatch(c))
		if left := e.describeFiltered(); left != "" {
			s += ": " + left
		}
	case c.Terms != nil:
		s = e.costSentence(c, others)
	default:
		s = e.scoreSentence(c, others)
	}
	s += "." + e.splitSentence()
	if e.Queued != "" || e.Refused != "" {
		return s + " " + e.queueSentence()
	}
	return s
}

// splitSentence says whether the prefill would be done elsewhere, after a space; "" in a fleet without roles.
func (e *Explanation) splitSentence() string {
	if e.Split == nil {
		return ""
	}
	x := e.Split
	costs := fmt.Sprintf("split it costs %s, of which the KV transfer takes %s, and whole %s",
		formatSeconds(x.SplitSeconds), formatSeconds(x.KVTransferSeconds), formatSeconds(x.WholeSeconds))
	switch x.Result {
	case SplitDone:
		return fmt.Sprintf(" %s does its prefill: %s.", x.Prefill, costs)
	case SplitCheaper:
		if x.SplitSeconds > 0 {
			return " It is not split: " + costs + "."
		}
		return " It is not split: it has too few tokens to compute, or too many for the replica."
	case SplitUnsplittable:
		return " It is not split: requests of its kind cannot be."
	case SplitNoPrefill:
		return " It is not split: no replica for prefill can take it that runs the same version of vLLM and keeps KV in the same form."
	case SplitFull:
		return " It is not split: the replicas for prefill have no room."
	case SplitNoDecode:
		return " It is served by a replica for prefill: no replica for decode can take it."
	}
	return " It is not split: the replica has so much to compute that the KV cache might not be kept for long enough."
}

// splitCandidates returns the chosen one and the others, the next best first.
func (e *Explanation) splitCandidates() (chosen BackendExplanation, othersByScore []BackendExplanation) {
	for _, b := range e.Backends {
		switch {
		case !b.Candidate:
		case b.Name == e.Choice:
			chosen = b
		default:
			othersByScore = append(othersByScore, b)
		}
	}
	slices.SortStableFunc(othersByScore, func(a, b BackendExplanation) int {
		if a.Score == nil || b.Score == nil {
			return 0
		}
		if e.HighestWins {
			a, b = b, a
		}
		return cmp.Compare(*a.Score, *b.Score)
	})
	return chosen, othersByScore
}

// costSentence is the sentence of the policy prefix.
func (e *Explanation) costSentence(chosen BackendExplanation, others []BackendExplanation) string {
	next := others[0]
	switch e.Reason {
	case ReasonLoad:
		nothing := "The request has no prompt to match"
		if e.PromptTokens > 0 {
			nothing = fmt.Sprintf("The prompt is shorter than a block of %d bytes, so nothing of it is matched", e.BlockBytes)
		}
		return fmt.Sprintf("%s, and %s %s", nothing, chosen.Name, e.describeAdvantage(chosen, next, others))
	case ReasonNoMatch:
		return fmt.Sprintf("No candidate holds any of its %s prompt tokens, and %s %s", groupDigits(e.PromptTokens), chosen.Name,
			e.describeAdvantage(chosen, next, others))
	case ReasonMatchedBusy:
		most := slices.MaxFunc(others, func(a, b BackendExplanation) int { return cmp.Compare(a.MatchedTokens, b.MatchedTokens) })
		return fmt.Sprintf("%s holds more, %s, but %s; %s holds %s and %s", most.Name, e.describeMatch(most), describeLoad(most), chosen.Name,
			e.describeMatch(chosen), e.describeAdvantage(chosen, most, others))
	}
	return fmt.Sprintf("%s holds %s and %s", chosen.Name, e.describeMatch(chosen), e.describeAdvantage(chosen, next, others))
}

// describeAdvantage says why the chosen backend is preferred to another.
func (e *Explanation) describeAdvantage(chosen, other BackendExplanation, others []BackendExplanation) string {
	soonest := !slices.ContainsFunc(others, func(o BackendExplanation) bool { return o.TTFTSeconds < chosen.TTFTSeconds })
	switch {
	case chosen.Score != nil && other.Score != nil && *chosen.Score == *other.Score:
		return fmt.Sprintf("costs the same as %s, but is preferred by a hash of the %s and the backend's name", other.Name, e.tieKeyName())
	case soonest && formatSeconds(chosen.TTFTSeconds) != formatSeconds(other.TTFTSeconds):
		return fmt.Sprintf("responds soonest: %s against %s on %s, which %s", formatSeconds(chosen.TTFTSeconds), formatSeconds(other.TTFTSeconds),
			other.Name, e.describeLoadAndMatch(other))
	case chosen.Score == nil || other.Score == nil || *chosen.Score > *other.Score: // slo.ttft takes precedence over the cost
		return fmt.Sprintf("has the longest match of those expected to meet slo.ttft, with a TTFT of %s", formatSeconds(chosen.TTFTSeconds))
	}
	return fmt.Sprintf("has the lowest cost: %s against %s on %s, which %s",
		formatSeconds(*chosen.Score), formatSeconds(*other.Score), other.Name, e.describeLoadAndMatch(other))
}

// tieKeyName names what the policy prefix breaks ties by.
func (e *Explanation) tieKeyName() string {
	if e.hasConversation {
		return "conversation"
	}
	return "prompt"
}

// scoreSentence is the sentence of every other policy.
func (e *Explanation) scoreSentence(chosen BackendExplanation, others []BackendExplanation) string {
	s := fmt.Sprintf("Policy %s picks %s by %s", e.Policy, chosen.Name, e.ScoreIs)
	if chosen.Score == nil {
		return s
	}
	next := slices.IndexFunc(others, func(o BackendExplanation) bool { return o.Score != nil })
	if next < 0 {
		return s + ": " + formatScore(*chosen.Score)
	}
	n := others[next]
	against := fmt.Sprintf(": %s against %s on %s", formatScore(*chosen.Score), formatScore(*n.Score), n.Name)
	if *chosen.Score == *n.Score {
		against = fmt.Sprintf(": %s, the same as %s; the tie is broken at random or by another criterion", formatScore(*chosen.Score), n.Name)
	}
	return s + against
}

// noCandidateSentence says why no backend can accept the request.
func (e *Explanation) noCandidateSentence() string {
	if left := e.describeFiltered(); left != "" {
		return "No backend can accept it now: " + left + "."
	}
	return "No backend can accept it now."
}

// maxNamed is how many filtered backends a sentence names.
const maxNamed = 4

// describeFiltered names those that serve the model and may not take the request, and why.
func (e *Explanation) describeFiltered() string {
	var why []string
	for _, b := range e.Backends {
		if b.WhyNot != "" && b.WhyNot != notServed {
			why = append(why, b.Name+" "+b.WhyNot)
		}
	}
	if more := len(why) - maxNamed; more > 0 {
		why = append(why[:maxNamed], fmt.Sprintf("and %d more", more))
	}
	return strings.Join(why, ", ")
}

// queueSentence says what happens to a request that is not sent at once.
func (e *Explanation) queueSentence() string {
	switch {
	case e.Refused != "":
		return "It would be refused: " + e.Refused + "."
	case e.Queued != "" && e.Choice != "":
		return fmt.Sprintf("It would wait in the admission queue, most likely for %s: %s.", e.Choice, e.Queued)
	}
	return "It would wait in the admission queue: " + e.Queued + "."
}

// describeMatch says how much of the prompt a backend holds.
func (e *Explanation) describeMatch(b BackendExplanation) string {
	switch {
	case b.HeldTokens > 0:
		return groupRoundedDigits(b.HeldTokens) + " of " + groupDigits(e.PromptTokens) + " prompt tokens, with " + describeCheckpoint(b) + ","
	case b.MatchedTokens == 0:
		return "nothing of its prompt"
	}
	return groupRoundedDigits(b.MatchedTokens) + " of " + groupDigits(e.PromptTokens) + " prompt tokens" + describeOffloaded(b)
}

// describeOffloaded says how much of what a backend holds it has to fetch; "" for none.
func describeOffloaded(b BackendExplanation) string {
	if b.Offloaded == 0 {
		return ""
	}
	return " (" + groupRoundedDigits(b.Offloaded) + " of these not on its GPU)"
}

// describeCheckpoint says how much a backend can reuse of what it holds.
func describeCheckpoint(b BackendExplanation) string {
	if b.MatchedTokens == 0 {
		return "no checkpoint"
	}
	return "a checkpoint at " + groupRoundedDigits(b.MatchedTokens)
}

// describeLoadAndMatch gives the load and the match of a backend that was not chosen.
func (e *Explanation) describeLoadAndMatch(b BackendExplanation) string {
	holds := "holds " + groupRoundedDigits(b.MatchedTokens) + describeOffloaded(b)
	switch {
	case b.HeldTokens > 0:
		holds = "holds " + groupRoundedDigits(b.HeldTokens) + " with " + describeCheckpoint(b)
	case b.MatchedTokens == 0:
		holds = "holds nothing"
	}
	join := " and "
	if b.InFlight == 0 && b.QueuedTokens == 0 {
		join = " but "
	}
	return describeLoad(b) + join + holds
}

func describeLoad(b BackendExplanation) string {
	switch n := groupRoundedDigits(b.InFlight); {
	case b.QueuedTokens > 0:
		return fmt.Sprintf("has %s tokens to compute before it and %s in flight", groupRoundedDigits(b.QueuedTokens), n)
	case b.InFlight > 0:
		return fmt.Sprintf("has %s in flight", n)
	}
	return "is idle"
}

func formatSeconds(s float64) string {
	switch {
	case s >= 10:
		return fmt.Sprintf("%.0f s", s)
	case s < 0.01:
		return fmt.Sprintf("%.3f s", s)
	}
	return fmt.Sprintf("%.2f s", s)
}

func formatScore(x float64) string { return strconv.FormatFloat(x, 'g', 6, 64) }

// groupRoundedDigits is groupDigits of the nearest integer.
func groupRoundedDigits(x float64) string { return groupDigits(int(math.Round(x))) }

// groupDigits writes 1984 as 1,984.
func groupDigits(n int) string {
	s := strconv.Itoa(n)
	for at := len(s) - 3; at > 0 && s[at-1] != '-'; at -= 3 {
		s = s[:at] + "," + s[at:]
	}
	return s
}
