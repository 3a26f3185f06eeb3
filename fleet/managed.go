package fleet

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/config"
	"warmroute/fleet/discovery"
)

// managedBackend is a backend with its connections and what runs for it.
type managedBackend struct {
	backend    *backends.Backend
	settings   transportSettings
	tls        *tls.Config            // nil: the defaults
	transports []*transport.Transport // that in use, and before it others with requests in flight

	ranks       rankDecision
	formerParts []*backends.Backend // of backend, with requests in flight when they were replaced

	added         time.Time          // zero: at the start
	cancelRemoval context.CancelFunc // nil: it is not being removed
	stopWatches   context.CancelFunc
	watches       sync.WaitGroup
}

type transportSettings struct {
	connectTimeout, idleTimeout time.Duration
	maxConns                    int // to one backend, for requests
	refuseLocal                 bool
	nameAddr                    netip.AddrPort
}

func transportSettingsOf(w *wantedBackend, c *config.Config) transportSettings {
	return transportSettings{c.Timeouts.Connect, c.Timeouts.KeepaliveIdle, c.Connections.MaxPerBackend, w.RefuseLocal, w.nameAddr}
}

// newManagedBackend returns a backend for which nothing runs, with connections of its own.
func newManagedBackend(w wantedBackend, c *config.Config, r *discovery.Resolver) (*managedBackend, error) {
	u, err := backends.ParseURL(w.URL)
	if err != nil {
		return nil, fmt.Errorf("backend %s: %w", w.Name, err)
	}
	tlsConfig, err := w.TLSConfig()
	if err != nil {
		return nil, fmt.Errorf("backend %s: certificate: %w", w.Name, err)
	}
	role, err := backends.ParseRole(w.Role)
	if err != nil {
		return nil, fmt.Errorf("backend %s: %w", w.Name, err)
	}
	s := transportSettingsOf(&w, c)
	t := transport.New(transport.Options{
		URL: u, Addr: w.addr, Resolver: r.NetResolver(), RefuseLocal: w.RefuseLocal, TLS: tlsConfig,
		ConnectTimeout: s.connectTimeout, IdleTimeout: s.idleTimeout, MaxConns: s.maxConns,
	})
	b := backends.New(w.Name, u, w.APIKey, t)
	b.Addr = w.addr
	b.SetOptions(backends.Options{
		APIKey: w.APIKey, EnginePriority: w.EnginePriority, MaxInFlight: w.MaxInFlight, Weight: w.Weight, Device: w.Device, Role: role,
		KVEvents: w.KVEvents, KVReplay: w.KVReplay, RanksOff: w.Ranks == "off", Source: w.Source, RefuseLocal: w.RefuseLocal,
		Transport: t,
	})
	return &managedBackend{backend: b, settings: s, tls: tlsConfig, transports: []*transport.Transport{t}}, nil
}

// isIdle reports whether no request of this proxy is in flight on the replica.
func (m *managedBackend) isIdle() bool { return m.countInFlight() == 0 }

// countInFlight returns how many requests of this proxy are in flight on the replica, on all of its ranks.
func (m *managedBackend) countInFlight() (n int64) {
	for _, b := range slices.Concat(m.backend.WithParts(), m.formerParts) {
		n += b.InFlight.Load() + b.NoEngineInFlight.Load()
	}
	return n
}

func (m *managedBackend) closeIdleConnections() {
	for _, t := range m.transports {
		t.CloseIdleConnections()
	}
}

// closeTransports ends the requests in flight.
func (m *managedBackend) closeTransports() {
	for _, t := range m.transports {
		t.Close()
	}
}

// isSame reports whether other is the same replica under the same name.
func (m *managedBackend) isSame(other *managedBackend) bool {
	return m.backend.Name == other.backend.Name && m.backend.Address() == other.backend.Address()
}

// conflictsWith reports whether the two cannot be there together.
func (m *managedBackend) conflictsWith(other *managedBackend) bool {
	return m.backend.Name == other.backend.Name || m.backend.Address() == other.backend.Address()
}

// isReplacedBy reports whether m is the backend of a name, and other that of the address that the name had.
func (m *managedBackend) isReplacedBy(other *managedBackend) bool {
	return m.backend.URL.String() == other.backend.URL.String() && m.settings.nameAddr.String() == other.backend.Addr
}

// cancelPendingRemoval keeps m if its removal is in progress.
func (m *managedBackend) cancelPendingRemoval() {
	if m.cancelRemoval != nil {
		m.cancelRemoval()
		m.cancelRemoval = nil
		m.backend.Unretire()
	}
}

// updateSettings gives m the settings of fresh, and its transport if they differ or its name has another address:
// requests in flight go on over those that they began with.
func (m *managedBackend) updateSettings(fresh *managedBackend) {
	used := m.backend.Options()
	m.transports = slices.DeleteFunc(m.transports, func(t *transport.Transport) bool {
		return t.OpenConns() == 0 && t != used.Transport
	})
	o := *fresh.backend.Options()
	renewed := m.settings != fresh.settings || !equalTLS(m.tls, fresh.tls)
	if renewed {
		m.closeIdleConnections()
		m.transports = append(m.transports, fresh.transports...)
	} else {
		o.Transport = used.Transport
	}
	m.settings, m.tls = fresh.settings, fresh.tls
	m.backend.SetOptions(o)
	if renewed { // the replica may be another one
		m.backend.SetVersion("")
		m.backend.RequestCheck()
		m.backend.RequestPoll()
	}
}

// equalTLS compares results of config.Backend.TLSConfig.
func equalTLS(a, b *tls.Config) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.ServerName == b.ServerName && a.RootCAs.Equal(b.RootCAs)
}
