package fleet

import (
	"cmp"
	"context"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"warmroute/clock"
	"warmroute/config"
	"warmroute/fleet/discovery"
	"warmroute/recovery"
)

const (
	// firstLookupTimeout bounds how long the lookups at the start take.
	firstLookupTimeout = 2 * time.Second
	lookupLogInterval  = time.Minute // between two lines about the same name
)

// lookedUpName is a name that is looked up again and again. Its fields are guarded by Fleet.mu, but for warnings.
type lookedUpName struct {
	addresses *discovery.Addresses
	stop      context.CancelFunc // of its goroutine; nil: none runs
	warnings  *rate.Sometimes
	aliases   aliases
}

// updateNames returns the names that members have. Those in old are kept.
func updateNames(members []config.Backend, maxAddresses int, old map[discovery.Name]*lookedUpName) map[discovery.Name]*lookedUpName {
	names := map[discovery.Name]*lookedUpName{}
	for _, m := range members {
		n, ok := m.DNSName()
		switch name := discovery.Name(n); {
		case !ok || names[name] != nil:
		case old[name] != nil:
			names[name] = old[name]
		default:
			names[name] = &lookedUpName{
				addresses: discovery.NewAddresses(maxAddresses, m.HasDNSScheme()),
				warnings:  &rate.Sometimes{Interval: lookupLogInterval},
			}
		}
	}
	return names
}

// lookUpNamesOnce looks up each name once.
func lookUpNamesOnce(ctx context.Context, names map[discovery.Name]*lookedUpName, r *discovery.Resolver, log *slog.Logger,
	panics recovery.Reporter) {
	ctx, cancel := context.WithTimeout(ctx, firstLookupTimeout)
	defer cancel()
	var lookups sync.WaitGroup
	for n, name := range names {
		lookups.Go(func() {
			panics.CallAndRecover(recovery.Discovery, func() {
				answer, err := r.Lookup(ctx, n)
				name.addresses.Record(answer, err, time.Now())
				name.logWarnings(log, n)
			})
		})
	}
	lookups.Wait()
}

// logWarnings logs that a lookup failed, or had more addresses than are used.
func (name *lookedUpName) logWarnings(log *slog.Logger, n discovery.Name) {
	s := name.addresses.State()
	if s.Err == nil && s.Omitted == 0 {
		return
	}
	name.warnings.Do(func() {
		if s.Err != nil {
			log.Warn("DNS lookup failed, keeping backends", "name", n.Host, "backends", len(s.Current), "err", s.Err)
		} else {
			log.Warn("DNS name has more addresses than dns.max_addresses", "name", n.Host, "used", len(s.Current), "omitted", s.Omitted)
		}
	})
}

// startLookups makes one goroutine run for each name. f.mu is held.
func (f *Fleet) startLookups() {
	if f.running == nil {
		return
	}
	for n, name := range f.names {
		if name.stop != nil {
			continue
		}
		var ctx context.Context
		ctx, name.stop = context.WithCancel(f.running)
		f.work.Go(func() {
			f.Panics.RunLoop(ctx, recovery.Discovery, func(ctx context.Context) { f.lookUpRepeatedly(ctx, n, name) })
		})
	}
}

// lookUpRepeatedly looks up a name every dns.interval until ctx is done.
func (f *Fleet) lookUpRepeatedly(ctx context.Context, n discovery.Name, name *lookedUpName) {
	for {
		interval := f.lookupInterval()
		// The random part spreads the lookups of proxies that were started together.
		if !clock.Sleep(ctx, interval-time.Duration(rand.Int64N(int64(interval)/10+1))) {
			return
		}
		answer, err := f.resolver.Lookup(ctx, n)
		if ctx.Err() == nil {
			f.recordLookup(n, name, answer, err)
			f.mergeAliases(ctx, name)
		}
	}
}

func (f *Fleet) lookupInterval() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.config.DNS.Interval
}

// recordLookup records the outcome of a lookup and changes the fleet accordingly.
func (f *Fleet) recordLookup(n discovery.Name, name *lookedUpName, answer []netip.AddrPort, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	changed := name.addresses.Record(answer, err, time.Now())
	name.logWarnings(f.Log, n)
	// Backends of a name without addresses stay only as long as they pass their checks.
	if changed || name.addresses.State().Empty {
		f.reconcile()
	}
}

func statesOf(names map[discovery.Name]*lookedUpName) map[discovery.Name]discovery.State {
	states := map[discovery.Name]discovery.State{}
	for n, name := range names {
		states[n] = name.state()
	}
	return states
}

// Name is a name that is looked up.
type Name struct {
	Name      string   `json:"name"`
	Addresses []string `json:"addresses"`
	Omitted   int      `json:"omitted,omitempty"` // addresses beyond dns.max_addresses
	Error     string   `json:"error,omitempty"`   // of the last lookup
}

// Names returns the names that are looked up, in their order.
func (f *Fleet) Names() []Name {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := []Name{}
	for n, name := range f.names {
		s := name.addresses.State()
		one := Name{Name: n.String(), Addresses: []string{}, Omitted: s.Omitted}
		for _, a := range s.Current {
			one.Addresses = append(one.Addresses, a.String())
		}
		if s.Err != nil {
			one.Error = s.Err.Error()
		}
		list = append(list, one)
	}
	slices.SortFunc(list, func(a, b Name) int { return cmp.Compare(a.Name, b.Name) })
	return list
}
