// Package discovery looks up the names of backends, and keeps what the lookups have shown: which addresses a
// name has, and whether it stands for one replica or for several.
package discovery

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"warmroute/recovery"
)

// ErrNotFound is the error of a lookup that shows that a name does not exist or has no address.
var ErrNotFound = errors.New("no address found")

var errLookupPanicked = errors.New("lookup panicked")

const (
	// lookupTimeout is enough for the answer of the third name server when the first two do not respond, with
	// the five seconds for each that the system's resolvers have as a default.
	lookupTimeout = 20 * time.Second
	// maxTargetLookups bounds how many targets of an SRV record are looked up at once.
	maxTargetLookups = 16
	// maxAnswer bounds the addresses that a lookup returns. The addresses in one DNS message are fewer, those of
	// all targets of an SRV record can be more.
	maxAnswer = 8192
)

// Name is what is looked up.
type Name struct {
	Host string // lower case, without the final dot
	Port string // "" with SRV
	SRV  bool
}

// String returns the name as in a URL.
func (n Name) String() string {
	if n.SRV {
		return n.Host
	}
	return net.JoinHostPort(n.Host, n.Port)
}

// Resolver looks up names. Safe for concurrent use.
type Resolver struct {
	server string // host:port; "": those of the system
	panics recovery.Reporter

	lookups     *net.Resolver
	connections *net.Resolver // nil: Go's default
}

// NewResolver returns a Resolver that asks the DNS server at host:port; "": those of the system's configuration.
// Names in /etc/hosts are found there in both cases. A panic in the lookup of one of several targets is reported to panics.
func NewResolver(server string, panics recovery.Reporter) *Resolver {
	r := &Resolver{server: server, panics: panics}
	// With StrictErrors a failed query for a name with one search domain ends the lookup. Otherwise the query for
	// the name with the next one would decide, and may find that it does not exist.
	r.lookups = &net.Resolver{PreferGo: true, StrictErrors: true, Dial: r.dial}
	if server != "" {
		r.connections = &net.Resolver{PreferGo: true, Dial: r.dial}
	}
	return r
}

// NetResolver returns the resolver for the hosts of connections; nil: Go's default.
func (r *Resolver) NetResolver() *net.Resolver { return r.connections }

// Lookup returns the addresses of a name, sorted and without duplicates. They are of one family: IPv4 if the name
// has any. Those of an SRV name are the addresses of its targets, of whatever priority and weight, with the
// targets' ports; each target has one family.
//
// The error is ErrNotFound if the name does not exist or has no address. Any other error says nothing about the
// name. Lookup blocks until ctx is done, at most 20 s.
func (r *Resolver) Lookup(ctx context.Context, n Name) ([]netip.AddrPort, error) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	lookup := r.lookupHost
	if n.SRV {
		lookup = r.lookupSRV
	}
	found, err := lookup(ctx, n)
	if err != nil {
		return nil, r.describe(n, err)
	}
	slices.SortFunc(found, netip.AddrPort.Compare)
	return slices.Compact(found), nil
}

func (r *Resolver) lookupHost(ctx context.Context, n Name) ([]netip.AddrPort, error) {
	port, err := strconv.ParseUint(n.Port, 10, 16)
	if err != nil {
		return nil, fmt.Errorf("port %q is not a number", n.Port)
	}
	addrs, err := r.lookupAddrs(ctx, n.Host)
	if err != nil {
		return nil, err
	}
	return withPort(addrs, uint16(port)), nil
}

// lookupSRV fails if the lookup of any target does, but for targets that have no address.
func (r *Resolver) lookupSRV(ctx context.Context, n Name) ([]netip.AddrPort, error) {
	_, targets, err := r.lookups.LookupSRV(ctx, "", "", n.Host)
	if err != nil {
		return nil, err
	}
	addrs := make([][]netip.Addr, len(targets))
	var total atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxTargetLookups)
	for i, target := range targets {
		if target.Port == 0 || target.Target == "." { // the service is not available
			continue
		}
		g.Go(func() error {
			err := errLookupPanicked
			r.panics.CallAndRecover(recovery.Discovery, func() { addrs[i], err = r.lookupAddrs(ctx, target.Target) })
			switch {
			case isNotFound(err):
				return nil
			case total.Add(int64(len(addrs[i]))) > maxAnswer:
				return fmt.Errorf("its targets have more than %d addresses", maxAnswer)
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	var found []netip.AddrPort
	for i, target := range targets {
		found = append(found, withPort(addrs[i], target.Port)...)
	}
	if len(found) == 0 {
		return nil, ErrNotFound
	}
	return found, nil
}

// lookupAddrs returns the IPv4 addresses of a host, or its IPv6 addresses if it is certain that it has no IPv4
// address. The families are looked up one after the other: together, the failed query for one of them would
// be hidden by what the other one shows.
func (r *Resolver) lookupAddrs(ctx context.Context, host string) ([]netip.Addr, error) {
	addrs, err := r.lookups.LookupNetIP(ctx, "ip4", host)
	if isNotFound(err) {
		addrs, err = r.lookups.LookupNetIP(ctx, "ip6", host)
	}
	if err != nil {
		return nil, err
	}
	// A connection to 0.0.0.0 reaches this machine; DNS filters use it for "no address".
	addrs = slices.DeleteFunc(addrs, func(a netip.Addr) bool { return a.Unmap().IsUnspecified() || a.Unmap().IsMulticast() })
	if len(addrs) == 0 {
		return nil, ErrNotFound
	}
	return addrs, nil
}

// withPort returns addresses with a port, IPv4 ones that were given as IPv6 as IPv4.
func withPort(addrs []netip.Addr, port uint16) []netip.AddrPort {
	found := make([]netip.AddrPort, len(addrs))
	for i, a := range addrs {
		found[i] = netip.AddrPortFrom(a.Unmap(), port)
	}
	return found
}

// isNotFound reports whether a lookup has shown that there is no address.
func isNotFound(err error) bool {
	if _, otherFamily := errors.AsType[*net.AddrError](err); otherFamily { // /etc/hosts has no address of this family
		return true
	}
	e, ok := errors.AsType[*net.DNSError](err)
	return ok && e.IsNotFound || errors.Is(err, ErrNotFound)
}

// describe returns the error of a lookup, with ErrNotFound in it if that is what it means.
func (r *Resolver) describe(n Name, err error) error {
	var e *net.DNSError
	if errors.As(err, &e) {
		named := *e // other lookups may have the same error
		named.Server = cmp.Or(r.server, named.Server)
		err = &named
	} else {
		err = fmt.Errorf("lookup %s: %w", n, err)
	}
	if isNotFound(err) && !errors.Is(err, ErrNotFound) {
		return fmt.Errorf("%w: %w", ErrNotFound, err)
	}
	return err
}

// dial connects to a DNS server. The connection is closed when ctx is done: the resolver itself would go on to
// wait for the response.
func (r *Resolver) dial(ctx context.Context, network, systemServer string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, cmp.Or(r.server, systemServer))
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { c.Close() })
	if udp, ok := c.(*net.UDPConn); ok {
		return refusalAsFailure{udp}, nil
	}
	return c, nil
}

// refusalAsFailure is a connection to a DNS server. A response that refuses a query is read from it as one that
// reports a failure of the server: only after that one the resolver does not go on to the next search domain.
type refusalAsFailure struct{ *net.UDPConn }

func (c refusalAsFailure) Read(p []byte) (n int, err error) {
	const codeMask, serverFailure, refused = 0xf, 2, 5 // of the fourth byte, RFC 1035
	n, err = c.UDPConn.Read(p)
	if n >= 4 && p[3]&codeMask == refused {
		p[3] = p[3]&^codeMask | serverFailure
	}
	return n, err
}
