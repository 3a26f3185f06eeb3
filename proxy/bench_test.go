package proxy

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"testing"
)

// BenchmarkRelay is a whole request: client, proxy and replica in one process,
// the two ends as cheap as they can be, and beside it the same through net/http's
// reverse proxy, which neither reads nor routes.
func BenchmarkRelay(b *testing.B) {
	for _, size := range []int{1 << 10, 32 << 10} {
		const frame = `{"model":"m","messages":[{"role":"user","content":""}]}`
		body := strings.Replace(frame, `"content":"`, `"content":"`+strings.Repeat("word ", (size-len(frame))/5), 1)
		answer := answered("200 OK", whole)
		b.Run(fmt.Sprintf("%dKB/warmroute", size>>10), func(b *testing.B) { benchWhole(b, body, answer, true) })
		b.Run(fmt.Sprintf("%dKB/httputil", size>>10), func(b *testing.B) { benchWhole(b, body, answer, false) })
	}
}

// BenchmarkRelayChunk is one event of a stream, from the replica's write to the
// client's read.
func BenchmarkRelayChunk(b *testing.B) {
	b.Run("warmroute", func(b *testing.B) { benchChunk(b, true) })
	b.Run("httputil", func(b *testing.B) { benchChunk(b, false) })
}

// skipRequest reads one request without looking at it, and allocates nothing.
func skipRequest(br *bufio.Reader, bodyLen int) bool {
	for {
		line, err := br.ReadSlice('\n')
		if err != nil {
			return false
		}
		if len(line) == 2 {
			_, err = br.Discard(bodyLen)
			return err == nil
		}
	}
}

// front listens before the script, through the Proxy or net/http's.
func front(b *testing.B, script func(*session), ours bool) net.Conn {
	r := &replica{script: script}
	var addr string
	if ours {
		f := serve(b, func(o *Options) { o.Log = slog.New(slog.DiscardHandler) }, r)
		addr = f.addr
	} else {
		r.start(b)
		b.Cleanup(r.stop)
		to := &url.URL{Scheme: "http", Host: r.listener.Addr().String()}
		transport := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 16}
		b.Cleanup(transport.CloseIdleConnections)
		server := httptest.NewServer(&httputil.ReverseProxy{
			Transport: transport,
			Rewrite:   func(p *httputil.ProxyRequest) { p.SetURL(to) },
		})
		b.Cleanup(server.Close)
		addr = server.Listener.Addr().String()
	}
	c, err := net.Dial("tcp", addr)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { c.Close() })
	return c
}

func requestBytes(body string) []byte {
	return fmt.Appendf(nil, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAccept: application/json\r\n"+
		"User-Agent: OpenAI/Python\r\nAuthorization: Bearer x\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
}

func benchWhole(b *testing.B, body, answer string, ours bool) {
	says := []byte(answer)
	c := front(b, func(s *session) {
		for skipRequest(s.br, len(body)) {
			s.Write(says)
		}
	}, ours)
	ask, br := requestBytes(body), bufio.NewReader(c)
	b.ReportAllocs()
	for b.Loop() {
		c.Write(ask)
		if !skipRequest(br, len(whole)) {
			b.Fatal("no answer")
		}
	}
}

func benchChunk(b *testing.B, ours bool) {
	next := make(chan bool)
	one := []byte(chunk(hello))
	c := front(b, func(s *session) {
		skipRequest(s.br, len(askStream))
		s.say(sseHead, chunk(role))
		for <-next {
			s.Write(one)
		}
		s.say(chunk(doneLine), lastChunk)
		s.closed()
	}, ours)
	c.Write(requestBytes(askStream))
	br := bufio.NewReader(c)
	skipRequest(br, len(chunk(role)))
	got := make([]byte, len(one))
	b.ReportAllocs()
	for b.Loop() {
		next <- true
		if _, err := io.ReadFull(br, got); err != nil || !bytes.Equal(got, one) {
			b.Fatalf("got %q, %v", got, err)
		}
	}
	close(next)
	io.CopyN(io.Discard, br, int64(len(chunk(doneLine)+lastChunk)))
}
