package discovery

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
	"go.uber.org/goleak"

	"warmroute/recovery"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// startDNS runs a DNS server, over UDP and TCP, until the test ends.
func startDNS(t *testing.T, handle dns.HandlerFunc) (address string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	packets, err := net.ListenPacket("udp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []*dns.Server{{Listener: listener, Handler: handle}, {PacketConn: packets, Handler: handle}} {
		started := make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		stopped := make(chan error, 1)
		go func() { stopped <- s.ActivateAndServe() }()
		<-started
		t.Cleanup(func() {
			if err := errors.Join(s.Shutdown(), <-stopped); err != nil {
				t.Error(err)
			}
		})
	}
	return listener.Addr().String()
}

// zone is a handler that responds with the records of its names, in the form of zone files without names. A name
// whose record is a code such as SERVFAIL gets this response, and one with none an empty one.
type zone map[string][]string

func (z zone) ServeDNS(w dns.ResponseWriter, query *dns.Msg) {
	response := new(dns.Msg).SetReply(query)
	response.RecursionAvailable = true
	records, found := z[query.Question[0].Name]
	if !found {
		response.Rcode = dns.RcodeNameError
	}
	for _, record := range records {
		kind, code, _ := strings.Cut(record, " ")
		if rcode, ok := dns.StringToRcode[code]; ok {
			if kind == dns.TypeToString[query.Question[0].Qtype] {
				response.Rcode = rcode
			}
			continue
		}
		rr, err := dns.NewRR(query.Question[0].Name + " 600 IN " + record)
		if err != nil {
			panic(err)
		}
		if rr.Header().Rrtype == query.Question[0].Qtype || rr.Header().Rrtype == dns.TypeCNAME {
			response.Answer = append(response.Answer, rr)
		}
		if alias, ok := rr.(*dns.CNAME); ok {
			for _, record := range z[alias.Target] {
				if rr, err = dns.NewRR(alias.Target + " 600 IN " + record); err != nil {
					panic(err)
				}
				response.Answer = append(response.Answer, rr)
			}
		}
	}
	size := dns.MinMsgSize
	if o := query.IsEdns0(); o != nil {
		size = int(o.UDPSize())
	}
	if w.LocalAddr().Network() == "tcp" {
		size = dns.MaxMsgSize
	}
	response.Truncate(size)
	_ = w.WriteMsg(response)
}

func TestLookup(t *testing.T) {
	z := zone{
		"one.test.":      {"A 10.0.0.1"},
		"several.test.":  {"A 10.0.0.9", "A 10.0.0.10", "A 10.0.0.9"},
		"both.test.":     {"AAAA fd00::1", "A 10.0.0.1"},
		"ipv6.test.":     {"AAAA fd00::2", "AAAA fd00::1"},
		"alias.test.":    {"CNAME several.test."},
		"no-data.test.":  {"TXT text"},
		"null.test.":     {"A 0.0.0.0"},
		"failing.test.":  {"A SERVFAIL", "AAAA fd00::1"},
		"refusing.test.": {"A REFUSED", "AAAA fd00::1"},
		"half.test.":     {"AAAA SERVFAIL"},
		"half-ok.test.":  {"A 10.0.0.1", "AAAA SERVFAIL"},
		"_http.srv.test.": {"SRV 1 0 8001 several.test.", "SRV 0 0 8000 one.test.", "SRV 0 0 8000 ipv6.test.", "SRV 0 0 8000 absent.test.",
			"SRV 0 0 0 one.test."},
		"off.test.":     {"SRV 0 0 0 ."},
		"stale.test.":   {"SRV 0 0 1 absent.test."},
		"broken.test.":  {"SRV 0 0 1 one.test.", "SRV 0 0 1 failing.test."},
		"refused.test.": {"SRV REFUSED"},
	}
	for i := range 20 { // targets that have 500 addresses each
		z["too-many.test."] = append(z["too-many.test."], fmt.Sprintf("SRV 0 0 %d many.test.", i+1))
	}
	var many []string
	for i := range 500 {
		address := fmt.Sprintf("10.1.%d.%d", i/250, i%250)
		z["many.test."] = append(z["many.test."], "A "+address)
		z["pods.test."] = append(z["pods.test."], fmt.Sprintf("SRV 0 0 8000 pod-%d.test.", i))
		z[fmt.Sprintf("pod-%d.test.", i)] = []string{"A " + address}
		many = append(many, address+":8000")
	}
	r := NewResolver(startDNS(t, z.ServeDNS), nil)
	for host, want := range map[string]string{
		"one.test":        "10.0.0.1:8000",
		"several.test":    "10.0.0.9:8000 10.0.0.10:8000",
		"both.test":       "10.0.0.1:8000",
		"ipv6.test":       "[fd00::1]:8000 [fd00::2]:8000",
		"alias.test":      "10.0.0.9:8000 10.0.0.10:8000",
		"half-ok.test":    "10.0.0.1:8000",
		"many.test":       strings.Join(many, " "),
		"localhost":       "127.0.0.1:8000", // of /etc/hosts
		"absent.test":     "not found",
		"no-data.test":    "not found",
		"null.test":       "not found",
		"failing.test":    "server misbehaving",
		"refusing.test":   "server misbehaving",
		"half.test":       "server misbehaving",
		"_http.srv.test":  "10.0.0.1:8000 10.0.0.9:8001 10.0.0.10:8001 [fd00::1]:8000 [fd00::2]:8000",
		"pods.test":       strings.Join(many, " "),
		"off.test":        "not found",
		"stale.test":      "not found",
		"absent.srv.test": "not found",
		"broken.test":     "server misbehaving",
		"refused.test":    "server misbehaving",
		"too-many.test":   "more than 8192 addresses",
	} {
		n := Name{Host: host, Port: "8000"}
		if records := z[host+"."]; strings.Contains(host, ".srv.") || records != nil && strings.HasPrefix(records[0], "SRV") {
			n = Name{Host: host, SRV: true}
		}
		got, err := r.Lookup(t.Context(), n)
		if err != nil {
			if errors.Is(err, ErrNotFound) != (want == "not found") || want != "not found" && !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %v, want %s", n, err, want)
			}
			if e := (*net.DNSError)(nil); errors.As(err, &e) && e.Server != "" && e.Server != r.server {
				t.Errorf("%s: the error %v names another server than %s", n, err, r.server)
			}
			continue
		}
		slices.SortFunc(got, func(a, b netip.AddrPort) int { return a.Addr().Compare(b.Addr()) })
		if text := strings.Trim(fmt.Sprint(got), "[]"); text != strings.Trim(want, "[]") {
			t.Errorf("%s: got %s, want %s", n, text, want)
		}
	}
}

// TestLookupOfInvalidResponses checks that none of them counts as the absence of a name.
func TestLookupOfInvalidResponses(t *testing.T) {
	absent := func(query *dns.Msg) *dns.Msg { return new(dns.Msg).SetRcode(query, dns.RcodeNameError) }
	for name, handle := range map[string]dns.HandlerFunc{
		"none":    func(dns.ResponseWriter, *dns.Msg) {},
		"garbage": func(w dns.ResponseWriter, _ *dns.Msg) { _, _ = w.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n")) },
		"empty":   func(w dns.ResponseWriter, _ *dns.Msg) { _, _ = w.Write(nil) },
		"with another id": func(w dns.ResponseWriter, query *dns.Msg) {
			response := absent(query)
			response.Id++
			_ = w.WriteMsg(response)
		},
		"to another question": func(w dns.ResponseWriter, query *dns.Msg) {
			response := absent(query)
			response.Question[0].Name = "other.test."
			_ = w.WriteMsg(response)
		},
		"cut": func(w dns.ResponseWriter, query *dns.Msg) {
			response := new(dns.Msg).SetReply(query)
			response.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: query.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET},
				A: net.IPv4(10, 0, 0, 1)}}
			packed, err := response.Pack()
			if err != nil {
				panic(err)
			}
			_, _ = w.Write(packed[:len(packed)-2])
		},
		"garbage after truncation": func(w dns.ResponseWriter, query *dns.Msg) {
			if w.LocalAddr().Network() == "tcp" {
				_, _ = w.Write([]byte("garbage"))
				return
			}
			response := absent(query)
			response.Rcode, response.Truncated = dns.RcodeSuccess, true
			_ = w.WriteMsg(response)
		},
		"referral": func(w dns.ResponseWriter, query *dns.Msg) { _ = w.WriteMsg(new(dns.Msg).SetReply(query)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := NewResolver(startDNS(t, handle), nil)
			for _, n := range []Name{{Host: "vllm.test", Port: "8000"}, {Host: "vllm.test", SRV: true}} {
				ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
				got, err := r.Lookup(ctx, n)
				cancel()
				if err == nil || errors.Is(err, ErrNotFound) {
					t.Errorf("%s: got %v, %v", n, got, err)
				}
			}
		})
	}
	t.Run("no server", func(t *testing.T) {
		t.Parallel()
		_, err := NewResolver("127.0.0.1:1", nil).Lookup(t.Context(), Name{Host: "vllm.test", Port: "8000"})
		if err == nil || errors.Is(err, ErrNotFound) {
			t.Errorf("got %v", err)
		}
	})
}

// TestRefusalIsTemporary checks what makes Go's resolver stop instead of trying the next search domain.
func TestRefusalIsTemporary(t *testing.T) {
	r := NewResolver(startDNS(t, zone{"vllm.test.": {"A REFUSED", "SRV REFUSED"}}.ServeDNS), nil)
	for _, n := range []Name{{Host: "vllm.test", Port: "8000"}, {Host: "vllm.test", SRV: true}} {
		_, err := r.Lookup(t.Context(), n)
		if e := (*net.DNSError)(nil); !errors.As(err, &e) || !e.IsTemporary {
			t.Errorf("%s: got %v", n, err)
		}
	}
}

// panickyContext panics where package net looks for a trace of a lookup, once it is armed.
type panickyContext struct {
	context.Context
	armed *atomic.Bool
}

func (c panickyContext) Value(key any) any {
	if c.armed.Load() && fmt.Sprintf("%T", key) == "nettrace.TraceKey" {
		panic("broken")
	}
	return c.Context.Value(key)
}

// A panic in the lookup of a target of an SRV record is reported, and makes the lookup of the name fail.
func TestPanicInTargetLookup(t *testing.T) {
	var armed atomic.Bool
	var reports atomic.Int32
	report := func(place recovery.Place, cause any, _ []byte) {
		if reports.Add(1); place != recovery.Discovery || cause != "broken" {
			t.Errorf("reported %v, %v", place, cause)
		}
	}
	z := zone{"vllm.test.": {"SRV 0 0 8000 pod.test."}, "pod.test.": {"A 10.0.0.1"}}
	r := NewResolver(startDNS(t, func(w dns.ResponseWriter, query *dns.Msg) {
		armed.Store(query.Question[0].Qtype == dns.TypeSRV) // the lookups of targets follow
		z.ServeDNS(w, query)
	}), report)
	_, err := r.Lookup(panickyContext{t.Context(), &armed}, Name{Host: "vllm.test.", SRV: true}) // the dot: without search domains
	if err == nil || errors.Is(err, ErrNotFound) || reports.Load() != 1 {
		t.Errorf("got %v, %d reports", err, reports.Load())
	}
}

func TestConnectionsUseDNSServer(t *testing.T) {
	replica, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer replica.Close()
	_, port, _ := net.SplitHostPort(replica.Addr().String())
	r := NewResolver(startDNS(t, zone{"vllm.test.": {"A 127.0.0.1"}}.ServeDNS), nil)
	c, err := (&net.Dialer{Resolver: r.NetResolver()}).DialContext(t.Context(), "tcp", "vllm.test:"+port)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if NewResolver("", nil).NetResolver() != nil {
		t.Error("without a server, connections do not use Go's default resolver")
	}
}

// TestRotatingSubsets looks up a name of eight addresses of which each answer has three others.
func TestRotatingSubsets(t *testing.T) {
	var lookups atomic.Int32
	r := NewResolver(startDNS(t, func(w dns.ResponseWriter, query *dns.Msg) {
		z := zone{}
		if query.Question[0].Qtype == dns.TypeA {
			n := lookups.Add(1)
			for i := range 3 {
				name := query.Question[0].Name
				z[name] = append(z[name], fmt.Sprintf("A 10.0.0.%d", (int(n)*3+i)%8))
			}
		}
		z.ServeDNS(w, query)
	}), nil)
	a := NewAddresses(256, false)
	for i := range 20 {
		answer, err := r.Lookup(t.Context(), Name{Host: "vllm.test", Port: "8000"})
		a.Record(answer, err, time.Now())
		if s := a.State(); i >= 2 && len(s.Current) != 8 || !s.Several {
			t.Errorf("after %d lookups: got %+v", i+1, s)
		}
	}
}
