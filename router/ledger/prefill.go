package ledger

import (
	"slices"
	"time"

	"warmroute/backends"
)

const (
	// WorkRate is the share of the prefill rate by which queued tokens shrink while nothing is heard.
	WorkRate          = 0.9
	minStreamsPending = 0.2 // of the streams' queued tokens remains until their first events are seen
)

// What an adapter costs a backend that does not run it, in seconds. These are costs and no order of
// preference: else all requests for a popular adapter would go to the replica that had the first of them.
const (
	adapterLoadSeconds = 0.25 // it is read from memory or a disk
	// adapterWaitSeconds is where all places for adapters are taken: an engine starts
	// no request for another one before one of them has no request left.
	adapterWaitSeconds = 8 * adapterLoadSeconds
	maxAdapters        = 64 // that an account keeps apart; engines have places for far fewer
)

// requestAccount is what one backend was sent, by this router and its peers, and has in flight,
// and what of it has yet to be prefilled.
//
// An engine prefills in the order of arrival. So a first event says that everything
// sent before it is prefilled as well. Responses that are not streamed have no first
// event: they are assumed to be prefilled at the prefill rate.
type requestAccount struct {
	pending []*Entry  // not prefilled yet, in the order sent
	tokens  float64   // sum of their uncached tokens
	fetches float64   // sum of their offloaded tokens
	streams float64   // the part of it whose first event can be seen
	depth   float64   // sum of their attendedTokens
	since   time.Time // up to when time has been counted as work

	// Those that are not streamed: kvAccount counts their outputs as if they had begun.
	wholeSequences int64
	wholePrompts   float64 // tokens

	sent, sentDepth float64 // sums of all requests so far, but for those that were not prefilled

	adapters map[string]int // requests in flight, by adapter

	requests  int     // those of peers included
	ofPeers   int     // requests of peers
	unstarted float64 // uncached tokens of requests without output
	attended  float64 // by these; see attendedTokens
	unseen    float64 // prompt tokens of requests without output
	prompts   float64 // prompt tokens of all requests
}

// add counts a request that is being sent.
func (p *requestAccount) add(e *Entry, now time.Time) {
	if len(p.pending) == 0 {
		p.since = now
	}
	p.requests++
	if e.OfPeer {
		p.ofPeers++
	}
	p.addAdapter(e)
	p.unstarted += e.Prediction.Uncached
	p.attended += e.attendedTokens()
	p.unseen += e.Prediction.PromptTokens
	p.prompts += e.Prediction.PromptTokens
	p.pending = append(p.pending, e)
	p.tokens += e.Prediction.Uncached
	p.fetches += e.Prediction.Offloaded
	p.depth += e.attendedTokens()
	p.sent += e.Prediction.Uncached
	p.sentDepth += e.attendedTokens()
	if e.Streams {
		p.streams += e.Prediction.Uncached
	} else {
		p.wholeSequences += e.Prediction.Sequences
		p.wholePrompts += e.Prediction.PromptTokens
	}
}

// queuedTokens returns the tokens that are still to be prefilled, at so many a second, and how many
// requests have them: without those without a first event that should be prefilled by now.
func (p *requestAccount) queuedTokens(now time.Time, prefillRate float64) (tokens float64, requests int) {
	if len(p.pending) == 0 {
		return 0, 0
	}
	done, _, tokens, worked := p.workedOff(now, prefillRate)
	if done == len(p.pending) {
		return 0, 0
	}
	return max(minStreamsPending*p.streams, tokens-worked), len(p.pending) - done
}

// queuedAttended returns how many tokens so many tokens attend to that are still to be prefilled, of so many requests.
func (p *requestAccount) queuedAttended(tokens float64, requests int) (attended float64) {
	if requests == 0 {
		return 0
	}
	all, attended := p.tokens, p.depth
	for _, e := range p.pending[:len(p.pending)-requests] {
		all -= e.Prediction.Uncached
		attended -= e.attendedTokens()
	}
	return attended * tokens / all
}

// queuedFetches returns how many tokens the last so many pending requests fetch.
func (p *requestAccount) queuedFetches(requests int) (tokens float64) {
	if p.fetches == 0 {
		return 0
	}
	for _, e := range p.pending[len(p.pending)-requests:] {
		tokens += e.Prediction.Offloaded
	}
	return tokens
}

// computedTokens returns how many tokens were prefilled so far, and how many these attended to.
func (p *requestAccount) computedTokens(now time.Time, prefillRate float64) (tokens, attended float64) {
	if p.tokens <= 0 {
		return p.sent, p.sentDepth
	}
	queued := p.tokens
	if prefillRate > 0 {
		queued, _ = p.queuedTokens(now, prefillRate)
	}
	return p.sent - queued, p.sentDepth - p.depth*queued/p.tokens
}

// mayHaveWorkedOff reports whether queuedTokens may leave out requests.
func (p *requestAccount) mayHaveWorkedOff() bool { return len(p.pending) > 0 && !p.pending[0].Streams }

// removeWorkedOff removes the requests that queuedTokens leaves out.
func (p *requestAccount) removeWorkedOff(now time.Time, prefillRate float64) {
	if !p.mayHaveWorkedOff() {
		return
	}
	done, since, tokens, _ := p.workedOff(now, prefillRate)
	if done == 0 {
		return
	}
	p.since, p.tokens = since, tokens
	for _, e := range p.pending[:done] {
		p.fetches -= e.Prediction.Offloaded
		p.depth -= e.attendedTokens()
		p.wholeSequences -= e.Prediction.Sequences
		p.wholePrompts -= e.Prediction.PromptTokens
	}
	if p.pending = slices.Delete(p.pending, 0, done); len(p.pending) == 0 {
		p.tokens, p.fetches, p.streams, p.depth, p.wholePrompts = 0, 0, 0, 0, 0 // no rounding error is left
	}
}

// workedOff returns how many of the first pending requests have no first event and should be prefilled by now,
// up to when time is then counted as work, the tokens of the others, and how many of those are computed.
func (p *requestAccount) workedOff(now time.Time, prefillRate float64) (done int, since time.Time, tokens, worked float64) {
	since, tokens = p.since, p.tokens
	worked = WorkRate * prefillRate * now.Sub(since).Seconds()
	for done < len(p.pending) && !p.pending[done].Streams && p.pending[done].Prediction.Uncached <= worked {
		u := p.pending[done].Prediction.Uncached
		worked -= u
		since = since.Add(time.Duration(u / (WorkRate * prefillRate) * float64(time.Second)))
		tokens -= u
		done++
	}
	return done, since, tokens, worked
}

// recordPrefilled records that the prefill of e is over, and with it that of every
// request without a first event that was sent before.
func (p *requestAccount) recordPrefilled(e *Entry, now time.Time) {
	p.unstarted -= e.Prediction.Uncached
	p.attended -= e.attendedTokens()
	p.unseen -= e.Prediction.PromptTokens
	at := slices.Index(p.pending, e)
	if at < 0 {
		return // it was assumed to be
	}
	p.removePendingAt(at)
	for i := at - 1; i >= 0; i-- {
		if !p.pending[i].Streams {
			p.removePendingAt(i)
		}
	}
	p.since = now
}

// removePending removes a request that will not be prefilled.
func (p *requestAccount) removePending(e *Entry) {
	if at := slices.Index(p.pending, e); at >= 0 {
		p.sent -= e.Prediction.Uncached
		p.sentDepth -= e.attendedTokens()
		p.removePendingAt(at)
	}
}

// removeRequest removes a request that is no longer in flight.
func (p *requestAccount) removeRequest(e *Entry) {
	p.requests--
	p.prompts -= e.Prediction.PromptTokens
	if e.OfPeer {
		p.ofPeers--
	}
	p.removeAdapter(e)
	if !e.prefilled {
		p.unstarted -= e.Prediction.Uncached
		p.attended -= e.attendedTokens()
		p.unseen -= e.Prediction.PromptTokens
	}
	if p.requests == 0 {
		p.unstarted, p.attended, p.unseen, p.prompts = 0, 0, 0, 0 // no rounding error is left
	}
}

// removePendingAt removes the pending request at an index, and its tokens.
func (p *requestAccount) removePendingAt(index int) {
	e := p.pending[index]
	p.tokens -= e.Prediction.Uncached
	p.fetches -= e.Prediction.Offloaded
	p.depth -= e.attendedTokens()
	if e.Streams {
		p.streams -= e.Prediction.Uncached
	} else {
		p.wholeSequences -= e.Prediction.Sequences
		p.wholePrompts -= e.Prediction.PromptTokens
	}
	p.pending = slices.Delete(p.pending, index, index+1)
	if len(p.pending) == 0 {
		p.tokens, p.fetches, p.streams, p.depth, p.wholePrompts = 0, 0, 0, 0, 0 // no rounding error is left
	}
}

// addAdapter counts a request for an adapter: the backend has it or is loading it, long before a poll says so.
// If maxAdapters are counted already, it clears the request's adapter.
func (p *requestAccount) addAdapter(e *Entry) {
	switch {
	case e.Adapter == "":
		return
	case p.adapters[e.Adapter] == 0 && len(p.adapters) == maxAdapters:
		e.Adapter = ""
		return
	case p.adapters == nil:
		p.adapters = map[string]int{}
	}
	p.adapters[e.Adapter]++
}

// removeAdapter undoes addAdapter.
func (p *requestAccount) removeAdapter(e *Entry) {
	if e.Adapter == "" {
		return
	}
	if p.adapters[e.Adapter]--; p.adapters[e.Adapter] == 0 {
		delete(p.adapters, e.Adapter)
	}
}

// adapterCost returns what it costs the replica whose last poll returned l to load an adapter,
// in seconds; 0 if it has it.
func (p *requestAccount) adapterCost(adapter string, l *backends.Load) (seconds float64) {
	switch {
	case adapter == "" || l != nil && slices.Contains(l.RunningAdapters, adapter) || p.adapters[adapter] > 0:
		return 0
	case l != nil && l.MaxAdapters > 0 && len(l.RunningAdapters) >= l.MaxAdapters:
		return adapterWaitSeconds
	}
	return adapterLoadSeconds
}
