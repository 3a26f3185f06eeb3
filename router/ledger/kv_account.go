package ledger

import (
	"time"

	"warmroute/backends"
	"warmroute/router/estimate"
)

const (
	DefaultDecodeRate = 40 // tokens a second of one sequence
	decodeRateWeight  = 10 // responses that the default counts for
	// maxMeanOutputs is how many mean outputs one is counted for at most. A longer one
	// is seen by the next poll.
	maxMeanOutputs = 8
	// A poll is as expected where so many of our requests at most are in flight and not
	// in the engine: they are being tokenized, or their responses are being read. The share
	// of the KV cache in use may differ as well, since tokens are estimated from bytes.
	maxUnseenRequests = 2
	maxUnseenShare    = 0.1
	maxKVDeviation    = 0.1
)

// kvAccount is what a backend's KV cache has to hold: the prompts and outputs of what runs there. The index
// counts the prompts' blocks, each once however many requests share it; this is the rest.
type kvAccount struct {
	unindexed int64 // tokens of prompts that are in none of the index's blocks

	// Outputs grow with time: sequences with output, the sum of the microseconds since
	// Ledger.start at which it began, and the rate. A client that reads slowly keeps
	// open what its engine has finished long ago, so they do not exceed maxOutput.
	sequences, began int64
	maxOutput        float64
	decodeRate       estimate.Average

	// Sums over the steps up to summedAt since Ledger.start, as far as is known.
	prompts                           float64 // tokens of the sequences with output
	steps, stepSequences, stepContext float64
	summedAt                          time.Duration

	// What the last poll returned.
	capacity   int     // tokens; 0: unknown
	external   float64 // tokens in use beyond what we know of; below 0: so many are not in use any more
	waiting    int     // requests that wait for capacity, less those that started since
	nearlyFull bool    // at least backends.MinWaitingKVUsage is in use, or it is unknown
	polledAt   time.Time
	expected   bool // it showed what we expected, so the next one may come later
}

// kvUse is what one request uses of it beyond the index's blocks.
type kvUse struct {
	unindexed   int64
	outputSince int64   // microseconds since Ledger.start
	maxOutput   float64 // tokens that its output is counted for at most
}

func newKVAccount() kvAccount {
	return kvAccount{decodeRate: estimate.NewAverage(DefaultDecodeRate, decodeRateWeight)}
}

// startOutputGrowth counts a request's output as growing from now on. meanOutput is the mean
// length of its backend's outputs, sinceStart the time since Ledger.start.
func (k *kvAccount) startOutputGrowth(e *Entry, meanOutput float64, sinceStart time.Duration) {
	k.prompts += e.Prediction.PromptTokens
	e.kv.outputSince = sinceStart.Microseconds()
	k.sequences += e.Prediction.Sequences
	k.began += e.Prediction.Sequences * e.kv.outputSince
	most := maxMeanOutputs * meanOutput
	if e.MaxOutputTokens > 0 {
		most = min(most, float64(e.MaxOutputTokens))
	}
	e.kv.maxOutput = most * float64(e.Prediction.Sequences)
	k.maxOutput += e.kv.maxOutput
}

// recordEnd releases what a request used, and learns from a response that was complete.
func (k *kvAccount) recordEnd(e *Entry, o *Outcome, sinceStart time.Duration) {
	k.unindexed -= e.kv.unindexed
	if e.Streams && !e.prefilled {
		return
	}
	k.prompts -= e.Prediction.PromptTokens
	sequences := e.Prediction.Sequences
	k.sequences -= sequences
	k.began -= sequences * e.kv.outputSince
	if k.maxOutput -= e.kv.maxOutput; k.sequences == 0 {
		k.prompts, k.maxOutput = 0, 0 // no rounding error is left
	}
	took := float64(sinceStart.Microseconds()-e.kv.outputSince) / 1e6
	if e.Streams && !e.untimed && o.End == Completed && o.OutputTokens > 1 && took > 0 {
		k.decodeRate.Add(float64(o.OutputTokens) / float64(sequences) / took)
	}
}

// outputTokensInFlight returns how many tokens the outputs in flight have at a time since Ledger.start.
func (k *kvAccount) outputTokensInFlight(sinceStart time.Duration) float64 {
	return min(k.decodeRate.Value*float64(k.sequences*sinceStart.Microseconds()-k.began)/1e6, k.maxOutput)
}

// observe compares a poll with our own account of used tokens. That is ahead of the engine by
// the unseen tokens, of what waits in its queue, and by the requests that it has finished and
// whose clients have yet to read the responses.
func (k *kvAccount) observe(l *backends.Load, ownTokens, unseenTokens float64) {
	k.polledAt = l.PolledAt
	k.waiting, k.external = l.WaitingForCapacity, 0
	k.nearlyFull = !l.KVKnown || l.KVCacheUsage >= backends.MinWaitingKVUsage
	if l.CacheTokens > 0 {
		k.capacity = l.CacheTokens
	}
	if !l.KVKnown || k.capacity == 0 {
		return
	}
	used := l.KVCacheUsage * float64(k.capacity)
	k.external = max(0, used-ownTokens)
	if finished := l.OwnInFlight - int64(l.Running+l.Waiting); l.QueuesKnown && finished > 0 {
		share := float64(finished) / float64(l.OwnInFlight)
		k.external += min(0, max(used+unseenTokens-ownTokens, -share*ownTokens))
	}
}

// isExpectedLoad reports whether a poll shows what our own account explains: requests of no
// other client, none that wait for room, and about as much of the KV cache in use as our
// requests need. ownTokens includes the unseen tokens, those of prompts without output.
func isExpectedLoad(l *backends.Load, ownTokens, unseenTokens float64) bool {
	unseen := l.OwnInFlight - int64(l.Running+l.Waiting)
	switch {
	case !l.QueuesKnown, l.Asleep, l.WaitingForCapacity > 0:
		return false
	case unseen < 0, float64(unseen) > max(maxUnseenRequests, maxUnseenShare*float64(l.OwnInFlight)):
		return false
	case !l.KVKnown || l.CacheTokens == 0:
		return true
	case l.KVCacheUsage >= backends.MinWaitingKVUsage:
		return false
	}
	capacity := float64(l.CacheTokens)
	used := l.KVCacheUsage * capacity
	return used <= ownTokens+maxKVDeviation*capacity && used >= ownTokens-unseenTokens-maxKVDeviation*capacity
}
