package router

import "warmroute/backends"

// ObserveLoad takes in a fresh scrape of a backend: its index follows the size of
// its cache.
func (r *Router) ObserveLoad(b *backends.Backend, l *backends.Load) {
	tokens := l.CacheTokens
	if tokens <= 0 {
		tokens = cacheTokens
	}
	r.deciding.Lock()
	defer r.unlock()
	if !r.has(b) {
		return
	}
	at := &r.lessons[b.Slot]
	if tokens != at.told {
		at.told, at.reach = tokens, newReach()
	}
	at.off = l.PrefixCachingOff
	at.steps.polled(l.StepTokens)
	r.polled(b, l)
	r.resize(b.Slot)
	r.index.Upkeep(upkeepBlocks)
	p := r.progress[b.Slot]
	p.polled(l, r.accounts[b.Slot].unstarted, r.accounts[b.Slot].requests)
	now := r.now()
	p.breaker.polled(&r.breaking, p.since, now)
	_, queued := r.foreign(l, now)
	if r.stalled(b, l, queued*r.uncached.value, now) {
		r.notifyStall(b)
	}
	r.cachePolled(b, l, now)
	r.dispatch(now)
}

// ForgetCache drops what a backend held: its replica lost its cache.
func (r *Router) ForgetCache(b *backends.Backend) {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	if !r.has(b) {
		return
	}
	r.index.Drop(b.Slot)
	r.lessons[b.Slot].window = window{}
	r.lessons[b.Slot].steps = steps{}
	r.dispatch(r.now())
}

// BackendIndexStats is the state of one backend's part of the index.
type BackendIndexStats struct {
	Backend          *backends.Backend // nil: nobody has the slot
	Blocks, Capacity int
	Evictions        uint64
}

// IndexStats reports the state of each backend's part, by slot, and about how many
// bytes all of them take.
func (r *Router) IndexStats() (parts []BackendIndexStats, bytes int64) {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	for slot := range r.accounts {
		parts = append(parts, BackendIndexStats{r.fleet[slot], r.index.Len(slot), r.index.Capacity(slot), r.index.Evictions(slot)})
	}
	return parts, r.index.Bytes()
}
