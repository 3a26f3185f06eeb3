package server

import (
	"cmp"
	"log/slog"
	"maps"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/config"
)

const (
	modelWarningsInterval = 10 * time.Second // between two looks
	// modelProblemTimeout is how long a problem with the models of the configuration lasts before the log says so: a replica
	// may be starting.
	modelProblemTimeout = time.Minute
)

// modelWarnings warns of models that the configuration names and no replica lists, such as misspelled ones, and of names of
// models that replicas list as models. Not safe for concurrent use.
type modelWarnings struct {
	problems map[modelProblem]*problemState
}

// modelProblem is what is wrong with a model.
type modelProblem struct {
	kind  modelProblemKind
	model string
}

type modelProblemKind int

const (
	unlistedModelOfKey modelProblemKind = iota
	unlistedModelOfName
	nameIsModel
)

// message returns the line of the log, and the attribute of the keys or names that it concerns.
func (k modelProblemKind) message() (message, concerned string) {
	switch k {
	case unlistedModelOfKey:
		return "no replica lists a model of keys", "keys"
	case unlistedModelOfName:
		return "no replica lists a model of models.names", "names"
	}
	return "a replica lists a model that is one of models.names; requests for it are for the name", "names"
}

type problemState struct {
	since  time.Time
	warned bool
}

// logModelWarnings logs the warnings about models that are due.
func (s *Server) logModelWarnings(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.modelWarnings.warn(s.log, s.config, s.registry.Catalog(), now)
}

// warn logs each problem that has lasted for modelProblemTimeout, once until it ends. It does nothing while no replica lists
// any model.
func (w *modelWarnings) warn(log *slog.Logger, c *config.Config, catalog *backends.Catalog, now time.Time) {
	if len(catalog.Models) == 0 {
		return
	}
	found := findModelProblems(c, catalog)
	maps.DeleteFunc(w.problems, func(p modelProblem, _ *problemState) bool { return found[p] == nil })
	for _, p := range slices.SortedFunc(maps.Keys(found), func(a, b modelProblem) int {
		return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.model, b.model))
	}) {
		s := w.problems[p]
		if s == nil {
			s = &problemState{since: now}
			if w.problems == nil {
				w.problems = map[modelProblem]*problemState{}
			}
			w.problems[p] = s
		}
		if !s.warned && now.Sub(s.since) >= modelProblemTimeout {
			s.warned = true
			message, concerned := p.kind.message()
			log.Warn(message, "model", p.model, concerned, found[p])
		}
	}
}

// findModelProblems returns the problems with the models of the configuration, each with the keys or names that it concerns. A
// model that replicas load at the first request, or that is started when requests wait for it, needs to be listed by none.
func findModelProblems(c *config.Config, catalog *backends.Catalog) map[modelProblem][]string {
	found := map[modelProblem][]string{}
	add := func(kind modelProblemKind, model, concerned string) {
		p := modelProblem{kind, model}
		if !slices.Contains(found[p], concerned) {
			found[p] = append(found[p], concerned)
		}
	}
	isUnlisted := func(model string) bool {
		_, listed := catalog.Find(model)
		return !listed && !c.LoadsOnDemand(model)
	}
	isName := map[string]bool{}
	for _, n := range c.Models.Names {
		isName[n.Name] = true
		if _, listed := catalog.Find(n.Name); listed {
			add(nameIsModel, n.Name, n.Name)
		}
		for _, model := range n.AllModels() {
			if isUnlisted(model) {
				add(unlistedModelOfName, model, n.Name)
			}
		}
	}
	for _, key := range c.APIKeys() {
		for _, model := range key.Models {
			if isUnlisted(model) && !isName[model] {
				add(unlistedModelOfKey, model, key.Name)
			}
		}
	}
	return found
}
