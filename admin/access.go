package admin

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
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
	maxPostBytes = 64 << 10
	// requestTimeout is how long a request may take to arrive, and its response to be read.
	requestTimeout = 10 * time.Second
	// lingerTimeout is how long the rest of an unread body is read, so that its sender
	// receives the response and not a reset; net/http has no limit.
	lingerTimeout = time.Second
)

// SetToken sets the token that operators must send. If it is empty, only clients over loopback are operators.
func (h *Handler) SetToken(token string) {
	if previous := h.token.Swap(&token); previous != nil && *previous != token {
		h.connections.resetRanks()
	}
}

// isLocal reports whether the client must be on this machine. The listener's address
// would not tell: it may be all interfaces.
func isLocal(r *http.Request) bool {
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	return isLoopback(local)
}

// isAllowedHost reports whether the Host header is one that a user would enter. Another
// name may belong to an attacker and resolve to this machine.
func (h *Handler) isAllowedHost(host string) bool {
	name := host
	if withoutPort, _, err := net.SplitHostPort(host); err == nil {
		name = withoutPort
	}
	name = strings.TrimSuffix(strings.TrimPrefix(name, "["), "]")
	return net.ParseIP(name) != nil || strings.EqualFold(name, "localhost") || h.Host != "" && strings.EqualFold(name, h.Host)
}

// isSameOrigin reports whether the request was not sent by a web page, or by one that was served here.
func isSameOrigin(r *http.Request) bool {
	switch r.Header.Get("Sec-Fetch-Site") {
	case "cross-site", "same-site":
		return false
	}
	values := r.Header["Origin"]
	if len(values) == 0 {
		return true
	}
	origin, err := url.Parse(values[0])
	return len(values) == 1 && err == nil && origin.Host != "" && strings.EqualFold(origin.Host, r.Host)
}

// checkOperator reports whether the request is an operator's, and writes the error if it is not.
func (h *Handler) checkOperator(w http.ResponseWriter, r *http.Request, local bool) (ok bool) {
	token := *h.token.Load()
	switch {
	case token == "" && local:
		return true
	case token == "":
		writeError(w, http.StatusForbidden, "other machines may only read /metrics unless admin_token (WARMROUTE_ADMIN_TOKEN) is set")
		return false
	case h.hasValidToken(r):
		return true
	}
	w.Header().Set("WWW-Authenticate", "Bearer")
	message := "missing admin token: send the admin_token as Authorization: Bearer TOKEN"
	if apikey.Bearer(r.Header) != "" {
		message = "invalid admin token: send this proxy's admin_token"
	}
	writeError(w, http.StatusUnauthorized, message)
	return false
}

func (h *Handler) hasValidToken(r *http.Request) bool {
	token := *h.token.Load()
	// Comparing hashes does not reveal the length.
	got, want := sha256.Sum256([]byte(apikey.Bearer(r.Header))), sha256.Sum256([]byte(token))
	return token != "" && subtle.ConstantTimeCompare(got[:], want[:]) == 1
}

// checkPostTypeAndSize reports whether a POST is declared as JSON, which browsers do not allow to pages of
// other origins, and whether its body is short. It reads the body into memory, and writes the error if not.
func checkPostTypeAndSize(w http.ResponseWriter, r *http.Request) (ok bool) {
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		writeError(w, http.StatusUnsupportedMediaType, "send POSTs with Content-Type: application/json; the body may be empty")
		return false
	}
	switch r.URL.Path {
	case "/api/explain", "/api/placed", "/api/backends":
		return true // the handler reads and limits the body
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxPostBytes))
	r.Body = io.NopCloser(bytes.NewReader(body))
	var tooLong *http.MaxBytesError
	switch {
	case errors.As(err, &tooLong):
		writeError(w, http.StatusRequestEntityTooLarge, fmt.Sprintf("the body is longer than %d bytes", maxPostBytes))
	case err != nil:
		writeError(w, http.StatusBadRequest, "the body is incomplete")
	}
	return err == nil
}

// timedBody is the body of a request with a timeout, whether a handler reads it or
// net/http does after the response.
type timedBody struct {
	io.ReadCloser
	conn    *http.ResponseController
	timeout time.Duration
	done    bool // read to its end, or failed
}

// setBodyTimeout replaces the request's body by one with a timeout, which it returns.
func (h *Handler) setBodyTimeout(w http.ResponseWriter, r *http.Request) *timedBody {
	b := &timedBody{ReadCloser: r.Body, conn: http.NewResponseController(w), timeout: h.timeout}
	_ = b.conn.SetReadDeadline(time.Now().Add(h.timeout)) // fails if the connection has no deadlines
	r.Body = b
	return b
}

// Read implements io.Reader. The timeout of the response starts when the body was read.
// Afterwards net/http reads the connection only to detect a disconnect, without timeout.
func (b *timedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	_ = b.conn.SetWriteDeadline(time.Now().Add(b.timeout))
	if err == io.EOF && !b.done {
		_ = b.conn.SetReadDeadline(time.Time{})
	}
	b.done = b.done || err != nil
	return n, err
}

// setLingerDeadline bounds the time for the rest of the body after the response.
func (b *timedBody) setLingerDeadline() {
	if !b.done {
		_ = b.conn.SetReadDeadline(time.Now().Add(lingerTimeout))
	}
}
