package transport

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"testing"
)

// BenchmarkRoundTrip sends a body and reads a short response, over a kept-alive
// connection to a server that does as little as it can, so that the difference
// between the two transports shows.
func BenchmarkRoundTrip(b *testing.B) {
	for _, size := range []int{1 << 10, 32 << 10} {
		ours := replica(b, Options{}, func(s *session) { swallow(s, size) })
		for name, transport := range map[string]http.RoundTripper{
			"warmroute": ours,
			"net/http":  &http.Transport{DisableCompression: true},
		} {
			b.Run(fmt.Sprintf("%dKB/%s", size>>10, name), func(b *testing.B) {
				roundTrips(b, transport, "http://"+ours.addr+"/v1/chat/completions", bytes.Repeat([]byte("x"), size))
			})
		}
	}
}

func roundTrips(b *testing.B, transport http.RoundTripper, url string, body []byte) {
	b.ReportAllocs()
	for b.Loop() {
		req, err := http.NewRequestWithContext(b.Context(), http.MethodPost, url, bytes.NewReader(body))
		if err != nil {
			b.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Authorization", "Bearer none")
		req.Header.Set("User-Agent", "bench")
		resp, err := transport.RoundTrip(req)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			b.Fatal(err)
		}
		resp.Body.Close()
	}
	transport.(interface{ CloseIdleConnections() }).CloseIdleConnections()
}

// swallow responds whenever a request with a body of size bytes has come.
func swallow(s *session, size int) {
	const response = "HTTP/1.1 200 OK\r\ndate: Sat, 01 Nov 2025 00:00:00 GMT\r\nserver: uvicorn\r\n" +
		"content-length: 2\r\ncontent-type: application/json\r\n\r\n{}"
	for {
		for {
			line, err := s.br.ReadSlice('\n')
			if err != nil {
				return
			}
			if len(line) == len("\r\n") {
				break
			}
		}
		if _, err := s.br.Discard(size); err != nil {
			return
		}
		io.WriteString(s.Conn, response)
	}
}
