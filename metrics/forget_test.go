package metrics

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"warmroute/backends"
	"warmroute/router"
)

// exposed makes the metrics of a fleet, and a func that scrapes them.
func exposed(t *testing.T, fleet ...*backends.Backend) (*Metrics, *router.Router, *backends.Registry, func() string) {
	t.Helper()
	registry, err := backends.NewRegistry(fleet)
	if err != nil {
		t.Fatal(err)
	}
	r, err := router.New(router.Options{
		Backends: registry.All(), Policy: "prefix", BlockBytes: 256, IndexMaxBytes: 1 << 20,
		PollInterval: time.Second, Now: time.Now, Rand: rand.New(rand.NewPCG(1, 1)),
	})
	if err != nil {
		t.Fatal(err)
	}
	m := New(registry, r, "test")
	return m, r, registry, func() string {
		t.Helper()
		w := httptest.NewRecorder()
		m.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
		if w.Code != http.StatusOK {
			t.Fatalf("status %d: %s", w.Code, w.Body)
		}
		return w.Body.String()
	}
}

func ended(m *Metrics, backend string) { endedFor(m, "m", backend) }

func endedFor(m *Metrics, model, backend string) {
	m.Ended(&Request{Endpoint: "/v1/chat/completions", Spilled: true, Model: model, Backend: backend, Code: 200, TTFT: time.Second, PromptTokens: 1, PredictedTokens: 1, ObservedTokens: 1}, "id", time.Now())
}

func TestARemovedBackendLeavesNoSeries(t *testing.T) {
	stays, goes := &backends.Backend{Name: "stays"}, &backends.Backend{Name: "goes"}
	m, r, registry, scrape := exposed(t, stays, goes)
	ended(m, "stays")
	ended(m, "goes")
	m.PollFailed(goes)
	if n := strings.Count(scrape(), `backend="goes"`); n == 0 {
		t.Fatal("it has no series")
	}
	r.RemoveBackend(goes)
	registry.Remove(goes)
	m.Forget("goes")
	ended(m, "goes") // one that was under way
	text := scrape()
	if strings.Contains(text, `"goes"`) {
		t.Errorf("it still has series:\n%s", text)
	}
	if !strings.Contains(text, `warmroute_requests_total{backend="stays"`) {
		t.Error("another's series are gone as well")
	}
}

func TestAModelThatNobodyListsAnyMoreLeavesNoSeries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &backends.Backend{Name: "one"}
		m, _, _, scrape := exposed(t, b)
		list := func(ids ...string) {
			var cards []backends.Model
			for _, id := range ids {
				cards = append(cards, backends.Model{ID: id})
			}
			b.SetModels(cards)
		}
		has := func(when, model string, want bool) {
			t.Helper()
			if got := strings.Contains(scrape(), `model="`+model+`"`); got != want {
				t.Errorf("%s: %s has series: %v, want %v", when, model, got, want)
			}
		}
		list("base", "adapter")
		endedFor(m, "base", "one")
		endedFor(m, "adapter", "one")
		m.Ended(&Request{Endpoint: "/v1/chat/completions", Code: 404}, "id", time.Now()) // for no model
		list("base")
		has("unloaded", "adapter", true)
		time.Sleep(unlistedFor / 2)
		list("base", "adapter")
		has("loaded again", "adapter", true)
		list("base")
		has("unloaded again", "adapter", true)
		time.Sleep(unlistedFor - time.Second)
		has("just before its time", "adapter", true)
		time.Sleep(time.Second)
		has("a while later", "adapter", false)
		has("a while later", "base", true)
		has("a while later", "", true)
		endedFor(m, "adapter", "one") // it was under way all the time
		has("another answer", "adapter", true)
		time.Sleep(unlistedFor)
		has("and a while later", "adapter", false)
	})
}

func TestAdaptersThatComeAndGoLeaveNoSeriesWhereNobodyScrapes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &backends.Backend{Name: "one"}
		m, _, _, scrape := exposed(t, b)
		for i := range 1000 {
			adapter := fmt.Sprint("adapter", i)
			b.SetModels([]backends.Model{{ID: adapter}})
			endedFor(m, adapter, "one")
			time.Sleep(time.Minute)
		}
		if n := strings.Count(scrape(), "warmroute_ttft_seconds_count"); n > 12 {
			t.Errorf("%d of 1,000 adapters have series", n)
		}
	})
}

// Prometheus takes no scrape in which a series comes twice.
func TestANameThatChangesHandsHasOneSetOfSeries(t *testing.T) {
	old := &backends.Backend{Name: "one"}
	_, r, registry, scrape := exposed(t, old)
	old.Retire()
	old.InFlight.Store(5)
	next := &backends.Backend{Name: "one"}
	if err := registry.Add(next); err != nil {
		t.Fatal(err)
	}
	r.AddBackend(next)
	if text := scrape(); !strings.Contains(text, `warmroute_backend_in_flight{backend="one"} 0`) {
		t.Errorf("the series are not those of the one that stays:\n%s", text)
	}
}

func TestADrainingBackendIsSeen(t *testing.T) {
	b := &backends.Backend{Name: "one"}
	b.SetState(backends.Ready)
	_, _, _, scrape := exposed(t, b)
	for _, c := range []struct {
		change          func()
		ready, draining string
	}{{func() {}, "1", "0"}, {b.Drain, "0", "1"}, {b.Undrain, "1", "0"}, {b.Retire, "0", "1"}} {
		c.change()
		text := scrape()
		for name, want := range map[string]string{"ready": c.ready, "draining": c.draining} {
			if line := `warmroute_backend_` + name + `{backend="one"} ` + want; !strings.Contains(text, line+"\n") {
				t.Errorf("no %s", line)
			}
		}
	}
}
