package admit

import (
	"net/netip"
	"slices"
	"strings"
)

// maxForwardedHops bounds how many addresses of X-Forwarded-For are looked at.
const maxForwardedHops = 32

// ClientAddress returns the address of the client: that of the connection or, where that is a trusted proxy's, the last one in
// X-Forwarded-For that is not. It is invalid if peer is not an address and a port.
func ClientAddress(peer string, forwardedFor []string, trusted []netip.Prefix) netip.Addr {
	connection, _ := netip.ParseAddrPort(peer)
	address := NormalizeAddress(connection.Addr())
	isTrusted := func() bool {
		return slices.ContainsFunc(trusted, func(p netip.Prefix) bool { return p.Contains(address) })
	}
	claimed := strings.Join(forwardedFor, ",")
	for hops := 0; hops < maxForwardedHops && claimed != "" && isTrusted(); hops++ {
		comma := strings.LastIndexByte(claimed, ',')
		next, ok := parseForwardedAddress(claimed[comma+1:])
		if !ok {
			return address
		}
		address, claimed = next, claimed[:max(comma, 0)]
	}
	return address
}

// parseForwardedAddress reads an address of X-Forwarded-For, which may have a port, and be IPv6 in brackets.
func parseForwardedAddress(text string) (address netip.Addr, ok bool) {
	text = strings.TrimSpace(text)
	if withPort, err := netip.ParseAddrPort(text); err == nil {
		return NormalizeAddress(withPort.Addr()), true
	}
	if inner, ok := strings.CutPrefix(text, "["); ok {
		text = strings.TrimSuffix(inner, "]")
	}
	address, err := netip.ParseAddr(text)
	return NormalizeAddress(address), err == nil
}

// NormalizeAddress returns a as prefixes contain it: without a zone, and as IPv4 if it is that in IPv6.
func NormalizeAddress(a netip.Addr) netip.Addr { return a.Unmap().WithZone("") }

// ClientNetwork returns the network that counts as one client: an IPv4 address, or the /64 of an IPv6 address.
func ClientNetwork(a netip.Addr) netip.Prefix {
	bits := a.BitLen()
	if a.Is6() {
		bits = 64
	}
	network, _ := a.Prefix(bits) // fails on an invalid address, which has no network
	return network
}
