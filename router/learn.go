package router

import (
	"math"
	"slices"

	"warmroute/backends"
)

// Text is no exact measure of tokens, so the truth may differ from a prediction
// by a share of it, or of the prompt; and by more where only part of the prompt
// matched, since tools have more tokens a byte than prose, and either may come
// first.
const (
	closeEnough = 0.05
	uneven      = 0.25 // of what was predicted, times the part that did not match
)

// lessons are what was learned of one backend.
type lessons struct {
	told   int     // tokens of KV cache that the replica reports
	off    bool    // it says that it caches no prefixes
	reach  reach   // how much of that it has for us
	texts  ratio   // bytes per token of what it was sent
	answer average // tokens of a sequence of an answer
	speed  speed
	steps  steps
	window window
	quiet  int // answers without a word on the cache since the last one with

	prompt, predicted, observed float64 // tokens, summed over all that could be compared
	saved                       float64 // seconds of prefill that the observed ones would have taken
}

// BackendEstimates is what was learned of one backend.
type BackendEstimates struct {
	Backend *backends.Backend // nil: nobody has the slot

	CapacityFactor float64 // size of its cache over what it reports, as far as we are concerned
	BytesPerToken  float64
	AnswerTokens   float64 // mean length of a sequence
	PrefillRate    float64 // tokens a second
	StepTokens     int     // the scheduler's budget for one step
	// Tokens of prompts, and of these the cached ones as predicted and as the replica
	// told, summed over the requests for which both are known; and what the latter
	// would have taken to compute, in seconds at the rate of their time.
	PromptTokens, PredictedTokens, ObservedTokens, SavedSeconds float64
}

// Estimates reports what was learned of each backend, by slot.
func (r *Router) Estimates() []BackendEstimates {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	all := make([]BackendEstimates, len(r.lessons))
	for slot := range r.lessons {
		l := &r.lessons[slot]
		all[slot] = BackendEstimates{
			Backend:        r.fleet[slot],
			CapacityFactor: l.reach.factor(), BytesPerToken: l.texts.value(), AnswerTokens: l.answer.value,
			PrefillRate: r.rate(slot), StepTokens: int(r.stepTokens(slot)),
			PromptTokens: l.prompt, PredictedTokens: l.predicted, ObservedTokens: l.observed, SavedSeconds: l.saved,
		}
	}
	return all
}

func newLessons() lessons {
	return lessons{
		told: cacheTokens, reach: newReach(), texts: newRatio(),
		answer: average{answerTokens, answerPrior}, quiet: usageFades,
	}
}

// usageFades is after how many answers without usage the polls' word on the
// cache counts.
const usageFades = 20

// served learns from an answer that came to its end.
func (r *Router) served(d *Decision, o *Outcome) {
	l := &r.lessons[d.Backend.Slot]
	if o.AnswerTokens > 0 && r.isTypical(d, r.now()) {
		l.answer.add(float64(o.AnswerTokens) / float64(d.sequences))
	}
	l.quiet++
	if r.noLearning {
		r.truth(d, o)
		return
	}
	uncached := d.uncached
	if d.plain && o.PromptTokens > 0 {
		if !credible(d.bytes, o.PromptTokens) {
			return // neither can the rest be trusted
		}
		r.texts.add(d.model, d.bytes, o.PromptTokens)
		l.texts.learn(d.bytes, o.PromptTokens)
		if r.truth(d, o) {
			l.quiet = 0
			uncached = max(leastUncached, float64(o.PromptTokens-o.CachedTokens))
		}
	}
	if d.plain && !d.tooLong && l.speed.add(d.ahead+uncached, d.ttft) {
		r.learnRate()
	}
	r.resize(d.Backend.Slot)
}

// truth compares what a Decision predicted with what the replica found, if it
// says so.
func (r *Router) truth(d *Decision, o *Outcome) bool {
	if !d.plain || d.tooLong || !o.CachedKnown || o.CachedTokens < 0 || o.CachedTokens > o.PromptTokens {
		return false
	}
	prompt, aligned := float64(o.PromptTokens), r.alignment(d.Backend)
	predicted := rounded(float64(d.MatchedBlocks*r.blockBytes)/float64(d.bytes)*prompt, prompt, aligned)
	var f foresight
	f.add(r.bucket(d), predicted, prompt)
	r.compare(d.Backend.Slot, &f, float64(o.CachedTokens), prompt, aligned)
	return true
}

// bucket is that of the deepest block that a Decision predicted.
func (r *Router) bucket(d *Decision) int {
	return bucketOf(float64(d.placed.ReuseDistance) / float64(max(1, r.blocks(d.Backend.Slot, 1))))
}

// alignment is what a hit on b is a multiple of, in tokens.
func (r *Router) alignment(b *backends.Backend) float64 {
	if l := b.Load(); l != nil && l.HitAlignment > 0 {
		return float64(l.HitAlignment)
	}
	return 1
}

// rounded is how much of so many matched tokens an engine can use: whole blocks,
// and never the last token of the prompt. Bytes are no exact measure, so what is
// all but a whole block is one.
func rounded(matched, prompt, aligned float64) float64 {
	return max(0, float64(int(min(matched, prompt-1)/aligned+0.1))*aligned)
}

// compare learns from predictions how much a replica's cache holds. A block that
// was to be there and is not has been evicted after Distance others were used:
// the cache holds less than that. The block itself need not be dropped, since
// the request that missed it has just computed it anew; what was used before it
// is gone as well, and goes here as the capacity shrinks.
func (r *Router) compare(slot int, f *foresight, observed, prompt, aligned float64) {
	l, predicted := &r.lessons[slot], f.sum
	l.prompt += prompt
	l.predicted += predicted
	l.observed += observed
	l.saved += observed / r.rate(slot)
	if r.noLearning {
		return
	}
	slack := math.Sqrt(f.variance)
	l.reach.learn(f, max(0, predicted-observed-max(aligned, slack+closeEnough*predicted)))
	// Our blocks may end a block before the engine's.
	block := float64(r.blockBytes) / l.texts.value()
	if observed-predicted > block+max(aligned, slack+closeEnough*prompt) && r.index.Evictions(slot) > 0 {
		l.reach.beyond()
	}
	l.reach.settle()
}

// resize lets the index follow what a backend's cache is thought to hold. Small
// changes are left alone.
func (r *Router) resize(slot int) {
	want, have := r.blocks(slot, r.lessons[slot].reach.factor()), r.index.RequestedCapacity(slot)
	if want > have+have/64 || want < have-have/64 {
		r.index.SetCapacity(slot, want)
	}
}

// blocks is how many blocks of ours a backend's cache has room for, were it
// larger by factor than it says.
func (r *Router) blocks(slot int, factor float64) int {
	l := &r.lessons[slot]
	if l.off {
		return 0
	}
	return int(r.indexMargin * factor * float64(l.told) * l.texts.value() / float64(r.blockBytes))
}

// answerTokens is how long the candidates' answers are, on average. None counts
// for more than twice the median: a replica that counts wrong decides for none of
// the others.
func (r *Router) answerTokens() float64 {
	means := r.sorted[:0]
	for _, b := range r.slots {
		means = append(means, r.lessons[b.Slot].answer.value)
	}
	r.sorted = means
	slices.Sort(means)
	sum, most := 0.0, 2*means[(len(means)-1)/2]
	for _, n := range means {
		sum += min(n, most)
	}
	return sum / float64(len(means))
}
