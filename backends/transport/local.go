package transport

import (
	"errors"
	"net/netip"
	"syscall"
)

var errLocalAddress = errors.New("loopback and link-local addresses need an element without * in registration.allow_urls")

// RefuseLocal is a net.Dialer.Control that refuses connections to addresses for which IsLocal holds. A dialer calls it with each
// address that it is about to connect to, so that it does not matter what a name had before.
func RefuseLocal(_, address string, _ syscall.RawConn) error {
	a, err := netip.ParseAddrPort(address)
	if err == nil && IsLocal(a.Addr()) {
		err = errLocalAddress
	}
	return err
}

// IsLocal reports whether an address is this machine's loopback, or one that only its neighbours have, such as that of a
// cloud's metadata server.
func IsLocal(a netip.Addr) bool {
	a = a.Unmap()
	return a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsUnspecified() || a.IsMulticast()
}
