package transport

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestResponseHeader(t *testing.T) {
	transport := replica(t, Options{}, always("HTTP/1.1 201 Made It\r\ncontent-type:text/plain\r\nX-A: 1\r\nx-a:\t2 \r\nX-Empty:\r\n"+
		"X-Utf8: ü\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"))
	resp, _ := sendBody(t, transport, "hello")
	want := http.Header{"Content-Type": {"text/plain"}, "X-A": {"1", "2"}, "X-Empty": {""}, "X-Utf8": {"ü"}}
	if len(resp.Header) != len(want) {
		t.Errorf("header %q", resp.Header)
	}
	for name, values := range want {
		if got := resp.Header[name]; strings.Join(got, "|") != strings.Join(values, "|") {
			t.Errorf("%s: %q, want %q", name, got, values)
		}
	}
	if resp.Status != "201 Made It" || resp.Proto != "HTTP/1.1" || !resp.ProtoAtLeast(1, 1) ||
		len(resp.TransferEncoding) != 1 || resp.Request == nil {
		t.Errorf("%+v", resp)
	}
}

// A replica that closes every connection as soon as it is idle: requests meet the
// close at every moment, before they are written, while they are and after. Each that
// does fails with a StaleError, and works on a connection of its own.
func TestIdleConnectionsClosedByReplica(t *testing.T) {
	for name, size := range map[string]int{"small": 100, "large": 1 << 20} {
		for end, how := range map[string]aftermath{"closed": fin, "reset": reset} {
			overBoth(t, name+", "+end, func(t *testing.T, ln net.Listener, scheme string, o Options) {
				o.StaleTimeout = time.Minute
				transport := replicaOn(t, ln, scheme, o, func(s *session) {
					_, body, whole := s.request()
					if !whole {
						return
					}
					s.say(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n%08d", len(body)))
					s.finish(how)
				})
				body, want := strings.Repeat("x", size), fmt.Sprintf("%08d", size)
				var clients sync.WaitGroup
				for range 4 {
					clients.Go(func() {
						for range 10 {
							got, err := sendOrRetry(t, transport, body)
							if got != want || err != nil {
								t.Errorf("response %q, error %v, want %q", got, err, want)
							}
						}
					})
				}
				clients.Wait()
			})
		}
	}
}

// sendOrRetry sends body, and once more where a stale connection ended that.
func sendOrRetry(t *testing.T, transport *Transport, body string) (string, error) {
	req, err := http.NewRequestWithContext(failsafe(t), "POST", "http://replica/", strings.NewReader(body))
	if err != nil {
		return "", err
	}
	resp, err := transport.RoundTrip(req)
	if stale := (*StaleError)(nil); errors.As(err, &stale) {
		req.Body, _ = req.GetBody()
		req.Close = true
		resp, err = transport.RoundTrip(req)
	}
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	return string(got), err
}

// Each response is followed by another, and the other is never taken for the next one.
func TestCoalescedResponses(t *testing.T) {
	overBoth(t, "", func(t *testing.T, ln net.Listener, scheme string, o Options) {
		transport := replicaOn(t, ln, scheme, o, func(s *session) {
			for {
				_, body, ok := s.request()
				if !ok {
					return
				}
				one := fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
				s.say(one + strings.Replace(one, body, strings.Repeat("?", len(body)), 1))
			}
		})
		var clients sync.WaitGroup
		for client := range 4 {
			clients.Go(func() {
				for n := range 25 {
					body := fmt.Sprintf("client %d, request %d", client, n)
					if _, got := sendBody(t, transport, body); got != body {
						t.Errorf("%s got the response %q", body, got)
					}
				}
			})
		}
		clients.Wait()
	})
}

// HTTP proxies of the environment are for the world outside; a replica is a neighbour.
func TestProxyEnvironmentIsIgnored(t *testing.T) {
	var asked atomic.Int32
	proxy := listenLocal(t)
	var running sync.WaitGroup
	running.Go(func() {
		for {
			c, err := proxy.Accept()
			if err != nil {
				return
			}
			asked.Add(1)
			c.Close()
		}
	})
	defer running.Wait()
	defer proxy.Close()
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"} {
		t.Setenv(name, "http://"+proxy.Addr().String())
	}
	overBoth(t, "", func(t *testing.T, ln net.Listener, scheme string, o Options) {
		_, port, _ := net.SplitHostPort(ln.Addr().String())
		dns := nameserver(t, func() []string { return []string{"127.0.0.1"} })
		// A name, since addresses of this machine are never proxied. The certificate
		// that tests have is for example.com.
		o.URL = &url.URL{Scheme: scheme, Host: net.JoinHostPort("example.com", port)}
		transport := replicaOn(t, ln, scheme, o, always(ok))
		transport.dialer.Resolver = dns
		sendBody(t, transport, "hello")
	})
	if n := asked.Load(); n > 0 {
		t.Errorf("the proxy was asked %d times", n)
	}
}

// A name is looked up for each connection, so that a replica may move; each of its
// addresses is tried, so that a dead one does not matter; and one that resolves to
// nothing is a replica that cannot be connected to.
func TestHeaderNames(t *testing.T) {
	var mu sync.Mutex
	var addresses []string
	resolveTo := func(a ...string) {
		mu.Lock()
		defer mu.Unlock()
		addresses = a
	}
	dns := nameserver(t, func() []string {
		mu.Lock()
		defer mu.Unlock()
		return addresses
	})
	ln := listenLocal(t)
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	second, err := net.Listen("tcp", "127.0.0.2:"+port)
	if err != nil {
		t.Fatal(err)
	}
	transport := replicaOn(t, ln, "http", Options{URL: &url.URL{Scheme: "http", Host: "replica.test:" + port}},
		once("HTTP/1.1 200 OK\r\n\r\n", "first"))
	transport.dialer.Resolver = dns
	moved := replicaOn(t, second, "http", Options{}, once("HTTP/1.1 200 OK\r\n\r\n", "second"))
	defer moved.CloseIdleConnections()

	for _, f := range []struct {
		addresses []string
		want      string
	}{
		{[]string{"127.0.0.1"}, "first"},
		{[]string{"127.0.0.2"}, "second"}, // it moved
		{[]string{"127.0.0.3", "127.0.0.2"}, "second"},
		{[]string{"127.0.0.1"}, "first"},
		{nil, ""},
		{[]string{"127.0.0.3"}, ""},
		{[]string{"127.0.0.1"}, "first"},
	} {
		resolveTo(f.addresses...)
		if f.want != "" {
			if _, got := sendBody(t, transport, "hello"); got != f.want {
				t.Errorf("%v: response of %q, want %q", f.addresses, got, f.want)
			}
			continue
		}
		_, err := send(failsafe(t), transport, "hello")
		if refused := (*ConnectError)(nil); !errors.As(err, &refused) {
			t.Errorf("%v: error %v, want a ConnectError", f.addresses, err)
		}
	}
	idleConns(t, transport, 0)
}

// nameserver answers every query for an IPv4 address with the configured one, and
// every other with nothing.
func nameserver(t *testing.T, addresses func() []string) *net.Resolver {
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	running.Go(func() {
		query := make([]byte, 512)
		for {
			n, from, err := conn.ReadFrom(query)
			if err != nil {
				return
			}
			conn.WriteTo(nameReply(query[:n], addresses()), from)
		}
	})
	t.Cleanup(func() {
		conn.Close()
		running.Wait()
	})
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "udp", conn.LocalAddr().String())
	}}
}

// nameReply makes a reply of RFC 1035 out of a query with one question.
func nameReply(query []byte, addresses []string) []byte {
	const header = 12
	end := header
	for query[end] != 0 { // labels of the name
		end += int(query[end]) + 1
	}
	end += 5 // the last label, type and class
	if query[end-3] != 1 {
		addresses = nil // not a question for an IPv4 address
	}
	reply := append([]byte(nil), query[:end]...)
	copy(reply[2:], []byte{0x81, 0x80, 0, 1, 0, byte(len(addresses)), 0, 0, 0, 0}) // an answer, without error
	for _, a := range addresses {
		reply = append(reply, 0xc0, header, 0, 1, 0, 1) // the question's name, type and class
		reply = binary.BigEndian.AppendUint32(reply, 0) // seconds to live
		reply = append(append(reply, 0, 4), net.ParseIP(a).To4()...)
	}
	return reply
}

// A response without end, of a byte in each kilobyte, can be left at any time.
func TestCloseEndlessChunks(t *testing.T) {
	overBoth(t, "", func(t *testing.T, ln net.Listener, scheme string, o Options) {
		transport := replicaOn(t, ln, scheme, o, func(s *session) {
			s.request()
			io.WriteString(s.Conn, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
			for {
				if _, err := io.WriteString(s.Conn, "1;"+strings.Repeat("e", 1000)+"\r\nx\r\n"); err != nil {
					return
				}
			}
		})
		req, _ := http.NewRequestWithContext(failsafe(t), "GET", "/", nil)
		resp, err := transport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(resp.Body, make([]byte, 10_000)); err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		idleConns(t, transport, 0)
	})
}
