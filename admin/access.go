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

// requireKnownOrigin rejects what a web page of another origin may have sent. A client that connects over loopback is on this
// machine; a browser may be too, so its pages are recognized by the host name, the origin and the content type.
func (h *Handler) requireKnownOrigin(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if h.hasValidToken(r) {
			h.markAuthenticated(r)
		}
		switch {
		case isLocal(r) && !h.isAllowedHost(r.Host):
			writeError(w, http.StatusForbidden, "the Host header is neither this machine nor the address in the setting admin: use "+
				"http://127.0.0.1 and the port")
		case !isSameOrigin(r) && !isNavigationToPage(r):
			writeError(w, http.StatusForbidden, "request of a web page from another origin")
		default:
			next.ServeHTTP(w, r)
		}
	})
}

// requireOperator serves operators only.
func (h *Handler) requireOperator(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		token := *h.token.Load()
		switch {
		case h.hasValidToken(r), token == "" && isLocal(r):
			next.ServeHTTP(w, r)
		case token == "":
			writeError(w, http.StatusForbidden, "other machines may only read /metrics unless admin_token (WARMROUTE_ADMIN_TOKEN) is set")
		default:
			w.Header().Set("WWW-Authenticate", "Bearer")
			message := "missing admin token: send the admin_token as Authorization: Bearer TOKEN"
			if apikey.Bearer(r.Header) != "" {
				message = "invalid admin token: send this proxy's admin_token"
			}
			writeError(w, http.StatusUnauthorized, message)
		}
	})
}

func (h *Handler) hasValidToken(r *http.Request) bool {
	token := *h.token.Load()
	// Comparing hashes does not reveal the length.
	got, want := sha256.Sum256([]byte(apikey.Bearer(r.Header))), sha256.Sum256([]byte(token))
	return token != "" && subtle.ConstantTimeCompare(got[:], want[:]) == 1
}

// requireJSON refuses POSTs that are not declared as JSON, which browsers do not allow to pages of other origins.
func requireJSON(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
		if r.Method == http.MethodPost && (err != nil || kind != "application/json") {
			writeError(w, http.StatusUnsupportedMediaType, "send POSTs with Content-Type: application/json; the body may be empty")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// readBody reads the body of a POST into memory, up to maxPostBytes, for handlers that do not limit it.
func readBody(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost {
			next.ServeHTTP(w, r)
			return
		}
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxPostBytes))
		var tooLong *http.MaxBytesError
		switch {
		case errors.As(err, &tooLong):
			writeError(w, http.StatusRequestEntityTooLarge, fmt.Sprintf("the body is longer than %d bytes", maxPostBytes))
		case err != nil:
			writeError(w, http.StatusBadRequest, "the body is incomplete")
		default:
			r.Body = io.NopCloser(bytes.NewReader(body))
			next.ServeHTTP(w, r)
		}
	})
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
