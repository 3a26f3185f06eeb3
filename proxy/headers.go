package proxy

import (
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/rs/cors"

	"warmroute/proxy/admit"
	"warmroute/proxy/httpheader"
	"warmroute/proxy/upstream"
	"warmroute/router"
)

// routeHeaders say where a request was routed, and why.
var routeHeaders = [...]string{
	"X-Warmroute-Backend", "X-Warmroute-Reason", "X-Warmroute-Predicted-Tokens", "X-Warmroute-Attempts", "X-Warmroute-Overhead-Us",
}

// prefillBackendHeader names the backend that has done the prefill, if that is another one.
const prefillBackendHeader = "X-Warmroute-Prefill-Backend"

// modelHeader and modelNameHeader name the model that serves the request and the name by which it was asked for, where that is one of
// models.names.
const (
	modelHeader     = "X-Warmroute-Model"
	modelNameHeader = "X-Warmroute-Model-Name"
)

// queueTimeHeader says how long the request was queued.
const queueTimeHeader = "X-Warmroute-Queue-Ms"

// fillResponseHeader fills the client's header from the replica's and with the route, without the length, and returns it.
func (r *request) fillResponseHeader(d *router.Reservation, from http.Header) (clientHeader http.Header) {
	h := r.client.Header()
	h["Content-Type"] = nil // net/http would guess one if the replica names none
	httpheader.DeleteNamedByConnection(from)
	for name, value := range from {
		switch {
		case name == "Content-Length", name == upstream.RequestIDHeader, httpheader.IsHopByHop(name), r.isProxyHeader(name):
		case name == "Endpoint-Load-Metrics": // not for clients
		case strings.HasPrefix(name, "Access-Control-"): // this proxy decides which pages may read it
		case name == "Vary":
			addReplicaVary(h, value)
		default:
			h[name] = value
		}
	}
	if !r.caller.mayShowRoute(r.proxy, r.settings) {
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
	if r.prefillBackend != "" {
		h[prefillBackendHeader] = []string{r.prefillBackend}
	}
	if r.named.name != nil {
		h[modelHeader], h[modelNameHeader] = []string{r.named.model()}, []string{r.named.name.Name}
	}
	r.history.addQueueTimeHeader(h)
	return h
}

// addQueueTimeHeader adds how long the request was queued.
func (h *history) addQueueTimeHeader(header http.Header) {
	if waited := h.waited.Total(); waited > 0 {
		header[queueTimeHeader] = []string{strconv.FormatInt(waited.Milliseconds(), 10)}
	}
}

// Values of X-Warmroute-Reason in responses of the proxy's own.
const (
	reasonRefused = "refused" // no backend was asked
	reasonQueued  = "queued"  // none was, after a wait
	reasonFailed  = "failed"  // at least one was, without a response for the client
)

// addErrorRouteHeaders adds the route to a response of the proxy's own. It names no backend.
func (r *request) addErrorRouteHeaders() {
	if !r.caller.mayShowRoute(r.proxy, r.settings) {
		return
	}
	h, reason := r.client.Header(), reasonRefused
	switch {
	case r.history.sent > 0:
		reason = reasonFailed
		h["X-Warmroute-Attempts"] = []string{strconv.Itoa(r.history.sent)}
	case r.history.waited.Total() > 0:
		reason = reasonQueued
	}
	h["X-Warmroute-Reason"] = []string{reason}
	r.history.addQueueTimeHeader(h)
}

// isProxyHeader reports whether a response header is set by this proxy alone. A replica may be another proxy of this kind, whose
// route and rates are not for the client.
func (c *caller) isProxyHeader(name string) bool {
	return strings.HasPrefix(name, "X-Warmroute-") || c.account != nil && strings.HasPrefix(name, "X-Ratelimit-")
}

// requestIDOrNew returns the client's own id if it is short and plain enough for headers and logs, else a new one.
func requestIDOrNew(h http.Header) string {
	id := httpheader.First(h, upstream.RequestIDHeader)
	if upstream.IsPlainID(id) && !admit.IDContainsSecret(h, id) {
		return id
	}
	made := append(make([]byte, 0, 35), "wr-"...)
	for range 2 {
		made = hex.AppendEncode(made, binary.BigEndian.AppendUint64(make([]byte, 0, 8), rand.Uint64()))
	}
	return string(made)
}

// preflightMaxAge is how long a browser may keep the response to a preflight. Chrome keeps none longer.
const preflightMaxAge = 2 * time.Hour

// newCORS returns the handler of cross-origin requests for the origins, or nil if there are none. It allows
// the methods that vLLM allows, so that a page can read why one of them is a 405.
func newCORS(origins []string) *cors.Cors {
	if len(origins) == 0 {
		return nil
	}
	exposed := append([]string{
		upstream.RequestIDHeader, "Retry-After", queueTimeHeader, modelHeader, modelNameHeader,
		"X-Ratelimit-Limit-Requests", "X-Ratelimit-Remaining-Requests", "X-Ratelimit-Reset-Requests",
		"X-Ratelimit-Limit-Tokens", "X-Ratelimit-Remaining-Tokens", "X-Ratelimit-Reset-Tokens",
	}, routeHeaders[:]...)
	return cors.New(cors.Options{
		AllowedOrigins: origins,
		AllowedMethods: []string{http.MethodDelete, http.MethodGet, http.MethodHead, http.MethodPatch, http.MethodPost, http.MethodPut},
		AllowedHeaders: []string{"*"},
		ExposedHeaders: exposed,
		MaxAge:         int(preflightMaxAge.Seconds()),
	})
}

// isPreflight reports whether a browser asks whether a page may send a request.
func isPreflight(r *http.Request) bool {
	return r.Method == http.MethodOptions && httpheader.First(r.Header, "Access-Control-Request-Method") != ""
}

// addReplicaVary adds a replica's Vary to that of this proxy. It leaves out Origin, which replicas do not see.
func addReplicaVary(h http.Header, from []string) {
	names := h["Vary"]
	for name := range httpheader.Members(from) {
		if !strings.EqualFold(name, "Origin") {
			names = append(names[:len(names):len(names)], name)
		}
	}
	if len(names) > 0 {
		h["Vary"] = names
	}
}
