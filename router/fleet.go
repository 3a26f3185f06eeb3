package router

import (
	"slices"

	"github.com/zeebo/xxh3"

	"warmroute/backends"
	"warmroute/router/policy"
)

// AddBackend takes in a backend that a Registry has given a Slot. Until then it is sent
// nothing. What its Slot's last owner left is not there any more.
func (r *Router) AddBackend(b *backends.Backend) {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	r.join(b)
	r.dispatch(r.now())
}

// RemoveBackend lets go of a backend: it is sent nothing more, and all that is known of
// it is forgotten. Decisions for it that are in flight stay good for a Release,
// which then counts nowhere but in the backend's own figures. Under another
// router's rule this may take a tenth of a second, if its table is full.
func (r *Router) RemoveBackend(b *backends.Backend) {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	if !r.has(b) {
		return
	}
	r.fleet[b.Slot] = nil
	r.clean(b.Slot)
	if p, ok := r.policy.(policy.Forgetter); ok {
		p.Forget(b.Slot)
	}
	for h := r.queue.oldest; h != nil; h = h.newer {
		if h.waitsFor == b.Slot {
			h.waitsFor = nowhere
		}
	}
	r.learnRate()
	r.dispatch(r.now())
}

// present are the backends that are in the fleet, by slot.
func (r *Router) present() []*backends.Backend {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	return slices.DeleteFunc(slices.Clone(r.fleet), func(b *backends.Backend) bool { return b == nil })
}

// has reports whether b is in the fleet. Requests, and decisions, may outlive its
// being there, and its Slot may be another's by then.
func (r *Router) has(b *backends.Backend) bool { return b.Slot < len(r.fleet) && r.fleet[b.Slot] == b }

func (r *Router) join(b *backends.Backend) {
	r.grow(b.Slot + 1)
	r.fleet[b.Slot] = b
	r.names[b.Slot] = xxh3.HashString(b.Name)
	r.resize(b.Slot)
}

// grow makes room for so many slots.
func (r *Router) grow(slots int) {
	from := len(r.fleet)
	more := slots - from
	if more <= 0 {
		return
	}
	r.fleet = append(r.fleet, make([]*backends.Backend, more)...)
	r.names = append(r.names, make([]uint64, more)...)
	r.progress = append(r.progress, make([]*progress, more)...)
	r.accounts = append(r.accounts, make([]account, more)...)
	r.caches = append(r.caches, make([]cache, more)...)
	r.lessons = append(r.lessons, make([]lessons, more)...)
	r.reserved = append(r.reserved, make([]reservation, more)...)
	r.room = append(r.room, make([]float64, more)...)
	r.matched = append(r.matched, make([]int, more)...)
	r.index.Grow(slots)
	for slot := from; slot < slots; slot++ {
		r.clean(slot)
	}
}

// clean makes a slot what it is for a backend of which nothing is known.
func (r *Router) clean(slot int) {
	r.progress[slot] = new(progress) // a Decision may still have the old one
	r.accounts[slot] = account{}
	r.caches[slot] = cache{speed: average{decodeRate, decodeRatePrior}}
	r.lessons[slot] = newLessons()
	r.index.Clear(slot)
}

// serving are the backends that serve a request's model by now. Where it is listed
// no more, those that did: another that serves it may be on its way.
func (r *Router) serving(req *Request) []*backends.Backend {
	if r.catalog == nil || req.CatalogID == "" {
		return req.Backends
	}
	if e, listed := r.catalog().Find(req.CatalogID); listed {
		return e.Backends
	}
	return req.Backends
}

// follow lets the held requests follow a fleet that has changed: a backend that
// joined may take them, one that left is nothing to wait for.
func (r *Router) follow() {
	if r.catalog == nil {
		return
	}
	c := r.catalog()
	if c == r.followed {
		return
	}
	r.followed = c
	for h := r.queue.oldest; h != nil; h = h.newer {
		if now := r.serving(&h.req); !slices.Equal(now, h.req.Backends) {
			r.queue.regroup(h, now)
			h.waitsFor = nowhere
		}
	}
}
