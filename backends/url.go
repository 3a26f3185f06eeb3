package backends

import (
	"errors"
	"fmt"
	"net/url"
	"path"
	"strconv"
	"strings"
)

// ParseURL parses the base URL of a replica: http or https, a host, optionally a port and
// a path prefix. Its errors say what to write instead, and show no secrets.
func ParseURL(raw string) (*url.URL, error) {
	fail := func(what string) (*url.URL, error) {
		return nil, fmt.Errorf("backend URL %q: %s", redactURL(raw), what)
	}
	scheme, _, found := strings.Cut(raw, "://")
	if !found {
		return fail("no scheme; write http://HOST:PORT or https://HOST:PORT")
	}
	if s := strings.ToLower(scheme); s != "http" && s != "https" {
		return fail("the scheme must be http or https")
	}
	u, err := url.Parse(raw)
	if err != nil {
		// url.Error contains the URL with any password.
		if e := (*url.Error)(nil); errors.As(err, &e) {
			err = e.Err
		}
		return fail(err.Error())
	}
	switch {
	case u.User != nil:
		return fail("user and password are not supported; set api_key instead")
	case u.RawQuery != "" || u.ForceQuery:
		return fail("remove the query")
	case strings.Contains(raw, "#"):
		return fail("remove the fragment")
	case u.Hostname() == "":
		return fail("no host; write http://HOST:PORT")
	case strings.HasSuffix(u.Host, ":"):
		return fail("no port after the colon; add one or remove the colon")
	}
	if p := u.Port(); p != "" {
		if n, err := strconv.Atoi(p); err != nil || n < 1 || n > 65535 {
			return fail("the port must be between 1 and 65535")
		}
	}
	u.Host = strings.ToLower(u.Host) // so that one replica written in two ways is one
	u.Path, u.RawPath = strings.TrimRight(u.Path, "/"), strings.TrimRight(u.RawPath, "/")
	if u.Path != "" && path.Clean(u.Path) != u.Path {
		return fail("the path must not contain //, . or ..")
	}
	if path.Base(u.Path) == "v1" {
		return fail("remove the /v1; it is part of the request path")
	}
	return u, nil
}

// redactURL removes keys and passwords from a URL that may be invalid.
func redactURL(raw string) string {
	scheme, rest, found := strings.Cut(raw, "://")
	if !found {
		scheme, rest = "", raw
	}
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		rest = "***" + rest[at:]
	}
	if end := strings.IndexAny(rest, "?#"); end >= 0 && end+1 < len(rest) {
		rest = rest[:end+1] + "***"
	}
	if found {
		return scheme + "://" + rest
	}
	return rest
}

// DefaultName returns the name of a backend without one: its URL's host, port and path.
func DefaultName(u *url.URL) string { return hostPort(u) + u.Path }

// NormalizeURL returns the normalized URL of a replica, always with a port.
func NormalizeURL(u *url.URL) string { return u.Scheme + "://" + hostPort(u) + u.EscapedPath() }

// hostPort returns u's host and port, by default the scheme's port.
func hostPort(u *url.URL) string {
	if u.Port() != "" {
		return u.Host
	}
	if u.Scheme == "https" {
		return u.Host + ":443"
	}
	return u.Host + ":80"
}
