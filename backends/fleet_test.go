package backends

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func names(r *Registry) string {
	var all []string
	for _, b := range r.All() {
		all = append(all, fmt.Sprint(b.Name, b.Slot))
	}
	return strings.Join(all, " ")
}

func TestASlotIsFreeOnceNothingIsInFlightThere(t *testing.T) {
	r := fleet(t, "m", "m", "m")
	add := func(name, want string) *Backend {
		t.Helper()
		b := &Backend{Name: name}
		if err := r.Add(b); err != nil {
			t.Fatal(err)
		}
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

func TestARemovedBackendIsOutOfTheCatalogAtOnce(t *testing.T) {
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

func TestAnAddedBackendIsInTheCatalogOnceItListsModels(t *testing.T) {
	r := fleet(t, "m")
	b := &Backend{Name: "b"}
	if err := r.Add(b); err != nil {
		t.Fatal(err)
	}
	b.SetModels(cards("new"))
	if e, _ := r.Catalog().Find("new"); len(e.Backends) != 1 || r.Find("b") != b {
		t.Errorf("new is served by %v", e.Backends)
	}
}

func TestABackendThatClashesIsNotAdded(t *testing.T) {
	r, err := NewRegistry([]*Backend{at(t, "a", "http://a:1"), at(t, "b", "http://b:1")})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, url, want string }{
		{"a", "http://c:1", `two backends are named "a"`},
		{"c", "http://b:1/", `"b" and "c" are the same replica`},
	} {
		if err := r.Add(at(t, c.name, c.url)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s at %s: %v, want %s", c.name, c.url, err, c.want)
		}
	}
	if got := names(r); got != "a0 b1" {
		t.Errorf("the fleet is %s", got)
	}
	old := r.Find("a")
	old.Retire()
	next := at(t, "a", "http://a:1")
	if err := r.Add(next); err != nil || r.Find("a") != next {
		t.Errorf("one that retires is in the way: %v", err)
	}
	old.Restore()
	next.Retire()
	if r.Find("a") != old {
		t.Error("the one that was restored is not found")
	}
	next.Restore()
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
func TestReadersSeeWholeFleets(t *testing.T) {
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
			if err := r.Add(b); err != nil {
				t.Fatal(err)
			}
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

func TestTheOperatorsWordAndTheChecksKeepOutOfEachOthersWay(t *testing.T) {
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
				b.Restore()
			default:
				b.setFlag(healthy, event == well)
			}
		}
		if got := b.State(); got != c.want {
			t.Errorf("%q: %v, want %v", c.events, got, c.want)
		}
	}
}

func TestDrainAndUndrainAreToldAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		checks := 0
		b := virtual(t, health(func(context.Context) (int, error) { checks++; return 200, nil }).RoundTrip)
		var told []string
		c := Checker{OnState: func(_ *Backend, s State, _ string) { told = append(told, s.String()) }}
		c.SetSettings(HealthSettings{Interval: time.Hour})
		watchUntilCleanup(t, c.Watch, b)
		time.Sleep(time.Second)
		for _, change := range []func(){b.Drain, b.Undrain, b.Retire, b.Restore} {
			change()
			time.Sleep(time.Second)
			synctest.Wait()
		}
		if got := strings.Join(told, " "); got != "ready draining ready draining ready" || checks != 5 {
			t.Errorf("told %s with %d checks", got, checks)
		}
	})
}

func TestAnotherPaceHoldsForThoseWhoWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var checks, polls int
		b := virtual(t, func(r *http.Request) (*http.Response, error) {
			switch r.URL.Path {
			case "/metrics":
				polls++
				return answer(200, vllmMetrics(1, 1, 0, 0))
			case "/health":
				checks++
				return answer(200, "")
			}
			return answer(200, vllmModels("1", "p", `"id":"m"`))
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

func TestTermsChangeWhileARequestIsUnderWay(t *testing.T) {
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
		c.RequestCheck(b)
	}
	if n := b.Options().MaxInFlight; n != 2 {
		t.Errorf("max_in_flight %d", n)
	}
}
