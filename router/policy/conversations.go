package policy

import (
	"math"
	"time"

	"warmroute/router/prompt"
)

const (
	// conversationInterval is over how long a conversation that began at a backend counts there.
	conversationInterval = time.Minute
	maxLaterTurns        = 10
	// priorConversations is how many conversations of 1 + maxLaterTurns turns are assumed to
	// have been seen at the beginning.
	priorConversations = 30
	// maxCountedTurns is at how many turns both counts are halved, so that old ones fade.
	maxCountedTurns = 10_000
)

// conversations counts those that began lately at each backend. Their later turns will follow
// their prefix to it, so the choice of a backend for a first turn decides for all.
type conversations struct {
	began        []float64 // by slot, each decayed over conversationInterval since countedAt
	countedAt    time.Time
	first, later float64 // turns seen
}

// laterTurns returns how many turns a conversation is expected to have after its first one.
func (c *conversations) laterTurns() float64 {
	return min(maxLaterTurns, (c.later+priorConversations*maxLaterTurns)/(c.first+priorConversations))
}

// sequencesPerBegun returns how many sequences of ours are in flight for each conversation that
// began lately, as countOn counts them; at most 1.
func (c *conversations) sequencesPerBegun(now time.Time, candidates []Candidate) float64 {
	inFlight, begun := 0.0, 0.0
	for i := range candidates {
		inFlight += candidates[i].InFlight - candidates[i].foreignSequences()
		begun += c.countOn(candidates[i].Slot, now)
	}
	if begun <= inFlight {
		return 1
	}
	return inFlight / begun
}

// countOn returns how many conversations began lately at a backend.
func (c *conversations) countOn(slot int, now time.Time) float64 {
	if slot >= len(c.began) {
		return 0
	}
	return c.began[slot] * math.Exp(-now.Sub(c.countedAt).Seconds()/conversationInterval.Seconds())
}

// recordTurn counts a turn that is sent to a backend.
func (c *conversations) recordTurn(turn prompt.Turn, slot int, now time.Time) {
	switch turn {
	case prompt.TurnUnknown:
		return
	case prompt.TurnLater:
		c.later++
	case prompt.TurnFirst:
		c.first++
		for len(c.began) <= slot {
			c.began = append(c.began, 0)
		}
		for i := range c.began {
			c.began[i] = c.countOn(i, now)
		}
		c.began[slot]++
		c.countedAt = now
	}
	if c.first+c.later >= maxCountedTurns {
		c.first, c.later = c.first/2, c.later/2
	}
}

// Forget forgets the conversations that began at the backend of a slot.
func (c *conversations) Forget(slot int) {
	if slot < len(c.began) {
		c.began[slot] = 0
	}
}
