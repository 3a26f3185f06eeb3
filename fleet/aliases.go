package fleet

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"github.com/valyala/fasthttp"

	"warmroute/backends"
	"warmroute/backends/vllm"
	"warmroute/fleet/discovery"
)

const (
	// comparisonTimeout bounds the requests that compare the processes at addresses after one lookup.
	comparisonTimeout = 5 * time.Second
	maxMetricsBytes   = 16 << 20
)

// aliases are the addresses of a name at which the same process listens as at another one: they get no backend.
type aliases struct {
	of       map[netip.AddrPort]alias
	compared map[addressPair]float64 // start time of both processes when they turned out to be different ones
}

type alias struct {
	address   netip.AddrPort // at which the process has its backend
	startTime float64        // of the process
}

type addressPair struct{ first, second netip.AddrPort }

// state returns what lookups have shown of a name, without aliases of addresses that it has.
func (name *lookedUpName) state() discovery.State {
	s := name.addresses.State()
	if len(name.aliases.of) > 0 {
		s.Current = slices.DeleteFunc(slices.Clone(s.Current), func(a netip.AddrPort) bool {
			other, ok := name.aliases.of[a]
			return ok && slices.Contains(s.Current, other.address)
		})
	}
	return s
}

// mergeAliases compares the processes at addresses of a name that have the same start time, and has one backend
// for those that are the same.
func (f *Fleet) mergeAliases(ctx context.Context, name *lookedUpName) {
	f.forgetStaleAliases(name)
	limited, cancel := context.WithTimeout(ctx, comparisonTimeout)
	defer cancel()
	for _, c := range f.pairsToCompare(name) {
		same, certain, err := isSameProcess(limited, c.first, c.second)
		if err == nil && certain && ctx.Err() == nil { // else they are compared again after the next lookup
			f.recordComparison(name, c, same)
		}
	}
}

// comparison is two backends of one name with the same start time.
type comparison struct {
	pair          addressPair
	first, second *backends.Backend
	startTime     float64
}

// forgetStaleAliases forgets the aliases of processes that have ended, and what concerns addresses that the name does
// not have any more.
func (f *Fleet) forgetStaleAliases(name *lookedUpName) {
	f.mu.Lock()
	defer f.mu.Unlock()
	running, current := f.backendsByAddr(), name.addresses.State().Current
	forgotten := false
	for a, other := range name.aliases.of {
		if now := startTimeOf(running[other.address]); now != other.startTime && now != 0 || !slices.Contains(current, a) {
			delete(name.aliases.of, a)
			forgotten = true
		}
	}
	for pair := range name.aliases.compared {
		if !slices.Contains(current, pair.first) || !slices.Contains(current, pair.second) {
			delete(name.aliases.compared, pair)
		}
	}
	if forgotten {
		f.reconcile()
	}
}

// pairsToCompare returns the backends of a name that may be the same process and have not been compared.
func (f *Fleet) pairsToCompare(name *lookedUpName) (list []comparison) {
	f.mu.Lock()
	defer f.mu.Unlock()
	running, current := f.backendsByAddr(), name.addresses.State().Current
	for i, a := range current {
		start := startTimeOf(running[a])
		if start == 0 {
			continue
		}
		for _, b := range current[i+1:] {
			if pair := (addressPair{a, b}); start == startTimeOf(running[b]) && name.aliases.compared[pair] != start {
				list = append(list, comparison{pair, running[a], running[b], start})
			}
		}
	}
	return list
}

// backendsByAddr returns the backends of looked-up names that are not being removed. f.mu is held.
func (f *Fleet) backendsByAddr() map[netip.AddrPort]*backends.Backend {
	byAddr := map[netip.AddrPort]*backends.Backend{}
	for _, m := range f.managed {
		if address, err := netip.ParseAddrPort(m.backend.Addr); err == nil && m.cancelRemoval == nil {
			byAddr[address] = m.backend
		}
	}
	return byAddr
}

// startTimeOf returns when the process of b has started, as of its last poll; 0 if that is unknown, or b is nil.
func startTimeOf(b *backends.Backend) float64 {
	if b == nil || b.Load() == nil {
		return 0
	}
	return b.Load().StartTime
}

// recordComparison records whether two backends are the same process; then the second one is removed.
func (f *Fleet) recordComparison(name *lookedUpName, c comparison, same bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if name.aliases.of == nil {
		name.aliases = aliases{map[netip.AddrPort]alias{}, map[addressPair]float64{}}
	}
	if !same {
		name.aliases.compared[c.pair] = c.startTime
		return
	}
	name.aliases.of[c.pair.second] = alias{c.pair.first, c.startTime}
	f.Log.Info("two addresses are the same replica", "backend", c.first.Name, "removed", c.second.Name)
	f.reconcile()
}

// isSameProcess requests /metrics from the first, the second and again the first backend, and reports whether one
// process has responded, and whether that is certain.
func isSameProcess(ctx context.Context, first, second *backends.Backend) (same, certain bool, err error) {
	var seen [3]vllm.Process
	for i, b := range []*backends.Backend{first, second, first} {
		process, err := readProcess(ctx, b)
		if err != nil {
			return false, false, err
		}
		seen[i] = process
	}
	same, certain = vllm.IsSameProcess(seen[0], seen[1], seen[2])
	return same, certain, nil
}

// readProcess returns what /metrics of a backend tells about its process.
func readProcess(ctx context.Context, b *backends.Backend) (vllm.Process, error) {
	res, err := b.Get(ctx, "/metrics", "text/plain;version=0.0.4", "", maxMetricsBytes)
	if res != nil {
		defer fasthttp.ReleaseResponse(res)
	}
	switch {
	case err != nil:
		return vllm.Process{}, fmt.Errorf("/metrics: %w", err)
	case res.StatusCode() != http.StatusOK:
		return vllm.Process{}, fmt.Errorf("/metrics returned %d", res.StatusCode())
	}
	return vllm.ParseProcess(res.Body()), nil
}
