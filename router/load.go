package router

import (
	"math"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/router/estimate"
	"warmroute/router/policy"
)

const (
	workRate          = 0.9 // of the prefill rate, by which queued tokens shrink while nothing is heard
	minStreamsPending = 0.2 // of the streams' queued tokens remains until their first events are seen

	externalLoadDecay  = 2 // poll intervals in which external load fades to 1/e
	maxExternalLoadAge = 3 // poll intervals, after which it counts for nothing

	// A scrape is as expected where so many of our requests at most are in flight and not
	// in the engine: they are being tokenized, or their responses are being read. The share
	// of the KV cache in use may differ as well, since tokens are estimated from bytes.
	maxUnseenRequests = 2
	maxUnseenShare    = 0.1
	maxKVDeviation    = 0.1
)

// What an adapter costs a backend that does not run it, in tokens of prefill. These
// are costs and no order of preference: else all requests for a popular adapter
// would go to the replica that had the first of them.
const (
	adapterLoadTokens = 2000 // a quarter of a second: it is read from memory or a disk
	// adapterWaitTokens is where all places for adapters are taken: an engine starts
	// no request for another one before one of them has no request left.
	adapterWaitTokens = 8 * adapterLoadTokens
	maxAdapters       = 64 // that a backend's account keeps apart; engines have places for far fewer
)

// load is what one backend was sent, by this router and its peers, and has in flight, and what
// of it has yet to be prefilled.
//
// An engine prefills in the order of arrival. So a first event says that everything
// sent before it is prefilled as well. Answers that are not streamed have no first
// event: they are assumed to be prefilled at the prefill rate.
type load struct {
	pending []*Decision // not prefilled yet, in the order sent
	tokens  float64     // sum of their uncached tokens
	streams float64     // the part of it whose first event can be seen
	since   time.Time   // up to when time has been counted as work

	adapters map[string]int // requests in flight, by adapter

	requests  int     // those of peers included
	ofPeers   int     // requests of peers
	unstarted float64 // uncached tokens of requests without output
	attended  float64 // by these; see attendedTokens
	unseen    float64 // prompt tokens of requests without output
}

// own returns how many of the requests are not those of peers.
func (l *load) own() int { return l.requests - l.ofPeers }

// addRequest counts a request that is being sent.
func (l *load) addRequest(d *Decision, now time.Time) {
	if len(l.pending) == 0 {
		l.since = now
	}
	p := &d.prediction
	l.requests++
	if d.request.ofPeer {
		l.ofPeers++
	}
	l.addAdapter(d)
	l.unstarted += p.Uncached
	l.attended += attendedTokens(p)
	l.unseen += p.PromptTokens
	l.pending = append(l.pending, d)
	l.tokens += p.Uncached
	if d.request.streams {
		l.streams += p.Uncached
	}
}

// queuedTokens returns the tokens that are still to be prefilled, at so many a second. It
// removes the requests without a first event that should be prefilled by now.
func (l *load) queuedTokens(now time.Time, prefillRate float64) (tokens float64) {
	if len(l.pending) == 0 {
		return 0
	}
	worked := workRate * prefillRate * now.Sub(l.since).Seconds()
	for len(l.pending) > 0 && !l.pending[0].request.streams && l.pending[0].prediction.Uncached <= worked {
		u := l.pending[0].prediction.Uncached
		worked -= u
		l.since = l.since.Add(time.Duration(u / (workRate * prefillRate) * float64(time.Second)))
		l.dropPendingAt(0)
	}
	return max(minStreamsPending*l.streams, l.tokens-worked)
}

// dropPrefilledUpTo records that the prefill of d is over, and with it that of every
// answer sent before it that is not streamed.
func (l *load) dropPrefilledUpTo(d *Decision, now time.Time) {
	l.unstarted -= d.prediction.Uncached
	l.attended -= attendedTokens(&d.prediction)
	l.unseen -= d.prediction.PromptTokens
	at := slices.Index(l.pending, d)
	if at < 0 {
		return // it was assumed to be
	}
	l.dropPendingAt(at)
	for i := at - 1; i >= 0; i-- {
		if !l.pending[i].request.streams {
			l.dropPendingAt(i)
		}
	}
	l.since = now
}

// removePending removes a request that will not be prefilled.
func (l *load) removePending(d *Decision) {
	if at := slices.Index(l.pending, d); at >= 0 {
		l.dropPendingAt(at)
	}
}

// recordEnd records that d is in flight no more.
func (l *load) recordEnd(d *Decision) {
	l.requests--
	if d.request.ofPeer {
		l.ofPeers--
	}
	l.removeAdapter(d)
	if !d.started {
		l.unstarted -= d.prediction.Uncached
		l.attended -= attendedTokens(&d.prediction)
		l.unseen -= d.prediction.PromptTokens
	}
	if l.requests == 0 {
		l.unstarted, l.attended, l.unseen = 0, 0, 0 // no rounding error is left
	}
}

// dropPendingAt removes the pending request at an index, and its tokens.
func (l *load) dropPendingAt(index int) {
	d := l.pending[index]
	l.tokens -= d.prediction.Uncached
	if d.request.streams {
		l.streams -= d.prediction.Uncached
	}
	l.pending = slices.Delete(l.pending, index, index+1)
	if len(l.pending) == 0 {
		l.tokens, l.streams = 0, 0 // no rounding error is left
	}
}

// attendedTokens returns how many tokens the uncached tokens of a prompt attend to, all together: each to
// those before it.
func attendedTokens(p *estimate.Prediction) float64 {
	return policy.AttendedTokens(p.PromptTokens, p.Uncached)
}

// addAdapter counts a request for an adapter: the backend has it or is loading it,
// long before a scrape says so.
func (l *load) addAdapter(d *Decision) {
	name := d.request.adapter
	if name == "" {
		return
	}
	if l.adapters[name] == 0 && len(l.adapters) == maxAdapters {
		d.request.adapter = ""
		return
	}
	if l.adapters == nil {
		l.adapters = map[string]int{}
	}
	l.adapters[name]++
}

func (l *load) removeAdapter(d *Decision) {
	name := d.request.adapter
	if name == "" {
		return
	}
	if l.adapters[name]--; l.adapters[name] == 0 {
		delete(l.adapters, name)
	}
}

// adapterCost returns what it costs the replica that reported scrape to load an adapter,
// in tokens of prefill; 0 if it has it.
func (l *load) adapterCost(adapter string, scrape *backends.Load) (tokens float64) {
	switch {
	case adapter == "" || scrape != nil && slices.Contains(scrape.RunningAdapters, adapter) || l.adapters[adapter] > 0:
		return 0
	case scrape != nil && scrape.MaxAdapters > 0 && len(scrape.RunningAdapters) >= scrape.MaxAdapters:
		return adapterWaitTokens
	}
	return adapterLoadTokens
}

// countEngines returns how many data-parallel engines a replica has, at least 1.
func countEngines(scrape *backends.Load) int {
	if scrape == nil {
		return 1
	}
	return max(1, scrape.Engines)
}

// externalLoad returns the load on a backend that is neither ours nor that of a peer: requests,
// and the uncached tokens of those that wait. It is what the last scrape saw beyond the
// requests that we know of, and fades with its age, since only a scrape says when they end.
func (r *Router) externalLoad(l *backends.Load, now time.Time) (requests, tokens float64) {
	if l == nil || !l.QueuesKnown {
		return 0, 0
	}
	requests = float64(l.Running+l.Waiting) - float64(l.OwnInFlight)
	age := now.Sub(l.PolledAt)
	if requests <= 0 || age > maxExternalLoadAge*r.settings.PollInterval {
		return 0, 0
	}
	waiting := min(requests, float64(l.Waiting))
	decay := math.Exp(-age.Seconds() / (externalLoadDecay * r.settings.PollInterval.Seconds()))
	return requests * decay, waiting * decay * r.estimates.MeanUncachedTokensOfAll()
}

// isExpectedLoad reports whether a scrape shows what our own account explains: requests of no
// other client, none that wait for room, and about as much of the KV cache in use as our
// requests need. ownKVTokens includes the unseen tokens, those of prompts without output.
func isExpectedLoad(l *backends.Load, ownKVTokens, unseenTokens float64) bool {
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
	return used <= ownKVTokens+maxKVDeviation*capacity && used >= ownKVTokens-unseenTokens-maxKVDeviation*capacity
}
