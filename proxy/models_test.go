package proxy

import (
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/proxy/apikey"
	"warmroute/router"
)

func TestAdapterPatternMatches(t *testing.T) {
	p := AdapterPattern{Prefix: "sql-", Suffix: "-v2"}
	for name, want := range map[string]bool{
		"sql-a-v2": true, "sql--v2": true, "sql-v2": false, "sql-a": false, "a-v2": false, "": false, "SQL-a-v2": false,
		"sql-" + strings.Repeat("a", maxAdapterNameBytes) + "-v2": false,
	} {
		if p.matches(name) != want {
			t.Errorf("%q: %v", name, !want)
		}
	}
}

// An adapter that replicas load at its first request goes to those of its base model, before and after one lists it.
func TestAdapterByPattern(t *testing.T) {
	base, other := &replica{models: []string{"base"}, script: always(answered("200 OK", whole))},
		&replica{models: []string{"sql-listed"}, script: always(answered("200 OK", whole))}
	second := &replica{models: []string{"base"}, script: always(answered("200 OK", whole))}
	f := serve(t, func(o *Options) {
		o.AdapterPatterns = []AdapterPattern{{Prefix: "gone-", Base: "absent"}, {Prefix: "sql-", Base: "base"}}
		withKeys(keyOf("a", nil), keyOf("sql", func(k *apikey.Key) {
			k.Models = []string{"sql-a"}
		}), keyOf("base", func(k *apikey.Key) { k.Models = []string{"base"} }))(o)
	}, base, other, second)
	all := []*replica{base, other, second}
	ask := func(model, key string, want int) (servedBy *replica) {
		t.Helper()
		before := []int{len(base.requests()), len(other.requests()), len(second.requests())}
		resp, got := f.post("/v1/chat/completions", strings.Replace(askWhole, `"model":"m"`, `"model":"`+model+`"`, 1), bearer(key)...)
		if resp.StatusCode != want {
			t.Errorf("%s by %s: got %d %s", model, key, resp.StatusCode, got)
		}
		for i, r := range all {
			if len(r.requests()) > before[i] {
				servedBy = r
			}
		}
		return servedBy
	}
	ask("sql-a", "a", http.StatusOK)
	if seen := base.requests(); len(seen) != 1 || !strings.Contains(seen[0].body, `"model":"sql-a"`) {
		t.Fatalf("the replica of the base model saw %d requests", len(seen))
	}
	if n := f.blocks(); n[0] != questionBlocks {
		t.Errorf("%v blocks are held", n)
	}
	if e, err := f.proxy.Explain(DryRunRequest{Body: strings.NewReader(strings.Replace(askWhole, `"model":"m"`, `"model":"sql-b"`, 1)),
		Length: -1}); err != nil || e.Blocks != questionBlocks {
		t.Errorf("explain of another adapter: %+v, %v", e, err)
	}
	ask("sql-b", "a", http.StatusOK)
	if n := f.blocks(); n[0] != 2*questionBlocks {
		t.Errorf("%v blocks are held: adapters do not share them", n)
	}
	ask("sql-a", "sql", http.StatusOK)
	ask("sql-b", "sql", http.StatusNotFound)
	ask("sql-a", "base", http.StatusNotFound)
	ask("gone-a", "a", http.StatusNotFound)
	ask("unknown", "a", http.StatusNotFound)
	if r := ask("sql-listed", "a", http.StatusOK); r != other {
		t.Errorf("a base model went to %v", r)
	}
	if text := f.exposition(); strings.Contains(text, `model="sql-a"`) || !strings.Contains(text, `model="base"`) {
		t.Error("a name that a client chose is a label")
	}
	if _, list := f.get("/v1/models"); strings.Contains(list, "sql-a") {
		t.Errorf("the list has %s", list)
	}
	f.backends[2].SetModels(cards([]string{"base", "sql-a<base"})) // it has loaded it
	if r := ask("sql-a", "a", http.StatusOK); r != base {
		t.Errorf("an adapter that another replica lists went to %v, not where its prompt is", r)
	}
}

// The 404 of the replica for a name that no resolver knows is the client's.
func TestUnknownAdapterByPattern(t *testing.T) {
	const unknown = `{"error":{"message":"The model ` + "`sql-x`" + ` does not exist.","type":"NotFoundError","param":"model","code":404}}`
	a, b := &replica{models: []string{"base"}, script: always(answered("404 Not Found", unknown))},
		&replica{models: []string{"base"}, script: always(answered("404 Not Found", unknown))}
	f := serve(t, func(o *Options) { o.AdapterPatterns = []AdapterPattern{{Prefix: "sql-", Base: "base"}} }, a, b)
	if resp, got := f.post("/v1/chat/completions", strings.Replace(askWhole, `"model":"m"`, `"model":"sql-x"`,
		1)); resp.StatusCode != http.StatusNotFound || got != unknown {
		t.Errorf("got %d %s", resp.StatusCode, got)
	}
	if n, m := len(a.requests()), len(b.requests()); n != 1 || m != 0 {
		t.Errorf("the replicas saw %d and %d requests", n, m)
	}
}

// A request for a model with a start hook waits although no replica lists it, as long as the setting says.
func TestRequestAwaitsModelWithStartHook(t *testing.T) {
	t.Parallel()
	r := &replica{script: always(answered("200 OK", whole))}
	queue := router.QueueSettings{Requests: 10, NoneReadyTimeout: 50 * time.Millisecond, BusyTimeout: time.Minute}
	f := serveWithQueue(t, queue, func(o *Options) {
		o.StartTimeouts = map[string]time.Duration{"big": time.Minute, "late": 100 * time.Millisecond}
		o.AdapterPatterns = []AdapterPattern{{Prefix: "sql-", Base: "big"}}
	}, r)
	named := func(model string) string { return strings.Replace(askWhole, `"model":"m"`, `"model":"`+model+`"`, 1) }
	if resp, got := f.post("/v1/chat/completions", named("unknown")); resp.StatusCode != http.StatusNotFound {
		t.Errorf("another model: got %d %s", resp.StatusCode, got)
	}
	waiting := []<-chan answer{f.background(named("big")), f.background(named("sql-a"))}
	f.awaitQueued(len(waiting))
	if !f.router.AwaitsModel("big") || f.router.AwaitsModel("late") || f.router.AwaitsModel("m") {
		t.Error("the wrong models are awaited")
	}
	resp, got := f.post("/v1/chat/completions", named("late"))
	if resp.StatusCode != http.StatusServiceUnavailable || !strings.Contains(got, "within 100ms (start_hooks[].timeout)") {
		t.Errorf("got %d %s", resp.StatusCode, got)
	}
	f.backends[0].SetModels(cards([]string{"m", "other"})) // the catalog changes
	f.backends[0].SetModels(cards([]string{"m", "big"}))
	f.router.BackendStateChanged(f.backends[0])
	for i, done := range waiting {
		if got := <-done; got.body != whole {
			t.Errorf("request %d got %+v", i, got)
		}
	}
	if f.router.AwaitsModel("big") {
		t.Error("it is still awaited")
	}
	for _, d := range f.proxy.Activity().Decisions() {
		if d.Model != "big" && d.Model != "sql-a" {
			t.Errorf("a decision is for the model %q", d.Model)
		}
	}
	var models []string
	for _, s := range r.requests() {
		_, after, _ := strings.Cut(s.body, `"model":"`)
		name, _, _ := strings.Cut(after, `"`)
		models = append(models, name)
	}
	if slices.Sort(models); !slices.Equal(models, []string{"big", "sql-a"}) {
		t.Errorf("the replica saw %v", models)
	}
}
