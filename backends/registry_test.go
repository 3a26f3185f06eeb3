package backends

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
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

func TestRegistryConflicts(t *testing.T) {
	backend := func(name, raw string) *Backend {
		u, err := url.Parse(raw)
		if err != nil {
			t.Fatal(err)
		}
		return New(name, u, "", nil)
	}
	if r, err := NewRegistry(nil); err != nil || len(r.All()) != 0 || len(r.Catalog().Models) != 0 {
		t.Errorf("an empty list: %v", err)
	}
	_, err := NewRegistry([]*Backend{
		backend("one", "http://a:1"), backend("one", "http://b:1"), backend("two", "http://a:1"),
		backend("three", "http://c"), backend("four", "http://c:80"), backend("five", "http://c/prefix"),
	})
	if err == nil {
		t.Fatal("duplicates were accepted")
	}
	for _, want := range []string{`two backends are named "one"`, `"one" and "two" are the same replica`,
		`"three" and "four" are the same replica`} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q says nothing of %q", err, want)
		}
	}
	if strings.Contains(err.Error(), "five") {
		t.Errorf("another path is another replica: %v", err)
	}
}

func TestRegistrySlots(t *testing.T) {
	r := fleet(t, "m", "m", "m")
	for i, b := range r.All() {
		if b.Slot != i {
			t.Errorf("backend %d has slot %d", i, b.Slot)
		}
	}
}

func TestCatalogOrder(t *testing.T) {
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

func TestCatalogKeepsModelsOfDownBackend(t *testing.T) {
	r := fleet(t, "m")
	r.All()[0].SetState(Down)
	if _, ok := r.Catalog().Find("m"); !ok {
		t.Error("the model is gone")
	}
}

func TestCatalogDuplicateID(t *testing.T) {
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
		got, ok := fleet(t, c.a, c.b).Catalog().OnlyBaseModel()
		if got != c.want || ok != (c.want != "") {
			t.Errorf("%q and %q: %q, %v; want %q", c.a, c.b, got, ok, c.want)
		}
	}
}

func TestEngineModel(t *testing.T) {
	c := fleet(t, "m=/m alias=/m fr<m plain").Catalog()
	for id, want := range map[string]string{"m": "/m", "alias": "/m", "fr": "fr", "plain": "plain", "unknown": "unknown"} {
		if got := c.EngineModel(id); got != want {
			t.Errorf("%s: %q, want %q", id, got, want)
		}
	}
}

func TestContextLengths(t *testing.T) {
	for _, c := range []struct {
		name   string
		each   []int // max_model_len by replica; notListed: it does not list the model
		differ bool
		card   string // of the replica with that name
	}{
		{"one", []int{10}, false, "a"},
		{"all the same", []int{10, 10, 10}, false, "a"},
		{"none is known", []int{0, 0}, false, "a"},
		{"the second is longer", []int{10, 30, 20}, true, "b"},
		{"the first is longer", []int{30, 10}, true, "a"},
		{"two are the longest", []int{10, 30, 30}, true, "b"},
		{"one does not say", []int{10, 0, 20}, true, "c"},
		{"the first does not say", []int{0, 10}, true, "b"},
		{"some do not list the model", []int{notListed, 10, notListed, 20}, true, "d"},
	} {
		var all []*Backend
		for i, n := range c.each {
			b := &Backend{Name: string(rune('a' + i))}
			if n != notListed {
				b.SetModels([]Model{{ID: "m", MaxTokens: n, Card: []byte(b.Name), Root: "/" + b.Name}, {ID: "fr", Parent: "m"}})
			}
			all = append(all, b)
		}
		r, err := NewRegistry(all)
		if err != nil {
			t.Fatal(err)
		}
		catalog := r.Catalog()
		for _, id := range []string{"m", "fr"} { // an adapter's card has none
			lengths := catalog.ContextLengths(id)
			if lengths.Differ() != c.differ {
				t.Errorf("%s: the lengths of %s differ: %v", c.name, id, lengths.Differ())
			}
			for slot, want := range c.each {
				if got := lengths.Of(slot); want != notListed && got != want {
					t.Errorf("%s: %s has %d tokens in slot %d, want %d", c.name, id, got, slot, want)
				}
			}
		}
		if lengths := catalog.ContextLengths("unknown"); lengths.Of(0) != 0 || lengths.Differ() {
			t.Errorf("an unknown model has %+v", lengths)
		}
		// The longest is listed, and blocks keep the seed of the first.
		first := catalog.EngineModel("m")
		if e, _ := catalog.Find("m"); string(e.Card) != c.card || string(catalog.Models[0].Card) != c.card || first != e.Root ||
			c.each[0] != notListed && first != "/a" {
			t.Errorf("%s: listed is the card of %s, and the engine's model is %s", c.name, catalog.Models[0].Card, first)
		}
	}
}

const notListed = -1

func TestCatalogAllocations(t *testing.T) {
	r := fleet(t, "m=/m", "m=/m")
	if n := testing.AllocsPerRun(100, func() {
		if e, ok := r.Catalog().Find("m"); !ok || len(e.Backends) != 2 || r.Catalog().EngineModel("m") != "/m" {
			t.Fatal("not found")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestCatalogConcurrentChanges(t *testing.T) {
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

func names(r *Registry) string {
	var all []string
	for _, b := range r.All() {
		all = append(all, fmt.Sprint(b.Name, b.Slot))
	}
	return strings.Join(all, " ")
}

func TestSlotReuse(t *testing.T) {
	r := fleet(t, "m", "m", "m")
	add := func(name, want string) *Backend {
		t.Helper()
		b := &Backend{Name: name}
		r.Add(b)
		if got := names(r); got != want {
			t.Errorf("after %s: %s, want %s", name, got, want)
		}
		return b
	}
	b := r.All()[1]
	b.InFlight.Store(1)
	r.Remove(b)
	add("d", "a0 c2 d3")
	b.InFlight.Store(0)
	b.NoEngineInFlight.Store(1) // a request that no engine works on
	add("e", "a0 c2 d3 e4")
	b.NoEngineInFlight.Store(0)
	f := add("f", "a0 f1 c2 d3 e4")
	r.Remove(b) // once more takes nothing from the next owner
	r.Remove(f)
	add("g", "a0 g1 c2 d3 e4")
}

func TestRemoveFromCatalog(t *testing.T) {
	r := fleet(t, "m only", "m")
	a := r.All()[0]
	a.InFlight.Store(3)
	r.Remove(a)
	if _, listed := r.Catalog().Find("only"); listed || r.Find("a") != nil {
		t.Error("it is still there")
	}
	if e, _ := r.Catalog().Find("m"); len(e.Backends) != 1 || e.Backends[0].Name != "b" {
		t.Errorf("m is served by %v", e.Backends)
	}
	a.SetModels(cards("late")) // a check that was under way
	if _, listed := r.Catalog().Find("late"); listed {
		t.Error("what a removed backend lists is in the catalog")
	}
}

func TestAddToCatalog(t *testing.T) {
	r := fleet(t, "m")
	b := &Backend{Name: "b"}
	r.Add(b)
	b.SetModels(cards("new"))
	if e, _ := r.Catalog().Find("new"); len(e.Backends) != 1 || r.Find("b") != b {
		t.Errorf("new is served by %v", e.Backends)
	}
}

func TestFindPrefersBackendNotRetired(t *testing.T) {
	r, err := NewRegistry([]*Backend{at(t, "a", "http://a:1"), at(t, "b", "http://b:1")})
	if err != nil {
		t.Fatal(err)
	}
	old := r.Find("a")
	old.Retire()
	next := at(t, "a", "http://a:1")
	r.Add(next)
	if r.Find("a") != next {
		t.Error("the retired backend is found")
	}
	old.Unretire()
	next.Retire()
	if r.Find("a") != old {
		t.Error("the restored backend is not found")
	}
	next.Unretire()
	old.Retire()
	r.Remove(old)
	if r.Find("a") != next {
		t.Error("the name went with the one before")
	}
}

func at(t *testing.T, name, url string) *Backend {
	t.Helper()
	u, err := ParseURL(url)
	if err != nil {
		t.Fatal(err)
	}
	return New(name, u, "", nil)
}

// Readers see whole fleets, in the order of slots, while others change them.
func TestConcurrentReaders(t *testing.T) {
	r := fleet(t, "m")
	var over atomic.Bool
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			for !over.Load() {
				all := r.All()
				if !slices.IsSortedFunc(all, func(a, b *Backend) int { return a.Slot - b.Slot }) || all[0].Name != "a" {
					t.Errorf("a fleet of %d out of order", len(all))
					return
				}
				if e, ok := r.Catalog().Find("m"); !ok || e.Backends[0].Name != "a" {
					t.Error("the model is gone")
					return
				}
			}
		})
	}
	rng := rand.New(rand.NewPCG(1, 1))
	var guests []*Backend
	for i := range 2000 {
		if len(guests) < 5 {
			b := &Backend{Name: fmt.Sprint("guest", i)}
			r.Add(b)
			b.SetModels(cards("m"))
			guests = append(guests, b)
			continue
		}
		out := rng.IntN(len(guests))
		r.Remove(guests[out])
		guests = slices.Delete(guests, out, out+1)
	}
	over.Store(true)
	readers.Wait()
	if slots := len(r.slots); slots > 7 {
		t.Errorf("%d slots for 6 backends at most", slots)
	}
}

func TestDrainAndChecksAreIndependent(t *testing.T) {
	const (
		drain, undrain, retire, restore = "drain", "undrain", "retire", "restore"
		well, ill                       = "well", "ill"
	)
	for _, c := range []struct {
		events string
		want   State
	}{
		{"", Down},
		{well, Ready},
		{well + " " + drain, Draining},
		{drain, Draining},
		{drain + " " + well, Draining},
		{well + " " + drain + " " + ill, Draining},
		{drain + " " + well + " " + undrain, Ready},
		{well + " " + drain + " " + ill + " " + undrain, Down},
		{well + " " + drain + " " + drain + " " + undrain, Ready},
		{well + " " + undrain, Ready},
		{well + " " + retire + " " + undrain, Draining},
		{well + " " + retire + " " + drain + " " + restore, Draining},
		{well + " " + retire + " " + drain + " " + restore + " " + undrain, Ready},
		{well + " " + retire + " " + ill + " " + restore, Down},
	} {
		b := &Backend{}
		for _, event := range strings.Fields(c.events) {
			switch event {
			case drain:
				b.Drain()
			case undrain:
				b.Undrain()
			case retire:
				b.Retire()
			case restore:
				b.Unretire()
			default:
				b.setFlag(healthy, event == well)
			}
		}
		if got := b.State(); got != c.want {
			t.Errorf("%q: %v, want %v", c.events, got, c.want)
		}
	}
}

func TestDrainIsReportedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		checks := 0
		b := virtual(t, health(func(context.Context) (int, error) { checks++; return 200, nil }).RoundTrip)
		var reported []string
		c := Checker{OnState: func(_ *Backend, s State, _ string) { reported = append(reported, s.String()) }}
		c.SetSettings(HealthSettings{Interval: time.Hour})
		watchUntilCleanup(t, c.Watch, b)
		time.Sleep(time.Second)
		for _, change := range []func(){b.Drain, b.Undrain, b.Retire, b.Unretire} {
			change()
			time.Sleep(time.Second)
			synctest.Wait()
		}
		if got := strings.Join(reported, " "); got != "ready draining ready draining ready" || checks != 5 {
			t.Errorf("reported %s with %d checks", got, checks)
		}
	})
}

func TestSettingsRestartWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var checks, polls int
		b := virtual(t, func(r *http.Request) (*http.Response, error) {
			switch r.URL.Path {
			case "/metrics":
				polls++
				return respond(200, vllmMetrics(1, 1, 0, 0))
			case "/health":
				checks++
				return respond(200, "")
			}
			return respond(200, vllmModels("1", "p", `"id":"m"`))
		})
		var c Checker
		var p Poller
		c.SetSettings(HealthSettings{Interval: time.Hour})
		p.SetSettings(PollSettings{Interval: time.Hour, Timeout: time.Second})
		watchUntilCleanup(t, c.Watch, b)
		watchUntilCleanup(t, p.Watch, b)
		time.Sleep(time.Minute)
		synctest.Wait()
		if checks != 1 || polls != 1 {
			t.Fatalf("%d checks and %d polls, want 1 each", checks, polls)
		}
		c.SetSettings(HealthSettings{Interval: 10 * time.Second})
		p.SetSettings(PollSettings{Interval: 10 * time.Second, Timeout: time.Second})
		time.Sleep(time.Minute)
		synctest.Wait()
		if checks < 6 || checks > 8 || polls < 6 || polls > 8 {
			t.Errorf("%d checks and %d polls in a minute, want one in ten seconds each", checks-1, polls-1)
		}
	})
}

func TestOptionsChangeDuringRequest(t *testing.T) {
	keys := make(chan string)
	b := replicaAt(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case keys <- r.Header.Get("Authorization"):
		case <-r.Context().Done():
		}
		healthyReplica(`"id":"m"`).ServeHTTP(w, r)
	}))
	set := func(key string) {
		terms := *b.Options()
		terms.APIKey, terms.MaxInFlight = key, terms.MaxInFlight+1
		b.SetOptions(terms)
	}
	set("one")
	c := &Checker{}
	watchUntilCleanup(t, c.Watch, b)
	if got := await(t, keys); got != "Bearer one" { // it is now asking for the models, or about to
		t.Errorf("asked with %q", got)
	}
	set("two")
	for await(t, keys) != "Bearer two" {
		b.RequestCheck()
	}
	if n := b.Options().MaxInFlight; n != 2 {
		t.Errorf("max_in_flight %d", n)
	}
}
