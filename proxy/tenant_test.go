package proxy

import (
	"strings"
	"testing"

	"warmroute/proxy/apikey"
)

func TestTheKeysClassIsTheFloorOfAPriority(t *testing.T) {
	f := serve(t, nil, &replica{})
	priority := func(class int, header ...string) int {
		t.Helper()
		f.proxy.keys.Replace([]apikey.Key{keyOf("a", func(k *apikey.Key) { k.Priority = class })})
		r, fault := f.understood("/v1/chat/completions", askWhole, append(bearer("a"), header...)...)
		if fault != nil {
			t.Fatal(fault.message)
		}
		return r.Priority
	}
	for _, c := range []struct {
		class  int
		header []string
		want   int
	}{
		{0, nil, 0}, {50, nil, 50}, {-10, nil, -10}, {50, []string{priorityHeader, "0"}, 50}, {50, []string{priorityHeader, "60"}, 60}, {-10, []string{priorityHeader, "0"}, 0},
	} {
		if got := priority(c.class, c.header...); got != c.want {
			t.Errorf("class %d, header %q: %d, want %d", c.class, c.header, got, c.want)
		}
	}
}

func TestTheTenantIsTheKeysName(t *testing.T) {
	f := serve(t, withKeys(keyOf("a", func(k *apikey.Key) { k.Hashes = append(k.Hashes, apikey.HashOf(secretOf("a's next"))) }), keyOf("b", nil)), &replica{})
	tenant := func(name string) uint64 {
		t.Helper()
		r, fault := f.understood("/v1/chat/completions", askWhole, bearer(name)...)
		if fault != nil {
			t.Fatal(fault.message)
		}
		return r.Tenant
	}
	if a := tenant("a"); a == 0 || a != tenant("a's next") || a == tenant("b") {
		t.Error("keys do not tell tenants apart, or the two secrets of one do")
	}
}

func TestIsolatedTenantsDoNotMatchEachOthersPrompts(t *testing.T) {
	for _, isolate := range []bool{false, true} {
		f := serve(t, func(o *Options) {
			withKeys(keyOf("a", func(k *apikey.Key) { k.RouteHeaders = true }), keyOf("b", func(k *apikey.Key) { k.RouteHeaders = true }))(o)
			o.IsolateTenants = isolate
		}, &replica{script: always(streamed(role, hello, world, stop, doneLine))})
		matched := func(name string) bool {
			t.Helper()
			resp, _ := f.post("/v1/chat/completions", askStream, bearer(name)...)
			return !strings.HasPrefix(resp.Header.Get("X-Warmroute-Prefix-Match"), "0/")
		}
		if matched("a") || !matched("a") {
			t.Error("a tenant's own prompts do not match")
		}
		if matched("b") == isolate {
			t.Errorf("isolated: %v, and another's prompt matches: %v", isolate, !isolate)
		}
		if blocks, want := f.blocks()[0], map[bool]int{false: questionBlocks, true: 2 * questionBlocks}[isolate]; blocks != want {
			t.Errorf("%d blocks, want %d", blocks, want)
		}
	}
}
