package estimate

import (
	"math/bits"

	"warmroute/prompt"
)

const (
	// newLayoutScore and maxLayoutScore are the evidence for a bit that contrary evidence has to
	// outweigh: right after a change, and at most.
	newLayoutScore = 1
	maxLayoutScore = 4
	// layoutTolerance is the share of the prompt by which bytes may be off as a measure of tokens.
	layoutTolerance = 0.02
)

// layout is what is known of the layout of a model's prompts.
type layout struct {
	value  prompt.Layout
	scores [len(prompt.LayoutBits)]int // evidence for each bit of value
}

func newLayout() *layout {
	l := &layout{value: prompt.DefaultLayout}
	for i := range l.scores {
		l.scores[i] = newLayoutScore
	}
	return l
}

// Layouts returns the layouts of the models whose layout is not the default one.
func (f *Estimates) Layouts() map[string]prompt.Layout {
	known := map[string]prompt.Layout{}
	for model, l := range f.layouts {
		if l.value != prompt.DefaultLayout {
			known[model] = l.value
		}
	}
	return known
}

// LearnLayout learns the layout of a model's prompts from a request whose response was complete,
// and reports whether it has changed. The cached tokens of a request that was matched up to
// where two layouts part, or beyond, tell which of them the replica has.
func (f *Estimates) LearnLayout(p *Prediction, u Usage, c CacheInfo) (changed bool) {
	if len(p.Forks) == 0 || f.disabled || !p.IsText || p.IsTooLong || !u.CachedKnown || u.PromptTokens <= 0 ||
		u.CachedTokens > u.PromptTokens {
		return false
	}
	l := f.layouts[p.Model]
	if l == nil {
		if len(f.layouts) >= maxModels {
			return false
		}
		l = newLayout()
		f.layouts[p.Model] = l
	}
	matched := float64(p.MatchedBlocks*f.blockBytes) / float64(p.Bytes)
	cached := float64(u.CachedTokens) / float64(u.PromptTokens)
	block := max(float64(f.blockBytes)/float64(p.Bytes), c.Alignment/float64(u.PromptTokens))
	before := l.value
	for _, fork := range p.Forks {
		if with, known := compareFork(&fork, l.value&fork.Bit != 0, matched, cached, block+layoutTolerance); known {
			l.addEvidence(fork.Bit, with)
		}
	}
	return l.value != before
}

// compareFork returns whether the replica lays out a prompt with the bit of a fork, if that is
// known from which share of the prompt was cached. inUse says whether the bit is set in the
// layout under which the share matched was predicted.
func compareFork(f *prompt.Fork, inUse bool, matched, cached, tolerance float64) (with, known bool) {
	isWithout := func(share float64) bool { return share >= f.Without-tolerance && share <= f.WithoutMost+tolerance }
	isWith := func(share float64) bool { return share > f.WithoutMost+tolerance && share <= f.With+tolerance }
	switch {
	case inUse && !isWith(matched), !inUse && !isWithout(matched):
		return false, false // the conversation is new there, or goes on behind the fork
	case inUse && cached >= matched-tolerance, !inUse && isWith(cached):
		return true, true
	case isWithout(cached) && f.With > f.WithoutMost+tolerance:
		return false, true
	}
	return false, false
}

// addEvidence adds that the layout has a bit, or has not.
func (l *layout) addEvidence(bit prompt.Layout, with bool) {
	score := &l.scores[bits.TrailingZeros8(uint8(bit))]
	if with == (l.value&bit != 0) {
		*score = min(*score+1, maxLayoutScore)
		return
	}
	if *score--; *score < 0 {
		l.value ^= bit
		*score = newLayoutScore
	}
}
