package proxy

import (
	"iter"
	"net/http"
	"net/textproto"
	"strings"
)

// firstHeaderValue is h.Get of a canonical name.
func firstHeaderValue(h http.Header, canonicalName string) string {
	if values := h[canonicalName]; len(values) > 0 {
		return values[0]
	}
	return ""
}

// isHopByHop reports whether a header belongs to one connection and is never forwarded. A switch costs less than looking up all
// of these in a header of few lines.
func isHopByHop(name string) bool {
	switch name {
	case "Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization",
		"Te", "Trailer", "Transfer-Encoding", "Upgrade":
		return true
	}
	return false
}

// listMembers returns the members of a header that is a list, in all of its lines.
func listMembers(lines []string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, line := range lines {
			for member := range strings.SplitSeq(line, ",") {
				if member = textproto.TrimString(member); member != "" && !yield(member) {
					return
				}
			}
		}
	}
}

// deleteNamedByConnection deletes the headers that Connection names.
func deleteNamedByConnection(h http.Header) {
	for name := range listMembers(h["Connection"]) {
		delete(h, textproto.CanonicalMIMEHeaderKey(name))
	}
}

// isEventStream goes by what the response says, never by what the request asked for.
func isEventStream(h http.Header) bool { return hasContentType(h, "text/event-stream") }

func hasContentType(h http.Header, mediaType string) bool {
	kind, _, _ := strings.Cut(firstHeaderValue(h, "Content-Type"), ";")
	return strings.EqualFold(strings.TrimSpace(kind), mediaType)
}

// isFramed reports whether the end of a response can be told from the end of its connection.
func isFramed(resp *http.Response) bool {
	return resp.ContentLength >= 0 || len(resp.TransferEncoding) > 0
}

// isEncoded reports whether a body is compressed or otherwise encoded. Other values, such as utf-8 and none, are mistakes of
// clients and intermediaries, whose bodies are plain.
func isEncoded(h http.Header) bool {
	for coding := range listMembers(h["Content-Encoding"]) {
		name, _, _ := strings.Cut(coding, ";") // some add a parameter
		switch strings.ToLower(strings.TrimSpace(name)) {
		// Those registered with IANA but for identity, and others in use.
		case "gzip", "x-gzip", "deflate", "br", "zstd", "compress", "x-compress", "dcb", "dcz", "pack200-gzip", "exi", "aes128gcm",
			"bzip2", "x-bzip2", "lz4", "lzma", "snappy", "xz":
			return true
		}
	}
	return false
}
