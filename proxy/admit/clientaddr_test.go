package admit

import (
	"net/netip"
	"strings"
	"testing"
)

func prefixes(list ...string) (out []netip.Prefix) {
	for _, text := range list {
		out = append(out, netip.MustParsePrefix(text))
	}
	return out
}

func TestClientAddress(t *testing.T) {
	trusted := prefixes("10.0.0.0/8", "fd00::/8")
	for name, c := range map[string]struct {
		peer      string
		forwarded []string
		want      string
	}{
		"no proxy":                        {"192.0.2.1:5", nil, "192.0.2.1"},
		"claim of a client":               {"192.0.2.1:5", []string{"198.51.100.1"}, "192.0.2.1"},
		"behind a proxy":                  {"10.0.0.1:5", []string{"198.51.100.1"}, "198.51.100.1"},
		"claim before a proxy's":          {"10.0.0.1:5", []string{"203.0.113.9, 198.51.100.1"}, "198.51.100.1"},
		"behind two proxies":              {"10.0.0.1:5", []string{"203.0.113.9, 198.51.100.1, 10.0.0.2"}, "198.51.100.1"},
		"lines":                           {"10.0.0.1:5", []string{"203.0.113.9", "198.51.100.1", "10.0.0.2,10.0.0.3"}, "198.51.100.1"},
		"proxies only":                    {"10.0.0.1:5", []string{"10.0.0.3, 10.0.0.2"}, "10.0.0.3"},
		"no header":                       {"10.0.0.1:5", nil, "10.0.0.1"},
		"empty":                           {"10.0.0.1:5", []string{""}, "10.0.0.1"},
		"not an address":                  {"10.0.0.1:5", []string{"198.51.100.1, unknown"}, "10.0.0.1"},
		"not an address behind a proxy's": {"10.0.0.1:5", []string{"unknown, 10.0.0.2"}, "10.0.0.2"},
		"with a port":                     {"10.0.0.1:5", []string{"198.51.100.1:1234"}, "198.51.100.1"},
		"IPv6":                            {"[fd00::1]:5", []string{"2001:db8::1"}, "2001:db8::1"},
		"IPv6 in brackets":                {"[fd00::1]:5", []string{"[2001:db8::1]"}, "2001:db8::1"},
		"IPv6 with a port":                {"[fd00::1]:5", []string{"[2001:db8::1]:443"}, "2001:db8::1"},
		"IPv4 in IPv6":                    {"[::ffff:10.0.0.1]:5", []string{"::ffff:198.51.100.1"}, "198.51.100.1"},
		"zone":                            {"[fe80::1%eth0]:5", nil, "fe80::1"},
		"more hops than are looked at":    {"10.0.0.1:5", []string{"198.51.100.1" + strings.Repeat(", 10.0.0.2", maxForwardedHops)}, "10.0.0.2"},
		"not a peer's address":            {"@", []string{"198.51.100.1"}, "invalid IP"},
	} {
		if got := ClientAddress(c.peer, c.forwarded, trusted).String(); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

func TestClientNetwork(t *testing.T) {
	for address, want := range map[string]string{"192.0.2.1": "192.0.2.1/32", "2001:db8:1:2:3::4": "2001:db8:1:2::/64"} {
		if got := ClientNetwork(netip.MustParseAddr(address)).String(); got != want {
			t.Errorf("%s: %s, want %s", address, got, want)
		}
	}
	if got := ClientNetwork(netip.Addr{}); got != (netip.Prefix{}) {
		t.Errorf("of no address: %v", got)
	}
}

// FuzzClientAddress asserts that nothing before the last address that a trusted proxy states
// has an effect, and that without a trusted proxy the header has none.
func FuzzClientAddress(f *testing.F) {
	for _, seed := range []string{"", "198.51.100.1", "a, 198.51.100.1:5 ,10.0.0.2", "[2001:db8::1]:1,", "::ffff:10.0.0.1", "fe80::1%eth0",
		",,,"} {
		f.Add(seed)
	}
	trusted := prefixes("10.0.0.0/8", "fd00::/8")
	f.Fuzz(func(t *testing.T, header string) {
		if got := ClientAddress("192.0.2.1:5", []string{header}, trusted); got.String() != "192.0.2.1" {
			t.Errorf("without a proxy: %v", got)
		}
		got := ClientAddress("10.0.0.1:5", []string{header}, trusted)
		if !got.IsValid() || got.Zone() != "" || got.Is4In6() {
			t.Errorf("%v", got)
		}
		if after := ClientAddress("10.0.0.1:5", []string{header, "198.51.100.1, 10.0.0.2"}, trusted); after.String() != "198.51.100.1" {
			t.Errorf("behind another proxy: %v", after)
		}
	})
}
