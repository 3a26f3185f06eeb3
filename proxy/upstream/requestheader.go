package upstream

import (
	"net/http"
	"strings"

	"warmroute/backends/vllm"
	"warmroute/proxy/httpheader"
)

// PriorityHeader is the priority in the queue of this proxy, lower first.
const PriorityHeader = "X-Warmroute-Priority"

// TTFTHeader is the target for the time to first token of a request in milliseconds, as llm-d's router reads it.
const TTFTHeader = "X-Llm-D-Slo-Ttft-Ms"

// enginePriorityHeader is the priority in vLLM's own queue, lower first. It takes precedence over that in the body.
const enginePriorityHeader = "X-Vllm-Priority"

// isStrippedRequestHeader reports whether a request header is not forwarded: it is the client's business with this proxy, or
// would let it control the inside of the replica.
func isStrippedRequestHeader(name string) bool {
	switch name {
	case "Authorization", "X-Api-Key", // the client's key; the backend's is set instead
		"Api-Key", "X-Goog-Api-Key", // of other SDKs
		"Cookie",                                                                    // of this host
		"Origin", "Access-Control-Request-Method", "Access-Control-Request-Headers", // cross-origin requests are decided here
		vllm.RankHeader,                // would bypass the routing
		enginePriorityHeader,           // would overtake others in the engine's queue
		"Endpoint-Load-Metrics-Format", // asks for the load of the replica
		"Content-Length",               // the transport frames the body
		"Expect",                       // done when the body was read
		PriorityHeader, TTFTHeader:     // of the queue of this proxy
		return true
	}
	return false
}

// IdentityEncoding is the encoding to accept, since the relay reads responses. Never modified.
var IdentityEncoding = []string{"identity"}

// RewriteHeader turns the client's header into that for replicas, except for what differs between attempts.
func RewriteHeader(h http.Header) {
	httpheader.DeleteNamedByConnection(h)
	for name := range h {
		if httpheader.IsHopByHop(name) || isStrippedRequestHeader(name) {
			delete(h, name)
		}
	}
	h["Accept-Encoding"] = IdentityEncoding
}

// MaxRequestIDBytes bounds the id of a request.
const MaxRequestIDBytes = 128

// IsPlainID reports whether an id is short and plain enough for headers and logs.
func IsPlainID(id string) bool {
	const plain = "-_.:0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	return id != "" && len(id) <= MaxRequestIDBytes && strings.Trim(id, plain) == ""
}

// SessionHeader names the session of a request to vLLM, which only repeats it in KV events.
const SessionHeader = "X-Session-Id"
