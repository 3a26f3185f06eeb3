// Package estimate learns what replicas do not report: how fast each prefills, how
// much of its cache it has for us, how many bytes make a token, how many tokens an
// image has, how long outputs are, and how its chat template lays out a prompt.
package estimate

import (
	"math"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/index"
	"warmroute/router/step"
)

const (
	defaultOutputTokens = 250
	outputPriorWeight   = 10
	defaultCacheTokens  = 400_000
	predictionTolerance = 0.05 // of a prediction by which bytes may be off as a measure of tokens

	// MaxOutputTokens is more tokens than any model generates.
	MaxOutputTokens = 1e6
	// MinUncachedTokens is what a replica computes at least: of a full hit the last block.
	MinUncachedTokens = 16
)

// Estimates holds the estimates of all backends, by slot. It is not safe for concurrent use.
type Estimates struct {
	blockBytes int     // of canonical prompt in a block
	margin     float64 // of an index's size over the cache that it mirrors
	disabled   bool

	backends []backend // by slot
	models   models
	layouts  map[string]*layout    // by model
	groups   map[string]*stepGroup // by the model that backends serve
	unknown  *stepGroup            // of backends whose model is not known
	rate     float64               // median prefill rate of all backends, in tokens a second
	scratch  []float64             // for medians
}

// backend is what was learned of one backend.
type backend struct {
	steps           backendSteps
	kvTransferTimes kvTransferTimes
	fetches         fetchTimes
	offloads        bool // it has reported hits that were not on its GPU
	cacheTokens     int  // that the replica reports
	cachingOff      bool // the replica reports that prefix caching is off
	capacity        capacity
	missing         missingHits
	reset           cacheReset
	restored        restored
	lostUntil       uint64     // what was last used then or earlier, as index.Pin.Use, was found to be lost
	engines         int        // that the replica reports; 0: unknown
	ratio           tokenRatio // of its prompts
	output          Average    // tokens of a sequence
	window          counterWindow
	withoutUsage    int // responses since the last one that reported its cached tokens
}

// Summary is what was learned of one backend.
type Summary struct {
	CapacityFactor float64 // size of its cache for us over the reported size
	BytesPerToken  float64 // of its own prompts
	OutputTokens   float64 // mean length of a sequence
	PrefillRate    float64 // tokens a second
	Step           step.Model
	FetchSeconds   float64 // for a token that is not on its GPU; 0: not learned
}

// New returns estimates for an index of blocks of so many bytes, larger than
// the caches that it mirrors by margin.
func New(blockBytes int, indexMargin float64) *Estimates {
	unknown := newStepGroup(step.Default())
	return &Estimates{
		blockBytes: blockBytes, margin: indexMargin, models: newModels(), layouts: map[string]*layout{},
		groups: map[string]*stepGroup{}, unknown: unknown, rate: unknownRateShare * unknown.guess.rate,
	}
}

// SetLearningDisabled stops or resumes learning. While it is stopped the defaults and what
// replicas report are used.
func (f *Estimates) SetLearningDisabled(disabled bool) { f.disabled = disabled }

// Grow makes room for so many slots.
func (f *Estimates) Grow(slots int) {
	for len(f.backends) < slots {
		f.backends = append(f.backends, newBackend(f.unknown))
	}
}

// ResetSlot resets a slot for another backend.
func (f *Estimates) ResetSlot(slot int) { f.backends[slot] = newBackend(f.unknown) }

// ForgetLearned resets what was learned of a backend. What the replica reports and the
// totals stay. ResetSlot resets these too.
func (f *Estimates) ForgetLearned(slot int) {
	b := &f.backends[slot]
	fresh := newBackend(b.steps.group)
	fresh.cacheTokens, fresh.cachingOff, fresh.engines = b.cacheTokens, b.cachingOff, b.engines
	*b = fresh
	f.forgetStepsOfGroup(fresh.steps.group)
}

// ForgetReplicaProcess forgets what was observed of a replica since it started.
func (f *Estimates) ForgetReplicaProcess(slot int) {
	b := &f.backends[slot]
	b.window, b.missing = counterWindow{}, missingHits{}
	b.reset, b.restored = cacheReset{missShare: b.reset.missShare}, restored{}
	b.fetches = fetchTimes{}
	b.steps = backendSteps{group: b.steps.group} // it may be another version, or on other hardware
}

func newBackend(g *stepGroup) backend {
	return backend{
		steps: backendSteps{group: g}, kvTransferTimes: newKVTransferTimes(), cacheTokens: defaultCacheTokens, capacity: newCapacity(),
		ratio:  newTokenRatio(),
		output: NewAverage(defaultOutputTokens, outputPriorWeight), withoutUsage: minUsageGap,
	}
}

// Summary returns the estimates of one backend.
func (f *Estimates) Summary(slot int) Summary {
	b := &f.backends[slot]
	return Summary{
		CapacityFactor: b.capacity.factor(), BytesPerToken: b.ratio.bytesPerToken(), OutputTokens: b.output.Value,
		PrefillRate: f.PrefillRate(slot), Step: *f.Step(slot), FetchSeconds: f.FetchSeconds(slot),
	}
}

// RecordUncached records how many tokens of a request for a model were computed.
func (f *Estimates) RecordUncached(model string, tokens float64) { f.models.addUncached(model, tokens) }

// MeanUncachedTokens returns how many tokens of a request for a model are computed on
// average; 0 before the first one.
func (f *Estimates) MeanUncachedTokens(model string) float64 { return f.models.meanUncached(model) }

// MeanUncachedTokensOfAll returns MeanUncachedTokens over the requests for all models.
func (f *Estimates) MeanUncachedTokensOfAll() float64 { return f.models.all.uncached.Value }

// TokenSizes returns the token sizes of a model's prompts of a class.
func (f *Estimates) TokenSizes(model string, class prompt.TextClass) TokenSizes {
	return f.models.tokenSizes(model, class)
}

// KnowsMediaTokens reports whether the tokens of a model's media were learned well, for all of
// the kinds that counts has.
func (f *Estimates) KnowsMediaTokens(model string, counts *prompt.MediaCounts) bool {
	e := f.models.find(model)
	for kind, n := range counts {
		if n > 0 && e.media.samples(prompt.MediaKind(kind)) < knownMediaSamples {
			return false
		}
	}
	return true
}

// ExceedsTokens reports whether a text of so many bytes certainly has more than limit tokens:
// by its token ids, by the usage of the model's prompts of its class, or because no tokenizer
// makes so few tokens of so many bytes.
func (f *Estimates) ExceedsTokens(model string, class prompt.TextClass, bytes, limit int) bool {
	if float64(bytes) <= minBytesPerToken*float64(limit) { // as of most prompts: nothing need be looked up
		return false
	}
	most := float64(maxBytesPerToken)
	switch e := f.models.byName[model]; {
	case class == prompt.TokenIDs:
		most = prompt.TokenIDBytes
	case e != nil && e.ratios[class].tokens >= minProvenTokens:
		most = e.ratios[class].bytesPerToken()
		if class.IsLatin() { // English may be in the same class as what has half of its bytes per token
			most = max(most, defaultBytesPerToken)
		}
		most *= lengthMargin
	}
	return float64(bytes) > most*float64(limit)
}

// TokensMargin returns how many times the tokens that are estimated of a prompt it may have. unknownMedia says that it has
// media of which no tokens were learned.
func (f *Estimates) TokensMargin(model string, class prompt.TextClass, unknownMedia bool) float64 {
	switch e := f.models.byName[model]; {
	case unknownMedia:
		return unprovenTokensMargin
	case class == prompt.TokenIDs:
		return 1
	case e != nil && e.ratios[class].tokens >= minProvenTokens:
		return tokensMargin
	}
	return unprovenTokensMargin
}

// BackendBytesPerToken returns how many bytes of a backend's prompts make a token.
func (f *Estimates) BackendBytesPerToken(slot int) float64 {
	return f.backends[slot].ratio.bytesPerToken()
}

// OutputTokens returns how long a backend's outputs are on average.
func (f *Estimates) OutputTokens(slot int) float64 { return f.backends[slot].output.Value }

// MeanOutputTokens returns how long the outputs of some backends are on average. None counts for more than
// twice the median, so that one replica that counts wrong does not decide for the others.
func (f *Estimates) MeanOutputTokens(list []*backends.Backend) float64 {
	means := f.scratch[:0]
	for _, b := range list {
		means = append(means, f.backends[b.Slot].output.Value)
	}
	f.scratch = means
	slices.Sort(means)
	sum, most := 0.0, 2*means[(len(means)-1)/2]
	for _, n := range means {
		sum += min(n, most)
	}
	return sum / float64(len(means))
}

// IndexCapacity returns how many blocks the index of a backend should hold.
func (f *Estimates) IndexCapacity(slot int) (blocks int) {
	return f.cacheBlocks(slot, f.backends[slot].capacity.factor())
}

// cacheBlocks returns how many blocks of the index, with its margin, a backend's cache
// could fill, were it larger by capacityFactor than it reports.
func (f *Estimates) cacheBlocks(slot int, capacityFactor float64) (blocks int) {
	b := &f.backends[slot]
	if b.cachingOff {
		return 0
	}
	return int(f.margin * capacityFactor * float64(b.cacheTokens) * b.ratio.bytesPerToken() / float64(f.blockBytes))
}

// Prediction is what was known of a request when it was sent to a backend.
type Prediction struct {
	Model         string
	Bytes         int     // of canonical prompt
	PromptTokens  float64 // about
	HeldBlocks    int     // leading blocks that the backend holds
	MatchedBlocks int     // of these, those that it can reuse
	MatchedTokens int     // likewise, about
	// Checkpoint is where what it can reuse ends, if its replica keeps checkpoints; nil: it can reuse each block.
	Checkpoint  *index.Checkpoint
	Distance    int    // blocks used since the last use of the deepest matched one; see index.Pin
	Use         uint64 // likewise
	Reused      [index.MaxReusedSpans]index.ReusedSpan
	Uncached    float64       // tokens to compute
	Elsewhere   float64       // tokens beyond those of MatchedBlocks that another backend holds
	Offloaded   float64       // tokens of MatchedTokens that the backend has to fetch
	QueuedAhead float64       // uncached tokens sent to the backend before, and not yet computed
	TTFT        time.Duration // 0: not measured
	Sequences   int64
	Forks       []prompt.Fork
	Media       prompt.MediaCounts // of the items in Bytes, if these are those of one prompt
	TextClass   prompt.TextClass
	IsText      bool // Bytes are those of one prompt's text
	IsTooLong   bool // the replica will refuse it

	hitsBefore       float64 // that the replica had counted before it was sent, if hitsKnown
	hitsKnown        bool
	restoredRecorded bool // it was recorded what it shows of restored blocks
}

// Usage is what a replica reported at the end of a response. Zero fields are unknown.
type Usage struct {
	PromptTokens, CachedTokens int
	CachedKnown                bool // the replica reports CachedTokens, so 0 means none
}

// CacheInfo is what matters of a backend's cache and of its index.
type CacheInfo struct {
	Alignment float64 // tokens that a hit is a multiple of
	Evicting  bool    // the index has evicted blocks
	Uses      uint64  // of it so far, as index.Pin counts them
}

// RecordOutputLength records the length of an output, all sequences together.
func (f *Estimates) RecordOutputLength(slot, totalTokens int, sequences int64) {
	f.backends[slot].output.Add(float64(totalTokens) / float64(sequences))
}

// LearnFromCompletion learns the token sizes and the capacity from a request whose response was complete. It returns how
// many tokens were computed of its prompt, as reported or else as predicted; 0 if that is not known.
func (f *Estimates) LearnFromCompletion(slot int, p *Prediction, u Usage, c CacheInfo) (uncached float64) {
	b := &f.backends[slot]
	b.withoutUsage++
	if f.disabled {
		return 0
	}
	if p.Media != (prompt.MediaCounts{}) && u.PromptTokens > 0 {
		f.models.addMedia(p.Model, p.TextClass, &p.Media, p.Bytes, u.PromptTokens)
	}
	uncached = p.Uncached
	if p.IsText && u.PromptTokens > 0 {
		if !isPlausibleRatio(p.Bytes, u.PromptTokens) {
			return 0 // nor is the rest
		}
		f.models.addPrompt(p.Model, p.TextClass, p.Bytes, u.PromptTokens)
		b.ratio.addPrompt(p.Bytes, u.PromptTokens)
		if f.learnFromUsage(slot, p, u, c) {
			b.withoutUsage = 0
			uncached = max(MinUncachedTokens, float64(u.PromptTokens-u.CachedTokens))
		}
	}
	if !p.IsText || p.IsTooLong {
		return 0
	}
	return uncached
}

// RecordPrefillDone records that the prefill of a request is over, for the counters.
func (f *Estimates) RecordPrefillDone(slot int, p *Prediction, c CacheInfo, now time.Time) {
	b := &f.backends[slot]
	if !b.window.open {
		return
	}
	b.window.addStarted(startedRequest{
		at: now, model: p.Model, prompt: p.PromptTokens, bytes: p.Bytes, textClass: p.TextClass, bucket: f.distanceBucket(slot, p),
		predicted: UsableHitTokens(float64(p.MatchedTokens), p.PromptTokens, c.Alignment),
		unknown:   p.IsTooLong || !p.IsText && p.Bytes >= f.blockBytes || f.reusesLost(slot, p) || !p.isHitCertain(),
		use:       p.Use, reused: f.nearSpans(slot, p), blockTokens: float64(f.blockBytes) / float64(max(1, p.Bytes)) * p.PromptTokens,
		prediction: p,
	})
}

// ObserveLoad learns from a poll. unseenTokens are those of the prompts in flight
// of which there is no output yet.
func (f *Estimates) ObserveLoad(slot int, l *backends.Load, unseenTokens float64, c CacheInfo) {
	b, tokens := &f.backends[slot], l.CacheTokens
	if l.KeepsCheckpoints {
		tokens = max(l.PoolTokens, l.CacheTokens) // what checkpoints take of it is accounted for in the index
	}
	if tokens <= 0 {
		tokens = defaultCacheTokens
	}
	if tokens != b.cacheTokens {
		b.cacheTokens, b.capacity = tokens, newCapacity()
	}
	b.cachingOff, b.engines = l.PrefixCachingOff, l.Engines
	b.offloads = l.HostHitsKnown && l.HostHits > 0
	b.capacity.setHostTier(!l.HostHitsKnown || l.HostHits > 0)
	f.advanceCounterWindow(slot, l, unseenTokens, c)
}

// learnFromUsage compares a prediction with the usage that the replica reported, and
// reports whether it could: the usage names the cached tokens.
func (f *Estimates) learnFromUsage(slot int, p *Prediction, u Usage, c CacheInfo) (comparable bool) {
	if !p.IsText || p.IsTooLong || !u.CachedKnown || u.CachedTokens < 0 || u.CachedTokens > u.PromptTokens {
		return false
	}
	prompt := float64(u.PromptTokens)
	cached := float64(u.CachedTokens)
	var all predictions
	hit := UsableHitTokens(float64(p.MatchedBlocks*f.blockBytes)/float64(p.Bytes)*prompt, prompt, c.Alignment)
	if p.Checkpoint != nil {
		hit = float64(p.Checkpoint.Tokens)
	}
	all.addPrediction(f.distanceBucket(slot, p), hit, prompt)
	f.learnStore(slot, p, hit, cached, all.hitTokensMargin(c))
	switch {
	case f.reusesLost(slot, p): // it was sent before that was found
	case f.reusesRestored(slot, p):
		f.recordRestored(slot, p, cached, prompt, all.hitTokensMargin(c), false)
	case p.Checkpoint != nil:
		f.recordReuse(slot, p, cached, prompt, all.hitTokensMargin(c))
		if p.Checkpoint.Certain { // that others are missing says nothing of the cache
			f.backends[slot].missing.addResponse(all.tokens, cached)
			f.backends[slot].capacity.addEvidence(&all, max(0, all.tokens-cached-all.hitTokensMargin(c)))
			f.backends[slot].capacity.updateLastKeptBucket()
		}
	default:
		f.backends[slot].missing.addResponse(all.tokens, cached)
		f.recordReuse(slot, p, cached, prompt, all.hitTokensMargin(c))
		f.learnCapacity(slot, &all, cached, prompt, c)
	}
	return true
}

// isHitCertain reports whether a replica that has its cache still reuses what the request was expected to reuse, and no more.
func (p *Prediction) isHitCertain() bool {
	return p.Checkpoint == nil || p.Checkpoint.Certain && p.HeldBlocks == p.MatchedBlocks
}

// distanceBucket returns the bucket of the deepest block that matched.
func (f *Estimates) distanceBucket(slot int, p *Prediction) int {
	bucket := capacityBucket(float64(p.Distance) / float64(max(1, f.cacheBlocks(slot, 1))))
	return min(bucket, f.backends[slot].capacity.count-1)
}

// UsableHitTokens returns how many of the matched tokens an engine can use: whole blocks, and never the last
// token of the prompt. Almost a whole block counts as one, since bytes are no exact measure.
func UsableHitTokens(matchedTokens, promptTokens, alignment float64) float64 {
	return max(0, float64(int(min(matchedTokens, promptTokens-1)/alignment+0.1))*alignment)
}

// learnCapacity learns how much a replica's cache holds, from predictions and how many
// tokens of their prompts were hits. A block that was expected and absent was
// evicted after Prediction.Distance others were used: the cache holds less than that.
func (f *Estimates) learnCapacity(slot int, p *predictions, hitTokens, promptTokens float64, c CacheInfo) {
	if f.disabled {
		return
	}
	b := &f.backends[slot]
	deviation := math.Sqrt(p.variance)
	b.capacity.addEvidence(p, max(0, p.tokens-hitTokens-p.hitTokensMargin(c)))
	// Our blocks may end a block before the engine's.
	block := float64(f.blockBytes) / b.ratio.bytesPerToken()
	if hitTokens-p.tokens > block+max(c.Alignment, deviation+predictionTolerance*promptTokens) && c.Evicting {
		b.capacity.addUnexpectedHit()
	}
	b.capacity.updateLastKeptBucket()
}
