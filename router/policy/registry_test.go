package policy

import (
	"slices"
	"strings"
	"testing"
)

func testRegistry() Registry {
	return Registry{{Name: "second"}, {Name: "first", Settings: []string{"slo.ttft"}}}
}

func TestRegistryLookup(t *testing.T) {
	r := testRegistry()
	if _, err := r.Lookup("best"); err == nil ||
		!strings.HasSuffix(err.Error(), `unknown policy "best"; choose one of first, prefix, second`) {
		t.Errorf("error %v does not name the policies", err)
	}
	if got := r.Names(); !slices.Equal(got, []string{"prefix", "second", "first"}) {
		t.Errorf("names %q", got)
	}
	for _, name := range r.Names() {
		if d, err := r.Lookup(name); err != nil || d.Name != name {
			t.Errorf("%s: %q, %v", name, d.Name, err)
		}
	}
	if d, err := Registry(nil).Lookup("prefix"); err != nil || !d.UsesQueue {
		t.Errorf("prefix in an empty registry: %+v, %v", d, err)
	}
}

func TestRegistryLookupWithQueue(t *testing.T) {
	r := testRegistry()
	d, err := r.Lookup("first" + WithQueue)
	if err != nil || !d.UsesQueue || d.Name != "first+queue" || !d.Reads("slo.ttft") {
		t.Errorf("%+v, %v", d, err)
	}
	if d, _ := r.Lookup("first"); d.UsesQueue {
		t.Error("first uses the queue")
	}
}
