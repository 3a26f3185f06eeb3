// Package httpheader reads headers of HTTP messages.
package httpheader

import (
	"iter"
	"net/http"
	"net/textproto"
	"strings"
)

// First is h.Get of a canonical name.
func First(h http.Header, canonicalName string) string {
	if values := h[canonicalName]; len(values) > 0 {
		return values[0]
	}
	return ""
}

// IsHopByHop reports whether a header belongs to one connection and is never forwarded. A switch costs less than looking up all
// of these in a header of few lines.
func IsHopByHop(name string) bool {
	switch name {
	case "Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization",
		"Te", "Trailer", "Transfer-Encoding", "Upgrade":
		return true
	}
	return false
}

// Members returns the members of a header that is a list, in all of its lines.
func Members(lines []string) iter.Seq[string] {
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

// DeleteNamedByConnection deletes the headers that Connection names.
func DeleteNamedByConnection(h http.Header) {
	for name := range Members(h["Connection"]) {
		delete(h, textproto.CanonicalMIMEHeaderKey(name))
	}
}

// IsEventStream reports whether a response is a stream of events by its own header, whatever the request asked for.
func IsEventStream(h http.Header) bool { return HasContentType(h, "text/event-stream") }

// HasContentType reports whether a header names a media type, whatever its parameters.
func HasContentType(h http.Header, mediaType string) bool {
	kind, _, _ := strings.Cut(First(h, "Content-Type"), ";")
	return strings.EqualFold(strings.TrimSpace(kind), mediaType)
}

// IsFramed reports whether the end of a response can be told from the end of its connection.
func IsFramed(resp *http.Response) bool {
	return resp.ContentLength >= 0 || len(resp.TransferEncoding) > 0
}

// IsEncoded reports whether a body is compressed or otherwise encoded. Other values, such as utf-8 and none, are mistakes of
// clients and intermediaries, whose bodies are plain.
func IsEncoded(h http.Header) bool {
	for coding := range Members(h["Content-Encoding"]) {
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
