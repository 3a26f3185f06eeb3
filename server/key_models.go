package server

import (
	"log/slog"
	"maps"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/config"
)

const (
	keyModelsInterval = 10 * time.Second // between two looks
	// unlistedTimeout is how long no replica lists a model of a key before the log says so: a replica may be starting.
	unlistedTimeout = time.Minute
)

// keyModels warns of models that keys may use and no replica lists, such as misspelled ones. Not safe for concurrent use.
type keyModels struct {
	unlisted map[string]*unlistedModel
}

type unlistedModel struct {
	since  time.Time
	warned bool
}

// warn logs each model that a key names and no replica has listed for unlistedTimeout, once until one lists it. It does
// nothing while no replica lists any model.
func (k *keyModels) warn(log *slog.Logger, c *config.Config, catalog *backends.Catalog, now time.Time) {
	if len(catalog.Models) == 0 {
		return
	}
	keys := namesOfModels(c, catalog)
	maps.DeleteFunc(k.unlisted, func(model string, _ *unlistedModel) bool { return keys[model] == nil })
	for _, model := range slices.Sorted(maps.Keys(keys)) {
		u := k.unlisted[model]
		if u == nil {
			u = &unlistedModel{since: now}
			if k.unlisted == nil {
				k.unlisted = map[string]*unlistedModel{}
			}
			k.unlisted[model] = u
		}
		if !u.warned && now.Sub(u.since) >= unlistedTimeout {
			u.warned = true
			log.Warn("no replica lists a model of keys", "model", model, "keys", keys[model])
		}
	}
}

// namesOfModels returns the models of keys that no replica lists, and that none loads or is started for, each with the
// names of these keys.
func namesOfModels(c *config.Config, catalog *backends.Catalog) map[string][]string {
	keys := map[string][]string{}
	for _, key := range c.APIKeys() {
		for _, model := range key.Models {
			_, listed := catalog.Find(model)
			if !listed && !c.LoadsOnDemand(model) && !slices.Contains(keys[model], key.Name) {
				keys[model] = append(keys[model], key.Name)
			}
		}
	}
	return keys
}
