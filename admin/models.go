package admin

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"warmroute/backends"
	"warmroute/router"
)

const (
	maxModels    = 100 // that are listed
	maxLastReady = 3   // models that are named of a backend
)

// modelsState is what operators see of the models.
type modelsState struct {
	All     int `json:"all"`
	Unready int `json:"unready"` // those without a ready backend
	// Listed are maxModels of them at most: first the unready ones, then base models,
	// then adapters.
	Listed []modelState `json:"listed"`
}

type modelState struct {
	ID       string     `json:"id"`
	Backends int        `json:"backends"` // that list it
	Ready    int        `json:"ready"`
	Reason   string     `json:"reason,omitempty"` // why none is ready
	Since    *time.Time `json:"since"`            // none is ready; null: one is, or it is not known

	adapter bool
}

// fleetSnapshot is the fleet at one moment, so that all parts of a State agree.
type fleetSnapshot struct {
	backends     []*backends.Backend // of two with one name, one of them on its way out, the other
	catalog      *backends.Catalog
	conditions   map[*backends.Backend]router.Condition // of all, those left out of backends included; with stateDrained
	stalled      map[string]bool                        // by name
	lastReadyFor map[*backends.Backend][]string
}

func (h *Handler) newFleetSnapshot() *fleetSnapshot {
	f := &fleetSnapshot{
		catalog:      h.registry.Catalog(),
		conditions:   map[*backends.Backend]router.Condition{},
		stalled:      map[string]bool{},
		lastReadyFor: map[*backends.Backend][]string{},
	}
	for _, b := range h.registry.All() {
		c := h.router.Condition(b)
		if c.State == router.Draining && b.Drained() && b.Idle() {
			c.State = stateDrained
		}
		f.conditions[b] = c
		if h.registry.Find(b.Name) == b {
			f.backends = append(f.backends, b)
			f.stalled[b.Name] = c.State == router.Stalled
		}
	}
	for _, m := range f.catalog.Models {
		entry, _ := f.catalog.Find(m.ID)
		if ready := f.ready(entry.Backends); len(ready) == 1 && len(f.lastReadyFor[ready[0]]) < maxLastReady {
			f.lastReadyFor[ready[0]] = append(f.lastReadyFor[ready[0]], m.ID)
		}
	}
	return f
}

// ready returns those of the backends that are ready.
func (f *fleetSnapshot) ready(list []*backends.Backend) (ready []*backends.Backend) {
	for _, b := range list {
		if f.conditions[b].State == router.Ready {
			ready = append(ready, b)
		}
	}
	return ready
}

// models shows the catalogue.
func models(f *fleetSnapshot) modelsState {
	s := modelsState{All: len(f.catalog.Models), Listed: []modelState{}}
	for _, m := range f.catalog.Models {
		entry, _ := f.catalog.Find(m.ID)
		one := modelState{ID: m.ID, Backends: len(entry.Backends), Ready: len(f.ready(entry.Backends)), adapter: entry.Adapter}
		if one.Ready == 0 {
			s.Unready++
			one.Reason, one.Since = f.whyUnready(entry.Backends)
		}
		s.Listed = append(s.Listed, one)
	}
	slices.SortStableFunc(s.Listed, func(a, b modelState) int {
		return cmp.Or(compareBool(a.Ready > 0, b.Ready > 0), compareBool(a.adapter, b.adapter), cmp.Compare(a.ID, b.ID))
	})
	s.Listed = s.Listed[:min(len(s.Listed), maxModels)]
	return s
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// whyUnready says why none of the backends is ready, and since when.
func (f *fleetSnapshot) whyUnready(list []*backends.Backend) (reason string, since *time.Time) {
	var reasons []string
	for _, b := range list {
		c := f.conditions[b]
		if len(reasons) < maxLastReady {
			reasons = append(reasons, fmt.Sprintf("%s is %s", b.Name, c.State))
		}
		if at := timeOrNull(c.Since); at != nil && (since == nil || at.After(*since)) {
			since = at
		}
	}
	if more := len(list) - len(reasons); more > 0 {
		reasons = append(reasons, fmt.Sprintf("%d more are not ready", more))
	}
	return strings.Join(reasons, ", "), since
}

func timeOrNull(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = t.UTC()
	return &t
}
