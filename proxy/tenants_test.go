package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/router"
)

// dialFrom opens a connection to the proxy from another loopback address.
func (f *fleet) dialFrom(address string) *net.TCPConn {
	f.t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
	c, err := d.Dial("tcp", f.addr)
	if err != nil {
		f.t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(failsafe))
	f.t.Cleanup(func() { c.Close() })
	return c.(*net.TCPConn)
}

// sender is how a tenant reaches the proxy: from an address, with header lines.
type sender struct{ address, header string }

// twoTenants are pairs of senders that count as two tenants.
var twoTenants = map[string][2]sender{
	"addresses": {{address: "127.0.0.1"}, {address: "127.0.0.2"}},
	"keys": {
		{"127.0.0.1", "Authorization: Bearer " + secretOf("a") + "\r\n"}, {"127.0.0.1", "Authorization: Bearer " + secretOf("b") + "\r\n"},
	},
	"behind one balancer": {
		{"127.0.0.3", "X-Forwarded-For: 198.51.100.1\r\n"}, {"127.0.0.3", "X-Forwarded-For: 198.51.100.1, 192.0.2.1\r\n"},
	},
}

// serveTenants starts a proxy to which the two senders of a pair in twoTenants are different.
func serveTenants(t *testing.T, pair string, hold router.QueueSettings, change func(*Options), replicas ...*replica) *fleet {
	return serveWithQueue(t, hold, func(o *Options) {
		o.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("127.0.0.3/32")}
		if pair == "keys" {
			withKeys(keyOf("a", nil), keyOf("b", nil))(o)
		}
		if change != nil {
			change(o)
		}
	}, replicas...)
}

// begin sends the header of a request, and the beginning of a body that is longer.
func (f *fleet) begin(s sender, length int, beginning string) *net.TCPConn {
	conn := f.dialFrom(s.address)
	fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s", s.header, length, beginning)
	return conn
}

// responseStatus returns the status of a response, 0 if the connection ends without one.
func responseStatus(conn net.Conn) int {
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return 0
	}
	if resp.StatusCode == http.StatusServiceUnavailable && resp.Header.Get("Retry-After") == "" {
		return -1
	}
	return resp.StatusCode
}

// countStatus waits until n of the connections have a response with a status, and returns the others.
func countStatus(t *testing.T, conns []*net.TCPConn, status, n int) {
	t.Helper()
	statuses := make(chan int, len(conns))
	for _, conn := range conns {
		go func() { statuses <- responseStatus(conn) }()
	}
	for range n {
		if got := <-statuses; got != status {
			t.Fatalf("status %d, want %d", got, status)
		}
	}
}

func TestTricklingClientsLeaveMemoryToOthers(t *testing.T) {
	for pair, senders := range twoTenants {
		t.Run(pair, func(t *testing.T) {
			gate := newGated()
			f := serveTenants(t, pair, router.QueueSettings{}, func(o *Options) { o.BodyBytes, o.BodyBytesTotal = 64<<10, 1<<20 }, &gate.replica)
			slow, other := senders[0], senders[1]
			inFlight := f.begin(other, len(askWhole), askWhole)
			eventually(t, "the other one's request is at the replica", func() bool { return f.inFlight() == 1 })
			var conns []*net.TCPConn
			for range 16 {
				conns = append(conns, f.begin(slow, 64<<10, strings.Repeat(" ", 60<<10)))
			}
			countStatus(t, conns, http.StatusServiceUnavailable, 16-7)
			if held := f.proxy.tenants.BodyBytesInUse(); held > 512<<10 {
				t.Errorf("one client has %d bytes of 1 MiB", held)
			}
			next := f.begin(other, len(askWhole), askWhole)
			for range cap(gate.next) {
				gate.next <- struct{}{}
			}
			for _, conn := range []net.Conn{inFlight, next} {
				if status := responseStatus(conn); status != http.StatusOK {
					t.Errorf("another client got %d", status)
				}
			}
		})
	}
}

func TestHeadersWithoutBodiesLeavePlacesToOthers(t *testing.T) {
	for pair, senders := range twoTenants {
		t.Run(pair, func(t *testing.T) {
			gate := newGated()
			f := serveTenants(t, pair, router.QueueSettings{}, func(o *Options) { o.Limits.InFlight = 16 }, &gate.replica)
			slow, other := senders[0], senders[1]
			inFlight := []net.Conn{f.begin(other, len(askWhole), askWhole)}
			eventually(t, "the other one's request is at the replica", func() bool { return f.inFlight() == 1 })
			var conns []*net.TCPConn
			for range 32 {
				conns = append(conns, f.begin(slow, len(askWhole), ""))
			}
			countStatus(t, conns, http.StatusServiceUnavailable, 32-7)
			for range 8 {
				inFlight = append(inFlight, f.begin(other, len(askWhole), askWhole))
			}
			eventually(t, "all of the other one's are at the replica", func() bool { return f.inFlight() == 9 })
			for range cap(gate.next) {
				gate.next <- struct{}{}
			}
			for _, conn := range inFlight {
				if status := responseStatus(conn); status != http.StatusOK {
					t.Errorf("the other one got %d", status)
				}
			}
		})
	}
}

// One tenant has all places while it is alone, also with incomplete bodies. Once another one was refused, it gets a share.
func TestLoneTenantHasAllPlaces(t *testing.T) {
	for pair, senders := range twoTenants {
		t.Run(pair, func(t *testing.T) {
			r := &replica{script: always(answered("200 OK", whole))}
			f := serveTenants(t, pair, router.QueueSettings{}, func(o *Options) { o.Limits.InFlight = 16 }, r)
			slow, other := senders[0], senders[1]
			var conns []*net.TCPConn
			for range 16 {
				conns = append(conns, f.begin(slow, len(askWhole), ""))
			}
			eventually(t, "all places are taken", func() bool { return f.proxy.inFlight.Load() == 16 })
			if status := responseStatus(f.begin(other, len(askWhole), askWhole)); status != http.StatusServiceUnavailable {
				t.Errorf("without a place: status %d", status)
			}
			conns[0].Close()
			eventually(t, "a place is free", func() bool { return f.proxy.inFlight.Load() == 15 })
			if status := responseStatus(f.begin(slow, len(askWhole), "")); status != http.StatusServiceUnavailable {
				t.Errorf("beyond its share, the one that has them got %d", status)
			}
			if status := responseStatus(f.begin(other, len(askWhole), askWhole)); status != http.StatusOK {
				t.Errorf("with a free place, the other one got %d", status)
			}
			for _, conn := range conns[1:] {
				io.WriteString(conn, askWhole)
				if status := responseStatus(conn); status != http.StatusOK {
					t.Errorf("a body that came later got %d", status)
				}
			}
		})
	}
}

// What fills the queue of one tenant leaves room to another one, and no request that waits is refused later.
func TestFullQueueLeavesRoomToOthers(t *testing.T) {
	const bound = 8
	for pair, senders := range twoTenants {
		t.Run(pair, func(t *testing.T) {
			gate := newGated()
			f := serveTenants(t, pair, queueOf(bound), nil, &gate.replica)
			limited := *f.backends[0].Options()
			limited.MaxInFlight = 1
			f.backends[0].SetOptions(limited)
			accepted := []net.Conn{f.begin(senders[0], len(askWhole), askWhole)}
			eventually(t, "the first is at the replica", func() bool { return f.inFlight() == 1 })
			for i, room := range []int{bound, bound / 2} {
				for range room {
					accepted = append(accepted, f.begin(senders[i], len(askWhole), askWhole))
					f.awaitQueued(len(accepted) - 1)
				}
				if status := responseStatus(f.begin(senders[i], len(askWhole), askWhole)); status != http.StatusTooManyRequests {
					t.Errorf("sender %d, beyond its room: status %d", i, status)
				}
			}
			if status := responseStatus(f.begin(senders[0], len(askWhole), askWhole)); status != http.StatusTooManyRequests {
				t.Errorf("the one that fills the queue got %d", status)
			}
			for range accepted {
				gate.next <- struct{}{}
			}
			for i, conn := range accepted {
				if status := responseStatus(conn); status != http.StatusOK {
					t.Errorf("request %d, which waited, got %d", i, status)
				}
			}
		})
	}
}

// Without keys a client gains nothing by values of Authorization that it makes up: they divide the share of its address.
func TestMadeUpKeysShareAnAddress(t *testing.T) {
	const flood = 24
	body := func(name string) string {
		return `{"messages":[{"role":"user","content":"` + name + strings.Repeat(" and what then", 8000) + `"}]}` // seconds of prefill
	}
	senders := twoTenants["behind one balancer"]
	for name, c := range map[string]struct {
		flood func(i int) sender
		other sender
	}{
		"another address": {func(i int) sender {
			return sender{senders[0].address, senders[0].header + fmt.Sprintf("Authorization: Bearer made-up-%d\r\n", i)}
		}, sender{senders[1].address, senders[1].header + "Authorization: Bearer other\r\n"}},
		"another value of the address": {func(int) sender {
			return sender{"127.0.0.1", "Authorization: Bearer one\r\n"}
		}, sender{"127.0.0.1", "Authorization: Bearer other\r\n"}},
	} {
		t.Run(name, func(t *testing.T) {
			gate := newGated()
			hold := queueOf(100)
			hold.Bytes = 1 << 30
			f := serveTenants(t, "", hold, nil, &gate.replica)
			limited := *f.backends[0].Options()
			limited.MaxInFlight = 1
			f.backends[0].SetOptions(limited)
			var conns []net.Conn
			for i := range flood + 1 {
				text := body(fmt.Sprint("flood ", i))
				conns = append(conns, f.begin(c.flood(i), len(text), text))
				if i == 0 {
					eventually(t, "the first is at the replica", func() bool { return f.inFlight() == 1 })
				} else {
					f.awaitQueued(i)
				}
			}
			text := body("other")
			conns = append(conns, f.begin(c.other, len(text), text))
			f.awaitQueued(flood + 1)
			for range conns {
				gate.next <- struct{}{}
			}
			for _, conn := range conns {
				if status := responseStatus(conn); status != http.StatusOK {
					t.Errorf("status %d", status)
				}
			}
			at := slices.IndexFunc(gate.requests(), func(r seen) bool { return strings.Contains(r.body, `"other`) })
			if at > 5 {
				t.Errorf("%d of %d requests were served before that of %s", at, flood+1, name)
			}
		})
	}
}
