package admin

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"io"
	"mime"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"warmroute/proxy/apikey"
)

const (
	mostBody    = 4 << 10
	mostScrapes = 8
	// patience is how long a request may take to come, and its answer to be taken.
	patience = 10 * time.Second
)

// ServeHTTP lets through what no web page can have sent, and to operators alone
// what is more than a scrape of the metrics. Whoever connects over loopback is on
// this machine already; a browser there is too, so a page in it is told by the
// name it was reached by, its origin and the content type that it may not send.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// An error says that the connection knows no deadlines; then there is none.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(h.patience))
	if r.ContentLength != 0 {
		w.Header().Set("Connection", "close") // what is not read of it is not waited for by the next request
		body := h.await(w, r)
		defer body.leave()
	}
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if h.hasToken(r) {
		h.markAuthenticated(r)
	}
	near := overLoopback(r)
	switch {
	case near && !h.mayBeCalled(r.Host):
		fail(w, http.StatusForbidden, "the Host header names neither this machine nor the address in the setting admin: ask for http://127.0.0.1 and the port")
	case !sameOrigin(r) && !isLinkToPage(r):
		fail(w, http.StatusForbidden, "the Origin header is another's: web pages may not ask here")
	case r.URL.Path == "/metrics" && (r.Method == http.MethodGet || r.Method == http.MethodHead):
		limited(h.scrapes, w, r, h.metrics)
	case pageFile(r) != "" && (near || *h.token.Load() != ""): // which asks for the token itself
		h.page(w, pageFile(r))
	case !h.isOperator(w, r, near) || r.Method == http.MethodPost && !isJSONPost(w, r):
	default:
		h.routes.ServeHTTP(w, r)
	}
}

// overLoopback reports whether the connection can only have come from this
// machine. The listener's own address would not tell: it may be every interface.
func overLoopback(r *http.Request) bool {
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	return isLoopback(local)
}

// mayBeCalled reports whether a browser could have been told this host only by
// its user: not by a name of somebody else's that now leads here.
func (h *Handler) mayBeCalled(host string) bool {
	name := host
	if bare, _, err := net.SplitHostPort(host); err == nil {
		name = bare
	}
	name = strings.TrimSuffix(strings.TrimPrefix(name, "["), "]")
	return net.ParseIP(name) != nil || strings.EqualFold(name, "localhost") || h.host != "" && strings.EqualFold(name, h.host)
}

// sameOrigin reports whether the request was sent by no web page, or by one that
// was served here.
func sameOrigin(r *http.Request) bool {
	switch r.Header.Get("Sec-Fetch-Site") {
	case "cross-site", "same-site":
		return false
	}
	given := r.Header["Origin"]
	if len(given) == 0 {
		return true
	}
	origin, err := url.Parse(given[0])
	return len(given) == 1 && err == nil && origin.Host != "" && strings.EqualFold(origin.Host, r.Host)
}

// isOperator reports whether the request may change something, and answers it if not.
func (h *Handler) isOperator(w http.ResponseWriter, r *http.Request, near bool) bool {
	token := *h.token.Load()
	switch {
	case token == "" && near:
		return true
	case token == "":
		fail(w, http.StatusForbidden, "from another machine there is only /metrics as long as admin_token (WARMROUTE_ADMIN_TOKEN) is not set")
		return false
	}
	if h.hasToken(r) {
		return true
	}
	w.Header().Set("WWW-Authenticate", "Bearer")
	message := "send the admin_token as Authorization: Bearer TOKEN"
	if apikey.FromHeader(r.Header, false) != "" {
		message = "the token is not this proxy's admin_token"
	}
	fail(w, http.StatusUnauthorized, message)
	return false
}

// hasToken reports whether the request has the admin token.
func (h *Handler) hasToken(r *http.Request) bool {
	token := *h.token.Load()
	// Hashes have one length, which the comparison would give away.
	given, want := sha256.Sum256([]byte(apikey.FromHeader(r.Header, false))), sha256.Sum256([]byte(token))
	return token != "" && subtle.ConstantTimeCompare(given[:], want[:]) == 1
}

// isJSONPost reports whether a POST says that it is JSON, which a web page of
// another origin cannot do unasked, and is no longer than any may be. It answers
// the request if not.
func isJSONPost(w http.ResponseWriter, r *http.Request) bool {
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		fail(w, http.StatusUnsupportedMediaType, "send POSTs with Content-Type: application/json; the body may be empty")
		return false
	}
	if takesBody(r.URL.Path) {
		return true
	}
	_, err := io.Copy(io.Discard, http.MaxBytesReader(w, r.Body, mostBody))
	var tooLong *http.MaxBytesError
	switch {
	case errors.As(err, &tooLong):
		fail(w, http.StatusRequestEntityTooLarge, "the body is too long; nothing of it is needed")
	case err != nil:
		fail(w, http.StatusBadRequest, "the body ended before its end")
	}
	return err == nil
}

// limited serves the request if there is a place for it.
func limited(places chan struct{}, w http.ResponseWriter, r *http.Request, next http.Handler) {
	select {
	case places <- struct{}{}:
		defer func() { <-places }()
		next.ServeHTTP(w, r)
	default:
		w.Header().Set("Retry-After", "1")
		fail(w, http.StatusServiceUnavailable, "as many such requests as may are under way")
	}
}
