package policy

import (
	"cmp"
	"math"
	"time"

	"warmroute/prompt"
	"warmroute/router/tenantlru"
)

const (
	maxConversations = 1 << 16 // in each list
	maxMoves         = 1024    // from one list to the next at once, which takes a third of a millisecond

	// The next turn of a conversation is overdue after maxTurnGaps mean times between turns.
	maxTurnGaps            = 4
	minTurnTimeout         = 10 * time.Second
	minConversationTimeout = time.Minute // after which an overdue one no longer counts
	maxConversationTimeout = time.Hour

	maxLaterTurns = 30
	// priorConversations is how many conversations of 1 + priorLaterTurns turns are assumed to
	// have been seen at the beginning.
	priorConversations = 3
	priorLaterTurns    = 10
	// maxCountedTurns is at how many turns the counts are halved, so that old ones fade.
	maxCountedTurns = 10_000

	// maxFill is the share of all caches from which on conversations are not moved to where there is more room.
	maxFill = 0.8
	// growthShare is the share of its later turns by which a conversation counts as longer than it is.
	growthShare = 0.2

	// maxDelayedTurns limits for how many later turns the delay by other conversations counts, since these end or move.
	maxDelayedTurns = 2
	// recentGaps is the time constant of conversations.recent, in mean times between two turns.
	recentGaps = 4
)

// conversationStats has the conversations under way at the backends, and what was learned from all.
type conversationStats struct {
	// Those that had a turn lately, those whose next turn is overdue, and those that do not count any more but
	// whose next turn would still say how long the pauses are; by ConversationKey. No tenant displaces those of others once it
	// has a sixteenth. nil: none yet.
	active, overdue, idle *tenantlru.LRU[conversation]
	underWay              []conversations // active and overdue, by slot

	recentAt time.Time // the time for which the recent weights in underWay are

	turnGap  float64 // mean seconds between two turns of a conversation
	turnGaps float64 // that it is the mean of

	later float64 // later turns seen
	ended float64 // conversations that had all of their turns, as far as is known
}

// conversations are those under way at one backend.
type conversations struct {
	count  int
	tokens float64 // in their last prompts, less the shared ones
	recent float64 // sum of their recentWeights, at conversationStats.recentAt
}

// conversation is one that is under way.
type conversation struct {
	slot   int
	at     time.Time // of its last turn
	tokens float64   // in the prompt of its last turn, less the shared ones
	shared float64   // tokens that were cached at its first turn, of a system prompt for instance
}

// add counts a conversation.
func (c *conversations) add(v *conversation) {
	c.count++
	c.tokens += v.tokens
}

// remove undoes add.
func (c *conversations) remove(v *conversation) {
	c.count--
	if c.tokens -= v.tokens; c.count == 0 {
		c.tokens = 0 // no rounding error is left
	}
}

// ConversationKey returns what the turns of a conversation have in common, of one of its requests; 0: unknown.
func ConversationKey(conversation, promptKey uint64, turn prompt.TurnKind) uint64 {
	if turn == prompt.TurnUnknown {
		return 0
	}
	return cmp.Or(conversation, promptKey)
}

// conversationKey identifies the request's conversation; without a Key it is not known to be one.
func (r *Request) conversationKey() tenantlru.Key {
	return tenantlru.Key{Tenant: r.Tenant, Key: ConversationKey(r.Conversation, r.PromptKey, r.Turn)}
}

// LaterTurnProbability implements ConversationTracker.
func (c *conversationStats) LaterTurnProbability() float64 {
	later := c.laterTurns()
	return later / (1 + later)
}

// laterTurns returns how many turns a conversation is expected to have after its first one:
// those seen for each conversation that has ended.
func (c *conversationStats) laterTurns() float64 {
	return min(maxLaterTurns, (c.later+priorConversations*priorLaterTurns)/(c.ended+priorConversations))
}

// on returns the conversations under way at a backend.
func (c *conversationStats) on(slot int) (underWay conversations) {
	if slot < len(c.underWay) {
		underWay = c.underWay[slot]
	}
	return underWay
}

// ageConversations counts the conversations whose next turn is overdue as ended, and no longer
// counts those for which it has been overdue for long.
func (c *conversationStats) ageConversations(now time.Time) {
	if c.active == nil {
		return
	}
	expected := time.Duration(maxTurnGaps * c.turnGap * float64(time.Second))
	moveOlder(c.active, now.Add(-min(max(expected, minTurnTimeout), maxConversationTimeout)), func(key tenantlru.Key, v conversation) {
		c.add(c.overdue, key, v)
		c.ended++
	})
	moveOlder(c.overdue, now.Add(-min(max(expected, minConversationTimeout), maxConversationTimeout)),
		func(key tenantlru.Key, v conversation) {
			c.idle.Add(key, v)
		})
	moveOlder(c.idle, now.Add(-maxConversationTimeout), func(tenantlru.Key, conversation) {})
}

// moveOlder removes conversations whose last turn was before a time, at most maxMoves, and
// passes them to moved.
func moveOlder(list *tenantlru.LRU[conversation], before time.Time, moved func(tenantlru.Key, conversation)) {
	for range maxMoves {
		key, oldest, ok := list.Oldest()
		if !ok || !oldest.at.Before(before) {
			return
		}
		list.Remove(key)
		moved(key, oldest)
	}
}

// add adds a conversation to one of the lists.
func (c *conversationStats) add(list *tenantlru.LRU[conversation], key tenantlru.Key, v conversation) {
	for len(c.underWay) <= v.slot {
		c.underWay = append(c.underWay, conversations{})
	}
	c.underWay[v.slot].add(&v)
	list.Add(key, v)
}

// remove removes a conversation from the lists, and returns it as it was.
func (c *conversationStats) remove(key tenantlru.Key) (v conversation, known bool) {
	if v, known = c.active.Find(key); known {
		c.active.Remove(key)
		return v, true
	}
	for _, list := range []*tenantlru.LRU[conversation]{c.overdue, c.idle} {
		if v, known = list.Find(key); known {
			list.Remove(key)
			c.ended = max(0, c.ended-1) // it had not
			return v, true
		}
	}
	return conversation{}, false
}

// find returns a conversation under way.
func (c *conversationStats) find(key tenantlru.Key) (v conversation, known bool) {
	if c.active == nil {
		return conversation{}, false
	}
	if v, known = c.active.Find(key); !known {
		v, known = c.overdue.Find(key)
	}
	return v, known
}

// recentWeight returns by which weight a conversation counts as recent: 1 at its last turn, and less with its age since then.
func (c *conversationStats) recentWeight(age time.Duration) float64 {
	if c.turnGap <= 0 {
		return 1
	}
	return math.Exp(-age.Seconds() / (recentGaps * c.turnGap))
}

// addRecent reduces all recent weights to those of the present time, and adds to those at a backend.
func (c *conversationStats) addRecent(slot int, weight float64, now time.Time) {
	faded := c.recentWeight(now.Sub(c.recentAt))
	for i := range c.underWay {
		c.underWay[i].recent *= faded
	}
	c.recentAt = now
	c.underWay[slot].recent = max(0, c.underWay[slot].recent+weight)
}

// spareShare returns 1 if the candidates' caches hold no conversations, and 0 if they are so full
// that none would have room elsewhere, or if the size of one is unknown.
func (c *conversationStats) spareShare(candidates []Candidate) float64 {
	tokens, capacity := 0.0, 0.0
	for i := range candidates {
		tokens += c.on(candidates[i].Slot).tokens
		if candidates[i].EngineCacheTokens == 0 {
			return 0
		}
		capacity += candidates[i].EngineCacheTokens
	}
	return max(0, 1-tokens/(maxFill*capacity))
}

// futureTurns is what is expected of the turns that follow a request's.
type futureTurns struct {
	*conversationStats
	request    *Request
	candidates []Candidate
	turns      float64 // that follow; 0: the request is not known to be a turn

	counted   conversation // the request's, as it is counted already
	isCounted bool
	spare     float64 // spareShare
	faded     float64 // share of the recent weights that is left since recentAt
	meanRate  float64 // of the candidates' prefill
}

// expectFutureTurns returns what is expected of the turns after a request.
func (c *conversationStats) expectFutureTurns(r *Request, candidates []Candidate, meanRate float64) futureTurns {
	f := futureTurns{conversationStats: c, request: r, candidates: candidates, meanRate: meanRate}
	if key := r.conversationKey(); key.Key != 0 {
		f.turns, f.spare = c.laterTurns(), c.spareShare(candidates)
		f.counted, f.isCounted = c.find(key)
		f.faded = c.recentWeight(r.Now.Sub(c.recentAt))
	}
	return f
}

// cost returns what the later turns of all conversations at a candidate cost more if the request's is there, in seconds.
func (f *futureTurns) cost(c *Candidate) (seconds float64) {
	if f.turns == 0 {
		return 0
	}
	return f.turns*f.spare*f.overflow(c)/c.Step.Rate + min(f.turns, maxDelayedTurns)*f.mutualDelay(c)
}

// mutualDelay returns by how many seconds a later turn of the request's conversation and one of each other conversation at a candidate
// delay each other. Each has a prefill and an output between two turns. A turn that begins during the prefill of another one waits for
// its end, and an output stops during the prefill of another turn.
func (f *futureTurns) mutualDelay(c *Candidate) (seconds float64) {
	others := f.countRecentOthers(c)
	if others <= 0 || f.turnGaps == 0 {
		return 0
	}
	r := f.request
	prefill, output := c.Step.PrefillSeconds(r.PromptTokens, r.MeanUncachedTokens), r.MeanOutputTokens*c.Step.Base
	share := prefill / max(f.turnGap, prefill+output) // of the time, in which another one is prefilled
	// Conversations are to be in proportion to the speeds of the backends.
	return others * share * (prefill + 2*decodeWeight*output) * c.Step.Rate / f.meanRate
}

// countRecentOthers returns how many other conversations have turns at present on an engine of a candidate, with those on other
// candidates of its device. It is a sum of recentWeights.
func (f *futureTurns) countRecentOthers(c *Candidate) (n float64) {
	n = f.countRecentOthersOn(c)
	if c.Device == 0 {
		return n
	}
	for i := range f.candidates {
		if o := &f.candidates[i]; o.Slot != c.Slot && o.Device == c.Device {
			n += f.countRecentOthersOn(o)
		}
	}
	return n
}

// countRecentOthersOn is countRecentOthers without those on other candidates.
func (f *futureTurns) countRecentOthersOn(c *Candidate) (n float64) {
	n = f.on(c.Slot).recent * f.faded
	if f.isCounted && f.counted.slot == c.Slot {
		n -= f.recentWeight(f.request.Now.Sub(f.counted.at))
	}
	return max(0, n) / c.Engines
}

// overflow returns how many more tokens would have to be computed again, in a turn of every conversation at a
// candidate, if the request's were there: what does not fit into the cache is evicted before the next turn.
func (f *futureTurns) overflow(c *Candidate) (tokens float64) {
	underWay := f.on(c.Slot)
	n, others := float64(underWay.count), underWay.tokens
	r := f.request
	own := r.PromptTokens - c.MatchedTokens
	if f.isCounted {
		own = r.PromptTokens - f.counted.shared
		if f.counted.slot == c.Slot {
			n, others = n-1, others-f.counted.tokens
		}
	}
	own += growthShare * f.turns * (r.MeanUncachedTokens + r.MeanOutputTokens)
	recomputed := func(n, tokens float64) float64 {
		return min(n*max(0, tokens-c.EngineCacheTokens), tokens)
	}
	return recomputed(n+1, others+own) - recomputed(n, others)
}

// countTurn counts a turn that is sent to a candidate.
func (c *conversationStats) countTurn(r *Request, candidate *Candidate) {
	key := r.conversationKey()
	if key.Key == 0 {
		return
	}
	if c.active == nil {
		uncount := func(_ tenantlru.Key, v conversation) { c.underWay[v.slot].remove(&v) }
		c.active, c.overdue = tenantlru.New(maxConversations, uncount), tenantlru.New(maxConversations, uncount)
		c.idle = tenantlru.New[conversation](maxConversations, nil)
	}
	c.ageConversations(r.Now)
	last, known := c.remove(key)
	if known {
		c.addRecent(last.slot, -c.recentWeight(r.Now.Sub(last.at)), r.Now)
	}
	if r.Turn == prompt.TurnFirst {
		last.shared = candidate.MatchedTokens
	}
	c.add(c.active, key, conversation{
		slot: candidate.Slot, at: r.Now, tokens: max(0, r.PromptTokens-last.shared), shared: last.shared,
	})
	c.addRecent(candidate.Slot, 1, r.Now)
	switch {
	case r.Retry: // the turn was recorded when it was sent first
	case r.Turn == prompt.TurnLater:
		c.later++
		if known {
			c.turnGaps++
			c.turnGap += (r.Now.Sub(last.at).Seconds() - c.turnGap) / c.turnGaps
		}
	case known:
		c.ended++ // another one begins alike
	}
	if c.later+c.ended >= maxCountedTurns {
		c.later, c.ended, c.turnGaps = c.later/2, c.ended/2, c.turnGaps/2
	}
}

// ForgetBackend forgets the conversations at the backend of a slot.
func (c *conversationStats) ForgetBackend(slot int) {
	if c.active == nil {
		return
	}
	for _, list := range []*tenantlru.LRU[conversation]{c.active, c.overdue, c.idle} {
		for key, v := range list.All() {
			if v.slot == slot {
				list.Remove(key)
			}
		}
	}
	if slot < len(c.underWay) {
		c.underWay[slot].recent = 0
	}
}
