package config

import "testing"

func TestDNSName(t *testing.T) {
	for _, c := range []struct {
		url, dns string
		want     DNSName // zero: none
		several  bool
		parsed   string
	}{
		{"http://vllm:8000", "auto", DNSName{Host: "vllm", Port: "8000"}, false, "http://vllm:8000"},
		{"HTTP://VLLM.example.:8000/a", "auto", DNSName{Host: "vllm.example", Port: "8000"}, false, "http://vllm.example.:8000/a"},
		{"http://vllm", "auto", DNSName{Host: "vllm", Port: "80"}, false, "http://vllm"},
		{"https://vllm", "auto", DNSName{Host: "vllm", Port: "443"}, false, "https://vllm"},
		{"http://localhost:8000", "auto", DNSName{Host: "localhost", Port: "8000"}, false, "http://localhost:8000"},
		{"DNS://vllm:8000/", "auto", DNSName{Host: "vllm", Port: "8000"}, true, "http://vllm:8000"},
		{"dns://_http._tcp.vllm.example.", "auto", DNSName{Host: "_http._tcp.vllm.example", SRV: true}, true, "http://_http._tcp.vllm.example."},
		{"http://vllm:8000", "off", DNSName{}, false, "http://vllm:8000"},
		{"http://10.0.0.5:8000", "auto", DNSName{}, false, "http://10.0.0.5:8000"},
		{"http://[fd00::1]:8000", "auto", DNSName{}, false, "http://[fd00::1]:8000"},
		{"http://[fe80::1%25eth0]:8000", "auto", DNSName{}, false, "http://[fe80::1%25eth0]:8000"},
	} {
		b := Backend{URL: c.url, DNS: c.dns}
		got, ok := b.DNSName()
		if got != c.want || ok != (c.want != DNSName{}) || b.HasDNSScheme() != c.several {
			t.Errorf("%s, dns: %s: got %+v, %v, several %v, want %+v", c.url, c.dns, got, ok, b.HasDNSScheme(), c.want)
		}
		if u, err := b.ParseURL(); err != nil || u.String() != c.parsed {
			t.Errorf("%s: got %v, %v, want %s", c.url, u, err, c.parsed)
		}
	}
}

func TestDefaultNamesWithDNS(t *testing.T) {
	c := mustLoad(t, "", "dns://vllm:8000", "dns://_http._tcp.vllm.example", "http://vllm:8001")
	for i, want := range []string{"vllm:8000", "_http._tcp.vllm.example", "vllm:8001"} {
		if got := c.Backends[i].Name; got != want {
			t.Errorf("%s: got %s, want %s", c.Backends[i].URL, got, want)
		}
	}
}
