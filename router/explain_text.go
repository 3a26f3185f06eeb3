package router

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// sentence is the explanation in plain English.
func (e *Explanation) sentence() string {
	if e.Choice == "" {
		return e.noCandidate() + " " + e.queueSentence()
	}
	c, others := e.candidates()
	var s string
	switch {
	case e.Reason == ReasonOnly:
		s = fmt.Sprintf("%s is the only candidate, and holds %s", c.Name, e.holdings(c))
		if left := e.filtered(); left != "" {
			s += ": " + left
		}
	case c.Terms != nil:
		s = e.byCost(c, others)
	default:
		s = e.byScore(c, others)
	}
	if e.Queued != "" || e.Refused != "" {
		return s + ". " + e.queueSentence()
	}
	return s + "."
}

// candidates are the chosen one and the others, the next best first.
func (e *Explanation) candidates() (chosen BackendExplanation, others []BackendExplanation) {
	for _, b := range e.Backends {
		switch {
		case !b.Candidate:
		case b.Name == e.Choice:
			chosen = b
		default:
			others = append(others, b)
		}
	}
	slices.SortStableFunc(others, func(a, b BackendExplanation) int {
		if a.Score == nil || b.Score == nil {
			return 0
		}
		if e.HighestWins {
			a, b = b, a
		}
		return cmp.Compare(*a.Score, *b.Score)
	})
	return chosen, others
}

// byCost is the sentence of the policy prefix.
func (e *Explanation) byCost(c BackendExplanation, others []BackendExplanation) string {
	next := others[0]
	switch e.Reason {
	case ReasonLoad:
		return fmt.Sprintf("The request has no prompt to match, and %s %s", c.Name, e.advantage(c, next, others))
	case ReasonCold:
		return fmt.Sprintf("No candidate holds any of its %s prompt tokens, and %s %s", groupDigits(e.PromptTokens), c.Name, e.advantage(c, next, others))
	case ReasonSpill:
		most := slices.MaxFunc(others, func(a, b BackendExplanation) int { return cmp.Compare(a.MatchedTokens, b.MatchedTokens) })
		return fmt.Sprintf("%s holds more, %s, but %s; %s holds %s and %s", most.Name, e.holdings(most), describeLoad(most), c.Name, e.holdings(c), e.advantage(c, most, others))
	}
	return fmt.Sprintf("%s holds %s and %s", c.Name, e.holdings(c), e.advantage(c, next, others))
}

// advantage compares the chosen backend with another.
func (e *Explanation) advantage(c, other BackendExplanation, others []BackendExplanation) string {
	soonest := !slices.ContainsFunc(others, func(o BackendExplanation) bool { return o.TTFTSeconds < c.TTFTSeconds })
	switch {
	case c.Score != nil && other.Score != nil && *c.Score == *other.Score:
		return fmt.Sprintf("costs the same as %s, but is preferred by a hash of the prompt and the backend's name", other.Name)
	case soonest && formatSeconds(c.TTFTSeconds) != formatSeconds(other.TTFTSeconds):
		return fmt.Sprintf("answers soonest: %s against %s on %s, which %s", formatSeconds(c.TTFTSeconds), formatSeconds(other.TTFTSeconds), other.Name, e.describeOther(other))
	case c.Score == nil || other.Score == nil || *c.Score > *other.Score: // slo.ttft takes precedence over the cost
		return fmt.Sprintf("has the longest match of those expected to meet slo.ttft, with a TTFT of %s", formatSeconds(c.TTFTSeconds))
	}
	return fmt.Sprintf("has the lowest cost: %s tokens of prefill against %s on %s, which %s",
		groupDigits(int(*c.Score)), groupDigits(int(*other.Score)), other.Name, e.describeOther(other))
}

// byScore is the sentence of every other policy.
func (e *Explanation) byScore(c BackendExplanation, others []BackendExplanation) string {
	s := fmt.Sprintf("Policy %s picks %s by %s", e.Policy, c.Name, e.ScoreIs)
	if c.Score == nil {
		return s
	}
	next := slices.IndexFunc(others, func(o BackendExplanation) bool { return o.Score != nil })
	if next < 0 {
		return s + ": " + formatScore(*c.Score)
	}
	n := others[next]
	against := fmt.Sprintf(": %s against %s on %s", formatScore(*c.Score), formatScore(*n.Score), n.Name)
	if *c.Score == *n.Score {
		against = fmt.Sprintf(": %s, the same as %s; the tie is broken at random or by another criterion", formatScore(*c.Score), n.Name)
	}
	return s + against
}

// noCandidate says why no backend can accept the request.
func (e *Explanation) noCandidate() string {
	if left := e.filtered(); left != "" {
		return "No backend can accept it now: " + left + "."
	}
	return "No backend can accept it now."
}

// maxNamed is how many filtered backends a sentence names.
const maxNamed = 4

// filtered names those that serve the model and may not take the request, and why.
func (e *Explanation) filtered() string {
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

func (e *Explanation) holdings(b BackendExplanation) string {
	if b.MatchedTokens == 0 {
		return "nothing of its prompt"
	}
	return groupDigits(int(b.MatchedTokens)) + " of " + groupDigits(e.PromptTokens) + " prompt tokens"
}

// describeOther gives the load and the match of a backend that was not chosen.
func (e *Explanation) describeOther(b BackendExplanation) string {
	holds := "holds " + groupDigits(int(b.MatchedTokens))
	if b.MatchedTokens == 0 {
		holds = "holds nothing"
	}
	join := " and "
	if b.InFlight == 0 && b.QueuedTokens == 0 {
		join = " but "
	}
	return describeLoad(b) + join + holds
}

func describeLoad(b BackendExplanation) string {
	switch n := groupDigits(int(b.InFlight + 0.5)); {
	case b.QueuedTokens > 0:
		return fmt.Sprintf("has %s tokens to compute before it and %s in flight", groupDigits(int(b.QueuedTokens)), n)
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

// groupDigits writes 1984 as 1,984.
func groupDigits(n int) string {
	s := strconv.Itoa(n)
	for at := len(s) - 3; at > 0 && s[at-1] != '-'; at -= 3 {
		s = s[:at] + "," + s[at:]
	}
	return s
}
