package fleet

import (
	"net/netip"
	"strings"

	"warmroute/backends"
	"warmroute/config"
	"warmroute/fleet/discovery"
)

// wantedBackend is a backend that the fleet should have.
type wantedBackend struct {
	config.Backend        // URL begins with http
	addr           string // where its connections go, host:port; "": the URL's host

	nameAddr netip.AddrPort // where a connection to the URL's host goes now; zero: it was not looked up
}

// address returns what no two backends have in common, as Backend.Address does.
func (w *wantedBackend) address() string {
	u, err := backends.ParseURL(w.URL)
	if err != nil {
		return w.URL
	}
	return (&backends.Backend{URL: u, Addr: w.addr}).Address()
}

// wantedBackends returns the backends that a fleet with these members should have. A name that has several
// addresses is as many backends. Of two with the same name or address, the first is returned. keepsAddress
// reports whether a backend at an address of a name that has become empty stays.
func wantedBackends(members []config.Backend, states map[discovery.Name]discovery.State,
	keepsAddress func(address string) bool) (wanted []wantedBackend) {
	names, addresses := map[string]bool{}, map[string]bool{}
	add := func(w wantedBackend) {
		address := w.address()
		if !names[w.Name] && !addresses[address] {
			names[w.Name], addresses[address] = true, true
			wanted = append(wanted, w)
		}
	}
	for _, m := range members {
		name, lookedUp := m.DNSName()
		state := states[discovery.Name(name)]
		if !lookedUp || !state.Several {
			if !m.HasDNSScheme() {
				w := wantedBackend{Backend: m}
				if len(state.Current) == 1 {
					w.nameAddr = state.Current[0]
				}
				add(w)
			}
			continue
		}
		base := m.Name
		m.URL = m.HTTPURL()
		for _, addr := range state.Current {
			m.Name = base + "@" + addressLabel(addr, name.SRV)
			w := wantedBackend{Backend: m, addr: addr.String()}
			if !state.Empty || keepsAddress(w.address()) {
				add(w)
			}
		}
	}
	return wanted
}

// addressLabel returns an address as the names of backends have it: without the port unless it comes from
// an SRV record, and without characters that have a meaning in lists, labels and paths.
func addressLabel(addr netip.AddrPort, withPort bool) string {
	if withPort {
		return addr.String()
	}
	return strings.ReplaceAll(addr.Addr().String(), "%", "-")
}
