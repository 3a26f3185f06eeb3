package proxy

import (
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
	"net/http"
	"net/textproto"
	"strconv"
	"strings"

	"warmroute/router"
)

// headerValue is h.Get of a name that is canonical, as the names here are.
func headerValue(h http.Header, name string) string {
	if values := h[name]; len(values) > 0 {
		return values[0]
	}
	return ""
}

// isHopByHop tells the headers that belong to one connection and are never passed
// on. A switch, as isPrivate: a header has few lines, and looking at each of them
// costs less than looking for each of these.
func isHopByHop(name string) bool {
	switch name {
	case "Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization",
		"Te", "Trailer", "Transfer-Encoding", "Upgrade":
		return true
	}
	return false
}

// isPrivate tells the request headers that are the client's business with us, or
// would let it steer the replica's inside.
func isPrivate(name string) bool {
	switch name {
	case "Authorization", "X-Api-Key", // the client's key; the backend's own is set instead
		"Api-Key", "X-Goog-Api-Key", // what other SDKs call it
		"Cookie",                                                                    // the client's with this host
		"Origin", "Access-Control-Request-Method", "Access-Control-Request-Headers", // whether a web page may ask is decided here
		"X-Data-Parallel-Rank",         // would pin an engine behind our back
		"X-Vllm-Priority",              // would go before others in the engine's queue
		"Endpoint-Load-Metrics-Format", // asks for the replica's load in the response
		"Content-Length",               // the transport frames the body, once
		"Expect",                       // met when the body was read
		priorityHeader:                 // orders who waits here, nothing there
		return true
	}
	return false
}

// dropConnectionHeaders drops what the header's Connection names.
func dropConnectionHeaders(h http.Header) {
	for _, line := range h["Connection"] {
		for name := range strings.SplitSeq(line, ",") {
			delete(h, textproto.CanonicalMIMEHeaderKey(textproto.TrimString(name)))
		}
	}
}

// identityEncoding is what the relay asks for, as it reads answers, and a server that is
// told nothing may compress them. Never modified.
var identityEncoding = []string{"identity"}

// rewriteRequestHeader turns the client's header into the one that replicas get, in place.
func rewriteRequestHeader(h http.Header, id string) {
	dropConnectionHeaders(h)
	for name := range h {
		if isHopByHop(name) || isPrivate(name) {
			delete(h, name)
		}
	}
	if h["X-Request-Id"] == nil { // it is ours already, but Connection may have named it
		h["X-Request-Id"] = []string{id}
	}
	h["Accept-Encoding"] = identityEncoding
}

// routeHeaders say where a request went, and why.
var routeHeaders = [...]string{
	"X-Warmroute-Backend", "X-Warmroute-Reason", "X-Warmroute-Prefix-Match", "X-Warmroute-Attempts", "X-Warmroute-Overhead-Us",
}

// responseHeader fills the client's header with what the replica said and where it
// was said, all but the length, which is set where the body is written.
func (r *request) responseHeader(d *router.Decision, from http.Header) http.Header {
	h := r.client.Header()
	h["Content-Type"] = nil // a replica that names none leaves it open: net/http would guess one from the body
	dropConnectionHeaders(from)
	for name, value := range from {
		switch {
		case name == "Content-Length", name == "X-Request-Id", isHopByHop(name), r.isProxyHeader(name):
		case name == "Endpoint-Load-Metrics": // a replica's load is not for clients
		case name == "Access-Control-Allow-Origin": // a replica that any web page may ask does not open this proxy to it
		default:
			h[name] = value
		}
	}
	if !r.mayShowRoute() {
		return h
	}
	values := []string{
		d.Backend.Name,
		d.Reason,
		strconv.Itoa(d.MatchedTokens) + "/" + strconv.Itoa(d.PromptTokens),
		strconv.Itoa(r.history.sent),
		strconv.FormatInt(r.outcome.Overhead.Microseconds(), 10),
	}
	for i, name := range routeHeaders {
		h[name] = values[i : i+1 : i+1]
	}
	r.addQueueTimeHeader(h)
	return h
}

func (r *request) addQueueTimeHeader(h http.Header) {
	if r.history.queueTime > 0 {
		h["X-Warmroute-Queue-Ms"] = []string{strconv.FormatInt(r.history.queueTime.Milliseconds(), 10)}
	}
}

// What X-Warmroute-Reason says where the proxy itself answers.
const (
	reasonRefused = "refused" // no backend was asked
	reasonQueued  = "queued"  // none was, though the request waited for one
	reasonFailed  = "failed"  // at least one was, and none of them has the answer that the client gets
)

// addErrorHeaders says in the header of an answer of the proxy's own what became of the
// request. No backend is named there, since none answers.
func (r *request) addErrorHeaders() {
	if !r.mayShowRoute() {
		return
	}
	h, reason := r.client.Header(), reasonRefused
	switch {
	case r.history.sent > 0:
		reason = reasonFailed
		h["X-Warmroute-Attempts"] = []string{strconv.Itoa(r.history.sent)}
	case r.history.queueTime > 0:
		reason = reasonQueued
	}
	h["X-Warmroute-Reason"] = []string{reason}
	r.addQueueTimeHeader(h)
}

// isProxyHeader reports whether a header is the proxy's to set. Where a request went says the
// one that the client asked: a replica may be another proxy of this kind, and of two
// accounts the client would get a mixture, or one that it is not to have. What is
// left of a key's rates says the one that knows the keys.
func (r *request) isProxyHeader(name string) bool {
	return strings.HasPrefix(name, "X-Warmroute-") || r.holder != nil && strings.HasPrefix(name, "X-Ratelimit-")
}

// requestID is the client's own if it is short and plain enough to be repeated
// in headers and logs, else a new one.
func requestID(h http.Header) string {
	id := headerValue(h, "X-Request-Id")
	if isPlainID(id) && !containsKey(h, id) {
		return id
	}
	var random [16]byte
	binary.BigEndian.PutUint64(random[:8], rand.Uint64())
	binary.BigEndian.PutUint64(random[8:], rand.Uint64())
	made := [3 + 2*len(random)]byte{'w', 'r', '-'}
	hex.Encode(made[3:], random[:])
	return string(made[:])
}

func isPlainID(id string) bool {
	if id == "" || len(id) > 128 {
		return false
	}
	for _, c := range []byte(id) {
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_' || c == '.' || c == ':') {
			return false
		}
	}
	return true
}
