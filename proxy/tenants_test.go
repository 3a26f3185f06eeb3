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
	"testing/synctest"
	"time"

	"warmroute/router"
)

func TestBodyShare(t *testing.T) {
	var all tenants
	limits := bodyLimits{1000, 8000}
	one, two, three := tenant{key: "one"}, tenant{key: "two"}, tenant{key: "three"}
	f := func(of tenant, n int64, want error) {
		t.Helper()
		if err := all.reserveBodyBytes(of, n, limits); err != want {
			t.Errorf("%d bytes for %s: %v, want %v", n, of.key, err, want)
		}
	}
	f(one, 8000, nil) // nobody else needs it
	f(one, 1, errBodyMemory)
	all.releaseBodyBytes(one, 4001)
	f(two, 1, nil)
	f(one, 1, errBodyShare)
	f(two, 1999, nil)
	f(two, 1, errBodyShare)
	f(three, 2000, nil)
	f(tenant{}, 2, errBodyMemory)
	all.releaseBodyBytes(one, 2499)
	f(one, 501, errBodyShare)
	f(one, 500, nil)
	all.releaseBodyBytes(one, 2000)
	all.releaseBodyBytes(two, 2000)
	all.releaseBodyBytes(three, 2000)
	if len(all.use) != 0 || all.bodyBytesInUse() != 0 {
		t.Errorf("%v, %d bytes in use", all.use, all.bodyBytesInUse())
	}
	limits.each = 7000 // one body is always allowed
	f(one, 7000, nil)
	f(one, 1, errBodyShare) // the others were refused a moment ago
	all.releaseBodyBytes(one, 7000)
}

func TestUploadShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = 16
		var all tenants
		inFlight := int64(0)
		one, two := tenant{key: "one"}, tenant{key: "two"}
		f := func(of tenant, n int, want error) {
			t.Helper()
			for range n {
				if err := all.beginUpload(of, inFlight+1, limit); err != want {
					t.Fatalf("%s with %d in flight: %v, want %v", of.key, inFlight, err, want)
				} else if err == nil {
					inFlight++
				}
			}
		}
		end := func(of tenant, n int) {
			for range n {
				all.endUpload(of)
				all.endRequest(of)
				inFlight--
			}
		}
		f(one, limit, nil) // alone
		all.recordRefusal(two)
		end(one, limit-4)
		f(one, 4, nil) // half of the limit is free
		f(one, 1, errUploadShare)
		end(one, 4)
		f(two, 1, nil)
		time.Sleep(refusalWindow)
		f(one, 3, nil)
		f(one, 1, errUploadShare) // the other one has a request
		f(two, 3, nil)
		for range 4 {
			all.endUpload(two) // and is complete
		}
		f(two, 4, nil)
		f(two, 1, errUploadShare)
		for range 4 {
			all.endUpload(two)
			all.endRequest(two)
		}
		for range 4 {
			all.endRequest(two)
		}
		inFlight -= 8
		f(one, 1, nil)
		f(one, 1, errUploadShare) // the other one was refused
		time.Sleep(refusalWindow)
		f(one, limit-8, nil)
		end(one, limit)
		if len(all.use) != 0 {
			t.Errorf("in use: %v", all.use)
		}
	})
}

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
			if held := f.proxy.tenants.bodyBytesInUse(); held > 512<<10 {
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
