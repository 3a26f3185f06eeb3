package fleet

import (
	"net/netip"
	"slices"
	"testing"

	"warmroute/config"
	"warmroute/fleet/discovery"
)

func TestWantedBackends(t *testing.T) {
	addresses := func(list ...string) (parsed []netip.AddrPort) {
		for _, a := range list {
			parsed = append(parsed, netip.MustParseAddrPort(a))
		}
		return parsed
	}
	vllm, service := discovery.Name{Host: "vllm", Port: "8000"}, discovery.Name{Host: "_vllm._tcp.example", SRV: true}
	four := discovery.State{Several: true, Current: addresses("10.0.0.1:8000", "10.0.0.2:8000")}
	for _, c := range []struct {
		name    string
		members []config.Backend
		states  map[discovery.Name]discovery.State
		keeps   string
		want    []string // name, URL, address of connections, device and role if any
	}{
		{"addresses", []config.Backend{{Name: "a", URL: "http://10.0.0.1:1"}, {Name: "b", URL: "http://10.0.0.2:1"}}, nil, "",
			[]string{"a http://10.0.0.1:1 ", "b http://10.0.0.2:1 "}},
		{"a name with one address", []config.Backend{{Name: "vllm:8000", URL: "http://vllm:8000"}},
			map[discovery.Name]discovery.State{vllm: {Current: addresses("10.0.0.1:8000")}}, "", []string{"vllm:8000 http://vllm:8000 "}},
		{"a name with two", []config.Backend{{Name: "vllm:8000", URL: "http://vllm:8000"}}, map[discovery.Name]discovery.State{vllm: four}, "",
			[]string{"vllm:8000@10.0.0.1 http://vllm:8000 10.0.0.1:8000", "vllm:8000@10.0.0.2 http://vllm:8000 10.0.0.2:8000"}},
		{"device and role of a name", []config.Backend{{Name: "vllm:8000", URL: "http://vllm:8000", Device: "gpu0", Role: "prefill"}},
			map[discovery.Name]discovery.State{vllm: four}, "",
			[]string{"vllm:8000@10.0.0.1 http://vllm:8000 10.0.0.1:8000 gpu0 prefill",
				"vllm:8000@10.0.0.2 http://vllm:8000 10.0.0.2:8000 gpu0 prefill"}},
		{"with lookups off", []config.Backend{{Name: "lb", URL: "http://vllm:8000", DNS: "off"}}, map[discovery.Name]discovery.State{vllm: four},
			"",
			[]string{"lb http://vllm:8000 "}},
		{"dns:// without an address", []config.Backend{{Name: "vllm:8000", URL: "dns://vllm:8000"}},
			map[discovery.Name]discovery.State{vllm: {Several: true}}, "", nil},
		{"SRV", []config.Backend{{Name: "gpu", URL: "dns://_vllm._tcp.example"}},
			map[discovery.Name]discovery.State{service: {Several: true, Current: addresses("10.0.0.1:8001", "[fd00::1]:8002")}}, "",
			[]string{"gpu@10.0.0.1:8001 http://_vllm._tcp.example 10.0.0.1:8001", "gpu@[fd00::1]:8002 http://_vllm._tcp.example [fd00::1]:8002"}},
		{"an address that is listed already", []config.Backend{{Name: "one", URL: "http://10.0.0.1:8000"},
			{Name: "vllm:8000", URL: "http://vllm:8000"}},
			map[discovery.Name]discovery.State{vllm: four}, "",
			[]string{"one http://10.0.0.1:8000 ", "vllm:8000@10.0.0.2 http://vllm:8000 10.0.0.2:8000"}},
		{"an empty name keeps what passes its checks", []config.Backend{{Name: "vllm:8000", URL: "http://vllm:8000"}},
			map[discovery.Name]discovery.State{vllm: {Several: true, Empty: true, Current: four.Current}}, "http://10.0.0.2:8000",
			[]string{"vllm:8000@10.0.0.2 http://vllm:8000 10.0.0.2:8000"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got []string
			for _, w := range wantedBackends(c.members, c.states, func(address string) bool { return address == c.keeps }) {
				one := w.Name + " " + w.URL + " " + w.addr
				if w.Device != "" {
					one += " " + w.Device + " " + w.Role
				}
				got = append(got, one)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}
