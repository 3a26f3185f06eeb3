package config

import (
	"cmp"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"time"

	"warmroute/proxy"
)

const (
	maxPatterns   = 64 // each unknown model is compared with them
	maxStartHooks = 64
)

func (c *Config) validateModels(errs *errorList) {
	if n := len(c.Models.Patterns); n > maxPatterns {
		errs.add("models.patterns", "%d patterns are too many; the maximum is %d", n, maxPatterns)
	}
	for _, pattern := range slices.Sorted(maps.Keys(c.Models.Patterns)) {
		switch base := c.Models.Patterns[pattern]; {
		case strings.Count(pattern, "*") != 1:
			errs.add("models.patterns", "%q needs exactly one *, as in sql-*", pattern)
		case pattern == "*":
			errs.add("models.patterns", `"*" would match every unknown model; name a part that all adapters share`)
		case base == "":
			errs.add("models.patterns", "%q has no base model; name the one whose replicas load such adapters", pattern)
		}
	}
	c.validateModelNames(errs)
	if len(c.StartHooks) > maxStartHooks {
		errs.add("start_hooks", "%d models are too many; the maximum is %d", len(c.StartHooks), maxStartHooks)
	}
	for i, w := range c.StartHooks {
		at := fmt.Sprintf("start_hooks[%d]", i)
		if errs.hasAny(at) {
			continue // it could not be read
		}
		if w.Model == "" {
			errs.add(at+".model", "is missing; name the model")
		} else if first := slices.IndexFunc(c.StartHooks, func(o StartHook) bool { return o.Model == w.Model }); first < i {
			errs.add(at+".model", "%s is already start_hooks[%d]; remove one of the two", w.Model, first)
		}
		// The URL may hold a secret.
		if u, err := url.Parse(w.URL); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.Fragment != "" {
			errs.add(at+".url", "is not a URL such as http://scaler:8000/start")
		}
		if w.Timeout < time.Second {
			errs.add(at+".timeout", "%v is too short; the minimum is 1s", w.Timeout)
		}
	}
}

// adapterPatterns returns the patterns, the longest first.
func (m *Models) adapterPatterns() (patterns []proxy.AdapterPattern) {
	for _, pattern := range slices.SortedFunc(maps.Keys(m.Patterns), func(a, b string) int {
		return cmp.Or(len(b)-len(a), strings.Compare(a, b))
	}) {
		prefix, suffix, _ := strings.Cut(pattern, "*")
		patterns = append(patterns, proxy.AdapterPattern{Prefix: prefix, Suffix: suffix, Base: m.Patterns[pattern]})
	}
	return patterns
}

// matchPattern returns the pattern that a model's name matches.
func (m *Models) matchPattern(model string) (pattern string, matches bool) {
	for _, p := range m.adapterPatterns() {
		if strings.HasPrefix(model, p.Prefix) && strings.HasSuffix(model, p.Suffix) {
			return p.Prefix + "*" + p.Suffix, true
		}
	}
	return "", false
}

// startTimeouts returns for how long requests wait for each model that has a start hook.
func (c *Config) startTimeouts() map[string]time.Duration {
	timeouts := map[string]time.Duration{}
	for _, w := range c.StartHooks {
		timeouts[w.Model] = w.Timeout
	}
	return timeouts
}

// LoadsOnDemand reports whether no replica needs to list a model: replicas load it at the first request, or are started
// when requests wait for it.
func (c *Config) LoadsOnDemand(model string) bool {
	if _, matches := c.Models.matchPattern(model); matches {
		return true
	}
	for _, w := range c.StartHooks {
		if w.Model == model {
			return true
		}
	}
	return false
}
