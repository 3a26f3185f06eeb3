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

// loading is what it costs the replica that reported l to have adapter loaded.
func loading(adapter string, l *backends.Load) float64 {
	switch {
	case adapter == "" || l != nil && slices.Contains(l.RunningAdapters, adapter):
		return 0
	case l != nil && l.MaxAdapters > 0 && len(l.RunningAdapters) >= l.MaxAdapters:
		return adapterWaits
	}
	return adapterLoads
}
