package config

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strings"

	"warmroute/backends"
)

// dnsScheme begins a URL that stands for all replicas of a name: dns://HOST:PORT for its addresses,
// dns://SERVICE for those of its SRV records.
const dnsScheme = "dns://"

// DNSName is a name that stands for replicas.
type DNSName struct {
	Host string // lower case, without a dot at its end
	Port string // "" with SRV
	SRV  bool
}

// DNSName returns the name that is looked up for a backend; false if its URL has an address instead of a
// name, or lookups are off. It is for a valid URL.
func (b Backend) DNSName() (n DNSName, ok bool) {
	u, err := url.Parse(b.URL)
	if err != nil || b.DNS == "off" {
		return DNSName{}, false
	}
	n = DNSName{Host: strings.ToLower(strings.TrimSuffix(u.Hostname(), ".")), Port: u.Port()}
	if _, err := netip.ParseAddr(n.Host); err == nil {
		return DNSName{}, false
	}
	switch {
	case n.Port == "" && b.HasDNSScheme():
		n.SRV = true
	case n.Port == "" && u.Scheme == "https":
		n.Port = "443"
	case n.Port == "":
		n.Port = "80"
	}
	return n, true
}

// HasDNSScheme reports whether the backend stands for any number of replicas, also none.
func (b Backend) HasDNSScheme() bool { return strings.HasPrefix(strings.ToLower(b.URL), dnsScheme) }

// HTTPURL returns the URL of the replicas: URL with http for dns.
func (b Backend) HTTPURL() string {
	if b.HasDNSScheme() {
		return "http://" + b.URL[len(dnsScheme):]
	}
	return b.URL
}

// ParseURL parses URL, which may begin with dns://.
func (b Backend) ParseURL() (*url.URL, error) {
	u, err := backends.ParseURL(b.HTTPURL())
	if err != nil || !b.HasDNSScheme() {
		return u, err
	}
	_, notAddress := netip.ParseAddr(u.Hostname())
	switch {
	case u.Path != "":
		return nil, fmt.Errorf("backend URL %q: remove the path; write dns://HOST:PORT, or dns://SERVICE for SRV records", b.URL)
	case notAddress == nil:
		return nil, fmt.Errorf("backend URL %q: an address needs no lookup; write http://%s", b.URL, net.JoinHostPort(u.Hostname(), "PORT"))
	case b.DNS == "off":
		return nil, fmt.Errorf("backend URL %q contradicts dns: off; write http://HOST:PORT for the load balancer", b.URL)
	}
	return u, nil
}
