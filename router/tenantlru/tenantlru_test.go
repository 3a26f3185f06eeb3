package tenantlru

import (
	"math/rand/v2"
	"slices"
	"testing"
)

func keys[V any](c *LRU[V]) (all []Key) {
	for key := range c.All() {
		all = append(all, key)
	}
	return all
}

func TestLRU(t *testing.T) {
	var removed []int
	c := New(2, func(_ Key, v int) { removed = append(removed, v) })
	c.Add(Key{1, 1}, 11)
	c.Add(Key{2, 1}, 21)
	c.Add(Key{1, 1}, 12)
	if got := keys(c); !slices.Equal(got, []Key{{2, 1}, {1, 1}}) || len(removed) != 0 {
		t.Errorf("%v after one was replaced, and %v were removed", got, removed)
	}
	c.Add(Key{3, 1}, 31) // in place of that of tenant 2
	c.Remove(Key{3, 1})
	c.Remove(Key{9, 9})
	if v, found := c.Find(Key{1, 1}); v != 12 || !found || c.Len() != 1 || !slices.Equal(removed, []int{21, 31}) {
		t.Errorf("found %v, %v of %d; %v were removed", v, found, c.Len(), removed)
	}
	if _, found := c.Find(Key{2, 1}); found {
		t.Error("a value is found that was displaced")
	}
}

// TestTenantsKeepTheirs has two tenants with few values, and one that adds more than there are places.
func TestTenantsKeepTheirs(t *testing.T) {
	const size, few = 1600, 50
	c := New[bool](size, nil)
	for key := range uint64(few) {
		c.Add(Key{1, key}, true)
		c.Add(Key{2, key}, true)
	}
	for key := range uint64(3 * size) {
		c.Add(Key{3, key}, true)
	}
	for key := range uint64(few) {
		for tenant := uint64(1); tenant <= 2; tenant++ {
			if _, found := c.Find(Key{tenant, key}); !found {
				t.Fatalf("value %d of tenant %d was displaced", key, tenant)
			}
		}
	}
	if c.Len() != size || c.tenants[3].count != size-2*few {
		t.Errorf("%d values, %d of the third tenant", c.Len(), c.tenants[3].count)
	}
	for key := range uint64(size) { // another one has a sixteenth by others' places, and then by its own
		c.Add(Key{4, key}, true)
	}
	if n := c.tenants[4].count; n != size/16 || c.Len() != size {
		t.Errorf("a new tenant has %d of %d places", n, c.Len())
	}
}

func TestLRUStaysConsistent(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	removed := 0
	c := New(1000, func(Key, int) { removed++ })
	added := map[Key]bool{}
	for range 50_000 {
		key := Key{uint64(random.ExpFloat64() * 10), random.Uint64N(300)}
		if random.IntN(4) == 0 {
			c.Remove(key)
		} else {
			c.Add(key, 1)
			added[key] = true
		}
	}
	ofTenants := 0
	for tenant, own := range c.tenants {
		if own.count == 0 {
			t.Errorf("tenant %d has an empty list", tenant)
		}
		ofTenants += own.count
	}
	if n := c.Len(); n > 1000 || n != len(c.byKey) || n != ofTenants || removed == 0 || len(c.entries) > 1001 {
		t.Errorf("%d values by key, %d in their order, %d of tenants, %d removed, memory for %d", len(c.byKey), n, ofTenants, removed,
			len(c.entries))
	}
	for key := range c.All() {
		c.Remove(key)
	}
	if c.Len() != 0 || len(c.tenants) != 0 {
		t.Errorf("%d values and %d tenants are left", c.Len(), len(c.tenants))
	}
}
