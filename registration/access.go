package registration

import (
	"crypto/sha256"
	"crypto/subtle"
	"net/http"
	"net/netip"
	"net/url"
	"path"
	"slices"
	"strings"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/config"
	"warmroute/metrics"
	"warmroute/proxy/apikey"
)

// access is who may register which replicas. Never modified.
type access struct {
	token    string         // empty: none is required
	networks []netip.Prefix // of callers; nil: all
	urls     []urlPattern   // nil: all
	trusted  []netip.Prefix // proxies in front, whose X-Forwarded-For counts
}

func newAccess(r config.Registration, trusted []netip.Prefix) access {
	a := access{token: r.Token, networks: r.AllowFrom, trusted: trusted}
	for _, pattern := range r.AllowURLs {
		a.urls = append(a.urls, newURLPattern(pattern))
	}
	return a
}

// refusal is the error of a call that is refused.
type refusal struct {
	status  int
	result  metrics.RegistrationResult
	code    string
	message string
	replica string // its normalized URL; empty: the caller is refused
}

func (r *refusal) Error() string { return r.message }

// checkCaller returns why nobody may send this request from that address, or nil. A client's API key does not count.
func (a *access) checkCaller(r *http.Request, from netip.Addr) *refusal {
	allowed := func(network netip.Prefix) bool { return network.Contains(from) }
	switch {
	case len(a.networks) > 0 && !slices.ContainsFunc(a.networks, allowed):
		return &refusal{status: http.StatusForbidden, result: metrics.RegistrationRefusedAddress, code: "ADDRESS_NOT_ALLOWED",
			message: "registration is not allowed from " + from.String() + "; see registration.allow_from"}
	case r.Header["Origin"] != nil: // a page in a browser of an allowed network
		return &refusal{status: http.StatusForbidden, result: metrics.RegistrationRefusedOrigin, code: "ORIGIN_NOT_ALLOWED",
			message: "registration is not allowed from web pages"}
	case a.token != "" && !a.hasToken(r.Header):
		return &refusal{status: http.StatusUnauthorized, result: metrics.RegistrationRefusedToken, code: "INVALID_TOKEN",
			message: "send the token of registration.token_file as Authorization: Bearer TOKEN"}
	}
	return nil
}

func (a *access) hasToken(h http.Header) bool {
	// Comparing hashes does not reveal the length.
	got, want := sha256.Sum256([]byte(apikey.Bearer(h))), sha256.Sum256([]byte(a.token))
	return subtle.ConstantTimeCompare(got[:], want[:]) == 1
}

// checkURL returns why a replica at that URL, which backends.ParseURL has read, may not be registered, or nil. byWildcard means
// that no element of registration.allow_urls names its host: it is then no address of this machine or its link, and
// connections to what its name stands for must not go to one either.
func (a *access) checkURL(u *url.URL) (byWildcard bool, refused *refusal) {
	if a.urls == nil {
		return false, nil
	}
	for _, p := range a.urls {
		switch {
		case !p.matches(u):
		case !p.hasWildcardHost():
			return false, nil
		default:
			byWildcard = true
		}
	}
	if byWildcard {
		return true, nil
	}
	replica := backends.NormalizeURL(u)
	return false, &refusal{
		status: http.StatusForbidden, result: metrics.RegistrationRefusedURL, code: "URL_NOT_ALLOWED",
		message: "registration.allow_urls does not allow " + replica, replica: replica,
	}
}

// urlPattern is an element of registration.allow_urls.
type urlPattern struct {
	scheme, host, port, path string // with * for any characters but /
}

// newURLPattern splits a pattern, in which * stands for any characters but /. A pattern of another form matches nothing.
func newURLPattern(pattern string) (p urlPattern) {
	scheme, rest, _ := strings.Cut(pattern, "://")
	p.scheme = strings.ToLower(scheme)
	if slash := strings.IndexByte(rest, '/'); slash >= 0 {
		rest, p.path = rest[:slash], strings.TrimRight(rest[slash:], "/")
	}
	p.host = strings.ToLower(rest)
	if colon := strings.LastIndexByte(p.host, ':'); colon > strings.LastIndexByte(p.host, ']') {
		p.host, p.port = p.host[:colon], p.host[colon+1:]
	}
	p.host = strings.Trim(p.host, "[]")
	if p.port == "" {
		p.port = defaultPort(p.scheme)
	}
	return p
}

// matches reports whether a URL that backends.ParseURL has read is one of the pattern. Each part of the URL is compared
// with that part of the pattern, so that a * in the host cannot match a port or a path. A * does not match an address
// of this machine or its link, such as that of a cloud's metadata server, and digits before it match addresses only:
// 10.0.* does not match 10.0.example.com.
func (p urlPattern) matches(u *url.URL) bool {
	host, port := u.Hostname(), u.Port()
	if port == "" {
		port = defaultPort(u.Scheme)
	}
	if p.hasWildcardHost() && (isLocalHost(host) || !isAddress(host) && (p.hasDigitsOnly() || endsInNumber(host))) {
		return false
	}
	return matchStars(p.scheme, u.Scheme) && matchStars(p.host, host) && matchStars(p.port, port) && matchStars(p.path, u.EscapedPath())
}

func (p urlPattern) hasWildcardHost() bool { return strings.Contains(p.host, "*") }

// hasDigitsOnly reports whether the host of the pattern is the beginning of an address, or its end.
func (p urlPattern) hasDigitsOnly() bool {
	return strings.ContainsAny(p.host, "0123456789") && strings.Trim(p.host, "0123456789.*") == "" || strings.Contains(p.host, ":")
}

// matchStars reports whether text matches a pattern in which * stands for any characters but /, and others for themselves.
func matchStars(pattern, text string) bool {
	pattern = strings.NewReplacer(`\`, `\\`, `?`, `\?`, `[`, `\[`, `]`, `\]`).Replace(pattern)
	matched, err := path.Match(pattern, text)
	return matched && err == nil
}

func defaultPort(scheme string) string {
	if scheme == "https" {
		return "443"
	}
	return "80"
}

func isAddress(host string) bool {
	_, err := netip.ParseAddr(host)
	return err == nil
}

// endsInNumber reports whether a host that is not an address may be one to the system's resolver, as 0x7f.1 is.
func endsInNumber(host string) bool {
	host = strings.TrimRight(host, ".")
	last := host[strings.LastIndexByte(host, '.')+1:]
	return last == "" || '0' <= last[0] && last[0] <= '9'
}

// isLocalHost reports whether a host is localhost, or an address for which transport.IsLocal holds. It does not look up names.
func isLocalHost(host string) bool {
	host = strings.TrimRight(host, ".")
	if host == "localhost" || strings.HasSuffix(host, ".localhost") {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && transport.IsLocal(a)
}
