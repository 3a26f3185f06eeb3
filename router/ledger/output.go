package ledger

import (
	"time"

	"warmroute/backends"
)

// maxOutputPolls is how many polls of a backend are kept: those of a minute at least, in which most requests end.
const maxOutputPolls = 64

// outputPoll is what a replica had counted of the outputs of all its clients' requests by a poll.
type outputPoll struct {
	at                          time.Time
	tokens, gaps, gapSeconds    float64
	firstTokens, firstTokenTime float64 // of responses: how many, and the sum of the seconds to them
	waiting                     int     // requests
}

// outputPolls are the latest polls of a backend, oldest first.
type outputPolls struct{ list []outputPoll }

// add adds a poll. The counters of a replica that has restarted begin again.
func (p *outputPolls) add(l *backends.Load) {
	poll := outputPoll{l.PolledAt, l.GenerationTokens, l.Gaps, l.GapSeconds, l.FirstTokens, l.FirstTokenSeconds, l.Waiting}
	if n := len(p.list); n > 0 && (poll.gaps < p.list[n-1].gaps || poll.firstTokens < p.list[n-1].firstTokens) {
		p.list = p.list[:0]
	}
	if len(p.list) == maxOutputPolls {
		p.list = p.list[:copy(p.list, p.list[1:])]
	}
	p.list = append(p.list, poll)
}

// rateSince returns how many tokens a second the replica has generated of a sequence since a poll; 0 if too few to tell. An output
// may have several tokens, by speculative decoding.
func (p *outputPolls) rateSince(earlier *outputPoll) float64 {
	last := &p.list[len(p.list)-1]
	gaps, seconds := last.gaps-earlier.gaps, last.gapSeconds-earlier.gapSeconds
	if gaps < minPolledGaps || seconds <= 0 {
		return 0
	}
	if last.firstTokens > 0 {
		gaps = max(gaps, last.tokens-earlier.tokens-(last.firstTokens-earlier.firstTokens))
	}
	return gaps / seconds
}

// rate returns how many tokens a second the replica has generated of a sequence since a time, as far as that is kept, else in the
// shortest time before that tells; 0 if none does.
func (p *outputPolls) rate(since time.Time) float64 {
	for i := len(p.list) - 1; i >= 0; i-- {
		if i > 0 && !p.list[i-1].at.Before(since) {
			continue
		}
		if rate := p.rateSince(&p.list[i]); rate > 0 {
			return rate
		}
	}
	return 0
}

// firstTokenDelay returns about how many seconds after it was sent a request gets its first token, as others did that the engine
// began to work on then; 0 if that is not known. An engine begins requests in the order of their arrival.
func (p *outputPolls) firstTokenDelay(sentAt time.Time) (seconds float64) {
	for i := range p.list {
		poll := &p.list[i]
		if i == 0 || poll.firstTokens == 0 || !poll.at.After(sentAt) {
			continue
		}
		before, passed := &p.list[i-1], poll.at.Sub(sentAt).Seconds()
		begun := poll.firstTokens - before.firstTokens
		meanDelay := 0.0
		if begun > 0 {
			meanDelay = (poll.firstTokenTime - before.firstTokenTime) / begun
		}
		switch {
		case poll.waiting == 0, begun > 0 && meanDelay <= passed && !before.at.Before(sentAt): // the request has begun by now
			return min(max(seconds, meanDelay), passed)
		case begun == 0, meanDelay > passed: // those that have begun came before it
			seconds = passed
		}
	}
	return seconds
}

// DecodeRateOf returns how many tokens a second the backend of an entry has generated of one sequence since that was sent: as the
// replica counts them, which includes other clients' requests, else as was learned from streams.
func (l *Ledger) DecodeRateOf(e *Entry) float64 {
	if rate := e.account.outputs.rate(e.SentAt); rate > 0 {
		return rate
	}
	return l.DecodeRate(e.Slot)
}

// FirstTokenDelay returns about how many seconds after it was sent the engine generates the first token of an entry: by what was
// sent before it, but no less than others took to theirs then, which waited for other clients' requests too.
func (l *Ledger) FirstTokenDelay(e *Entry) float64 {
	asOthers := e.account.outputs.firstTokenDelay(e.SentAt)
	if asOthers > 0 && !l.estimates.KnowsPrefillRate(e.Slot) {
		return asOthers
	}
	return max(asOthers, (e.Prediction.QueuedAhead+e.Prediction.Uncached)/l.estimates.PrefillRate(e.Slot))
}
