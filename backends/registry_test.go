package backends

import (
	"net/url"
	"strings"
	"sync"
	"testing"
)

// fleet makes a registry whose backends list the given models; "id=root" has a
// root, "id<parent" is an adapter.
func fleet(t *testing.T, lists ...string) *Registry {
	t.Helper()
	var all []*Backend
	for i, list := range lists {
		b := &Backend{Name: string(rune('a' + i))}
		b.SetModels(cards(list))
		all = append(all, b)
	}
	r, err := NewRegistry(all)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func cards(list string) []Model {
	var models []Model
	for _, word := range strings.Fields(list) {
		m := Model{Card: []byte(word)}
		if id, parent, ok := strings.Cut(word, "<"); ok {
			m.ID, m.Parent, m.Root = id, parent, "/adapters/"+id
		} else {
			m.ID, m.Root, _ = strings.Cut(word, "=")
		}
		models = append(models, m)
	}
	return models
}

func TestRegistryRefusesAListAndNamesEveryFault(t *testing.T) {
	backend := func(name, raw string) *Backend {
		u, err := url.Parse(raw)
		if err != nil {
			t.Fatal(err)
		}
		return New(name, u, "", nil)
	}
	if _, err := NewRegistry(nil); err == nil {
		t.Error("an empty list was accepted")
	}
	_, err := NewRegistry([]*Backend{
		backend("one", "http://a:1"), backend("one", "http://b:1"), backend("two", "http://a:1"),
		backend("three", "http://c"), backend("four", "http://c:80"), backend("five", "http://c/prefix"),
	})
	if err == nil {
		t.Fatal("duplicates were accepted")
	}
	for _, want := range []string{`two backends are named "one"`, `"one" and "two" are the same replica`, `"three" and "four" are the same replica`} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q says nothing of %q", err, want)
		}
	}
	if strings.Contains(err.Error(), "five") {
		t.Errorf("another path is another replica: %v", err)
	}
}

func TestRegistryGivesSlotsInOrder(t *testing.T) {
	r := fleet(t, "m", "m", "m")
	for i, b := range r.All() {
		if b.Slot != i {
			t.Errorf("backend %d has slot %d", i, b.Slot)
		}
	}
}

func TestCatalogIsTheUnionInRegistryOrder(t *testing.T) {
	c := fleet(t, "base=/x fr<base", "base=/y de<base", "").Catalog()
	var ids []string
	for _, m := range c.Models {
		ids = append(ids, string(m.Card))
	}
	if got := strings.Join(ids, " "); got != "base=/x fr<base de<base" {
		t.Errorf("models are %q: the first replica's card has to win", got)
	}
	for id, want := range map[string]string{"base": "ab", "fr": "a", "de": "b"} {
		e, ok := c.Find(id)
		got := ""
		for _, b := range e.Backends {
			got += b.Name
		}
		if !ok || got != want || e.Adapter != (id != "base") {
			t.Errorf("%s: listed by %q, adapter %v; want %q", id, got, e.Adapter, want)
		}
	}
	if _, ok := c.Find("nothing"); ok {
		t.Error("an unknown model was found")
	}
}

func TestCatalogKeepsTheModelsOfABackendThatIsDown(t *testing.T) {
	r := fleet(t, "m")
	r.All()[0].SetState(Down)
	if _, ok := r.Catalog().Find("m"); !ok {
		t.Error("the model is gone")
	}
}

func TestCatalogCountsABackendOnceThatListsAnIDTwice(t *testing.T) {
	e, _ := fleet(t, "m m").Catalog().Find("m")
	if len(e.Backends) != 1 {
		t.Errorf("%d backends", len(e.Backends))
	}
}

func TestOnlyBase(t *testing.T) {
	for _, c := range []struct{ a, b, want string }{
		{"m=/m", "m=/m", "m"},
		{"m=/m alias=/m fr<m", "m=/m", "m"}, // aliases of one model
		{"m=/m", "alias=/m", "m"},           // also across replicas
		{"m=/m", "m=/elsewhere/m", "m"},     // one ID from two paths
		{"m", "m", "m"},
		{"m=/m", "other=/other", ""},
		{"m", "other", ""}, // no root: nothing says that they are one
		{"fr<m", "", ""},
		{"", "", ""},
	} {
		got, ok := fleet(t, c.a, c.b).Catalog().OnlyBase()
		if got != c.want || ok != (c.want != "") {
			t.Errorf("%q and %q: %q, %v; want %q", c.a, c.b, got, ok, c.want)
		}
	}
}

func TestEngineModelIsSharedByAliasesAndNotByAdapters(t *testing.T) {
	c := fleet(t, "m=/m alias=/m fr<m plain").Catalog()
	for id, want := range map[string]string{"m": "/m", "alias": "/m", "fr": "fr", "plain": "plain", "unknown": "unknown"} {
		if got := c.EngineModel(id); got != want {
			t.Errorf("%s: %q, want %q", id, got, want)
		}
	}
}

func TestHowLongAModelsPromptsMayBe(t *testing.T) {
	for _, c := range []struct {
		name string
		each []int // max_model_len by replica
		want int
	}{
		{"one", []int{10}, 10},
		{"the most of several", []int{10, 30, 20}, 30},
		{"one does not say", []int{10, 0, 20}, 0},
		{"the first does not say", []int{0, 10}, 0},
	} {
		var all []*Backend
		for i, n := range c.each {
			b := &Backend{Name: string(rune('a' + i))}
			b.SetModels([]Model{{ID: "m", MaxTokens: n}, {ID: "fr", Parent: "m"}})
			all = append(all, b)
		}
		r, err := NewRegistry(all)
		if err != nil {
			t.Fatal(err)
		}
		for _, id := range []string{"m", "fr"} {
			if n := r.Catalog().MaxTokens(id); n != c.want {
				t.Errorf("%s: %q takes %d tokens, want %d", c.name, id, n, c.want)
			}
		}
		if n := r.Catalog().MaxTokens("unknown"); n != 0 {
			t.Errorf("an unknown model takes %d tokens", n)
		}
	}
}

func TestCatalogIsReadWithoutAllocation(t *testing.T) {
	r := fleet(t, "m=/m", "m=/m")
	if n := testing.AllocsPerRun(100, func() {
		if e, ok := r.Catalog().Find("m"); !ok || len(e.Backends) != 2 || r.Catalog().EngineModel("m") != "/m" {
			t.Fatal("not found")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestCatalogHasEveryChangeOfReplicasThatChangeTogether(t *testing.T) {
	r := fleet(t, "", "", "", "")
	var all sync.WaitGroup
	for _, b := range r.All() {
		all.Go(func() {
			for range 100 {
				b.SetModels(nil)
				b.SetModels(cards("m" + b.Name))
				if _, ok := r.Catalog().Find("m" + b.Name); !ok {
					t.Errorf("a change of %s is missing", b.Name)
				}
			}
		})
	}
	all.Wait()
	if n := len(r.Catalog().Models); n != 4 {
		t.Errorf("%d models", n)
	}
}
