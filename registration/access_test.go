package registration

import (
	"net/http"
	"net/netip"
	"testing"

	"warmroute/backends"
	"warmroute/config"
)

func TestURLPattern(t *testing.T) {
	for _, c := range []struct {
		pattern, url string
		want         bool
	}{
		{"http://10.0.*:8000", "http://10.0.3.7:8000", true},
		{"http://10.0.*:8000", "http://10.0.3.7:8000/", true},
		{"http://10.0.*:8000", "HTTP://10.0.3.7:8000", true},
		{"http://10.0.*:8000", "http://10.0.3.7:8001", false},
		{"http://10.0.*:8000", "http://10.0.3.7", false},
		{"http://10.0.*:8000", "https://10.0.3.7:8000", false},
		{"http://10.0.*:8000", "http://10.1.3.7:8000", false},
		{"http://10.0.*:8000", "http://10.0.example.com:8000", false}, // somebody's name
		{"http://10.0.*:8000", "http://10.0.3:8000", false},           // 10.0.0.3 to some resolvers
		{"http://10.0.*:8000", "http://10.0.3.7.:8000", false},
		{"http://10.0.*:8000", "http://10.0.3.7:8000/vllm", false},
		{"http://10.0.*", "http://10.0.3.7:80", true},
		{"http://10.0.*", "http://10.0.3.7:22", false},
		{"http://10.0.*:*", "http://10.0.3.7:22", true},
		{"http://10.0.*:8000/*", "http://10.0.3.7:8000/vllm", true},
		{"http://10.0.*:8000/*", "http://10.0.3.7:8000/a/b", false},
		{"http://10.0.*:8000/*", "http://10.0.3.7:8000/a%2Fb", true}, // which the replica gets as it is
		{"http://gpu-*.cluster:8000", "http://gpu-7.cluster:8000", true},
		{"http://gpu-*.cluster:8000", "http://GPU-7.Cluster:8000", true},
		{"http://GPU-*.cluster:8000", "http://gpu-7.cluster:8000", true},
		{"http://gpu-*.cluster:8000", "http://gpu-7.cluster.example.com:8000", false},
		{"http://gpu-*.cluster:8000", "http://gpu-7.cluster.:8000", false},
		{"http://gpu-?:8000", "http://gpu-7:8000", false}, // only * is special
		{"http://gpu-[0-9]:8000", "http://gpu-7:8000", false},
		{"http://*:8000", "http://gpu-7:8000", true},
		{"http://*:8000", "http://10.0.3.7:8000", true},
		{"http://*:8000", "http://127.0.0.1:8000", false}, // of this machine: only if it is named
		{"http://*:8000", "http://127.1:8000", false},
		{"http://*:8000", "http://0x7f.0.0.1:8000", false},
		{"http://*:8000", "http://2130706433:8000", false},
		{"http://*:8000", "http://localhost:8000", false},
		{"http://*:8000", "http://localhost.:8000", false},
		{"http://*:8000", "http://a.localhost:8000", false},
		{"http://*:8000", "http://0.0.0.0:8000", false},
		{"http://*:8000", "http://[::]:8000", false},
		{"http://*:8000", "http://[::1]:8000", false},
		{"http://*:8000", "http://[::ffff:127.0.0.1]:8000", false},
		{"http://*:80", "http://169.254.169.254", false},
		{"http://*:8000", "http://[fe80::1]:8000", false},
		{"http://127.0.0.1:*", "http://127.0.0.1:15000", true},
		{"http://localhost:*", "http://localhost:15000", true},
		{"http://[fd00:*]:8000", "http://[fd00::7]:8000", true},
		{"http://[fd00::7]:8000", "http://[fd00::7]:8000", true},
		{"http://[fd00:*]:8000", "http://[fe00::7]:8000", false},
		{"*://gpu-7:8000", "https://gpu-7:8000", true},
		{"http://*/", "http://gpu-7", true},
		{"gpu-7", "http://gpu-7", false},
	} {
		u, err := backends.ParseURL(c.url)
		if err != nil {
			t.Fatal(err)
		}
		if got := newURLPattern(c.pattern).matches(u); got != c.want {
			t.Errorf("pattern %s, URL %s: got %v, want %v", c.pattern, c.url, got, c.want)
		}
	}
}

// FuzzURLPattern asserts that no URL of another host or port matches a pattern.
func FuzzURLPattern(f *testing.F) {
	for _, given := range []string{"http://10.0.3.7:8000", "http://10.0.x@evil:8000", "http://evil:8000/10.0.3.7:8000",
		"http://10.0.3.7:8000@evil", "http://10.0.[::1]:8000", "http://10.0.\\evil:8000", "http://10.0.%40evil:8000"} {
		f.Add(given)
	}
	network := netip.MustParsePrefix("10.0.0.0/16")
	pattern := newURLPattern("http://10.0.*:8000")
	f.Fuzz(func(t *testing.T, given string) {
		u, err := backends.ParseURL(given)
		if err != nil || !pattern.matches(u) {
			return
		}
		address, err := netip.ParseAddr(u.Hostname())
		if err != nil || !network.Contains(address) || u.Port() != "8000" || u.Path != "" || u.Scheme != "http" {
			t.Errorf("%q matches: %v", given, u)
		}
	})
}

func TestCheckCaller(t *testing.T) {
	const token = "a-long-random-token"
	lan := config.Registration{AllowFrom: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}
	for name, c := range map[string]struct {
		settings config.Registration
		from     string
		header   http.Header
		want     string // code; empty: allowed
	}{
		"in the network":  {lan, "10.1.2.3", nil, ""},
		"another network": {lan, "192.0.2.1", nil, "ADDRESS_NOT_ALLOWED"},
		"a web page":      {lan, "10.1.2.3", http.Header{"Origin": {"http://10.1.2.3"}}, "ORIGIN_NOT_ALLOWED"},
		"with the token":  {config.Registration{Token: token}, "192.0.2.1", http.Header{"Authorization": {"Bearer " + token}}, ""},
		"without it":      {config.Registration{Token: token}, "192.0.2.1", nil, "INVALID_TOKEN"},
		"part of it": {config.Registration{Token: token}, "192.0.2.1", http.Header{"Authorization": {"Bearer " + token[:8]}},
			"INVALID_TOKEN"},
		"two tokens": {config.Registration{Token: token}, "192.0.2.1",
			http.Header{"Authorization": {"Bearer " + token, "Bearer " + token}}, "INVALID_TOKEN"},
		"in another header": {config.Registration{Token: token}, "192.0.2.1", http.Header{"X-Api-Key": {token}}, "INVALID_TOKEN"},
		"token, not network": {config.Registration{Token: token, AllowFrom: lan.AllowFrom}, "192.0.2.1",
			http.Header{"Authorization": {"Bearer " + token}}, "ADDRESS_NOT_ALLOWED"},
	} {
		a, got := newAccess(c.settings, nil), ""
		if refused := a.checkCaller(&http.Request{Header: c.header}, netip.MustParseAddr(c.from)); refused != nil {
			got = refused.code
		}
		if got != c.want {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}

func TestNoURLPatternAllowsAll(t *testing.T) {
	u, err := backends.ParseURL("http://127.0.0.1:8000")
	if err != nil {
		t.Fatal(err)
	}
	all, some := newAccess(config.Registration{}, nil), newAccess(config.Registration{AllowURLs: []string{"http://gpu-*:8000"}}, nil)
	if byWildcard, refused := all.checkURL(u); refused != nil || byWildcard {
		t.Error(byWildcard, refused)
	}
	if _, refused := some.checkURL(u); refused == nil || refused.replica != "http://127.0.0.1:8000" {
		t.Error(refused)
	}
}
