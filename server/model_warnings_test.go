package server

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/config"
	"warmroute/proxy/apikey"
)

// newModelLists returns a registry of one backend, and sets the models that this lists.
func newModelLists(t *testing.T) (registry *backends.Registry, list func(ids ...string)) {
	t.Helper()
	u, err := backends.ParseURL("http://10.0.0.1:8000")
	if err != nil {
		t.Fatal(err)
	}
	replica := backends.New("gpu-0", u, "", nil)
	if registry, err = backends.NewRegistry([]*backends.Backend{replica}); err != nil {
		t.Fatal(err)
	}
	return registry, func(ids ...string) {
		var models []backends.Model
		for _, id := range ids {
			models = append(models, backends.Model{ID: id})
		}
		replica.SetModels(models)
	}
}

// A model of a key that no replica lists is logged after a minute, once until one lists it.
func TestUnlistedModelOfKeyIsLogged(t *testing.T) {
	registry, list := newModelLists(t)
	c := &config.Config{Models: config.Models{Patterns: map[string]string{"sql-*": "qwen"}}}
	for name, models := range map[string][]string{"team-a": {"qwen", "qwne", "sql-1"}, "team-b": {"qwne"}} {
		c.Keys = append(c.Keys, config.Key{Key: apikey.Key{Name: name, Models: models}})
	}
	var log syncBuffer
	var w modelWarnings
	now := time.Unix(0, 0)
	warned := func(after time.Duration, want int) {
		t.Helper()
		now = now.Add(after)
		w.warn(slog.New(slog.NewTextHandler(&log, nil)), c, registry.Catalog(), now)
		if n := strings.Count(log.String(), "no replica lists a model of keys"); n != want {
			t.Errorf("%d lines, want %d:\n%s", n, want, log.String())
		}
	}
	warned(0, 0)
	warned(time.Hour, 0) // no replica has listed anything
	list("qwen")
	warned(0, 0)
	warned(59*time.Second, 0)
	warned(time.Second, 1)
	if !strings.Contains(log.String(), `model=qwne keys="[team-a team-b]"`) &&
		!strings.Contains(log.String(), `model=qwne keys="[team-b team-a]"`) {
		t.Error(log.String())
	}
	warned(time.Hour, 1)
	list("qwen", "qwne")
	warned(0, 1)
	list("qwen")
	warned(0, 1)
	warned(time.Minute, 2)
}

// A model of a name that no replica lists is logged after a minute, and so is a name that a replica lists.
func TestProblemsOfModelNamesAreLogged(t *testing.T) {
	registry, list := newModelLists(t)
	c := &config.Config{
		StartHooks: []config.StartHook{{Model: "big"}},
		Models: config.Models{Names: []config.ModelName{
			{Name: "coder", Models: []string{"v2", "v1"}}, {Name: "gpt", Model: "v2"}, {Name: "large", Model: "big"}, {Name: "v3", Model: "v1"},
		}},
		Tenants: config.Tenants{Keys: []config.Key{{Key: apikey.Key{Name: "team-a", Models: []string{"coder"}}}}},
	}
	var log syncBuffer
	var w modelWarnings
	now := time.Unix(0, 0)
	lines := func(after time.Duration) string {
		now = now.Add(after)
		w.warn(slog.New(slog.NewTextHandler(&log, nil)), c, registry.Catalog(), now)
		return log.String()
	}
	list("v1", "v3")
	if got := lines(0) + lines(59*time.Second); got != "" {
		t.Errorf("too early: %s", got)
	}
	for range 2 { // once
		got := lines(time.Second)
		for _, want := range []string{
			`msg="no replica lists a model of models.names" model=v2 names="[coder gpt]"`,
			`msg="a replica lists a model that is one of models.names; requests for it are for the name" model=v3 names=[v3]`,
		} {
			if strings.Count(got, want) != 1 || strings.Count(got, "\n") != 2 {
				t.Errorf("want %s, got\n%s", want, got)
			}
		}
	}
}
