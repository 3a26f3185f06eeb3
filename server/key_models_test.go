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

// A model of a key that no replica lists is logged after a minute, once until one lists it.
func TestUnlistedModelOfKeyIsLogged(t *testing.T) {
	u, err := backends.ParseURL("http://10.0.0.1:8000")
	if err != nil {
		t.Fatal(err)
	}
	replica := backends.New("gpu-0", u, "", nil)
	registry, err := backends.NewRegistry([]*backends.Backend{replica})
	if err != nil {
		t.Fatal(err)
	}
	list := func(ids ...string) {
		var models []backends.Model
		for _, id := range ids {
			models = append(models, backends.Model{ID: id})
		}
		replica.SetModels(models)
	}
	c := &config.Config{Models: config.Models{Patterns: map[string]string{"sql-*": "qwen"}}}
	for name, models := range map[string][]string{"team-a": {"qwen", "qwne", "sql-1"}, "team-b": {"qwne"}} {
		c.Keys = append(c.Keys, config.Key{Key: apikey.Key{Name: name, Models: models}})
	}
	var log syncBuffer
	var k keyModels
	now := time.Unix(0, 0)
	warned := func(after time.Duration, want int) {
		t.Helper()
		now = now.Add(after)
		k.warn(slog.New(slog.NewTextHandler(&log, nil)), c, registry.Catalog(), now)
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
	if !strings.Contains(log.String(), `model=qwne keys="[team-a team-b]"`) && !strings.Contains(log.String(), `model=qwne keys="[team-b team-a]"`) {
		t.Error(log.String())
	}
	warned(time.Hour, 1)
	list("qwen", "qwne")
	warned(0, 1)
	list("qwen")
	warned(0, 1)
	warned(time.Minute, 2)
}
