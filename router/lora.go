package router

import (
	"slices"

	"warmroute/backends"
)

// What an adapter costs a backend that is not at work for it, in tokens of
// prefill. These are costs and no order of preference: a strict one would pile
// all requests for a hot adapter on the replica that had the first of them.
const (
	// adapterLoads is a quarter of a second: it is read from the host's memory or a disk.
	adapterLoads = 2000
	// adapterWaits is where all places for adapters are taken: an engine starts no
	// request for another one before one of them has no request left.
	adapterWaits = 8 * adapterLoads
)

// mostAdapters is how many adapters a backend's account keeps apart; engines
// have places for far fewer.
const mostAdapters = 64

// adapterUse is how many requests for an adapter a backend has of ours.
type adapterUse struct {
	name     string
	requests int
}

// adapterSent counts a request for an adapter: the backend has it or is loading
// it, long before a scrape says so.
func (a *account) adapterSent(d *Decision) {
	if d.adapter == "" {
		return
	}
	at := a.adapterAt(d.adapter)
	if at < 0 {
		if len(a.adapters) == mostAdapters {
			d.adapter = ""
			return
		}
		at = len(a.adapters)
		a.adapters = append(a.adapters, adapterUse{name: d.adapter})
	}
	a.adapters[at].requests++
}

// adapterEnded takes back what adapterSent counted.
func (a *account) adapterEnded(d *Decision) {
	if d.adapter == "" {
		return
	}
	at := a.adapterAt(d.adapter)
	if a.adapters[at].requests--; a.adapters[at].requests == 0 {
		a.adapters = slices.Delete(a.adapters, at, at+1)
	}
}

func (a *account) adapterAt(name string) int {
	return slices.IndexFunc(a.adapters, func(u adapterUse) bool { return u.name == name })
}

// loading is what it costs the replica that reported l to have adapter loaded.
func (a *account) loading(adapter string, l *backends.Load) float64 {
	switch {
	case adapter == "" || l != nil && slices.Contains(l.RunningAdapters, adapter) || a.adapterAt(adapter) >= 0:
		return 0
	case l != nil && l.MaxAdapters > 0 && len(l.RunningAdapters) >= l.MaxAdapters:
		return adapterWaits
	}
	return adapterLoads
}
