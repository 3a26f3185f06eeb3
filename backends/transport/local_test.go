package transport

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
)

func TestIsLocal(t *testing.T) {
	for _, c := range []struct {
		addresses string
		want      bool
	}{
		{"127.0.0.1 127.9.9.9 ::1 ::ffff:127.0.0.1 0.0.0.0 :: 169.254.169.254 ::ffff:169.254.169.254 fe80::1 fe80::1%lo 224.0.0.1 ff02::1", true},
		{"10.0.0.1 192.168.1.1 172.16.0.1 203.0.113.7 128.0.0.1 ::ffff:10.0.0.1 fd00::7 2001:db8::1", false},
	} {
		for _, address := range strings.Fields(c.addresses) {
			a := netip.MustParseAddr(address)
			if IsLocal(a) != c.want {
				t.Errorf("%s: got %v", address, !c.want)
			}
			if err := RefuseLocal("tcp", netip.AddrPortFrom(a, 80).String(), nil); (err != nil) != c.want {
				t.Errorf("connection to %s: got %v", address, err)
			}
		}
	}
}

func TestRefuseLocal(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "localhost"} {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		_, port, _ := net.SplitHostPort(ln.Addr().String())
		o := Options{Addr: net.JoinHostPort(host, port)}
		served := replicaOn(t, ln, "http", o, func(s *session) { s.request(); s.say("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") })
		resp, err := send(failsafe(t), served, "")
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		o.URL, o.RefuseLocal = served.options.URL, true
		if _, err := send(failsafe(t), New(o), ""); !errors.As(err, new(*ConnectError)) || !errors.Is(err, errLocalAddress) {
			t.Errorf("%s: got %v", host, err)
		}
	}
}
