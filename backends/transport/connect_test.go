package transport

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"syscall"
	"testing"
)

func TestConnectError(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := ln.Addr().String()
	ln.Close()
	busy := replica(t, Options{MaxConns: 1}, func(s *session) { s.request(); s.say("HTTP/1.1 200 OK\r\n\r\n"); s.closed() })
	stream, err := send(failsafe(t), busy, "")
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Body.Close()
	untrusted := httptest.NewUnstartedServer(http.NotFoundHandler())
	untrusted.Config.ErrorLog = log.New(io.Discard, "", 0)
	untrusted.StartTLS()
	defer untrusted.Close()
	tlsURL, _ := url.Parse(untrusted.URL)

	for name, f := range map[string]struct {
		transport *Transport
		want      func(error) bool
	}{
		"refused": {New(Options{URL: &url.URL{Scheme: "http", Host: closed}}), func(err error) bool {
			_, ok := errors.AsType[*net.OpError](err)
			return ok
		}},
		"no free connection": {busy, func(err error) bool { return errors.Is(err, errMaxConns) }},
		"certificate": {New(Options{URL: tlsURL}), func(err error) bool {
			_, ok := errors.AsType[*tls.CertificateVerificationError](err)
			return ok
		}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := send(failsafe(t), f.transport, "hello")
			if refused := (*ConnectError)(nil); !errors.As(err, &refused) || refused.Addr == "" || !f.want(err) {
				t.Errorf("error %v", err)
			}
		})
	}
}

func TestConnectErrorText(t *testing.T) {
	refused := &net.OpError{Op: "dial", Net: "tcp", Addr: &net.TCPAddr{IP: net.IPv4(10, 0, 0, 5), Port: 8000},
		Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	for _, c := range []struct {
		addr string
		err  error
		want string
	}{
		{"10.0.0.5:8000", refused, "connect: connection refused"},
		{"vllm:8000", refused, "connect to 10.0.0.5:8000: connection refused"},
		{"10.0.0.5:8000", &net.OpError{Op: "dial", Net: "tcp", Addr: refused.Addr, Err: os.ErrDeadlineExceeded}, "connect: i/o timeout"},
		{"vllm:8000", &net.OpError{Op: "dial", Net: "tcp", Err: &net.DNSError{Err: "no such host", Name: "vllm"}},
			"connect: lookup vllm: no such host"},
		{"vllm:8000", &net.OpError{Op: "read", Net: "tcp", Addr: refused.Addr, Err: os.NewSyscallError("read", syscall.ECONNRESET)},
			"connect: read tcp 10.0.0.5:8000: read: connection reset by peer"},
		{"10.0.0.5:8000", errMaxConns, "connect: the limit of open connections is reached"},
	} {
		if got := (&ConnectError{c.addr, c.err}).Error(); got != c.want {
			t.Errorf("%s: %q, want %q", c.addr, got, c.want)
		}
	}
}

func TestTLSWithOwnCA(t *testing.T) {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Write(body)
	}))
	defer server.Close()
	u, _ := url.Parse(server.URL)
	transport := New(Options{URL: u, TLS: server.Client().Transport.(*http.Transport).TLSClientConfig})
	defer transport.CloseIdleConnections()
	for _, size := range []int{1, maxJoinedBytes, 32 << 10, 1 << 20} {
		sent := strings.Repeat("x", size)
		if _, body := sendBody(t, transport, sent); body != sent {
			t.Errorf("%d bytes came back of %d", len(body), size)
		}
	}
	idleConns(t, transport, 1)
}

// A response longer than it said, all in one record: what is too much stays inside
// the TLS layer, where neither the buffer nor the socket shows it.
func TestDropsTLSConnectionWithBytesLeft(t *testing.T) {
	ln, config := listenTLS(t)
	transport := replicaOn(t, ln, "https", Options{TLS: config}, func(s *session) {
		const size = maxJoinedBytes * 2 // so that it is read past the buffer
		for {
			if _, _, more := s.request(); !more {
				return
			}
			s.say(fmt.Sprintf("HTTP/1.1 200 OK\r\nX-Connection: %d\r\nContent-Length: %d\r\n\r\n", s.n, size))
			s.say(strings.Repeat("x", size) + "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison")
		}
	})
	for n := 1; n <= 2; n++ {
		resp, err := send(failsafe(t), transport, "hello")
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(bufio.NewReaderSize(resp.Body, 64<<10))
		resp.Body.Close()
		if len(body) != maxJoinedBytes*2 || err != nil || resp.Header.Get("X-Connection") != fmt.Sprint(n) {
			t.Errorf("response %d: %d bytes, error %v, header %v", n, len(body), err, resp.Header)
		}
	}
}

// listenTLS listens with a certificate that config trusts.
func listenTLS(t *testing.T) (net.Listener, *tls.Config) {
	server := httptest.NewUnstartedServer(nil)
	server.StartTLS()
	server.Close()
	server.TLS.DynamicRecordSizingDisabled = true // one write, one record
	return tls.NewListener(listenLocal(t), server.TLS), server.Client().Transport.(*http.Transport).TLSClientConfig
}

func TestIPv6(t *testing.T) {
	ln, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Fatal(err)
	}
	host := make(chan string, 1)
	transport := replicaOn(t, ln, "http", Options{}, func(s *session) {
		req, _, _ := s.request()
		host <- req.Host
		s.say(ok)
	})
	sendBody(t, transport, "hello")
	if got := <-host; got != ln.Addr().String() {
		t.Errorf("Host %q, want %q", got, ln.Addr())
	}
}

func TestAddresses(t *testing.T) {
	for in, want := range map[string][2]string{
		"http://a":                   {"a:80", "a"},
		"https://a":                  {"a:443", "a"},
		"http://a:8000/prefix":       {"a:8000", "a:8000"},
		"http://[::1]":               {"[::1]:80", "[::1]"},
		"http://[fe80::1%25eth0]:80": {"[fe80::1%eth0]:80", "[fe80::1]:80"},
	} {
		u, err := url.Parse(in)
		if err != nil {
			t.Fatal(err)
		}
		if transport := New(Options{URL: u}); transport.addr != want[0] || transport.host != want[1] {
			t.Errorf("%s: dials %s, says Host %s; want %v", in, transport.addr, transport.host, want)
		}
	}
}

func TestUnderHTTPClient(t *testing.T) {
	transport := replica(t, Options{}, func(s *session) {
		for {
			req, _, ok := s.request()
			switch {
			case !ok:
				return
			case req.URL.Path == "/moved":
				s.say("HTTP/1.1 302 Found\r\nLocation: /here\r\nContent-Length: 0\r\n\r\n")
			default:
				s.say(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(req.URL.Path), req.URL.Path))
			}
		}
	})
	client := &http.Client{Transport: transport}
	resp, err := client.Get("http://replica/moved")
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil || string(body) != "/here" || resp.Request == nil || resp.Request.URL.Path != "/here" {
		t.Errorf("body %q, error %v", body, err)
	}
	client.CloseIdleConnections()
	idleConns(t, transport, 0)
}
