package router

import (
	"errors"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/router/policy"
)

// ErrMaxInFlight says that every backend that could take the request has as many of
// ours as it may have (Terms.MaxInFlight).
var ErrMaxInFlight = errors.New("every backend that could take the request has as many as it may have")

// kvPressure is the share of its KV cache beyond which a replica gets no new
// work: the answers that it has would soon push each other out.
const kvPressure = 0.95

// trouble ranks what speaks against a backend that could take a request. Only
// candidates of the lowest rank there is are left, so that trouble everywhere is
// trouble nowhere.
type trouble int

const (
	due trouble = iota - 1 // it has failed, and has to be tried again, or nobody would see it heal
	well
	pressed // its KV cache is all but full
	failing // it fails what it is sent, or refuses it for its full queue, and does so at once
	small   // the prompt is too long for it
	stuck   // it produces nothing
)

// gather fills candidates and slots with the backends that could take req; when
// there are none it says why.
func (r *Router) gather(req *Request, tried []*backends.Backend, now time.Time) error {
	r.candidates, r.slots = r.candidates[:0], r.slots[:0]
	none, least := ErrNoneReady, stuck
	perToken := r.texts.bytesPerToken(req.Model)
	for _, b := range req.Backends {
		if !r.available(b, tried) {
			continue
		}
		if isFull(b, req.sequences()+r.reserved[b.Slot].sequences) {
			none = ErrMaxInFlight
			continue
		}
		s := r.stands(req, tried, b, now)
		switch {
		case s.rank > least:
			continue
		case s.rank < least:
			least = s.rank
			r.candidates, r.slots = r.candidates[:0], r.slots[:0]
		}
		r.slots = append(r.slots, b)
		r.candidates = append(r.candidates, policy.Candidate{})
		r.describe(&r.candidates[len(r.candidates)-1], req, b, &s, perToken, now)
	}
	if len(r.slots) == 0 {
		return none
	}
	if r.needsHeadroom(req, now) && !r.tooLongForAll(req) {
		return r.keepHeadroom(req, now)
	}
	return nil
}

// standing is how a backend stands that may take a request.
type standing struct {
	rank    trouble
	load    *backends.Load
	foreign float64 // requests on it that are not ours
	queued  float64 // tokens that those of them bring that wait
}

func (r *Router) stands(req *Request, tried []*backends.Backend, b *backends.Backend, now time.Time) (s standing) {
	s.load = b.Load()
	s.foreign, s.queued = r.foreign(s.load, now)
	s.queued *= r.uncached.value
	s.rank = r.trouble(req, tried, b, s.load, s.queued, now)
	return s
}

// describe fills in what policies know of b, for a request whose matched blocks are
// in depth.
func (r *Router) describe(c *policy.Candidate, req *Request, b *backends.Backend, s *standing, perToken float64, now time.Time) {
	rate := r.rate(b.Slot)
	a, share := &r.accounts[b.Slot], weight(b)
	tokens := float64(req.Bytes) / perToken
	matched := min(float64(r.depth[b.Slot]*r.blockBytes)/perToken, tokens)
	*c = policy.Candidate{
		Slot:           b.Slot,
		NameHash:       r.names[b.Slot],
		Weight:         share,
		MatchedTokens:  matched,
		UncachedTokens: max(leastUncached, tokens-matched),
		QueuedTokens:   a.waiting(now, rate) + s.queued + r.reserved[b.Slot].uncached,
		AdapterTokens:  a.loading(req.Adapter, s.load),
		InFlight:       float64(b.InFlight.Load()) + s.foreign,
		PrefillRate:    rate,

		Requests: float64(a.requests) / share, UnstartedTokens: a.unstarted / share,
	}
	if r.policyDef.NeedsContext {
		c.ContextTokens = r.cacheUsed(b.Slot, now)
	}
	if l := s.load; l != nil { // the replica's own word
		c.Waiting, c.KVUsage, c.CacheTokens = float64(l.Waiting), l.KVCacheUsage, float64(l.CacheTokens)
	}
}

// absence is why a backend may not be sent a request at all.
type absence int

const (
	present  absence = iota
	away             // it has left the fleet
	unready          // its checks fail, or were not made yet
	draining         // it finishes what it has
	ending           // its replica is about to stop
	asleep           // its replica says so
	triedNow         // by this request
)

func (r *Router) absent(b *backends.Backend, tried []*backends.Backend) absence {
	if !r.has(b) {
		return away
	}
	switch b.State() {
	case backends.Down:
		return unready
	case backends.Draining:
		return draining
	}
	if r.progress[b.Slot].stopping(r.now) {
		return ending
	}
	if l := b.Load(); l != nil && l.Asleep {
		return asleep
	}
	if slices.Contains(tried, b) {
		return triedNow
	}
	return present
}

func (r *Router) available(b *backends.Backend, tried []*backends.Backend) bool {
	return r.absent(b, tried) == present
}

// isFull reports whether b may not have so many sequences more. One request
// alone always may, whatever it counts for.
func isFull(b *backends.Backend, sequences int64) bool {
	most := b.Options().MaxInFlight
	if most <= 0 {
		return false
	}
	n := b.InFlight.Load()
	return n > 0 && n+sequences > int64(most)
}

func weight(b *backends.Backend) float64 {
	if w := b.Options().Weight; w > 0 {
		return w
	}
	return 1
}

// trouble ranks b; queued is what waits on it for other clients, in tokens. All
// policies keep away from a replica that produces nothing; the size of its cache
// is the business of prefix alone, since the rules of others are to be what
// they are elsewhere.
func (r *Router) trouble(req *Request, tried []*backends.Backend, b *backends.Backend, l *backends.Load, queued float64, now time.Time) trouble {
	p := r.progress[b.Slot]
	k := &p.breaker
	switch {
	case r.stalled(b, l, queued, now):
		return stuck
	case k.due(now) && !p.full(now) && len(tried) == 0 && !req.NoEngine && !r.tooLong(req, b.Slot):
		return due // a request that failed elsewhere is not risked
	case r.policyDef.FiltersLength && r.tooLong(req, b.Slot):
		return small
	case k.open, p.full(now):
		return failing
	case l != nil && l.KVKnown && l.KVCacheUsage > kvPressure && r.policyDef.FiltersKV:
		return pressed
	}
	return well
}
